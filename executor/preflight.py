"""What must hold before a run creates anything: the plan is whole, this machine has what it names, the data is there.

Every check raises PlannerError with the exit code of its kind. Not here: checks of the run folder (rundir.py), or
whether a model fits a GPU, which planning decides.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from executor import cgroups
from planner.case import Case
from planner.errors import PlannerError
from planner.host import loading_bytes
from planner.plan import Plan
from planner.units import format_bytes

PREFLIGHT = 3


class Check(NamedTuple):
    """One thing that must hold, by the name it has in a table. `run` raises PlannerError where it does not."""

    name: str
    run: Callable[[], object]


def require(checks: Iterable[Check]) -> None:
    """All of them, in order; the first that does not hold is the answer no."""
    for one in checks:
        one.run()


def refusals(checks: Iterable[Check]) -> dict[str, PlannerError]:
    """Every check that does not hold here, by name."""
    found = {}
    for one in checks:
        try:
            one.run()
        except PlannerError as error:
            found[one.name] = error
    return found


def check_shape(plan: Plan, nodes: int) -> int:
    """The processes each node starts; refuses a plan whose layout is not its cluster, or that K nodes cannot split."""
    world = plan.layout.world_size
    if plan.cluster.gpus != world:
        raise PlannerError(
            "plan: cluster.gpus",
            plan.cluster.gpus,
            f"the layout has {world} ranks",
            "Make the plan again for as many devices as ranks",
        )
    if nodes < 1 or world % nodes:
        divisors = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
        raise PlannerError("--nodes", nodes, f"does not divide the plan's {world} ranks", f"Try {divisors}")
    return world // nodes


def check_software(engine: str, method: str = "full") -> None:
    """The packages the ranks will import are installed here. Nothing is imported to find out."""
    adapted = {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}
    frameworks = {name: ["accelerate"] for name in ("single", "ddp", "fsdp2")}
    framework = ["deepspeed"] if engine.startswith("deepspeed") else frameworks.get(engine, [])
    check_packages(["torch", "transformers", *framework, *adapted.get(method, [])])


def check_packages(needed: list[str]) -> None:
    """Refuse (exit code 3) when one of the packages is not installed here."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise PlannerError(
            "software",
            None,
            f"{' and '.join(missing)} not installed",
            "pip install 'meshwright[run]'",
            exit_code=PREFLIGHT,
        )


def check_devices(plan: Plan, found: int | None = None, *, ranks: int | None = None) -> None:
    """This machine has the devices the plan names, or as many as `ranks`. `found` stands in for counting them."""
    kind = plan.cluster.gpu.kind
    if kind == "cpu":
        return
    if kind != "cuda":
        raise PlannerError(
            "plan: cluster.gpu.kind",
            kind,
            "the local launcher starts cuda and cpu plans",
            "Plan for one of these",
            exit_code=PREFLIGHT,
        )
    have = visible_gpus() if found is None else found
    if have < (plan.cluster.gpus if ranks is None else ranks):
        raise PlannerError(
            "plan: cluster",
            f"{plan.cluster.gpus if ranks is None else ranks} x {plan.cluster.gpu.name}",
            f"this machine shows {have or 'no'} CUDA device{'s' * (have > 1)}",
            "Run it where the devices are, or plan with --cluster localhost",
            exit_code=PREFLIGHT,
        )


def check_script(plan: Plan, script: str) -> None:
    """A person's own script is there, and this machine would not train it in another way than planned."""
    if not Path(script).is_file():
        raise PlannerError("--script", script, "does not exist or is not a file", "Give the path of a Python file")
    if plan.cluster.gpu.kind == "cpu" and plan.layout.engine == "fsdp2":
        raise PlannerError(
            "--script",
            script,
            "Accelerate turns FSDP into plain DDP on CPU without a word (1.15)",
            "Plan for GPUs, or run the built-in trainer",
            exit_code=PREFLIGHT,
        )


def check_host_memory(plan: Plan, available: float | None = None, *, ranks: int | None = None) -> None:
    """On CPU the predicted peaks of all ranks (or of `ranks`) must fit in this machine's free memory together.

    No prediction, no verdict.
    """
    peaks = [phase.total for phase in plan.prediction.memory]
    if plan.cluster.gpu.kind != "cpu" or not peaks:
        return
    ranks = plan.layout.world_size if ranks is None else ranks
    need = max(peaks) * ranks
    have = available_memory() if available is None else available
    if need > have:
        raise PlannerError(
            "memory",
            f"{ranks} ranks x {format_bytes(max(peaks))}",
            f"predicted {format_bytes(need)} on a machine with {format_bytes(have)} free",
            "Plan a smaller model, micro-batch or sequence, or fewer ranks",
            exit_code=PREFLIGHT,
        )


def check_loading_memory(plan: Plan, available: float | None = None, *, ranks: int) -> None:
    """With GPUs every rank loads its part of the model through host memory: weight by weight, but where tensor ranks
    cut a whole one (`planner.host.loading_bytes`).

    With CPUs the predicted peaks hold that moment (`check_host_memory`).
    """
    if plan.cluster.gpu.kind == "cpu":
        return
    case = Case.of(plan)
    need = max(float(loading_bytes(case.at(stage))) for stage in case.stages())
    have = available_memory() if available is None else available
    if ranks * need > have:
        raise PlannerError(
            "host memory",
            f"{ranks} ranks x {format_bytes(need)}",
            f"that is what loading takes, and this machine has {format_bytes(have)} free",
            "Use a host with more memory, or a smaller model",
            exit_code=PREFLIGHT,
        )


def check_disk(folder: Path, need: float, field: str, fix: str) -> None:
    """The disk on which a folder will stand has room for so many bytes."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    if need > free:
        rule = f"needs {format_bytes(need)} for the weights, and its disk has {format_bytes(free)} free"
        raise PlannerError(field, folder, rule, fix, exit_code=PREFLIGHT)


def visible_gpus() -> int:
    """CUDA devices a process started here would see, asked of the driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return 0
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    # CUDA stops reading the list at the first index that is not there.
    count = 0
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        if name.lstrip("-").isdigit() and not 0 <= int(name) < present:
            break
        count += 1
    return min(count, present)


def available_memory() -> float:
    """Bytes this machine can still give, or this container, whichever is less."""
    import psutil  # type: ignore[import-untyped]  # part of the [run] extra

    free = float(psutil.virtual_memory().available)
    limit = cgroups.limit_bytes()
    return free if limit is None else min(free, limit)

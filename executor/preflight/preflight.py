"""Checks before a run creates anything: the plan is complete, this machine has its devices and packages, the data
exist.

Every check raises PlannerError with the exit code of its kind. Not here: checks of the run folder (rundir.py), or
whether a model fits a GPU, which planning decides.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from executor.backends.launched import FLASH_MODULES, LIGER_MODULE, PACKAGES
from executor.backends.tools import TOOLS
from executor.folder.checkpoints import expected_bytes
from executor.system import cgroups
from executor.system.facts import cores, versions
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes
from planner.figures.host import loading_bytes
from planner.inventory.optimizers import BITSANDBYTES_8BIT
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob
from planner.spec.engines import ENGINES
from planner.spec.plan import Plan

PREFLIGHT = 3


class Doubt(PlannerError):
    """A doubt that does not prevent a start."""


class Check(NamedTuple):
    """One thing that must hold, by the name it has in a table. `run` raises PlannerError where it does not, Doubt where
    it may not; else it may return the measured value, as a text. `of_host`: it says something of the machine that
    asks, and of no file that all nodes share."""

    name: str
    run: Callable[[], object]
    of_host: bool = False


def require(checks: Iterable[Check], echo: Callable[[str], None]) -> None:
    """Run all checks in order; raise the first failure, print doubts."""
    for one in checks:
        try:
            one.run()
        except Doubt as doubt:
            echo(f"note: {doubt.sentence}")


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


def check_software(layout: Layout, job: TrainingJob) -> None:
    """The packages the ranks will import are installed here. Nothing is imported to find out."""
    needed = ["torch", "transformers", ENGINES[layout.engine].framework or "torch"]
    if layout.attention in FLASH_MODULES:
        needed.append(FLASH_MODULES[layout.attention])
    if layout.liger:
        needed.append(LIGER_MODULE)
    if job.method != "full":
        needed.append("peft")
    if job.method == "qlora" or job.optimizer.name in BITSANDBYTES_8BIT:
        needed.append("bitsandbytes")
    check_packages(list(dict.fromkeys(needed)))


def check_tool(word: str) -> str:
    """The tool that is to train a plan is installed here, in a release whose keys its file has."""
    from importlib import metadata  # which takes long to load, and most commands ask for no version

    tool = TOOLS[word]
    try:
        found = metadata.version(tool.package)
    except metadata.PackageNotFoundError:
        raise PlannerError(
            "--with", word, "is not installed here", f"Run {tool.install}", exit_code=PREFLIGHT
        ) from None
    if tool.releases and not any(f"{found}.".startswith(f"{one}.") for one in tool.releases):
        rule = f"is {found} here, and the file is written for {' or '.join(tool.releases)}"
        raise PlannerError("--with", word, rule, f"Run {tool.install}", exit_code=PREFLIGHT)
    return found


def check_packages(needed: list[str]) -> None:
    """Refuse (exit code 3) when one of the packages is not installed here."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise PlannerError(
            "software",
            None,
            f"{' and '.join(missing)} not installed",
            f"Install it: {sys.executable} -m pip install {' '.join(PACKAGES.get(name, name) for name in missing)}",
            exit_code=PREFLIGHT,
        )


def check_versions(plan: Plan, installed: Mapping[str, str] | None = None) -> None:
    """Doubt packages of another release than the plan's figures describe. Those of a repair alone (the third number)
    count as the same. `installed` stands in for asking."""
    found = versions() if installed is None else installed
    described = (part.partition(" ") for part in plan.runtime.version.split(", "))
    others = [
        (f"{package} {found[package]}", f"{package} {number}")
        for package, _, number in described
        if package in found and RELEASE.match(number) and _release(number) != _release(found[package])
    ]
    if others:
        here, there = (" and ".join(one) for one in zip(*others, strict=True))
        fix = f"planner presets runtimes lists the versions of {plan.runtime.base} that are known"
        raise Doubt("versions", here, f"differs from what the plan's figures describe, {there}", fix)


RELEASE = re.compile(r"(\d+)\.(\d+)")


def _release(version: str) -> tuple[str, ...] | None:
    return None if (found := RELEASE.match(version)) is None else found.groups()


def check_devices(plan: Plan, found: int | None = None, *, ranks: int | None = None) -> str:
    """This machine has the devices the plan names, or as many as `ranks`. `found` stands in for counting them."""
    kind = plan.cluster.gpu.kind
    if kind == "cpu":
        return f"{cores()} CPU cores"
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
    return f"{have} CUDA devices"


def check_host_memory(plan: Plan, available: float | None = None, *, ranks: int | None = None) -> str:
    """On CPU the predicted peaks of all ranks (or of `ranks`) must fit in this machine's free memory together.

    No prediction, no verdict.
    """
    peaks = [phase.total for phase in plan.prediction.memory]
    if plan.cluster.gpu.kind != "cpu" or not peaks:
        return "n/a"
    ranks = plan.layout.world_size if ranks is None else ranks
    fix = "Plan a smaller model, micro-batch or sequence, or fewer ranks"
    rule = "predicted {need} on a machine with {have} free"
    return _fits_in_host("memory", ranks, max(peaks), available, rule, fix)


def check_copy_memory(plan: Plan, available: float | None = None, *, ranks: int) -> str:
    """`ranks` copy their parts of a checkpoint into this host's memory; on a CPU beside their predicted peaks."""
    of_rank = expected_bytes(plan) / plan.layout.world_size
    if plan.cluster.gpu.kind == "cpu":
        of_rank += max((phase.total for phase in plan.prediction.memory), default=0.0)
    fix = "Use a host with more memory, or leave out checkpoints"
    rule = "each rank copies its part of a checkpoint, and this machine has {have} free"
    return _fits_in_host("--checkpoint-every", ranks, of_rank, available, rule, fix)


def check_loading_memory(plan: Plan, available: float | None = None, *, ranks: int) -> str:
    """With GPUs every rank loads its part of the model through host memory: weight by weight, but where tensor ranks
    cut a whole one (`planner.figures.host.loading_bytes`).

    With CPUs the predicted peaks hold that moment (`check_host_memory`).
    """
    if plan.cluster.gpu.kind == "cpu":
        return "n/a"
    case = Case.of(plan)
    need = max(float(loading_bytes(case.at(stage))) for stage in case.stages())
    fix = "Use a host with more memory, or a smaller model"
    rule = "loading takes that much, and this machine has {have} free"
    return _fits_in_host("host memory", ranks, need, available, rule, fix)


def _fits_in_host(field: str, ranks: int, of_rank: float, available: float | None, rule: str, fix: str) -> str:
    """Check that this host has the bytes of each rank free; `rule` may name what is needed in all, and what is free."""
    have, need = available_memory() if available is None else available, ranks * of_rank
    if need > have:
        value = f"{ranks} ranks x {format_bytes(of_rank)}"
        said = rule.format(need=format_bytes(need), have=format_bytes(have))
        raise PlannerError(field, value, said, fix, exit_code=PREFLIGHT)
    return f"{format_bytes(need)} of {format_bytes(have)} free"


def check_disk(folder: Path, need: float, field: str, fix: str) -> str:
    """Check that the disk of a folder has room for `need` bytes of weights and logs."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    if need > free:
        rule = f"needs {format_bytes(need)} for weights and logs, and its disk has {format_bytes(free)} free"
        raise PlannerError(field, folder, rule, fix, exit_code=PREFLIGHT)
    return f"{format_bytes(need)} of {format_bytes(free)} free"


def visible_gpus() -> int:
    """CUDA devices a process started here would see, asked of the driver's own tool."""
    return len(visible_cards())


def visible_cards() -> list[int | str]:
    """The visible devices, each by the driver's number or its UUID."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(present))
    # CUDA stops reading the list at the first index that is not there.
    found: list[int | str] = []
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        if name.lstrip("-").isdigit() and not 0 <= int(name) < present:
            break
        found.append(int(name) if name.isdigit() else name)
    return found[:present]


def available_memory() -> float:
    """Bytes this machine can still give, or this container, whichever is less."""
    import psutil  # type: ignore[import-untyped]  # part of the [run] extra

    free = float(psutil.virtual_memory().available)
    limit = cgroups.limit_bytes()
    return free if limit is None else min(free, limit)

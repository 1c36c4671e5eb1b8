"""A run as a task of SkyPilot: nodes of a cloud, to which the run folder, the code and the inputs are copied.

Not here: the run folder (dryrun.py), writing files (launch_export.py), or launching, which is sky's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from executor.launchers.kubernetes import RUNS
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.names import check_name
from planner.basics.quoting import for_shell, identifier
from planner.spec.plan import Plan
from planner.spec.presets import packaged

CODE, RUN = "~/meshwright-code", "~/meshwright-run"

START = """\
master=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
export PYTHONPATH=$HOME/meshwright-code
exec python -m executor.cli join "$HOME/meshwright-run" --node-rank "$SKYPILOT_NODE_RANK" --master "$master:{port}"
"""
"""What every node runs; its rank and node 0's address are SkyPilot's."""
START_AGAIN = """\
set -e
master=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
export PYTHONPATH=$HOME/meshwright-code
run={run}
if [ "$SKYPILOT_NODE_RANK" = 0 ] && [ ! -e "$run" ]; then
    rm -rf "$run.new"
    cp -r "$HOME/meshwright-run" "$run.new"
    mv "$run.new" "$run"
fi
exec python -m executor.cli join "$run" --node-rank "$SKYPILOT_NODE_RANK" --master "$master:{port}" \\
    --start "$SKYPILOT_TASK_ID $(echo $SKYPILOT_NODE_IPS)"
"""
"""The same of a run that writes checkpoints: all nodes share its folder, which outlives them. The task's id is the same
for nodes that take the place of others, their addresses are not."""


def accelerator(plan: Plan, given: str | None) -> str | None:
    """SkyPilot's name of the plan's GPU, or None for a CPU. Refuses one that has none here and was not given."""
    gpu = plan.cluster.gpu
    if gpu.kind == "cpu":
        return None
    known: dict[str, str] = tomllib.loads((packaged() / "launchers/skypilot.toml").read_text())["accelerators"]
    name = given or known.get(gpu.name)
    if name is None:
        rule = f"{gpu.name} has no name of SkyPilot's in presets/launchers/skypilot.toml"
        fix = f"Give it: --accelerator NAME, as sky show-gpus prints it. {did_you_mean(gpu.name, known.values())}"
        raise PlannerError("plan: cluster.gpu", None, rule, fix, exit_code=3)
    if ":" in check_name(name, "--accelerator", "Try --accelerator H100"):
        raise PlannerError("--accelerator", name, "must be a name that sky show-gpus prints", "Try --accelerator H100")
    return name


def task(
    plan: Plan,
    folder: Path,
    port: int,
    requirements: Iterable[str],
    inputs: Iterable[Path] = (),
    secrets: Iterable[str] = (),
    gpu: str | None = None,
    volumes: Mapping[str, str] | None = None,
    run_id: str | None = None,
    restarts: int = 0,
) -> dict[str, Any]:
    """A task whose nodes join the run that stands in `folder`/run, with the code of `folder`/code, each installing
    `requirements`; `inputs` lie on every node where they lie here, and `volumes`, by name, at their paths. `run_id` is
    that of a run that goes on on other nodes, after as many failures of its own as `restarts`."""
    resources: dict[str, Any] = {} if gpu is None else {"accelerators": f"{gpu}:{plan.cluster.gpus_per_node}"}
    if restarts:
        resources["job_recovery"] = {"max_restarts_on_errors": restarts}
    mounts = {CODE: str(folder / "code"), RUN: str(folder / "run")} | {str(path): str(path) for path in inputs}
    name = identifier(f"{plan.model.name}-{plan.layout.engine}")
    found: dict[str, Any] = {"name": name, "num_nodes": plan.cluster.nodes}
    if resources:
        found["resources"] = resources
    if volumes:
        found["volumes"] = dict(volumes)
    if secrets := list(secrets):
        found["secrets"] = dict.fromkeys(secrets)  # null: sky refuses to launch without --secret NAME
    return found | {
        "file_mounts": mounts,
        "setup": f"python -m pip install --quiet {for_shell(requirements)}\n",
        "run": START.format(port=port)
        if run_id is None
        else START_AGAIN.format(port=port, run=for_shell([f"{RUNS}/{run_id}"])),
    }

"""A run whose agents are shell scripts: the launcher, the node and the folder are real, and no rank is.

A script talks as an agent does (executor.worker.agent): it answers what it is asked to read, waits for its ranks'
environment, and then does what a test says, in a shell's words, with the functions `met` and `failed`. Not here: any
claim, or real agents (tests/cluster).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
from kept import PLAN

from executor.backends.common import read_back
from executor.launchers import local
from executor.run import prepare
from executor.run.prepare import PreparedRun, RunOptions
from planner.parallelism.rule import Rule
from planner.spec.plan import Plan

AGENT = r"""#!/bin/sh
case "$*" in *executor.worker.readback*) echo '{"as": "@reads@"}'; exit;; esac
while [ "$1" != --nproc-per-node ]; do shift; done
ranks=$2 node=$MESHWRIGHT_NODE
cd "$MESHWRIGHT_RUN_DIR"
met() {  # every rank of this node has joined the process group, whose size is given
    for place in $(seq 0 $((ranks - 1))); do
        rank=$((node * ranks + place))
        echo "{\"world_size\": $1}" > mesh/rank-$rank.json
        mkdir -p logs/node-$node/run/attempt_0/$place
        echo "rank $rank is here" >> logs/node-$node/run/attempt_0/$place/stdout.log
        : >> logs/node-$node/run/attempt_0/$place/stderr.log
    done
}
failed() {  # a rank has left with this exit code, and the agent says so
    left="{\"rank\": $1, \"local_rank\": 0, \"exit_code\": $2, \"time\": 1.0}"
    echo "{\"failures\": [$left]}" > failed/node-$node.json
    exit 1
}
@first@
while IFS= read -r line; do
    case $line in
        *'"read"'*) echo "[0, \"{\\\"as\\\": \\\"@reads@\\\"}\", \"\"]" > "/dev/fd/$MESHWRIGHT_ANSWERS_FD" ;;
        *'"environment"'*) printf '%s\n' "$line" > environment-$node.json; break ;;
    esac
done
"""


class Plain:
    """A backend of another package, with one file whose effect its agent tells."""

    name, engines = "plain", ("ddp",)
    rules: tuple[Rule, ...] = ()

    def files(self, plan: Plan) -> dict[str, str]:
        return {"config/plain.json": f'"{plan.content_hash}"'}

    def drift(self, plan: Plan, folder: str) -> list[str]:
        found = read_back("plain", folder, "config/plain.json")["as"]
        return [] if found == "planned" else [f"it is {found}"]

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        return {"PLAIN": folder}


class Agents:
    """The script of all agents, and runs that they start."""

    def __init__(self, place: Path) -> None:
        self.place, self.script = place, place / "agent.sh"
        self.do("")

    def do(self, words: str, reads: str = "planned", first: str = "") -> None:
        """What agents do once they know their ranks' environment, as what they read the backend's file, and what they
        do `first` of all, before the launcher begins to wait."""
        self.script.write_text(AGENT.replace("@reads@", reads).replace("@first@", first) + words + "\n")
        self.script.chmod(0o700)

    def plan(self, nodes: int = 1, processes: int = 2) -> Plan:
        """A tiny plan for the given nodes, each with the given ranks."""
        cluster = msgspec.structs.replace(PLAN.cluster, nodes=nodes, gpus_per_node=processes)
        layout = msgspec.structs.replace(PLAN.layout, dp_replicate=nodes * processes)
        runtime = msgspec.structs.replace(PLAN.runtime, backend="plain")
        return msgspec.structs.replace(PLAN, cluster=cluster, layout=layout, runtime=runtime, inputs=()).sealed()

    def ready(self, nodes: int = 1, processes: int = 2, **options: object) -> PreparedRun:
        """A run that may start, on nodes that share this machine's loopback interface."""
        asked = RunOptions(self.place / "run", nodes, **options)  # type: ignore[arg-type]
        made = prepare.decided(self.plan(nodes, processes), asked, lambda _: None)
        return replace(made, hosts=local.describe(nodes, "loopback"))

    def environment(self, folder: Path, node: int = 0) -> dict[str, str]:
        """What a node's agent was told for its ranks."""
        return msgspec.json.decode((folder / f"environment-{node}.json").read_bytes())["environment"]  # type: ignore[no-any-return]


def said(*lines: str) -> str:
    """A shell's words that add lines to metrics.jsonl."""
    return "\n".join(f"echo {shlex.quote(line)} >> metrics.jsonl" for line in lines)

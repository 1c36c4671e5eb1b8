"""Run the stand-in rank through the project's real launcher, as a process that a test can signal.

python -m tests.cluster.drive BEHAVIOUR RUN_DIR NODES HOSTS MEET_S [TRAINER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from executor.run import launch
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Recipe, Runtime, TrainingJob
from planner.spec.plan import Plan

RANKS = 2


class NoFiles:
    """A backend with nothing to configure."""

    name = "none"
    engines = ("ddp",)
    rules = ()

    def files(self, plan: Plan) -> dict[str, str]:
        """Writes nothing."""
        return {}

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """Nothing can differ."""
        return []

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """Adds nothing."""
        return {}


def small_plan(data: Path | None = None, ranks: int = RANKS) -> Plan:
    """DDP over two CPU ranks of one node."""
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    return Plan(
        model=ModelSpec(name="tiny", layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=300),
        cluster=Cluster(
            name="localhost",
            gpu=Gpu(name="cpu", kind="cpu"),
            nodes=1,
            gpus_per_node=ranks,
            intra_link=link,
            inter_link=link,
        ),
        job=TrainingJob(seq_len=8, precision="fp32", recipe=Recipe(data=str(data) if data else None)),
        layout=Layout(engine="ddp", dp_replicate=ranks),
        runtime=Runtime(name="ddp", engine="ddp", kernels="transformers"),
    ).sealed()


def main(
    behaviour: str, run_dir: str, nodes: str, hosts: str, meet_s: str, trainer: str = "tests.cluster.standin"
) -> int:
    """Exit with the run's code, its record on stdout."""
    data = Path(run_dir).with_name("behaviour.txt")
    data.write_text(behaviour + "\n" + "x" * 8192)
    options = launch.RunOptions(
        run_dir=Path(run_dir), nodes=int(nodes), hosts=hosts, meet_s=float(meet_s), trainer=trainer
    )
    ready = launch.prepare(small_plan(data), options, lambda text: click.echo(text, err=True), NoFiles())
    record = launch.execute(ready, lambda text: click.echo(text, err=True))
    sys.stdout.buffer.write(msgspec.json.encode(record))
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""`executor join`: be one node of a run, for loops of one's own over hosts.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (run/join.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from executor.cli import options as cli_options
from executor.cli import output as cli_output
from executor.launchers import slurm
from executor.run import join as joins
from executor.system import environment
from planner.basics.help_page import PagedCommand, option
from planner.basics.saying import say


@click.command(cls=PagedCommand, example="executor join launch --node-rank 1 --master node1")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@option("question", "--node-rank", often=True, type=int, metavar="N", help="Number of this node, from 0.")
@option(
    "question",
    "--master",
    metavar="HOST[:PORT]",
    help="Node 0 as every node reaches it; node 0 itself may leave it out.",
)
@option(
    "question",
    "--slurm",
    "by_slurm",
    often=True,
    is_flag=True,
    help="Read rank and master from the environment of a task of srun.",
)
@option(
    "run",
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Environment variable of this node's ranks; without a value, this host's. Repeatable.",
)
@option(
    "run",
    "--resolve-timeout",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds to wait for node 0's name to resolve, as that of a new pod.",
)
@option(
    "run",
    "--start",
    often=True,
    metavar="WORD",
    help="A word for this start, the same on every node. Where RUN writes checkpoints and an earlier start had another "
    "word, the run resumes from the newest. Default with --slurm: the job's.",
)
@cli_options.MEET_TIMEOUT
@cli_options.DEBUG_NETWORK
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def join(
    run: Path,
    node_rank: int | None,
    master: str | None,
    by_slurm: bool,
    env: tuple[str, ...],
    resolve_timeout: float,
    start: str | None,
    meet_timeout: float,
    debug_network: bool,
    as_json: bool,
) -> int:
    """Join the run in RUN as node N. The folder, shared or copied to each host, is made by
    `executor run --dry-run -o RUN`."""
    if by_slurm == (node_rank is not None) or (by_slurm and (master or start)):
        raise click.UsageError("give --node-rank (and --master, --start), or --slurm, which reads them all")
    part = slurm.part(os.environ) if by_slurm else None
    if part is not None:
        node_rank, master, start = part.node, part.master, part.start
    assert node_rank is not None
    env = environment.debugging(env) if debug_network else env
    asked = joins.NodeRequest(
        node=node_rank, master=master, env=env, meet_s=meet_timeout, task=part, resolve_s=resolve_timeout, start=start
    )
    ready, record = joins.join(run, asked, cli_output.tell)
    if node_rank == 0:
        return cli_output.finish(ready, record, None, as_json)
    if as_json:
        say(msgspec.json.encode({"run_dir": str(run), "node": asked.node} | msgspec.to_builtins(record)))
    if record.exit_code:
        cli_output.tell_failure(ready, record)
    return record.exit_code

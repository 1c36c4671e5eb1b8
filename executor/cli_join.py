"""`executor join`: be one node of a run, for loops of one's own over hosts.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (join.py).
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from executor import cli
from executor import join as joins


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--node-rank", type=int, required=True, metavar="N", help="Which node this host is, from 0.")
@click.option(
    "--master", metavar="HOST[:PORT]", help="Node 0 as every node reaches it; node 0 itself may leave it out."
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Give this node's ranks this variable too; without a value, this host's own. Repeatable.",
)
@cli.MEET_TIMEOUT
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def join(
    run: Path, node_rank: int, master: str | None, env: tuple[str, ...], meet_timeout: float, as_json: bool
) -> int:
    """Be node N of the run in RUN, a folder made by executor run --dry-run -o RUN: shared, or a copy on each host."""
    asked = joins.Asked(node=node_rank, master=master, env=env, meet_s=meet_timeout)
    ready, record = joins.join(run, asked, cli.tell)
    if node_rank == 0:
        return cli.finish(ready, record, None, as_json)
    if as_json:
        click.echo(msgspec.json.encode({"run_dir": str(run), "node": node_rank} | msgspec.to_builtins(record)))
    if record.exit_code:
        cli.tell(f"error: {record.message.rstrip('.')}. Logs: {ready.options.run_dir / 'logs'}")
    return record.exit_code

"""`executor check`: whether a plan can run on this machine or on hosts, as a table, before anything is started.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (checks/).
"""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from executor.cli import options as cli_options
from executor.cli import output as cli_output
from executor.folder import rundir
from executor.hosts import ssh
from executor.hosts.checks import check as checking
from executor.hosts.checks import table
from executor.hosts.fleet import fleet_of
from executor.preflight.preflight import PREFLIGHT, visible_gpus
from executor.run.prepare import RunOptions, decided
from planner.basics.help_page import PagedCommand, option
from planner.basics.saying import say, terminal_width
from planner.spec import inputs
from planner.spec.plan import read_plan


@click.command(cls=PagedCommand, example="executor check plan.json --hosts hosts.txt")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    "question",
    "--hosts",
    often=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask these hosts over ssh, a line each in the order of the nodes, instead of this machine.",
)
@option("layout", "--nodes", often=True, type=int, help="Nodes to spread the ranks over (default: the plan's).")
@cli_options.MASTER
@cli_options.REMOTE_DIR
@option("output", "--run-dir", often=True, type=click.Path(path_type=Path), help="Where the run folder would be made.")
@option(
    "output",
    "--save-weights/--no-save-weights",
    default=True,
    help="Check that the disk has room for the weights.",
    show_default=True,
)
@option(
    "run",
    "--data",
    often=True,
    type=click.Path(path_type=Path),
    help="Text, .jsonl or .bin file, instead of the plan's.",
)
@cli_options.ENV
@option(
    "question",
    "--all-reduce/--no-all-reduce",
    default=True,
    show_default=True,
    help="Start all ranks for one all-reduce.",
)
@option("output", "--debug-network", is_flag=True, help="Enable the debug logs of NCCL and torch in it.")
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def check(
    plan_file: Path,
    hosts: Path | None,
    nodes: int | None,
    master: str | None,
    remote_dir: str | None,
    run_dir: Path | None,
    save_weights: bool,
    data: Path | None,
    env: tuple[str, ...],
    all_reduce: bool,
    debug_network: bool,
    as_json: bool,
) -> int:
    """Ask whether PLAN can run here, or on the hosts of a file. Looks at devices, packages, files,
    limits and the network."""
    if (master or remote_dir) and hosts is None:
        raise click.UsageError("--master and --remote-dir are for a host file: add --hosts FILE")
    plan = read_plan(plan_file)
    wanted = plan.cluster.nodes if nodes is None else nodes
    machines = fleet_of(hosts, plan, wanted, cli_output.tell).used if hosts else ()
    options = RunOptions(
        run_dir=run_dir or rundir.default_folder(plan),
        nodes=wanted,
        data=data,
        save_weights=save_weights,
        env=env,
        place=remote_dir,
    )
    made = decided(plan, options, cli_output.tell)
    whole = inputs.resolved(made.plan)
    names = tuple(one.name for one in machines) or (socket.gethostname(),)
    ask = partial(
        checking.checked, names=names, plan=whole, options=options, all_reduce=all_reduce, debug=debug_network
    )
    if machines:
        with ssh.contact(machines, cli_output.tell) as contact:
            rows, where, port = checking.place_of(contact, master)
            found = ask(contact, ranks=made.processes, master=where, port=port, copied=True)
        found = replace(found, rows=(*rows, *found.rows))
    else:
        ranks = made.ranks
        if whole.cluster.gpu.kind == "cuda" and made.processes <= visible_gpus() < ranks:
            cli_output.tell(f"this machine is checked as one of {wanted} nodes, for {made.processes} of {ranks} ranks")
            ranks = made.processes
        found = ask(checking.ThisMachine(), ranks=ranks)
    say(table.as_json(found, names, made.plan) if as_json else table.as_text(found, names, terminal_width()))
    return PREFLIGHT if found.failed else 0

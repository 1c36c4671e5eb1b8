"""`executor run --dry-run`: what a launch would write and start, on any machine, and what could not be checked on it.

A plan for other machines is shown with a name for each of its hosts. Not here: what a launch is (launch.py), or the
checks (prepare.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from executor.folder import joining, rundir
from executor.folder.ownership import LOCK, owned
from executor.launchers import local
from executor.preflight.findings import asked
from executor.run import attempts
from executor.run.launch import configuration_environment, launch_spec
from executor.run.prepare import PreparedRun, RunOptions, decided, files_of, folder_checks, host_checks
from executor.system.environment import inherited, masked
from executor.watch.supervise import Echo
from planner import __version__
from planner.basics.display import broken
from planner.basics.errors import PlannerError
from planner.basics.quoting import for_comment, for_shell
from planner.parallelism.backend import Backend, LaunchSpec, NodeCommand
from planner.spec import inputs
from planner.spec.lengths import course
from planner.spec.plan import Plan

SCHEMA = "dry-run/1"
OF_MACHINES = ("devices",)
"""Checks that say whether this machine is one that the plan is for."""
SCRIPT = "node-{}.sh"
ANY_MASTER = "HOST"
CONTINUED = " \\"
"""At the end of a line of a shell that goes on."""


@dataclass(frozen=True)
class DryRun:
    """The files and commands of a launch. `unchecked` has, by check, the sentences of those that fail or cannot run
    here."""

    ready: PreparedRun
    spec: LaunchSpec
    port: int
    unchecked: dict[str, str]

    @property
    def elsewhere(self) -> bool:
        """Whether the hosts are other machines than this one."""
        return self.ready.hosts.emulation == "elsewhere"

    @property
    def commands(self) -> tuple[NodeCommand, ...]:
        """The nodes' commands, without the values of what a person adds to their environment."""
        added = self.ready.environment
        return tuple(msgspec.structs.replace(one, env=masked(one.env, added)) for one in self.spec.commands)


def dry_run(
    plan: Plan, options: RunOptions, echo: Echo, backend: Backend | None = None, *, read_back: bool = True
) -> DryRun:
    """The launch of a plan, without starting it. PlannerError for a fault of the plan itself, with which no machine
    could run it.

    Without `read_back` the backend's variables are the plan's, and not what the framework, which takes seconds to
    import, makes of its files here: every node asks the one that it has.
    """
    made = decided(plan, options, echo, backend)
    checks = (*host_checks(made.plan, options, made.ranks), *folder_checks(made.plan, options))
    refused = {one.check: one.refusal.sentence for one in asked(checks) if one.rule}
    hosts = _hosts(options, refused)
    made = replace(
        made,
        plan=inputs.resolved(made.plan),
        hosts=hosts,
        options=replace(options, run_dir=options.run_dir.absolute()),
    )
    made = replace(made, files=files_of(made))
    port = local.hold_port(hosts, made.run_id)
    port.close()
    configured = _configured(made, refused) if read_back else _expected(made)
    return DryRun(made, launch_spec(made, port.number, configured), port.number, refused)


def _hosts(options: RunOptions, refused: dict[str, str]) -> local.LaunchedNodes:
    if options.hosts == "elsewhere" or any(name in refused for name in OF_MACHINES):
        return local.describe(options.nodes, "elsewhere")
    try:
        emulation, reason = local.choose_emulation(options.hosts, options.nodes)
    except PlannerError as error:
        emulation, reason = "loopback", error.sentence
    if reason:
        refused["hosts"] = f"nodes share the loopback interface: {reason}"
    return local.describe(options.nodes, emulation)


def _configured(made: PreparedRun, refused: dict[str, str]) -> dict[str, str]:
    """Variables that the framework exports for its files; those of the plan where it is not installed."""
    if "software" not in refused:
        with tempfile.TemporaryDirectory() as scratch:
            rundir.create(Path(scratch), made.plan, made.files)
            try:
                configured = configuration_environment(made, Path(scratch))
            except PlannerError as error:
                refused["configuration"] = error.sentence
            else:
                return {name: value.replace(scratch, str(made.options.run_dir)) for name, value in configured.items()}
    else:
        refused["configuration"] = (
            f"{made.backend.name} is not installed here, so its file was not read back: the variables are the plan's"
        )
    return _expected(made)


def _expected(made: PreparedRun) -> dict[str, str]:
    expected: Any = getattr(made.backend, "expected_environment", None)
    return dict(sorted(expected(made.plan).items())) if expected else {}


def write(found: DryRun, folder: Path, scripts: Mapping[str, str] | None = None) -> list[str]:
    """A run folder that its nodes can join, with scripts by name, by default one for each node; the names of what was
    written."""
    if scripts is None:
        nodes = len(found.ready.hosts.hosts)
        made = found.ready.plan
        said = course(made.job.recipe, made.layout.global_batch_size)
        scripts = {SCRIPT.format(node): script(node, nodes, said) for node in range(nodes)}
    with owned(folder, "--output", new=not found.ready.options.again):
        rundir.create(folder, found.ready.plan, found.ready.files)
        attempts.keep_asked(found.ready, folder, launcher="join")
        rundir.write_launch(folder, found.spec, found.ready.environment)
        joining.write(folder, joining_of(found.ready, found.port))
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o700)
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return sorted(path.relative_to(folder).as_posix() for path in files)


def joining_of(ready: PreparedRun, port: int) -> joining.Joining:
    """join.json of a prepared run, with the port of node 0."""
    program = ready.options.script
    return joining.Joining(
        run_id=ready.run_id,
        plan_hash=ready.plan.content_hash,
        version=__version__,
        code=joining.code_digest(),
        port=port,
        save_weights=ready.options.save_weights,
        stall_s=ready.options.stall_s,
        script=(str(Path(program[0]).absolute()), *program[1:]) if program else (),
        tool=ready.options.tool,
        environment=joining.without_secrets(ready.environment),
        checkpoints=ready.options.checkpoints,
        bad_loss=ready.options.bad_loss,
        profile=ready.options.profile,
        resume=os.path.relpath(ready.options.resume, ready.options.run_dir) if ready.options.resume else None,
    )


def script(node: int, nodes: int, said: str = "") -> str:
    """One node's command as a shell script that stands in the run folder, wherever that is on the host, and what it
    `said` of the run."""
    words = f'exec executor join "$(dirname -- "$0")" --node-rank {node} "$@"'
    lines = ["#!/bin/sh", for_comment(f"Node {node} of {nodes}.")]
    if nodes > 1:
        lines[1] += f" Start every node's at about the same time, each with --master {ANY_MASTER}[:PORT] of node 0."
    return "\n".join([*lines, *([for_comment(f"{said}.")] if said else []), words]) + "\n"


def join_command(found: DryRun, node: int) -> str:
    """The command that joins a node, as a user types it."""
    return for_shell(join_words(found, node))


def join_words(found: DryRun, node: int) -> list[str]:
    """Its words."""
    words = ["executor", "join", str(found.ready.options.run_dir), "--node-rank", str(node)]
    return [*words, "--master", ANY_MASTER] if len(found.ready.hosts.hosts) > 1 else words


def as_json(found: DryRun, environment: Mapping[str, str] = os.environ) -> bytes:
    """The dry-run/1 contract."""
    commands = [{"node": one.node, "argv": one.argv, "env": one.env} for one in found.commands]
    whole = {
        "schema": SCHEMA,
        "run_dir": str(found.ready.options.run_dir),
        "files": _files(found),
        "commands": commands,
        "inherits": sorted(inherited(environment)),
        "elsewhere": found.elsewhere,
        "join": [join_command(found, one.node) for one in found.commands],
        "unchecked": found.unchecked,
    }
    return msgspec.json.encode(whole)


def as_text(found: DryRun, environment: Mapping[str, str] = os.environ, width: int | None = None) -> str:
    """The dry run as text: all lines but comments can be copied into a shell. Where there is a width, comments and
    commands go on in further lines."""

    def note(text: str) -> str:
        return for_comment(broken(text, None if width is None else width - len("# ")))

    lines = [note(f"run folder: {found.ready.options.run_dir} (nothing is started)")]
    for name, text in _files(found).items():
        lines += ["", note(f"file {name}"), broken(text, width) if name == rundir.PLAN else text.rstrip()]
    kept = " ".join(sorted(inherited(environment)))
    lines += ["", note(f"every node inherits {kept}, and nothing else of this environment")]
    hosts = found.ready.hosts.hosts
    if found.elsewhere:
        names = f"{hosts[0].name} to {hosts[-1].name}" if len(hosts) > 1 else hosts[0].name
        lines += [note(f"{names}: your own hosts, each with the folder that --output writes, shared or copied")]
    for one in found.commands:
        lines += ["", note(f"node {one.node} ({hosts[one.node].name})")]
        if found.elsewhere:
            lines += [
                _command(join_words(found, one.node), width),
                note("which starts this command there, with addresses and interface of the host:"),
            ]
        room = width if width is None or not found.elsewhere else width - len("# ")
        started = [*(f"{name}={for_shell([value])} \\" for name, value in one.env.items()), _command(one.argv, room)]
        lines += [for_comment("\n".join(started))] if found.elsewhere else started
    if not found.elsewhere:
        joined = f"on your own hosts, each with the folder that --output writes: {join_command(found, 0)}"
        lines += ["", note(joined)]
    if found.unchecked:
        lines += ["", note("different on this machine, or not checked here:")]
        lines += [note(f"  {name}: {sentence}") for name, sentence in found.unchecked.items()]
    return "\n".join(lines)


def _command(argv: Sequence[str], width: int | None) -> str:
    """A command line, in several lines of the shell where it is longer than `width`."""
    lines = [""]
    for word in map(for_shell, ([one] for one in argv)):
        if width is not None and lines[-1] and len(lines[-1]) + len(word) + len(" " + CONTINUED) > width:
            lines[-1] += CONTINUED
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _files(found: DryRun) -> dict[str, str]:
    changed = found.ready.plan.content_hash
    return {rundir.PLAN: f"(the plan as it would run, {changed})", **found.spec.files}

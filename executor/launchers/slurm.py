"""Slurm: the script of a job, what a node reads of its task, and why Slurm ended a job, in a sentence.

Everything is asked of the system's own scontrol, squeue and sinfo. Not here: submitting or running (slurm_run.py), or
being a node (join.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from executor.folder import rundir
from executor.launchers.local import FIRST_PORT, PORTS
from planner.basics.errors import PlannerError
from planner.basics.quoting import for_comment, for_shell, identifier
from planner.spec.lengths import course
from planner.spec.plan import Plan

FIELD, OPTION = "--slurm", "--sbatch"
SCRIPT, JOB = "run.sbatch", "slurm.json"
ASK_S = 10.0
"""How long scontrol and its like may take to answer."""
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "REQUEUED", "RESIZING")
"""States of a job that has not ended."""
OPTION_NAME = re.compile(r"[a-z][a-z-]*")
OURS = {"nodes", "ntasks", "ntasks-per-node", "array", "wrap", "chdir"}
"""sbatch's options that decide which nodes there are and what runs on them: the plan's, and another value would be
another run."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """slurm.json: the job that a run folder was submitted as."""

    schema: str = "slurm/1"
    job: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,18}([_+][0-9]{1,18})?\Z")]


@dataclass(frozen=True)
class SlurmTask:
    """The present Slurm task: its job, its node number of how many, and node 0's host."""

    job: str
    node: int
    nodes: int
    hosts: tuple[str, ...]
    restarts: int = 0
    step: str = "0"

    @property
    def start(self) -> str:
        """The word of this start of the run: a job that is started again, and each srun in it, is another."""
        return f"{self.job}.{self.restarts}.{self.step}"

    @property
    def master(self) -> str:
        """HOST:PORT of node 0. Every job has a port of its own by its number, as several may share a host."""
        return f"{self.hosts[0]}:{FIRST_PORT + int(self.job) % PORTS}"


def part(environment: Mapping[str, str]) -> SlurmTask:
    """The present task, from Slurm's variables. PlannerError where this process is not a task of its own."""
    found = {name: environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "NODEID", "NNODES", "NTASKS")}
    if not all(value.isdecimal() for value in found.values()):
        fix = "Start it with srun --ntasks-per-node=1, or give --node-rank"
        raise PlannerError(FIELD, None, "needs a task that srun has started", fix)
    if found["NTASKS"] != found["NNODES"]:
        rule = f"has {found['NTASKS']} tasks on {found['NNODES']} nodes, and the agent of a node is one task"
        raise PlannerError(FIELD, f"job {found['JOB_ID']}", rule, "Start it with srun --ntasks-per-node=1")
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    hosts = tuple(_ask("scontrol", "show", "hostnames", listed).split())
    if len(hosts) != int(found["NNODES"]):
        rule = f"names {len(hosts)} hosts of {found['NNODES']} nodes: {listed}"
        raise PlannerError(FIELD, f"job {found['JOB_ID']}", rule, "Give --node-rank and --master instead", exit_code=3)
    restarts = environment.get("SLURM_RESTART_COUNT") or "0"
    step = environment.get("SLURM_STEP_ID") or "0"
    return SlurmTask(found["JOB_ID"], int(found["NODEID"]), int(found["NNODES"]), hosts, int(restarts), step)


def executor_words() -> tuple[str, ...]:
    """The path of this executor, which every node has to have."""
    beside = Path(sys.executable).with_name("executor")
    return (str(beside),) if beside.is_file() else (sys.executable, "-m", "executor.cli")


def srun_words(nodes: int) -> tuple[str, ...]:
    """srun's part of the command line: one agent a node, on all of its cores. An agent that ends badly says so to the
    others by itself; srun would kill them before they have written down how the run ended."""
    return ("srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0")


def directives(plan: Plan, folder: Path, given: Sequence[str]) -> dict[str, str | None]:
    """The #SBATCH lines of a plan's job by option; what the person gives as NAME or NAME=VALUE comes before ours."""
    gpus = plan.cluster.gpus_per_node if plan.cluster.gpu.kind != "cpu" else 0
    found: dict[str, str | None] = {
        "job-name": identifier(f"{plan.model.name}-{plan.layout.engine}"),
        "nodes": str(plan.cluster.nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(gpus)} if gpus else {}),
        "exclusive": None,
        "mem": "0",
        "output": str(folder / "slurm-%j.log").replace("%", "%%").replace("%%j", "%j"),
        "open-mode": "append",
        "requeue": None,
    }
    return found | dict(_given(text) for text in given)


def script(
    plan: Plan, folder: Path, given: Sequence[str] = (), again: Sequence[str] | None = None, call: Sequence[str] = ()
) -> str:
    """The job as a script for sbatch. `again` are the words of `executor run` with which a requeued job makes a new
    folder (None: it continues in the same), `call` those that call the executor (default: as this one was)."""
    name, nodes, gpus = for_shell(call or executor_words()), plan.cluster.nodes, plan.cluster.gpus_per_node
    lines = ["#!/bin/bash"]
    for option, value in directives(plan, folder, given).items():
        lines.append(f"#SBATCH --{option}" + ("" if value is None else f"={_quoted(option, value)}"))
    lines += [
        "",
        for_comment(f"{plan.model.name} by {plan.layout.engine}: {nodes} x {gpus} {plan.cluster.gpu.name}."),
        for_comment(f"{course(plan.job.recipe, plan.layout.global_batch_size)}."),
        "set -euo pipefail",
        f"run={for_shell([folder])}",
        *(_anew(name, again) if again is not None else ()),
        "# Each node reads its rank and node 0's address from the environment of its task.",
        *(["# A requeued job resumes from the newest checkpoint."] if again is None else ()),
        f'{for_shell(srun_words(nodes))} {name} join "$run" --slurm',
    ]
    return "\n".join(lines) + "\n"


def _anew(name: str, again: Sequence[str]) -> tuple[str, ...]:
    """The lines that make another folder where Slurm starts a job again whose run writes no checkpoints."""
    call = f'{name} run "$first/{rundir.PLAN}" --launcher slurm --dry-run -o "$run" {for_shell(again)}'.rstrip()
    return (
        "if ((${SLURM_RESTART_COUNT:-0})); then",
        "    # Slurm has started this job again: the run needs a new folder.",
        "    first=$run run=$run-restart-$SLURM_RESTART_COUNT",
        f"    {call} >/dev/null",
        "fi",
    )


def why(job: str, nodes: Sequence[str] = (), restarts: int = 0, number: int = signal.SIGTERM) -> str:
    """The reason why Slurm ended a job or sent it the signal `number`, as a sentence without a full stop; the job ran
    on `nodes`, for the `restarts`-th time after the first."""
    said = show(job)
    if not said:
        return f"Slurm ended job {job}"
    again = int(said.get("Restarts", "0")) > restarts
    queue = ", and put the job back into the queue" if again else ""
    if lost := [text for name, state, text in node_states(nodes) if state.startswith(("down", "drained", "fail"))]:
        return f"Slurm ended job {job}: {'; '.join(lost)}{queue}"
    if again:
        return f"Slurm put job {job} back into the queue (scontrol requeue, or a job that comes first)"
    ran, limit = seconds(said.get("RunTime", "")), seconds(said.get("TimeLimit", ""))
    if said.get("JobState") == "RUNNING" and number == signal.SIGUSR1:
        left = "" if ran is None or limit is None else f" {limit - ran} s before its time limit of {said['TimeLimit']}"
        return f"job {job} was sent SIGUSR1{left}"
    if said.get("JobState") == "RUNNING":
        return f"the step of job {job} was cancelled"
    if ran is not None and limit is not None and ran >= limit:
        return f"Slurm ended job {job} at its time limit of {said['TimeLimit']}"
    return f"job {job} was cancelled (scancel)"


def seconds(text: str) -> int | None:
    """Seconds of a time as Slurm writes it, [days-]hours:minutes:seconds; None of another word (UNLIMITED, INVALID)."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (int(one or 0) for one in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def standing(job: str) -> tuple[str, str]:
    """State of a job: a word, and a sentence that names the nodes that are unavailable."""
    said = show(job)
    state = said.get("JobState", "")
    if not state:
        return "unknown", f"Slurm no longer knows job {job}"
    reason = said.get("Reason", "None")
    if state != "PENDING":
        return state.lower(), f"job {job}"
    away = [text for _, look, text in node_states() if look.startswith(("down", "drain", "fail"))]
    reason = "" if reason == "None" else f" ({reason})"
    return "queued", f"job {job} waits{reason}" + (f"; {'; '.join(away)}" if away else "")


def holds(job: str) -> bool:
    """Whether a job runs, or may still."""
    return show(job).get("JobState") in UNDER_WAY


def submitted(path: Path, added: Mapping[str, str]) -> str:
    """Submit a script; the number of its job. Slurm hands the environment of sbatch to the job, and a requeued one:
    what is `added` to it stands in no file of ours."""
    return _ask("sbatch", "--parsable", str(path), added=added).strip().partition(";")[0]


def end_step(job: str, name: str) -> bool:
    """Send SIGTERM to the tasks of a job's step of that name; whether Slurm took it."""
    try:
        said = _ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j")
        rows = (line.split(maxsplit=1) for line in said.splitlines())
        found = [row[0] for row in rows if row[1:] == [name]]
        _ask("scancel", "--signal=TERM", *found)
    except PlannerError:  # the job itself is being ended
        return False
    return bool(found)


def show(job: str) -> dict[str, str]:
    """Slurm's fields of a job by name; empty where it knows none."""
    try:
        said = _ask("scontrol", "show", "job", job, "--oneliner")
    except PlannerError:
        return {}
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


def node_states(nodes: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """Name, state and a few words of each node of these, or of all, that Slurm gives a reason of."""
    chosen = ("--nodes", ",".join(nodes)) if nodes else ()
    try:
        said = _ask("sinfo", "--noheader", "--Node", *chosen, "--format", "%N|%T|%E")
    except PlannerError:
        return []
    rows = sorted({tuple(line.split("|", 2)) for line in said.splitlines() if line.count("|") > 1})
    return [(name, state, f"{name} is {state.rstrip('*')} ({text})") for name, state, text in rows if text != "none"]


def read_job(folder: Path) -> str | None:
    """The job that a run folder was submitted as, if it was."""
    return rundir.read_json(folder / JOB, Job).job if (folder / JOB).is_file() else None


def _given(text: str) -> tuple[str, str | None]:
    """NAME or NAME=VALUE of --sbatch."""
    name, has_value, value = text.removeprefix("--").partition("=")
    if not OPTION_NAME.fullmatch(name):
        rule = "must be NAME or NAME=VALUE, an option of sbatch in its long form"
        raise PlannerError(OPTION, text, rule, "Try --sbatch partition=gpu --sbatch time=4:00:00")
    if name in OURS:
        raise PlannerError(OPTION, text, "is decided by the plan", "Leave it out, or plan for other nodes")
    if not value.isprintable():
        raise PlannerError(OPTION, name, "has a line break or another control character", "Leave it out")
    return name, value if has_value else None


def _quoted(option: str, value: str) -> str:
    """A value as sbatch reads it: words in double quotes, in which it knows no way to write one."""
    if not value.isprintable() or '"' in value or "\\" in value:
        rule = "has a quote, a backslash or a control character, which no #SBATCH line can hold"
        raise PlannerError(OPTION, f"{option}={value}", rule, "Choose another name or place")
    return value if re.fullmatch(r"[\w.,:/%@+=-]*", value) else f'"{value}"'


def _ask(*words: str, added: Mapping[str, str] = MappingProxyType({})) -> str:
    """The answer of one of Slurm's programs. PlannerError (exit code 3) where there is none."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_S, check=False, env=os.environ | added)
    except FileNotFoundError:
        fix = "Run it where Slurm's commands are, or use --dry-run"
        raise PlannerError("slurm", words[0], "is not installed here", fix, exit_code=3) from None
    except subprocess.TimeoutExpired:
        raise PlannerError("slurm", words[0], f"gave no answer in {ASK_S:g} s", exit_code=3) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise PlannerError("slurm", words[0], said[-1] if said else f"ended with {done.returncode}", exit_code=3)
    return done.stdout

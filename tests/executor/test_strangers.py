"""A run folder is data from a stranger: no command runs, reaches or ends what is written in one.

Every command meets every file that is read back with everything that a stranger may have put there. `ssh` and Slurm's
programs are real programs that say that they were called. Not here: names in plans, or how a text is quoted.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kept import PLAN, checkpoint
from sleepers import sleeper
from test_ownership import content

from executor.cli import executor, watch
from executor.folder import rundir
from executor.follow import attach
from executor.run import reap
from executor.system import processes
from planner.basics.command import exit_code

READING = ("status", "watch", "report", "export", "logs", "attach")
COMMANDS = (*READING, "stop", "resume")
THOROUGH = ("status", "stop", "resume")
"""Meet every text; the others meet every file, and a third of the texts each."""
GONE = f"{os.getpid()}:1"
"""The identity of a process that is no more: another has its number now."""
RUN_ID = f"victim-{os.getpid()}"
PROGRAMS = ("ssh", "scontrol", "sbatch", "srun", "scancel", "squeue", "sinfo")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A folder with programs that say that they were called, and a process of ours that is not a launcher."""
    place = tmp_path_factory.mktemp("here")
    (place / "bin").mkdir()
    for name in PROGRAMS:
        (place / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {place}/called\n')
        (place / "bin" / name).chmod(0o755)
    victim = sleeper({processes.RUN_ID_VARIABLE: RUN_ID, "PATH": os.environ["PATH"]})
    yield place, victim
    victim.kill()
    victim.wait()


@pytest.fixture
def folder(tmp_path: Path, here: tuple[Path, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose launcher is gone, with a checkpoint, on a host whose prelude would run."""
    monkeypatch.setenv("PATH", f"{here[0] / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MESHWRIGHT_SSH", raising=False)
    monkeypatch.chdir(tmp_path)

    def ctrl_c(_: float) -> None:  # a run that goes on is watched until then
        raise KeyboardInterrupt

    for module in (watch, attach):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=ctrl_c))
    (here[0] / "called").unlink(missing_ok=True)
    rundir.create(tmp_path / "run", PLAN, {})
    (tmp_path / "run" / "checkpoints").mkdir()
    checkpoint(tmp_path / "run", 10)
    put(tmp_path / "run", rundir.LAUNCHER, launcher())
    put(tmp_path / "run", rundir.HOSTS, hosts(prelude=f"touch {tmp_path / 'canary'}"))
    (tmp_path / "run" / "stranger.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    return tmp_path / "run"


def launcher(**changed: Any) -> Any:
    here = reap.this_launcher("no-run-of-ours", in_namespaces=False)
    return {**msgspec.to_builtins(here), "process": GONE, **changed}


def hosts(**changed: Any) -> Any:
    machine = {"name": "red", "slots": None, "user": None, "port": None, "python": None, "prelude": None}
    return {"schema": "hosts/1", "hosts": [{**machine, "container": None, "line": 1, **changed}]}


def joining(**changed: Any) -> Any:
    shared = {"schema": "join/1", "run_id": "a-run", "plan_hash": PLAN.content_hash, "version": "1", "code": "c"}
    return {**shared, "port": 20000, "checkpoints": {"every": "10"}, **changed}


def asked(**changed: Any) -> Any:
    return {"schema": "asked/1", "checkpoints": {"every": "10"}, **changed}


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())


TOUCH = "touch canary"
HOSTILE: list[tuple[str, Callable[..., Any] | None, Any]] = [
    *((rundir.HOSTS, hosts, {field: value}) for field, value in [
        ("name", f"-oProxyCommand={TOUCH}"), ("name", f"red;{TOUCH}"), ("name", f"$({TOUCH})"), ("name", "n[1-40000]"),
        ("name", "me@red"), ("name", ""), ("user", f"-oProxyCommand={TOUCH}"), ("user", f"me;{TOUCH}"), ("port", -1),
        ("port", 99999999), ("slots", 0), ("python", f"-c {TOUCH}"), ("python", f"$({TOUCH})"), ("prelude", TOUCH),
        ("prelude", f"true\n{TOUCH}"), ("prelude", "\x1b[2J"), ("container", TOUCH), ("container", "'"),
    ]),
    *((rundir.LAUNCHER, launcher, {field: value}) for field, value in [
        ("process", "-1:0"), ("process", "1:0"), ("process", "0:0"), ("process", f"$({TOUCH}):1"),
        ("process", "VICTIM"), ("run_id", ""), ("run_id", "../../x"), ("run_id", "a b"), ("host", "\x1b[2J"),
        ("host", f"$({TOUCH})"), ("network", -1),
    ]),
    *(("join.json", joining, {field: value}) for field, value in [
        ("resume", "../../etc"), ("resume", "/etc"), ("script", [TOUCH]), ("environment", {"LD_PRELOAD=x;y": "x"}),
        ("environment", {"RANK": "0"}), ("port", 0), ("master", f"-oProxyCommand={TOUCH}"),
        ("checkpoints", {"every": TOUCH}), ("bad_loss", {"window": -1}), ("run_id", "../../x"),
    ]),
    *(("asked.json", asked, {field: value}) for field, value in [
        ("trainer", "run.stranger"), ("trainer", f"-c {TOUCH}"), ("kept", "../../x"), ("kept", "/etc"),
        ("launcher", "x"), ("hosts", f"$({TOUCH})"), ("hosts", "\x1b[2J"), ("place", f"x\n{TOUCH}"), ("meet_s", -1),
        ("max_restarts", 10**6),
        ("environment", {"RANK": "0"}), ("environment", {f"A;{TOUCH}": "x"}), ("sbatch", [f"wrap={TOUCH}"]),
        ("sbatch", [f"comment=x\n{TOUCH}"]), ("checkpoints", {"every": f"1;{TOUCH}"}),
        ("checkpoints", {"every": "5", "keep_last": 0}),
    ]),
    *(("slurm.json", None, {"schema": "slurm/1", "job": job}) for job in [
        "--help", "", f"7;{TOUCH}", f"$({TOUCH})", "-M x", "7 8", "7\n8",
    ]),
    *(("joined/node-0.json", None, {"node": 0, "process": "1:1", "host": host}) for host in ["\x1b[2J", "a\nb"]),
    *((name, None, content) for name in (
        rundir.HOSTS, rundir.LAUNCHER, "join.json", "asked.json", "slurm.json", "joined/node-0.json", "run.json",
        "launch.json", "attempts/1/attempt.json", "checkpoints/step-10/COMPLETE", "measured/rank-0.json",
    ) for content in (b"", b"[", b"[" * 5000, b"\xff\xfe", b'{"schema": "x/9"}', b"null")),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_of_a_folder_is_run_reached_or_ended_by_any_command(
    command: str, folder: Path, here: tuple[Path, subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    place, victim = here
    whole = content(folder)
    drawn = HOSTILE if command in THOROUGH else HOSTILE[COMMANDS.index(command) % 3 :: 3]
    for number, (name, kind, value) in enumerate(drawn):
        if kind is not None:
            value = kind(
                **{key: processes.identity(victim.pid) if one == "VICTIM" else one for key, one in value.items()}
            )
        put(folder, name, value)
        if name == "slurm.json":
            (folder / rundir.HOSTS).unlink()
        before, words = content(folder), [str(folder.parent / "model")] if command == "export" else []

        code = exit_code(executor, [command, str(folder), *words])

        said, case = capsys.readouterr(), (name, value)
        assert code != 1 and "internal error" not in said.err, (case, said.err)
        assert "\x1b" not in said.out + said.err, case
        assert not list(folder.parent.rglob("canary")), case
        assert not (place / "called").exists(), (case, (place / "called").read_text())
        assert victim.poll() is None, case
        if command in READING:
            assert content(folder) == before, (number, case)
        now = content(folder)
        for path in now.keys() | whole.keys():
            if path not in whole:
                (folder / path).unlink()
            elif now.get(path) != whole[path]:
                put(folder, path, whole[path])


@pytest.mark.parametrize("command", ["stop", "resume"])
def test_hosts_are_named_and_not_reached_unasked(
    command: str, folder: Path, here: tuple[Path, subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(executor, [command, str(folder)]) == 3
    said = capsys.readouterr().err
    assert f"{folder / rundir.HOSTS} names red (prelude 'touch {folder.parent / 'canary'}')" in said
    assert "names hosts that you have not named or confirmed" in said and not (here[0] / "called").exists()

    exit_code(executor, [command, str(folder), "--yes"])
    assert (here[0] / "called").read_text().startswith("ssh ")
    assert not (folder.parent / "canary").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are made by root")
@pytest.mark.parametrize("name", [".", rundir.HOSTS, rundir.LAUNCHER, "asked.json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_another_user_is_read_and_nothing_is_done_by_it_unless_its_owner_is_trusted(
    command: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, "asked.json", asked())
    os.chown(folder / name, 4061, 4061)
    words = [str(folder.parent / "model")] if command == "export" else []
    refused = f"{(folder / name).name}: belongs to another user (uid 4061)"
    exit_code(executor, [command, str(folder), *words])
    assert (refused in capsys.readouterr().err) is (command in ("stop", "resume", "attach"))
    if command in ("stop", "resume", "attach"):
        exit_code(executor, [command, str(folder), "--trust-owner"])
        assert "belongs to another user" not in capsys.readouterr().err


def test_what_this_code_writes_passes_its_own_checks(tmp_path: Path) -> None:
    from executor.hosts.hosts import kept_hosts, read_hosts

    (tmp_path / "hosts.txt").write_text(
        "* python=~/venv/bin/python prelude=\"module load cuda; export A='b c'\"\nme@big port=22 slots=8\n10.0.0.1\n"
        "n[01-03] container=\"docker exec 'a b'\"\nfe80::1%eth0\n"
    )
    from executor.hosts.hosts import keep_hosts

    machines = read_hosts(tmp_path / "hosts.txt")
    keep_hosts(tmp_path, machines)
    assert kept_hosts(tmp_path) == machines

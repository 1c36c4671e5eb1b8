"""A run seen from another terminal while it goes: over a restart, after its launcher died, and when the watching ends.

Real agents and ranks. Not here: the pure parts (tests/executor/test_view.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from test_launch import both_wait, run_id, start
from test_resume import HOST, plan_of
from waiting import until

from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.follow import attach
from executor.run import launch
from executor.system.processes import processes_of

PATIENCE_S = 300
EXECUTOR = str(Path(sys.executable).with_name("executor"))


def _as_an_interactive_shell() -> None:
    """Ctrl-C is a signal of the terminal, and heeded: tests that a script starts in the background inherit SIGINT as
    ignored, and so would the command."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command on a terminal of its own, and what it has shown so far."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_as_an_interactive_shell,
        )
        os.close(slave)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        try:
            while some := os.read(self.master, 65536):
                self.shown += some.decode()
        except OSError:  # closed by the command's end
            pass

    def interrupt(self) -> int:
        """Press Ctrl-C. The exit code."""
        os.write(self.master, b"\x03")
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self.reader.join()
        os.close(self.master)
        return code


def piped(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([EXECUTOR, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_run_is_watched_over_a_restart_to_its_end(tmp_path):
    folder, seen, echoed = tmp_path / "run", {}, []
    options = launch.RunOptions(
        run_dir=folder, nodes=1, hosts="loopback", env=("DIE=1 12 1", "EVERY=5"), trainer="tests.cluster.hanging",
        max_restarts=1, checkpoints=CheckpointSchedule(every="5"),
    )  # fmt: skip

    def train() -> None:
        ready = launch.prepare(plan_of("ddp"), options, print)
        seen["ends"] = launch.execute(ready, echoed.append)

    threading.Thread(target=train).start()
    until((folder / "plan.json").is_file, "a run folder")
    text, lines = piped("watch", str(folder)), piped("watch", str(folder), "--json")
    terminal, attached = Terminal(EXECUTOR, "watch", str(folder)), piped("attach", str(folder), "--rank", "0")

    out, err = text.communicate(timeout=PATIENCE_S)
    said = [json.loads(line) for line in lines.communicate(timeout=PATIENCE_S)[0].splitlines()]
    printed = attached.communicate(timeout=PATIENCE_S)[0].splitlines()
    until(lambda: "ends" in seen, "the launcher")

    assert seen["ends"].status == "completed", seen["ends"].message
    assert (text.returncode, lines.returncode, terminal.ended()) == (0, 0, 0), err
    restart = [line for line in out.splitlines() if line.startswith("start 1: ")]
    assert len(restart) == 1 and "rank 1" in restart[0] and restart[0].endswith("resumed after step 10"), out
    assert out.splitlines()[-1].startswith("completed  step 32/32  loss ") and "checkpoint step-30 of" in out
    assert {"starting", "completed"} <= {one["status"] for one in said}
    assert [one["exit_code"] for one in said] == [None] * (len(said) - 1) + [0]
    assert said[-1]["restarts"][0]["failed_rank"] == 1 and {one["step"] for one in said[-1]["ranks"]} == {0}
    assert {one["stage"] for one in said[-1]["ranks"]} == {"end"}
    assert "\x1b[J" in terminal.shown and "rank  host" in terminal.shown
    assert "Ctrl-C stops watching" in terminal.shown

    of_rank_0 = [line for line in echoed if line.startswith(f"{HOST}:0  ")]
    assert sum("  step 11/32  loss" in line for line in of_rank_0) == 2  # trained by both starts
    assert attached.returncode == 0 and printed == of_rank_0
    later: list[str] = []
    assert attach.follow(folder, 0, from_start=True, echo=later.append).exit_code == 0 and later == of_rank_0
    assert attach.follow(folder, None, from_start=False, echo=pytest.fail).exit_code == 0


def test_ctrl_c_ends_the_watching_alone_and_a_killed_launcher_is_seen_and_left(tmp_path):
    folder = tmp_path / "run"
    launcher = start("wait", folder)
    both_wait(folder)
    terminal = Terminal(EXECUTOR, "watch", str(folder))
    until(lambda: "Ctrl-C stops" in terminal.shown, "the first look", lambda: terminal.shown)
    assert terminal.interrupt() == 130 and "watching stopped; the run continues" in terminal.shown
    assert launcher.poll() is None

    detached = Terminal(EXECUTOR, "attach", str(folder), "--from-start")
    until(lambda: "node-1:1  rank 1 met 2" in detached.shown, "the ranks' lines", lambda: detached.shown)
    assert detached.interrupt() == 130 and "detached; the run continues" in detached.shown and launcher.poll() is None

    watching, attached = piped("watch", str(folder)), piped("attach", str(folder))
    assert watching.stdout is not None and watching.stdout.readline().startswith("running")
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    out, err = watching.communicate(timeout=PATIENCE_S)

    assert watching.returncode == 7 and out.splitlines()[-1].startswith("launcher lost: its launcher"), out + err
    assert attached.communicate(timeout=PATIENCE_S)[1].startswith("launcher lost") and attached.returncode == 7
    assert not (folder / "run.json").exists()  # looking writes nothing
    for pid in processes_of(run_id(folder)):
        os.kill(pid, signal.SIGKILL)

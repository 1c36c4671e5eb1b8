"""What commands show in a real terminal, and the golden first screens of 80 columns and 24 lines drawn anew.

    python tests/planner/screens.py             # draw screens/*.txt anew, after a change of what is shown

Golden screens are plain text, so a change of them is read in a diff. Commands whose answer is of the machine, or that
start a run (check, probe, measure, trace, export), have none; the explorer's are in tests/tui. Not here: any claim.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "screens"
COLUMNS, LINES = 80, 24
UNSEEN = re.compile(r"[^\n]*\r(?!\n)|\x1b\[[0-9;?]*[a-zA-Z]")
"""Lines that are drawn over, and escapes."""
OLD = PROJECT / "tests" / "executor" / "old"
MODULES = {"planner": "planner.cli", "executor": "executor.cli"}
UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "MESHWRIGHT_PRESETS")

SCREENS = {
    "estimate": "planner estimate --model 7b --gpus 32",
    "recommend": "planner recommend --model 70b --gpus 64 --global-batch-size 512",
    "fit": "planner fit --model 7b --gpus 8",
    "sweep": "planner sweep --model 7b --gpus 8..64",
    "cost": "planner cost --model 7b --gpus 32 --tokens 50B --price-per-gpu-hour 2",
    "compare": "planner compare 8.json 16.json",
    "explain": "planner explain --model 7b --gpus 8",
    "explain-phase": "planner explain --model 7b --gpus 8 --phase peak",
    "show": "planner show 16.json",
    "timeline": "planner timeline 16.json",
    "groups": "planner groups 16.json",
    "backends": "planner backends",
    "presets": "planner presets",
    "presets-models": "planner presets models",
    "schema": "planner schema plan",
    "replay": "planner replay rows.jsonl",
    "calibrate": "planner calibrate rows.jsonl",
    "planner-help": "planner --help",
    "planner-estimate-help": "planner estimate --help",
    "planner-recommend-help": "planner recommend --help",
    "report": "executor report run",
    "status": "executor status run",
    "watch": "executor watch run",
    "executor-help": "executor --help",
    "executor-run-help": "executor run --help",
}


def raw(command: str, folder: Path, columns: int = COLUMNS, **variables: str) -> str:
    """What a command writes to a terminal of that width, with its escapes, once it has ended well."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    env |= {"TERM": "xterm", "PYTHONPATH": str(PROJECT)} | variables
    program, *words = command.split()
    started = subprocess.Popen(
        [sys.executable, "-c", f"from {MODULES[program]} import main; main()", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=env,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        shown += more
    started.wait()
    os.close(ours)
    assert started.returncode == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


@cache
def in_terminal(command: str, columns: int, folder: Path) -> str:
    """What a command leaves on a terminal of that width."""
    return UNSEEN.sub("", raw(command, folder, columns))


def drawn(name: str, folder: Path) -> str:
    """The first screen of one of SCREENS, as it is now."""
    lines = in_terminal(SCREENS[name], COLUMNS, folder).split("\n")
    rows = [line[at : at + COLUMNS] for line in lines for at in range(0, max(1, len(line)), COLUMNS)]
    return "".join(f"{row.rstrip()}\n" for row in rows[:LINES])


def prepare(folder: Path) -> Path:
    """Put there what the commands read: two plans, rows and a run."""
    for gpus in (8, 16):
        words = f"planner recommend --model 7b --gpus {gpus} -o {gpus}.json"
        raw(words, folder)
    shutil.copy(OLD / "rows.jsonl", folder)
    shutil.copytree(OLD / "run", folder / "run")
    return folder


def main() -> None:
    """Draw them anew."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for one in SCREENS:
            (FOLDER / f"{one}.txt").write_text(drawn(one, folder))


if __name__ == "__main__":
    main()

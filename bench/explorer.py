"""How long the explorer takes to paint, to answer and to plan again, on a terminal of 80x24. Informational.

A pseudo-terminal is read as a person's would be: the first paint is the first frame with the fields on it, the answer
the first with the bars. Re-planning is measured at the function the screen calls, and key by key on the screen.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time

REPEATS = 7
SIZE = (24, 80)
COMMAND = [sys.executable, "-m", "planner", "explore", "--model", "7b", "--gpus", "64"]
PAINTED, ANSWERED = b"more options", "✓".encode()
NAMES = ("first paint", "of that on a processor", "first answer", "of that on a processor")
PATIENCE_S = 20.0
GPUS = (64, 1024)


def main() -> None:
    """Print medians and the fastest of several runs."""
    print(f"{'process, 7b on 64 GPUs, 80x24':40}{'median':>10}{'fastest':>10}")
    runs = [watched() for _ in range(REPEATS)]
    for place, name in enumerate(NAMES):
        report(name, [run[place] for run in runs])
    print(f"\n{'re-planning, in a process that is warm':40}{'median':>10}{'fastest':>10}")
    for gpus in GPUS:
        runs = [replanned("7b", gpus, turn) for turn in range(REPEATS)]
        for place, name in enumerate((f"7b on {gpus} GPUs", "of that on a processor")):
            report(name, [run[place] for run in runs])
    for name, watching in (
        ("from a key to the new answer on screen", False),
        ("longest pause of its event loop", True),
    ):
        report(name, [asyncio.run(typed(watching)) for _ in range(REPEATS)])


def report(name: str, taken: list[float]) -> None:
    """One line of milliseconds."""
    print(f"{name:40}{statistics.median(taken) * 1e3:>7.0f} ms{min(taken) * 1e3:>7.0f} ms")


def watched() -> list[float]:
    """Seconds to the first paint and to the first answer of one process, each with the processor's share of it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
    start = time.perf_counter()
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen, painted = b"", list[float]()
    try:
        while time.perf_counter() - start < PATIENCE_S:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
            if not painted and PAINTED in seen:
                painted = [time.perf_counter() - start, processor_seconds(process.pid)]
            if painted and ANSWERED in seen:
                return [*painted, time.perf_counter() - start, processor_seconds(process.pid)]
        raise SystemExit(f"no answer after {PATIENCE_S:.0f} s; on the terminal: {seen[-500:]!r}")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)


def processor_seconds(pid: int) -> float:
    """User and system time of a process."""
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def replanned(model: str, gpus: int, turn: int) -> tuple[float, float]:
    """Seconds of one re-plan, and the processor's; `turn` changes the question, so that no answer is remembered."""
    from tui import inputs, state

    texts = inputs.typed({"model": model, "gpus": gpus, "seq_len": 2048 + 16 * turn})
    before = time.process_time()
    return state.plan(state.ask(texts)).seconds, time.process_time() - before


async def typed(watching: bool) -> float:
    """Seconds from a key to the new answer on the screen when 6 GPUs become 64; or, watching, the longest pause of the
    event loop meanwhile. Not both at once: a loop that wakes a thousand times a second slows the planner's thread."""
    from textual.events import Key
    from textual.widgets import Input

    from tui import inputs
    from tui.app import ExplorerApp

    app = ExplorerApp(inputs.typed({"model": "7b", "gpus": 6}))
    async with app.run_test(size=SIZE[::-1]) as pilot:
        while app.main.planned is None:
            await asyncio.sleep(0.01)
        field = app.main.query_one("#gpus", Input)
        field.focus()
        await pilot.press("end")
        await asyncio.sleep(0.5)
        before, longest = app.main.planned, 0.0
        start = time.perf_counter()
        field.post_message(Key("4", "4"))  # not pilot.press: it waits on its own
        while app.main.planned is before:
            slept = time.perf_counter()
            await asyncio.sleep(0.001 if watching else 0.01)
            longest = max(longest, time.perf_counter() - slept - 0.001)
        return longest if watching else time.perf_counter() - start


if __name__ == "__main__":
    main()

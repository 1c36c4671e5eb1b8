"""Rewrite what is generated in the documentation: whole pages and the charts of docs/accuracy.md; the output of a
console block's commands and of Python blocks; the tables of layouts that were run and of how often "fits" was false;
and the JSON Schemas in planner/spec/schemas.

    python scripts/docs.py [--check] [--runs] [FILE...]

`--check` writes nothing and exits 1 when a file would change; the tests call it so. `--runs` also runs what starts
processes in a page that is executed as a whole. Not here: what the generated pages say (scripts/pages), or the
pictures of README.md (pictures.py).
"""

from __future__ import annotations

import difflib
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout, suppress
from pathlib import Path

from scripts.pages import formats, schemas

PROJECT = Path(__file__).resolve().parents[1]
PART = re.compile(r"^<!-- (layouts|fits) -->\n.*?^<!-- end -->", re.MULTILINE | re.DOTALL)
ACCURACY = PROJECT / "docs" / "accuracy.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORMULAS = PROJECT / "docs" / "formulas.md"
REFERENCE = PROJECT / "docs" / "commands.md"
CURRENCY = PROJECT / "docs" / "currency.md"
WHOLE = (ACCURACY, CURRENCY, FORMULAS, REFERENCE)
FORMATS = PROJECT / "docs" / formats.FOLDER
"""A page for each format of other tools."""
CHARTS = tuple(ACCURACY.with_suffix("") / name for name in ("memory.svg", "time.svg"))
"""The pictures of docs/accuracy.md: rewritten and checked with it."""
EXECUTED = (PROJECT / "docs" / "library.md", PROJECT / "docs" / "tutorial.md")
"""Pages whose blocks are run one after the other, in one Python session and one folder."""
STEP = re.compile(
    r"^```python\n(?P<python>.*?)^```\n(?:\n```text\n.*?^```\n)?"
    r"|^```console\n(?P<console>.*?)^```$|^```bash\n(?P<bash>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COLUMNS = "110"
TERMINAL = {PROJECT / "README.md": 80}
"""Pages whose commands are run on a terminal of that many columns; elsewhere they write into a pipe."""
TIMEOUT_S, RUN_TIMEOUT_S = 240, 900
HERE = re.compile(r"executor | --cluster localhost ")
"""A command whose output depends on the machine that it is run on."""
OF_HERE = (
    (re.compile(r"(cpu \(|card of )[\d.]+ [MGT]iB"), r"\1?"),
    (re.compile(r"(unprobed machine [\d.]+ m?s) [\d.]+ m?s ([+-][\d.]+ %|x [\d.]+)"), r"\1 ?"),
    (re.compile(r"\b(loss \d+\.\d)\d*( → \d+\.\d)\d*"), r"\1\2"),
)
"""What of it: the host's memory and its speed; of losses, which a processor rounds in its own way, later digits."""


def main() -> int:
    """Rewrite or check the files named, else every page."""
    check, runs = ("--check" in sys.argv[1:]), ("--runs" in sys.argv[1:])
    named = [Path(name).resolve() for name in sys.argv[1:] if not name.startswith("--")]
    stale = False
    for page in pages() if not named else [*named, *(CHARTS if ACCURACY in named else ())]:
        before = page.read_text() if page.exists() else ""
        after = rewritten(page, before, runs)
        if after == before:
            continue
        stale = True
        if check:
            sys.stdout.writelines(
                difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(page), "now")
            )
        else:
            write(page, after)
    return 1 if stale and check else 0


def write(page: Path, text: str) -> None:
    """Write a generated page, or remove it where it has no text any more."""
    if text:
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)
    else:
        page.unlink()
    print(f"rewrote {page}" if text else f"removed {page}")


def pages() -> list[Path]:
    """Every Markdown page of the project that people read on its own, and every JSON Schema that is written or should
    be."""
    written = [page for pattern in ("*.md", "docs/**/*.md", "presets/**/*.md") for page in PROJECT.glob(pattern)]
    made = {*schemas.texts(), *schemas.FOLDER.glob("*.json"), *formats.texts(FORMATS.parent)}
    return sorted({*written, *made} | {*WHOLE, *CHARTS})


def rewritten(page: Path, text: str, runs: bool = False) -> str:
    """A page's text with everything generated in it as it is now."""
    if page.parent == schemas.FOLDER:
        return schemas.texts().get(page, "")
    if page.parent == FORMATS:
        return formats.texts(FORMATS.parent).get(page, "")
    if page in (*WHOLE, *CHARTS):
        return whole(page)
    if page in EXECUTED:
        return executed(text, runs)
    text = PART.sub(lambda found: f"<!-- {found[1]} -->\n{table(found[1])}\n<!-- end -->", text)
    return BLOCK.sub(lambda block: f"```console\n{refreshed(block[1], columns=TERMINAL.get(page))}```", text)


def whole(page: Path) -> str:
    """A page or picture that is generated from its first line to its last."""
    from scripts.pages import accuracy, commands, currency, formulas

    if page in CHARTS:
        return accuracy.picture(PROJECT, page.name)
    if page == REFERENCE:
        return commands.page()
    if page == CURRENCY:
        return currency.page()
    return formulas.page() if page == FORMULAS else accuracy.of_rows(PROJECT)


def executed(text: str, runs: bool = False) -> str:
    """A page's blocks, run one after the other: Python in one session, each block with the block of what it prints;
    commands in one folder. A block that starts a run, and one of `bash`, is run only if `runs`."""
    session: dict[str, object] = {}

    def run(block: re.Match[str]) -> str:
        if block["python"]:
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(block["python"], session)
            shown = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
            return f"```python\n{block['python']}```\n{shown}"
        if block["console"]:
            return f"```console\n{refreshed(block['console'], folder, runs=runs)}```"
        for line in block["bash"].splitlines() if runs else ():
            if line.strip():
                output(line, folder, check=True)
        return block[0]

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return STEP.sub(run, text)


def table(name: str) -> str:
    """A table between two comments of docs/how-far-off.md."""
    from scripts.pages import fits, layouts

    if name == "fits":
        return fits.summary(ACCURACY.read_text())
    return layouts.summary(layouts.read_record(PROJECT / "docs" / "accuracy" / layouts.FILE))


def refreshed(block: str, folder: str | None = None, *, columns: int | None = None, runs: bool = False) -> str:
    """A console block with the output of its `planner` commands, and if `runs` of `executor`'s; what other programs
    print stays as it is.

    The commands of a block share one folder, an empty one of their own unless it is given, so that one may read what
    the one before it wrote.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return refreshed(block, folder, columns=columns, runs=runs)
    ours = ("$ planner ", "$ executor ") if runs else ("$ planner ",)
    parts = re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
    return "".join(_rerun(part, folder, columns) if part.startswith(ours) else part for part in parts)


def output(command: str, folder: str, columns: int | None = None, check: bool = False) -> str:
    """What a command line prints, stdout then stderr, without trailing spaces; stdout on a terminal where `columns` are
    given."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "COLUMNS": str(columns or COLUMNS), "NO_COLOR": "1", "PATH": path}
    words = shlex.split(command, comments=True)
    timeout_s = RUN_TIMEOUT_S if words[0] == "executor" else TIMEOUT_S
    with _terminal(columns) as (stdout, shown):
        done = subprocess.run(
            words, cwd=folder, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=timeout_s, check=False
        )
    if check and done.returncode:
        raise RuntimeError(f"{command}\n{done.stderr}")
    text = (done.stdout or "") + "".join(shown).replace("\r\n", "\n") + done.stderr
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def alike(command: str, before: str, now: str) -> bool:
    """Whether two outputs of a command that depends on its machine differ in nothing else."""
    if not HERE.search(command):
        return before == now
    before, now = " ".join(before.split()), " ".join(now.split())  # a longer figure breaks a line elsewhere
    for figure, kept in OF_HERE:
        before, now = figure.sub(kept, before), figure.sub(kept, now)
    return before == now


@contextmanager
def _terminal(columns: int | None) -> Iterator[tuple[int, list[str]]]:
    """Where a command writes its stdout: a pipe, or a terminal of so wide a line, with what was written there."""
    shown: list[str] = []
    if columns is None:
        yield subprocess.PIPE, shown
        return
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(ours, encoding="utf-8", newline="") as reading:

        def read() -> None:
            with suppress(OSError):  # the end, on Linux
                for line in reading:
                    shown.append(line)  # noqa: PERF402 - what was read stays when the end is an error

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield theirs, shown
        finally:
            os.close(theirs)
            reader.join()


def _rerun(part: str, folder: str, columns: int | None) -> str:
    command, _, before = part.partition("\n")
    now = output(command.removeprefix("$ "), folder, columns)
    return part if alike(command, before, now) else f"{command}\n{now}"


if __name__ == "__main__":
    sys.exit(main())

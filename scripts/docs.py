"""Rewrite what is generated in the documentation: whole pages; the output of a console block's commands and of
the library page's Python blocks; the README's tables of layouts that were run and of how often "fits" was false; and
the JSON Schemas in planner/spec/schemas.

    python scripts/docs.py [--check] [FILE...]

`--check` writes nothing and exits 1 when a file would change; the tests call it so. Not here: what the generated pages
say (scripts/pages), or any command that starts a run.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from scripts.pages import schemas

PROJECT = Path(__file__).resolve().parents[1]
PART = re.compile(r"^<!-- (layouts|fits) -->\n.*?^<!-- end -->", re.MULTILINE | re.DOTALL)
ACCURACY = PROJECT / "docs" / "accuracy.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORMULAS = PROJECT / "docs" / "formulas.md"
REFERENCE = PROJECT / "docs" / "commands.md"
WHOLE = (ACCURACY, FORMULAS, REFERENCE)
EXECUTED = (PROJECT / "docs" / "library.md",)
PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
COLUMNS = "110"
TIMEOUT_S = 60


def main() -> int:
    """Rewrite or check the files named, else every page."""
    check = "--check" in sys.argv[1:]
    named = [Path(name).resolve() for name in sys.argv[1:] if name != "--check"]
    stale = False
    for page in named or pages():
        before = page.read_text() if page.exists() else ""
        after = rewritten(page, before)
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
    return sorted({*written, *schemas.texts(), *schemas.FOLDER.glob("*.json")} | {*WHOLE})


def rewritten(page: Path, text: str) -> str:
    """A page's text with everything generated in it as it is now."""
    if page.parent == schemas.FOLDER:
        return schemas.texts().get(page, "")
    if page in WHOLE:
        return whole(page)
    if page in EXECUTED:
        return executed(text)
    text = PART.sub(lambda found: f"<!-- {found[1]} -->\n{table(found[1])}\n<!-- end -->", text)
    return BLOCK.sub(lambda block: f"```console\n{refreshed(block[1])}```", text)


def whole(page: Path) -> str:
    """A page that is generated from its first line to its last."""
    from scripts.pages import accuracy, commands, formulas

    if page == REFERENCE:
        return commands.page()
    return formulas.page() if page == FORMULAS else accuracy.of_rows(PROJECT)


def executed(text: str) -> str:
    """A page's Python blocks, run one after the other in one session, each with the block of what it prints."""
    session: dict[str, object] = {}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(block[1], session)
        shown = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{block[1]}```\n{shown}"

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return PYTHON.sub(run, text)


def table(name: str) -> str:
    """A table between two comments of the README."""
    from scripts.pages import fits, layouts

    if name == "fits":
        return fits.summary(ACCURACY.read_text())
    return layouts.summary(layouts.read_record(PROJECT / "docs" / "accuracy" / layouts.FILE))


def refreshed(block: str) -> str:
    """A console block with the output of its `planner` commands; other programs' commands stay as they are.

    The commands of a block share one empty folder, so that one may read what the one before it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        parts = re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
        return "".join(_rerun(part, folder) if part.startswith("$ planner ") else part for part in parts)


def output(command: str, folder: str) -> str:
    """What a command line prints, stdout then stderr, without trailing spaces."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "PATH": path}
    words = shlex.split(command, comments=True)
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return "".join(f"{line.rstrip()}\n" for line in (done.stdout + done.stderr).strip("\n").splitlines())


def _rerun(part: str, folder: str) -> str:
    command = part.splitlines()[0]
    return f"{command}\n{output(command.removeprefix('$ '), folder)}"


if __name__ == "__main__":
    sys.exit(main())

"""Claims about the documents: links lead somewhere, commands exist, printed output is current, the file tree is true.

Not here: whether what they say is well said.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

from scripts import docs

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("presets/**/*.md")])
README = PROJECT / "README.md"
ASKING = PROJECT / "docs" / "asking.md"
CHATS = (PROJECT / "docs" / "finetuning.md", "## On your own chats")
TWO_HOSTS = (PROJECT / "docs" / "launching.md", "## On two machines")
STORIES = (CHATS, TWO_HOSTS)
"""Sections whose block is typed in a shell from its first line to its last, by tests/cluster/test_story.py and
test_two_hosts.py."""
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = {"planner": "planner.cli", "executor": "executor.cli"}


def page_id(page: Path) -> str:
    return str(page.relative_to(PROJECT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue  # an address elsewhere: tests do not use the network
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    return broken


def commands(page: Path) -> Iterator[str]:
    """Every line of a code block that starts one of our commands, continuation lines joined."""
    for language, block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip()
            if language == "console":
                line = line.removeprefix("$ ") if line.startswith("$ ") else ""
            if line.split(" ")[0] in COMMANDS and language in ("bash", "console"):
                yield line


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next of its depth."""
    depth = heading.partition(" ")[0]
    return page.read_text().partition(f"\n{heading}\n")[2].partition(f"\n{depth} ")[0]


def parse(line: str) -> None:
    """Parse a command line with the real command, up to running it (click.ClickException when it cannot)."""
    name, *arguments = shlex.split(line, comments=True)
    group = getattr(import_module(COMMANDS[name]), name)
    with group.make_context(name, list(arguments)) as context:
        # What the group did not take itself: the subcommand's name and its arguments.
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        sub_name, sub, sub_arguments = group.resolve_command(context, rest)
        sub.make_context(sub_name, list(sub_arguments), parent=context).close()


def listed(tree: str) -> dict[str, str]:
    """Path -> description of the architecture page's tree; two columns of indentation are one folder deeper."""
    found: dict[str, str] = {}
    folder = ""
    for line in filter(None, tree.splitlines()):
        name, _, about = line.strip().partition(" ")
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            found[name] = about.strip()
        else:
            found[folder + name] = about.strip()
    return found


def tree_differences(tree: str, project: Path = PROJECT) -> list[str]:
    """What the tree lists that is not there, and what is missing beside something it lists."""
    paths = listed(tree)
    wrong = [f"{path} is listed and does not exist" for path in paths if not (project / path).exists()]
    wrong += [f"{path} has no description" for path, about in paths.items() if not about]
    for folder in {str(Path(path).parent) + "/" for path in paths if Path(path).parent != Path()}:
        for path in (project / folder).iterdir():
            name = folder + path.name + "/" * path.is_dir()
            hidden = path.name.startswith((".", "__")) or path.name == "py.typed"
            if not hidden and name not in paths and path.name != "README.md":
                wrong.append(f"{name} exists and is not listed")
    return wrong


def file_tree() -> str:
    told = section(PROJECT / "docs" / "architecture.md", "## What is where")
    return next(block for language, block in FENCE.findall(told) if language == "text")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](nowhere.md) [b](#here) [c](#there) [d](page.md#here) ![e](nowhere.svg)\n")

    assert broken_links(page) == ["nowhere.md", "#there", "nowhere.svg"]


@pytest.mark.parametrize(("page", "line"), [(page_id(page), line) for page in PAGES for line in commands(page)])
def test_every_command_in_a_code_block_parses(page, line):
    parse(line)


@pytest.mark.parametrize(
    "line", ["executor report runs/one --no-such-option", "executor no-such-command", "executor run"]
)
def test_a_command_that_does_not_exist_is_found(line):
    with pytest.raises(click.ClickException):
        parse(line)


def told_in_a_story() -> set[str]:
    """Commands of the blocks that tests/cluster types, without their comments."""
    blocks = [block for page in STORIES for _, block in FENCE.findall(section(*page))]
    return {line.partition("#")[0].strip() for block in blocks for line in block.splitlines()}


@pytest.mark.parametrize("page", [README, ASKING], ids=page_id)
def test_every_command_of_the_first_pages_runs_one_after_the_other_here_or_in_a_story(tmp_path, page):
    (tmp_path / "train.py").write_text("")  # a reader's own
    for line in commands(page):
        name, *arguments = shlex.split(line, comments=True)
        if line not in told_in_a_story() and arguments[0] != "explore":  # which waits for keys: tests/tui
            program = [str(Path(sys.executable).with_name(name)), *arguments]
            done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_readme_is_no_longer_than_a_reader_reads():
    assert len(README.read_text().splitlines()) <= 140


WHOLE = ("formulas.md", "accuracy.md", "commands.md", "currency.md", "library.md", "tutorial.md")
SCHEMAS = sorted(PROJECT.glob("planner/spec/schemas/*.json"))
GENERATED = [*SCHEMAS, *(page for page in PAGES if "```console\n" in page.read_text() or page.name in WHOLE)]


@pytest.mark.parametrize("page", GENERATED, ids=page_id)
def test_what_is_generated_is_what_the_commands_print_now(page):
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check", str(page)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nmake docs writes it anew"


def test_python_blocks_run_in_one_session_and_what_they_print_replaces_what_they_printed():
    page = "```python\nlayers = 2\n```\nText.\n\n```python\nprint(layers)\n```\n\n```text\n3\n```\nMore.\n"

    assert docs.executed(page) == page.replace("3", "2")


RUN_PAGE = "```python\nwidth = 2\n```\n\n```bash\nplanner no-such-command\n```\n"


def test_a_bash_block_is_run_only_when_runs_are_asked_for():
    assert docs.executed(RUN_PAGE) == RUN_PAGE
    with pytest.raises(RuntimeError, match="no-such-command"):
        docs.executed(RUN_PAGE, runs=True)


REPORT = """PEAK in backward        29.06 MiB  29.07 MiB  -0.01 %
median step time, unprobed machine   359.2 ms  334.3 ms  +7.44 %
loss 6.3203 → 3.9744 over 20 steps
on 1 x 2 cpu (11.77 GiB), of a card of 11.77 GiB
"""


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("334.3 ms  +7.44 %", "1.21 s  -70.31 %"),
        ("334.3 ms  +7.44 %", "135.8 ms  x 2.64"),
        ("11.77 GiB", "125.4\nGiB"),
        ("9744", "9751"),
    ],
)
def test_a_figure_of_the_machine_may_differ_from_what_a_page_has(before, now):
    assert docs.alike("executor report runs/one", REPORT, REPORT.replace(before, now))
    assert not docs.alike("planner estimate --cluster dgx-h100 --model 7b", REPORT, REPORT.replace(before, now))


@pytest.mark.parametrize(
    ("before", "now"), [("29.07", "29.09"), ("359.2 ms", "359.3 ms"), ("20 steps", "10 steps"), ("3.97", "4.17")]
)
def test_no_other_figure_may_differ(before, now):
    assert not docs.alike("executor report runs/one", REPORT, REPORT.replace(before, now))


def test_a_report_of_other_figures_replaces_what_a_page_has(monkeypatch):
    page = f"```console\n$ executor report runs/one\n{REPORT}```\n"
    monkeypatch.setattr(docs, "output", lambda *_, **__: REPORT.replace("334.3 ms  +7.44 %", "1.21 s  -70.31 %"))
    assert docs.executed(page, runs=True) == page

    monkeypatch.setattr(docs, "output", lambda *_, **__: REPORT.replace("29.07", "31.07"))
    assert docs.executed(page, runs=True) == page.replace("29.07", "31.07")
    assert docs.executed(page) == page


def unread(page: str) -> set[str]:
    """Figures in a page's sentences that no block of it has."""
    figures = re.compile(r"(?<![\w.,-])\d[\d,.]*\d|(?<![\w.,-])\d(?![\w-])")
    blocks = "\n".join(block for _, block in FENCE.findall(page))
    return set(figures.findall(LINK.sub("", FENCE.sub("", page)))) - set(figures.findall(blocks))


def test_every_figure_in_the_tutorials_sentences_is_one_that_a_block_has():
    page = (PROJECT / "docs" / "tutorial.md").read_text()

    assert unread(page) == set()
    assert unread(f"{page}\nIt takes 12,345 bytes, or 7.\n") == {"12,345", "7"}


def test_output_that_is_out_of_date_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ planner --version\nplanner, version 0.0.0\n```\n")

    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check", str(page)], cwd=PROJECT, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "-planner, version 0.0.0" in done.stdout


def test_the_layers_in_the_architecture_page_are_those_of_the_import_contract():
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    contract = next(one for one in config["tool"]["importlinter"]["contracts"] if one.get("exhaustive"))
    page = (PROJECT / "docs" / "architecture.md").read_text()
    told = next(block for _, block in FENCE.findall(page) if block.startswith("cli"))

    layers = [
        [re.sub(r"^\((\w+)\)$", r"\1 (later)", name.strip()) for name in layer.split("|")]
        for layer in contract["layers"]
    ]

    assert [line.split(", ") for line in told.splitlines()] == layers


def test_the_file_tree_in_the_architecture_page_is_the_file_tree():
    assert tree_differences(file_tree()) == []


def test_a_wrong_file_tree_is_found(tmp_path):
    for name in ("one.py", "two.py"):
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / name).touch()

    assert tree_differences("code/  the code\n  one.py  it\n  three.py  it\n", tmp_path) == [
        "code/three.py is listed and does not exist",
        "code/two.py exists and is not listed",
    ]


KINDS = ["Breaking", "Added", "Changed", "Fixed"]


def test_every_version_of_the_changelog_tells_its_changes_by_kind_and_first_what_breaks():
    versions = re.split(r"^## ", (PROJECT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]

    for version in versions:
        before, *sections = re.split(r"^### ", version, flags=re.MULTILINE)
        names = [section.partition("\n")[0] for section in sections]
        assert names == [kind for kind in KINDS if kind in names] != []
        assert "\n- " not in before


FRAGMENT = re.compile(r"(\+[a-z0-9-]+|\d+)\.(breaking|feature|change|fix)\.md")


def test_every_change_since_the_last_version_has_a_name_that_towncrier_gathers():
    names = [path.name for path in (PROJECT / "changes").iterdir() if path.name != "README.md"]

    assert [name for name in names if not FRAGMENT.fullmatch(name)] == []


def test_a_release_gathers_changes_by_kind_above_the_versions_before(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / "changes").mkdir()
    for name in ("+a.fix.md", "12.feature.md", "+b.breaking.md", "+c.change.md"):
        (tmp_path / "changes" / name).write_text(f"Text of {name}.\n")

    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "9.0.0"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    page = (tmp_path / "CHANGELOG.md").read_text()
    newest = page.partition("\n## 9.0.0")[2].partition("\n## 0.1.0")[0]
    assert (done.returncode, re.findall(r"^### (.+)$", newest, re.MULTILINE)) == (0, KINDS)
    assert "- Text of 12.feature.md. (#12)" in newest
    assert not list((tmp_path / "changes").iterdir())

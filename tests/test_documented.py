"""Claims about what the documents name: every command and option of ours is in a page, and every name of ours that a
page gives in backticks exists.

Not here: links, printed output and the file tree (test_docs.py), or whether what is said of a name is true.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from executor.cli import executor
from planner.cli import planner

PROJECT = Path(__file__).resolve().parents[1]
GROUPS: tuple[click.Group, ...] = (planner, executor)
HISTORY = ("CHANGELOG.md", "docs/log.md")
"""Pages that tell of what was: names in them may be gone."""
REFERENCE = "docs/commands.md"
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PATH = re.compile(r"(?<![\w/.~-])(?:planner|executor|tui|tests|scripts|presets|docs|bench)/[\w./*-]+")
FILE = re.compile(r"(?<![\w/.-])\w+\.py\b")
DOTTED = re.compile(r"(?<![\w./])(?:planner|executor|tui)(?:\.\w+)+")
NAME = re.compile(r"(?<![\w./-])[A-Za-z_]\w*\b(?!\.py\b)")
CODE = (".py", ".toml", ".sh", ".c", ".txt", ".yaml", "Makefile")

OTHERS = {
    "torch": ("_context_parallel", "monitored_barrier", "MemTracker", "FSDPMemTracker"),
    "deepspeed": ("stage_1_and_2.py", "flat_buffer_bytes"),
    "Megatron-DeepSpeed": ("--pp-partition-method",),
    "Megatron-Core": ("decoder_first_pipeline_num_layers",),
    "packaging": ("version.py",),
    "slurm": ("--requeue", "--exclusive", "--mem"),
    "kubernetes": ("openAPIV3Schema",),
    "skypilot": ("get_task_schema", "get_resources_schema"),
    "the ends of secrets' names": ("_TOKEN", "_KEY", "_PASSWORD"),
    "a reader's own files": ("my_config",),
}
"""Names in backticks that are not ours, by whose they are."""


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listed.splitlines() if (PROJECT / name).is_file())


def pages() -> list[str]:
    return [name for name in tracked() if name.endswith(".md") and name not in HISTORY]


def text_of(names: list[str]) -> str:
    return "\n".join((PROJECT / name).read_text() for name in names)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Each command that a help shows, with its program's name."""
    for group in GROUPS:
        with group.make_context(group.name, ["--help"], resilient_parsing=True) as context:
            for name in group.list_commands(context):
                command = group.get_command(context, name)
                if not command.hidden:
                    yield f"{group.name} {name}", command


def options(command: click.Command) -> set[str]:
    """The long names of a command's options."""
    with click.Context(command) as context:
        found = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
    return {name for one in found for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}


@cache
def words() -> frozenset[str]:
    """Every word of the project's code and data."""
    names = [name for name in tracked() if name.endswith(CODE) and Path(name).name != Path(__file__).name]
    return frozenset(re.findall(r"[A-Za-z_]\w*", text_of(names)))


@cache
def known_options() -> frozenset[str]:
    """Every option of our commands, and those that the code gives to other programs or that a script takes."""
    names = [name for name in tracked() if name.endswith(CODE) and not name.startswith("tests/")]
    text = text_of([*names, "tests/conftest.py"])
    return frozenset(OPTION.findall(text)).union(*(options(command) for _, command in commands()))


def exists(dotted: str) -> bool:
    """Whether a dotted name of ours is a module, or a name in one."""
    place, *rest = dotted.split(".")
    folder = PROJECT / place
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    file = folder / f"{rest[0]}.py" if rest and (folder / f"{rest[0]}.py").is_file() else folder / "__init__.py"
    inside = rest[1:] if file.name != "__init__.py" else rest
    return file.is_file() and all(re.search(rf"\b{name}\b", file.read_text()) for name in inside)


def unknown(text: str) -> set[str]:
    """What a page names in backticks as ours, and is not there."""
    found: set[str] = set()
    files = {Path(name).name for name in tracked()}
    for span in SPAN.findall(FENCE.sub("", text)):
        found |= {name for name in OPTION.findall(span) if name not in known_options()}
        found |= {path for path in PATH.findall(span) if not list(PROJECT.glob(path.rstrip("/.")))}
        found |= {name for name in FILE.findall(span) if name not in files}
        found |= {name for name in DOTTED.findall(span) if not exists(name)}
        compound = (name for name in NAME.findall(span) if "_" in name or re.search("[a-z][A-Z]", name))
        found |= {name for name in compound if name not in words()}
    return found - {name for names in OTHERS.values() for name in names}


def test_every_command_is_named_in_a_page_that_was_written_by_hand():
    text = text_of([name for name in pages() if name != REFERENCE])

    assert [name for name, _ in commands() if not re.search(rf"\b{name}\b", text)] == []


def test_every_option_is_named_in_a_page():
    named = set(OPTION.findall(text_of(pages())))

    assert {f"{name} {one}" for name, command in commands() for one in options(command) - named} == set()


@pytest.mark.parametrize("page", pages())
def test_every_name_of_ours_in_backticks_exists(page):
    assert unknown((PROJECT / page).read_text()) == set()


@pytest.mark.parametrize(
    "name",
    [
        "common_refusals",
        "planner.spec.Layouts",
        "planner.no_such.module",
        "planner/no-such.py",
        "no_such.py",
        "--no-so",
    ],
)
def test_a_name_that_does_not_exist_is_found(name):
    assert unknown(f"Use `{name}` here.") == {name}


@pytest.mark.parametrize(
    "name", ["executor.cli:main", "planner.spec.Layout", "presets/models/*.toml", "--why-not", "test_docs.py"]
)
def test_a_name_that_exists_is_no_finding(name):
    assert unknown(f"Use `{name}` here.") == set()

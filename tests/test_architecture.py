"""Claims about the shape of the code: imports run one way, faces stay light, modules say what they are and stay small.

Not here: whether anything it computes is right.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from planner.spec.engines import ENGINES

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "executor", "tui")
LONGEST = {"planner": 600, "executor": 600, "tui": 600, "tests": 600}
"""Lines of a file, by the folder it is in."""
MOST_ENTRIES = 15
HEAVY = ("torch", "numpy", "rich", "textual", "accelerate", "deepspeed", "transformers", "peft")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PROJECT / folder).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PLANNER = [dotted(path) for path in modules("planner") if path.stem != "__main__"]  # importing that would run it
LIGHT_EXECUTOR = [dotted(path) for path in modules("executor") if "worker" not in path.parts]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(folder / "pyproject.toml"),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def heavy_modules_after(code: str, heavy: tuple[str, ...] = HEAVY) -> set[str]:
    """Which of `heavy` a fresh interpreter has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        cwd=PROJECT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(heavy) & set(done.stdout.splitlines()[-1].split())  # an answer above it names packages too


def shipped(file: str) -> bool:
    """Whether a file of the project is in the wheel: under a folder that the build includes, and not ignored by git."""
    build = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    ignored = subprocess.run(["git", "check-ignore", "-q", file], cwd=PROJECT, check=False).returncode == 0
    return (PROJECT / file).is_file() and Path(file).parts[0] in build["only-include"] and not ignored


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_says_that_each_of_its_packages_is_typed(package):
    assert shipped(f"{package}/py.typed")


@pytest.mark.parametrize("file", ["planner/no-such-file", "planner/build/py.typed", "tests/conftest.py"])
def test_a_file_that_is_absent_or_ignored_or_elsewhere_is_not_shipped(file):
    assert not shipped(file)


def test_every_import_contract_is_kept():
    done = lint_imports(PROJECT)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("planner/basics/quantities.py", "import executor.folder.rundir", "tui, executor, planner"),
        ("planner/spec/model.py", "import planner.figures.memory", "inside planner"),
        ("planner/basics/arith.py", "import torch", "planner is pure"),
        ("executor/measure/report.py", "import torch", "frameworks under worker only"),
    ],
)
def test_a_wrong_import_breaks_its_contract(tmp_path, module, line, contract):
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / module).write_text((tmp_path / module).read_text() + f"\n{line}\n")

    done = lint_imports(tmp_path)

    assert any(line.startswith(f"{contract} BROKEN") for line in done.stdout.splitlines())


def test_the_contract_for_light_modules_names_every_part_of_the_executor_but_the_worker():
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    named = next(one["source_modules"] for one in contracts if "executor.worker" in one.get("forbidden_modules", ()))

    parts = {".".join(name.split(".")[:2]) for name in LIGHT_EXECUTOR} - {"executor"}

    assert sorted(named) == sorted(parts)


@pytest.mark.parametrize("module", ["planner", "planner.cli", "executor.cli"])
def test_a_face_starts_without_anything_heavy(module):
    assert heavy_modules_after(f"import {module}") == set()


def test_no_module_but_the_worker_s_loads_anything_heavy_when_imported():
    assert heavy_modules_after(f"import {', '.join([*PLANNER, *LIGHT_EXECUTOR])}") == set()


ROOTS = ("planner.cli", "planner.views.library", "executor", "tui", "web")
"""Where a user comes in: commands, the library, what runs a plan, the explorer, and the page in a browser."""


def named_modules(code: str, known: set[str]) -> set[str]:
    """Modules of ours that code imports, at once or when it is called, or names in a text that is imported later."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                found |= {one.name for one in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{one.name}" for one in names)}
            case ast.Constant(value=str(text)):
                found.add(text.partition(":")[0])
    return found & known


def unreached(sources: dict[str, str]) -> set[str]:
    """Modules of the planner that nothing at the roots leads to; an engine is imported by its name."""
    known, seen = set(sources), set()
    todo = [name for name in known if name.startswith(ROOTS) or name == "planner"]
    todo += [f"planner.engines.{engine.replace('-', '_')}" for engine in ENGINES]
    while todo:
        name = todo.pop()
        if name in known - seen:
            seen.add(name)
            todo += [name.rpartition(".")[0], *named_modules(sources[name], known)]
    return {name for name in known - seen if name.startswith("planner.")} - {"planner.__main__"}


SOURCES = {dotted(path): path.read_text() for path in [*modules(*PACKAGES), PROJECT / "web/ask.py"]}


def test_each_module_of_the_planner_serves_a_command_the_library_or_the_executor():
    assert unreached(SOURCES) == set()


def test_a_module_that_only_tests_use_would_be_seen():
    assert unreached(SOURCES | {"planner.figures.judged": "import planner.spec"}) == {"planner.figures.judged"}


WRITING = ("json", "hashlib", "planner.basics.tomltext", "planner.spec.inputs")
"""What serves plans and presets that are written."""


def loaded_by_an_estimate(*options: str) -> set[str]:
    asked = ["estimate", "--model", "7b", "--gpus", "32", *options]
    code = f"from planner.cli import planner\nfrom planner.basics import command\ncommand.exit_code(planner, {asked})"
    return heavy_modules_after(code, (*HEAVY, *WRITING))


def test_an_estimate_loads_nothing_heavy_and_nothing_that_only_writing_needs():
    assert loaded_by_an_estimate() == set()


def test_what_writing_needs_is_seen_where_a_plan_is_written(tmp_path):
    assert {"hashlib", "planner.spec.inputs"} <= loaded_by_an_estimate("-o", str(tmp_path / "plan.json"))


def test_a_heavy_import_would_be_seen():
    assert heavy_modules_after("import planner, numpy") == {"numpy"}


def test_every_module_opens_with_a_docstring():
    silent = [
        str(path.relative_to(PROJECT))
        for path in modules(*PACKAGES, "tests", "bench", "scripts")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]

    assert silent == []


def test_every_module_can_be_read_in_one_sitting():
    lengths = {path: len(path.read_text().splitlines()) for path in modules(*LONGEST)}

    too_long = {str(path.relative_to(PROJECT)): lines for path, lines in lengths.items() if lines > longest(path)}
    assert too_long == {}


def longest(path: Path) -> int:
    return LONGEST[path.relative_to(PROJECT).parts[0]]


@pytest.mark.parametrize("package", ["planner", "executor"])
def test_a_package_s_listing_is_seen_at_a_glance(package):
    folder = PROJECT / package
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    entries = sorted({path.parts[0] for path in files if "__pycache__" not in path.parts})

    assert len(entries) <= MOST_ENTRIES, entries


# -- what a person or a file says goes through one module ------------------------------------------------------------

OWN_WAYS = {
    "planner/basics/quoting.py": {"yaml", "comment"},
    "planner/basics/saying.py": {"echo"},
    "planner/basics/command.py": {"echo"},  # click's own help page
    "executor/launchers/slurm.py": {"comment"},  # #SBATCH lines, whose values it quotes by sbatch's rules itself
    "planner/basics/reading.py": {"yaml"},  # looks at one before it is read
    "tui/inputs.py": {"shlex"},  # a field of its own, which it splits again by the same module
    "executor/follow/view_text.py": {"stream"},
    "planner/basics/waiting.py": {"stream"},  # a line of numbers
    "planner/views/cells/map.py": {"stream"},  # drawn by rich, of a picture whose texts are shown ones
}
"""Modules that write in one way by themselves; all others go through planner/basics/quoting.py and saying.py."""
WRITERS = {
    "executor/launchers/slurm.py": {"for_shell", "for_comment", "identifier"},
    "executor/launchers/skypilot.py": {"for_shell", "identifier"},
    "executor/run/launch_export.py": {"for_shell", "for_yaml"},
    "executor/run/dryrun.py": {"for_shell", "for_comment"},
    "executor/hosts/ssh_session.py": {"for_shell"},
    "executor/hosts/ssh_run.py": {"for_shell"},
    "executor/follow/view_text.py": {"for_terminal"},
    "planner/views/svg/canvas.py": {"for_terminal"},
    "planner/views/scene/map.py": {"for_terminal"},
    "planner/basics/saying.py": {"for_terminal", "in_json"},
    "tui/state.py": {"for_shell"},
}
"""What each writer of scripts, manifests, drawings and lines calls."""


def own_ways(code: str) -> set[str]:
    """Ways of writing that go by the quoting functions: shlex's own quotes, YAML, print, comments in formatted text."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value=ast.Name(id="shlex"), attr="quote" | "join"):
                found.add("shlex")
            case ast.ImportFrom(module="shlex", names=names) if {one.name for one in names} & {"quote", "join"}:
                found.add("shlex")
            case ast.Import(names=names) if any(one.name.partition(".")[0] == "yaml" for one in names):
                found.add("yaml")
            case ast.ImportFrom(module="yaml"):
                found.add("yaml")
            case ast.Attribute(value=ast.Name(id="click"), attr="echo" | "secho") | ast.Call(func=ast.Name(id="print")):
                found.add("echo")
            case ast.Attribute(value=ast.Attribute(attr="stdout" | "stderr" | "stream"), attr="write"):
                found.add("stream")
            case ast.Call(func=ast.Name(id="Console")):
                found.add("stream")
            case ast.JoinedStr(values=[ast.Constant(value=str(first)), *_]) if first.startswith(("# ", "#S", "#!")):
                found.add("comment")
            case ast.JoinedStr(values=values) if any(
                isinstance(one, ast.Constant) and ("\n#" in one.value or "<text" in one.value) for one in values
            ):
                found.add("comment")
    return found


def called(code: str) -> set[str]:
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return {node.func.id for node in calls if isinstance(node.func, ast.Name)}


@pytest.mark.parametrize(
    "path",
    [path for path in modules(*PACKAGES) if "worker" not in path.parts],
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_nothing_is_quoted_or_printed_but_by_the_functions_for_it(path: Path):
    name = str(path.relative_to(PROJECT))
    assert own_ways(path.read_text()) <= OWN_WAYS.get(name, set())


@pytest.mark.parametrize("name", sorted(OWN_WAYS))
def test_no_way_of_its_own_is_left_over(name: str):
    assert own_ways((PROJECT / name).read_text()) >= OWN_WAYS[name] - {"comment"}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_writer_calls_the_functions_that_quote(name: str):
    assert called((PROJECT / name).read_text()) >= WRITERS[name]


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("import shlex\nshlex.quote(name)", "shlex"),
        ("from shlex import join", "shlex"),
        ("def write():\n    import yaml", "yaml"),
        ("from yaml import safe_dump", "yaml"),
        ("click.echo(name)", "echo"),
        ("print(name)", "echo"),
        ("sys.stderr.write(name)", "stream"),
        ("self.stream.write(name)", "stream"),
        ("lines = [f'# {name}']", "comment"),
        ("lines = f'#SBATCH --job-name={name}'", "comment"),
        ("text = f'{a}\\n# {name}'", "comment"),
    ],
)
def test_a_way_of_writing_by_itself_would_be_seen(code: str, way: str):
    assert own_ways(code) == {way}


# -- one name, one meaning -------------------------------------------------------------------------------------------


def type_names(code: str) -> list[str]:
    """Classes anywhere in a module, and the type aliases at its top level."""
    tree = ast.parse(code)
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_type(value) and camel(name):
                names.append(name)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                names.append(name)
    return names


def camel(name: str) -> bool:
    return name.lstrip("_")[:1].isupper() and not name.isupper()


def is_type(value: ast.expr) -> bool:
    """Whether an assigned value is a type: `list[int]`, `A | B`, `NewType(...)`."""
    match value:
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name[:1].isupper() or name in ("dict", "frozenset", "list", "set", "tuple", "type")
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return all(isinstance(one, ast.Name | ast.Constant) or is_type(one) for one in (left, right))
        case ast.Call(func=ast.Name(id="NewType" | "NamedTuple" | "namedtuple")):
            return True
    return False


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def test_a_type_s_name_is_defined_once():
    assert repeated(name for path in modules(*PACKAGES) for name in type_names(path.read_text())) == set()


@pytest.mark.parametrize(
    "code",
    [
        "class _Twice: pass",
        "class Outer:\n    class _Twice: pass",
        "def make():\n    class _Twice: pass",
        "_Twice = dict[str, int]",
        "_Twice = Callable[[int], str]",
        "_Twice = typing.Annotated[int, 1]",
        "_Twice = Literal['a', 'b']",
        "_Twice = int | None",
        "_Twice = dict[str, int] | A | B",
        "_Twice: TypeAlias = int",
        "_Twice = NewType('_Twice', int)",
    ],
)
def test_a_second_definition_of_a_type_s_name_would_be_seen(code: str):
    assert repeated([*type_names("class _Twice: pass"), *type_names(code)]) == {"_Twice"}


@pytest.mark.parametrize("code", ["TABLE = Literal['a']", "first = rows[0]", "both = LOW | HIGH", "Twice = Base()"])
def test_a_value_is_not_taken_for_a_type(code: str):
    assert type_names(code) == []

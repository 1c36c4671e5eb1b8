"""Single changes of formulas, bounds, rules and verdicts, read from the syntax trees of planner and executor.

A change is one of: a comparison's operator, a number, + and -, * and /, & and |, and and or, min and max, any and all,
a sign, a returned condition, the order of two arguments. It counts in every module of planner and executor but for
faces (FACES: what is typed and printed), modules that import a framework (the runs of tests/cluster prove these) and
modules that handle processes and sockets; and there in every function but for those that return text. Texts, errors,
annotations and decorators do not count. Not here: running tests on a change (mutants.py).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("planner", "executor")
FACES = {
    "cli",
    "text",
    "show",
    "views",
    "render",
    "catalogue",
    "explorer",
    "progress",
    "waiting",
    "command",
    "__main__",
}
"""Names of modules or packages; so are those that begin with cli_ or end in _text."""
FRAMEWORKS = {"torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "safetensors", "psutil"}
PROCESSES = {"subprocess", "socket", "selectors", "signal", "threading", "multiprocessing", "fcntl", "pty", "pwd"}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.FloorDiv,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
ANY_ORDER = {
    *CALLS, "isinstance", "zip", "gcd", "isclose", "print", "getattr", "hasattr", "replace", "partial", "cast", "drop",
    "release",
}  # fmt: skip
"""Calls whose arguments are not swapped: they mean the same, or could only fail. `drop` and `release` of a tape count
one holder less of each, and note no moment between."""


class Change(NamedTuple):
    """One single change: the `place`th node of a module's tree, by the `way`th of the changes that it allows."""

    module: Path
    function: str
    """Qualified name, "" at the top of the module or of a class."""
    line: int
    place: int
    way: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function or '(module)'}: {self.before}  ->  {self.after}"


def ways(node: ast.AST) -> list[Callable[[Any], ast.AST]]:
    """The changes that a node allows, each of which makes another node of a copy."""
    found: list[Callable[[Any], ast.AST]] = []
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            found.append(lambda copied: _with(copied, ops=[COMPARISONS[type(operator)]()]))
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=0)):
            pass  # a zero that makes a float of a sum: taken away it does the same
        case ast.BinOp() if type(node.op) in OPERATORS and not any(map(_is_no_number, (node.left, node.right))):
            operator_after = OPERATORS[type(node.op)]
            found.append(lambda copied: _with(copied, op=operator_after()))
        case ast.BoolOp():
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            found.append(lambda copied: _with(copied, op=other()))
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            found.append(lambda copied: copied.operand)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            found.append(
                lambda copied: _with(copied, value=number + 1 if isinstance(number, int) else 2 * number or 1.0)
            )
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not())):
            found.append(lambda copied: _with(copied, value=ast.UnaryOp(ast.Not(), copied.value)))
        case ast.Call():
            found += _ways_of_call(node)
    return found


def _ways_of_call(node: ast.Call) -> list[Callable[[Any], ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if isinstance(node.func, ast.Name) and name in CALLS:
        return [lambda copied: _with(copied, func=ast.Name(CALLS[name], ast.Load()))]
    first = 1 if name == "where" else 0
    pair = node.args[first : first + 2]
    if name in ANY_ORDER or len(pair) < 2 or any(isinstance(one, ast.Starred) or _is_text(one) for one in pair):
        return []
    if ast.dump(pair[0]) == ast.dump(pair[1]):
        return []
    return [lambda copied: _with(copied, args=_swapped(copied.args, first))]


def _swapped(items: list[ast.expr], first: int) -> list[ast.expr]:
    return [*items[:first], items[first + 1], items[first], *items[first + 2 :]]


def _with(node: Any, **fields: Any) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _is_no_number(node: ast.AST) -> bool:
    return _is_text(node) or isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.DictComp)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def changes_of(path: Path, root: Path = ROOT) -> Iterator[Change]:
    """Every change of one module."""
    tree = ast.parse((root / path).read_text())
    for place, (node, function) in enumerate(counted(tree)):
        for way, change in enumerate(ways(node)):
            after = ast.fix_missing_locations(change(copy.deepcopy(node)))
            yield Change(path, function, node.lineno, place, way, _source(node), _source(after))


def _source(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 90 else text[:87] + "..."


def counted(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """The expressions and returns that may be changed, in one order, with the function that they are in."""
    yield from _counted(tree, "", top=True)


SKIPPED = {"annotation", "returns", "decorator_list"}
TEXTS = {"sentence", "fix", "help", "message", "why", "title"}


def _counted(node: ast.AST, function: str, top: bool) -> Iterator[tuple[ast.AST, str]]:
    for name, value in ast.iter_fields(node):
        if name in SKIPPED:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert):
                continue
            if isinstance(child, ast.keyword) and child.arg in TEXTS:
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if isinstance(child, ast.ClassDef) or not _returns_text(child):
                    is_class = isinstance(child, ast.ClassDef)
                    inner = f"{function}.{child.name}" if function else child.name
                    yield from _counted(child, inner, top=top and is_class)
                continue
            # `A | B` at the top is a type's other name.
            if isinstance(child, ast.expr | ast.Return) and not (top and _is_union(child)):
                yield child, "" if top else function
            if not (top and _is_union(child)):
                yield from _counted(child, function, top and not isinstance(child, ast.Lambda))


def _is_union(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _returns_text(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    words = ast.unparse(node.returns) if node.returns else ""
    return words.replace(" | None", "") in ("str", "list[str]", "tuple[str, ...]", "Iterator[str]")


def modules(root: Path = ROOT, within: tuple[str, ...] = ()) -> list[Path]:
    """The modules that count; of places that are named, those that handle processes and sockets too."""
    found = (path.relative_to(root) for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    left_out = FRAMEWORKS if within else FRAMEWORKS | PROCESSES
    named = (path for path in found if not within or str(path).startswith(within))
    return [path for path in named if not _is_face(path) and not imported_by(root / path) & left_out]


def _is_face(path: Path) -> bool:
    names = (*path.parts[1:-1], path.stem)
    return any(name in FACES or name.startswith("cli_") or name.endswith("_text") for name in names)


def imported_by(path: Path) -> set[str]:
    """First names of what a module imports at its top."""
    return {name.partition(".")[0] for name in _names(path)}


def needs_framework(path: Path, root: Path = ROOT) -> bool:
    """Whether importing a module imports a framework, itself or through modules of ours or helpers of the tests."""
    seen, waiting = set[Path](), [path]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            if imported_by(module) & FRAMEWORKS:
                return True
            waiting += [found for name in _names(module) if (found := _file_of(name, path.parent, root))]
    return False


@cache
def importers(module: Path, root: Path = ROOT) -> list[Path]:
    """The modules of ours that import one, anywhere in them, and those that import its package."""
    names = {".".join(module.with_suffix("").parts), ".".join(module.parent.parts)}
    files = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return [path for path in files if not names.isdisjoint(_names_anywhere(path))]


@cache
def _names_anywhere(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    return _imported_names(nodes)


@cache
def _names(path: Path) -> set[str]:
    return _imported_names(ast.parse(path.read_text()).body)


def _imported_names(nodes: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@cache
def _file_of(name: str, beside: Path, root: Path) -> Path | None:
    place = Path(*name.split("."))
    places = [parent / place for parent in (root, beside, root / "tests" / "cluster")]
    files = [file for one in places for file in (one.with_suffix(".py"), one / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def every_change(root: Path = ROOT, within: tuple[str, ...] = ()) -> list[Change]:
    """All changes of all modules that count."""
    return [change for path in modules(root, within) for change in changes_of(path, root)]


def codes_of(change: Change, root: Path = ROOT) -> tuple[CodeType, CodeType]:
    """The module's code without and with the change, of the same lines."""
    path = root / change.module
    before, after = ast.parse(path.read_text()), changed_tree(change, root)
    return _compiled(before, path), _compiled(after, path)


def _compiled(tree: ast.Module, path: Path) -> CodeType:
    return compile(tree, str(path), "exec", dont_inherit=True)


def changed_tree(change: Change, root: Path = ROOT) -> ast.Module:
    """The module's tree with the change."""
    tree = ast.parse((root / change.module).read_text())
    target = next(node for place, (node, _) in enumerate(counted(tree)) if place == change.place)
    made = ways(target)[change.way](copy.deepcopy(target))
    return ast.fix_missing_locations(_Replace(target, made).visit(tree))


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, made: ast.AST) -> None:
        self.target, self.made = target, ast.copy_location(made, target)

    def visit(self, node: ast.AST) -> ast.AST:
        return self.made if node is self.target else self.generic_visit(node)

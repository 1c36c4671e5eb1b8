"""Whether the quick tests notice a wrong formula: `make mutants`.

    python scripts/mutants.py              60 single changes drawn by a seed, and those that no quick test notices
    python scripts/mutants.py --seed 7     others
    python scripts/mutants.py --only N     the Nth of a seed alone, with the test that noticed it
    python scripts/mutants.py --list       the changes of a seed, and how many there are
    python scripts/mutants.py --within executor/watch --within executor/run   of these places, processes and sockets too
    python scripts/mutants.py --within executor/run --tests tests/executor    asking only these tests: sooner

Quick tests are all of TESTS that are not marked slow, cluster, gpu or long, and whose file imports no framework. They
run once to be timed, and once more to see which functions each calls. Then each change is made in a fork: in the code
of the living functions where no import needs it, else before the module is imported. The tests that call a changed
function run there, likely ones first, up to the first failure; after a change that import sees, those that call any
function of its module or of one that imports it. Not here: the changes (mutations.py) or the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.machinery
import inspect
import os
import random
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import _lru_cache_wrapper, partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

if __package__:
    from scripts.mutations import PACKAGES, ROOT, Change, codes_of, every_change, importers, needs_framework
else:
    from mutations import PACKAGES, ROOT, Change, codes_of, every_change, importers, needs_framework  # type: ignore[import-not-found, no-redef]

TESTS = ("tests/planner", "tests/truth", "tests/executor", "tests/test_presets.py")
MARKS = "not slow and not cluster and not gpu and not long"
WARM = ("numpy", "click", "rich.table", "rich.console", "hypothesis", "textual.app", "jsonschema", "yaml")
"""Imported before any fork: they are not changed."""
DRAWN, SEED = 60, 4
LEAST_KILLED = 0.9
MOST_SECONDS = 90.0
"""Processor time of all quick tests together."""

OWN_ERROR = 99
"""The exit code of a fork in which this program failed, and no test: that is not a change noticed."""

T = TypeVar("T")
PLACES = tuple(f"{ROOT / package}/" for package in PACKAGES)
Key = tuple[str, str]
"""(file, qualified name) of a function."""


class Record(msgspec.Struct, frozen=True):
    """The quick tests without a change: processor time of each in seconds, and the functions that each calls.

    `imported` are the functions that importing and collecting call, `asked` the places of the tests.
    """

    asked: tuple[str, ...] = TESTS
    failed: str = ""
    seconds: dict[str, float] = {}
    calls: dict[str, list[Key]] = {}
    imported: list[Key] = []


class Ending(msgspec.Struct, frozen=True):
    """How the tests of a change ended: the test that failed, "" where none did, and how many ran."""

    failed: str
    tests: int


class Attempt(NamedTuple):
    """A change that is ready to be made: the module's code with it, code objects after by those before, and the tests
    in the order in which they run. `imported`: importing or collecting calls it, so it is made before."""

    change: Change
    code: CodeType
    pairs: dict[CodeType, CodeType]
    tests: list[str]
    imported: bool


class Collected:
    """A pytest plugin that hands the collected tests to `loop` instead of running them, and keeps the first failure."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.failed = loop, ""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Pass over files of tests that import a framework."""
        return True if collection_path.suffix == ".py" and needs_framework(collection_path) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Hand over."""
        if not session.testsfailed:
            self.loop(self, session.items)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported."""
        self._keep(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that failed."""
        self._keep(report)

    def _keep(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


Loop = Callable[[Collected, list[pytest.Item]], None]


def collect(loop: Loop, tests: Sequence[str]) -> str:
    """Collect the quick ones of `tests` and hand them to `loop`. The first failure."""
    from hypothesis import settings

    settings.register_profile("mutants", database=None, derandomize=True, deadline=None)
    settings.load_profile("mutants")
    plugin = Collected(loop)
    places = [place for place in tests if (ROOT / place).exists()]
    code = pytest.main(["-q", "-m", MARKS, "-p", "no:cacheprovider", *places], plugins=[plugin])
    wrong = code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    return plugin.failed or (f"pytest: {code!r}" if wrong else "")


def run(plugin: Collected, items: Sequence[pytest.Item], usual: dict[str, float]) -> Ending:
    """Run tests up to the first failure. One that takes far longer than without a change ends this process."""
    for count, (item, following) in enumerate(_followed(items), 1):
        seconds = usual.get(item.nodeid, 1.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 5 + 20 * seconds)
        signal.setitimer(signal.ITIMER_REAL, 120 + 200 * seconds)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if plugin.failed:
            return Ending(plugin.failed, count)
    return Ending("", len(items))


def _followed(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test with the next one, which pytest asks for; none of no tests."""
    return zip(items, [*items[1:], None], strict=False)


class Fork:
    """Work in a fork of this process that prints nothing and answers with one value."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.pipe, writing = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if "LOUD" not in os.environ:
                    quiet = os.open(os.devnull, os.O_RDWR)
                    os.dup2(quiet, 1)
                    os.dup2(quiet, 2)
                text = msgspec.json.encode(work())
                with os.fdopen(writing, "wb") as stream:
                    stream.write(text)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(OWN_ERROR)
        os.close(writing)

    def answer(self, kind: type[T]) -> T | str:
        """Its value, or a word on what ended it."""
        with os.fdopen(self.pipe, "rb") as stream:
            text = stream.read()
        _, status = os.waitpid(self.pid, 0)
        if text:
            return msgspec.json.decode(text, type=kind)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == OWN_ERROR:
            raise RuntimeError("make mutants itself failed in a fork: LOUD=1 shows where")
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit"


def timed(tests: Sequence[str]) -> Record:
    """The seconds of quick tests."""
    seconds: dict[str, float] = {}

    def loop(plugin: Collected, items: list[pytest.Item]) -> None:
        for item, following in _followed(items):
            before = _cpu_s()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds[item.nodeid] = _cpu_s() - before

    return Record(failed=collect(loop, tests), seconds=seconds)


def _cpu_s() -> float:
    """Processor time of this process and those it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def traced(tests: Sequence[str]) -> Record:
    """The functions that each quick test calls."""
    calls: dict[str, list[Key]] = {}
    imported: list[Key] = []
    seen: set[CodeType] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        seen.add(frame.f_code)

    def ours() -> list[Key]:
        found = sorted({key for code in tuple(seen) if (key := key_of(code))[0].startswith(PLACES)})
        seen.clear()
        return found

    def loop(plugin: Collected, items: list[pytest.Item]) -> None:
        imported.extend(ours())
        keeping = list(_keeping())
        for item, following in _followed(items):
            for one in keeping:  # or a test would not be seen to call what an earlier one had worked out
                one.cache_clear()
            sys.settrace(trace)  # a test may have left its own
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            calls[item.nodeid] = ours()

    threading.settrace(trace)
    sys.settrace(trace)
    failed = collect(loop, tests)
    sys.settrace(None)
    return Record(failed=failed, calls=calls, imported=imported)


def recorded(kept: Path | None, tests: Sequence[str]) -> Record:
    """Timed and traced; or as kept in a file by an earlier call that asked the same tests."""
    if kept is not None and kept.exists():
        record = msgspec.json.decode(kept.read_bytes(), type=Record)
        if record.asked != tuple(tests):
            raise SystemExit(f"{kept} is of {' '.join(record.asked)}: name another file")
        return record
    times, calls = (one.answer(Record) for one in [Fork(partial(timed, tests)), Fork(partial(traced, tests))])
    if isinstance(times, str) or isinstance(calls, str):
        raise SystemExit(f"the quick tests end without a change by {times if isinstance(times, str) else calls}")
    if failed := times.failed or calls.failed:
        raise SystemExit(f"{failed} fails without a change")
    record = msgspec.structs.replace(calls, asked=tuple(tests), seconds=times.seconds)
    if kept is not None:
        kept.write_bytes(msgspec.json.encode(record))
    return record


def key_of(code: CodeType) -> Key:
    """By which a function is known in every process."""
    return code.co_filename, code.co_qualname


class Suite:
    """The quick tests, by what they call."""

    def __init__(self, record: Record) -> None:
        self.asked, self.seconds, self.imported = record.asked, record.seconds, set(record.imported)
        self.by_function: dict[Key, list[str]] = defaultdict(list)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        # Quick tests of few functions are about these.
        self.order = sorted(record.seconds, key=lambda test: record.seconds[test] * len(record.calls[test]))
        for test in self.order:
            for key in record.calls[test]:
                self.by_function[key].append(test)
                self.by_file[key[0]].add(test)

    def ready(self, change: Change) -> Attempt:
        """A change with the tests that may notice it."""
        before, after = codes_of(change)
        pairs = dict(zip(codes_in(before), codes_in(after), strict=True))
        changed = [old for old, new in pairs.items() if _own(old) != _own(new)]
        keys = [key_of(code) for code in changed]
        imported = not all(code.co_flags & inspect.CO_OPTIMIZED for code in changed)  # a module's or a class's own
        imported = imported or not self.imported.isdisjoint(keys)
        if imported:
            near = self.by_file[before.co_filename]
            around = near.union(*(self.by_file[str(path)] for path in importers(change.module)))
            tests = sorted((test for test in self.order if test in around), key=lambda test: test not in near)
        else:
            tests = list(dict.fromkeys(test for key in keys for test in self.by_function[key]))
        return Attempt(change, after, pairs, tests, imported)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and all inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _own(code: CodeType) -> CodeType:
    """A function's code without the functions inside it."""
    return code.replace(co_consts=tuple(None if isinstance(one, CodeType) else one for one in code.co_consts))


def make_on_import(attempt: Attempt) -> None:
    """Make a change when its module is imported."""
    path, get_code = str(ROOT / attempt.change.module), importlib.machinery.SourceFileLoader.get_code

    def changed(loader: Any, name: str) -> CodeType | None:
        return attempt.code if loader.path == path else get_code(loader, name)

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign]


def make_alive(attempt: Attempt) -> None:
    """Make a change in the functions that are there, and forget what functions have kept."""
    path = str(ROOT / attempt.change.module)
    for living in gc.get_objects():
        if isinstance(living, FunctionType) and living.__code__.co_filename == path:
            living.__code__ = attempt.pairs.get(living.__code__, living.__code__)
    for keeps in _keeping():
        keeps.cache_clear()


def _keeping() -> Iterator[_lru_cache_wrapper[Any]]:
    """The functions of the product that keep results."""
    for living in gc.get_objects():
        if isinstance(living, _lru_cache_wrapper) and living.__module__.startswith(PACKAGES):
            yield living


def on_import(suite: Suite, attempt: Attempt) -> Ending:
    """The tests of a change that is made before anything is imported."""
    place = {test: number for number, test in enumerate(attempt.tests)}
    endings = []

    def loop(plugin: Collected, items: list[pytest.Item]) -> None:
        items = [item for item in items if item.nodeid in place or item.nodeid not in suite.seconds]
        items.sort(key=lambda item: place.get(item.nodeid, -1))
        endings.append(run(plugin, items, suite.seconds))

    make_on_import(attempt)
    failed = collect(loop, suite.asked)
    return endings[0] if endings else Ending(failed or "(collecting)", 0)


def alive(suite: Suite, items: dict[str, pytest.Item], plugin: Collected, attempt: Attempt) -> Ending:
    """The tests of a change that is made in living functions; those that the record does not know come first."""
    make_on_import(attempt)
    make_alive(attempt)
    unknown = [item for test, item in items.items() if test not in suite.seconds]
    return run(plugin, [*unknown, *(items[test] for test in attempt.tests if test in items)], suite.seconds)


def attempt_all(
    attempts: Sequence[Attempt], one: Callable[[Attempt], Ending], jobs: int
) -> Iterator[tuple[Change, Ending]]:
    """The endings of all, each in a fork, `jobs` at a time."""

    def endings(part: Sequence[Attempt]) -> list[Ending]:
        answers = [Fork(partial(one, attempt)).answer(Ending) for attempt in part]
        return [Ending(f"({found})", 0) if isinstance(found, str) else found for found in answers]

    parts = [attempts[first::jobs] for first in range(jobs)]
    for part, fork in zip(parts, [Fork(partial(endings, part)) for part in parts], strict=True):
        found = fork.answer(list[Ending])
        yield from zip((attempt.change for attempt in part), found, strict=True)


def endings_of(changes: Sequence[Change], suite: Suite, jobs: int) -> dict[Change, Ending]:
    """What the quick tests say of each change."""
    attempts = [suite.ready(change) for change in changes]
    endings = dict(attempt_all([one for one in attempts if one.imported], partial(on_import, suite), jobs))

    def loop(plugin: Collected, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        later = [one for one in attempts if not one.imported]
        endings.update(attempt_all(later, partial(alive, suite, by_name, plugin), jobs))

    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        collect(loop, suite.asked)
    return endings


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where enough are noticed by tests that are quick enough."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=DRAWN)
    parser.add_argument("--only", type=int, metavar="N")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--within", action="append", metavar="PLACE", help="change only modules whose path begins so")
    parser.add_argument("--tests", action="append", metavar="PLACE", help=f"ask only these (else {' '.join(TESTS)})")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep there what the tests call, or take it from there"
    )
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    if missing := [place for place in given.tests or () if not (ROOT / place).exists()]:
        parser.error(f"there are no tests in {missing[0]}")
    every = every_change(within=tuple(given.within or ()))
    changes = random.Random(given.seed).sample(every, min(given.count, len(every)))
    changes = changes if given.only is None else [changes[given.only - 1]]
    if given.list:
        modules = len({one.module for one in every})
        print(*changes, f"{len(changes)} of {len(every):,} changes in {modules} modules", sep="\n")
        return 0
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    record = recorded(given.record, given.tests or TESTS)
    return report(changes, endings_of(changes, Suite(record), given.jobs), record, every=given.only is not None)


def report(changes: Sequence[Change], endings: dict[Change, Ending], record: Record, every: bool) -> int:
    """Print those that live, or all."""
    for number, change in enumerate(changes, 1):
        end = endings[change]
        if every or not end.failed:
            print(f"{number:3} {end.failed or 'lives'} after {end.tests} tests: {change}")
    seconds, killed = sum(record.seconds.values()), sum(bool(endings[change].failed) for change in changes)
    print(
        f"{killed} of {len(changes)} changes noticed; {len(record.seconds):,} quick tests take {seconds:.1f} s together"
    )
    return 0 if killed >= LEAST_KILLED * len(changes) and seconds <= MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

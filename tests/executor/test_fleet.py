"""Which hosts of a file a run uses, which are left when some are lost, and from which checkpoint those go on.

Hosts answer from folders of this machine; the connections are the test's. Not here: hosts that ssh reaches
(tests/executor/test_ssh_run.py, tests/cluster/test_resume_apart.py).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_checkpoints import NAMES, flip
from test_holdings import runs, written  # noqa: F401
from test_rundir import make_plan

from executor.folder import holdings
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.hosts import elsewhere, ssh
from executor.hosts.fleet import Fleet, fleet_of, left
from executor.hosts.hosts import HostEntry
from executor.run import attempts
from planner.basics.errors import PlannerError
from planner.spec import Layout

RED, BLUE, GREEN = HostEntry("red"), HostEntry("blue", port=2222), HostEntry("green")
FOUR = make_plan(Layout(engine="ddp", dp_replicate=4))
FOUR = msgspec.structs.replace(FOUR, cluster=msgspec.structs.replace(FOUR.cluster, nodes=2)).sealed()


def chosen(folder: Path, text: str, nodes: int = 2) -> tuple[list[str], list[str], list[str]]:
    """Names of the hosts used and of the spares, and what is said."""
    (file := folder / "hosts").write_text(text)
    said: list[str] = []
    found = fleet_of(file, FOUR, nodes, said.append)
    return [one.name for one in found.used], [one.name for one in found.spares], said


def test_the_first_hosts_are_used_and_those_that_have_room_are_spares(tmp_path: Path) -> None:
    assert chosen(tmp_path, "a slots=2\nb\n") == (["a", "b"], [], [])
    used, spares, said = chosen(tmp_path, "a\nb\nc slots=1\nd slots=2\ne\n")
    assert (used, spares) == (["a", "b"], ["d", "e"])
    assert said == ["using the first 2 of 5 hosts: the plan has 2 nodes; d, e can replace a lost host"]
    assert chosen(tmp_path, "a\nb\nc slots=1\n") == (
        ["a", "b"], [], ["using the first 2 of 3 hosts: the plan has 2 nodes"])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n", "names 1 host(s), and the plan has 2 nodes. Add hosts, or spread the ranks over fewer: --nodes 1"),
        ("a slots=2\nb slots=1\n", "--hosts line 2=b: has slots=1, and each node has 2 ranks"),
    ],
)
def test_too_few_hosts_and_one_that_is_too_small_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PlannerError) as refused:
        chosen(tmp_path, text)
    assert words in refused.value.sentence


Answering = Callable[[int, Mapping[str, Any]], Any]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[dict[str, Any], float]]]:
    """Lets hosts answer as a function of their place says, None for silence; gives what they were asked, and how long
    they had."""

    def reach(answer: Answering, refused: Sequence[int] = ()) -> list[tuple[dict[str, Any], float]]:
        asked: list[tuple[dict[str, Any], float]] = []

        @contextlib.contextmanager
        def contact(machines: Sequence[HostEntry], echo: Any) -> Iterator[Any]:
            def ask(request: dict[str, Any], timeout_s: float) -> Iterator[ssh.HostReply]:
                asked.append((request, timeout_s))
                for place, machine in enumerate(machines):
                    yield ssh.HostReply(place, machine, answer(place, request))

            gone = {place: PlannerError("ssh", None, "is gone") for place in refused}
            yield SimpleNamespace(ask=ask, refused=gone)

        monkeypatch.setattr(ssh, "contact", contact)
        return asked

    return reach


def test_hosts_that_answer_are_left_and_a_node_s_that_does_not_is_named(reached: Any) -> None:
    said: list[str] = []
    reached(lambda *_: None, refused=[1, 2])
    assert left(Fleet((RED, BLUE), (GREEN,)), said.append) == (RED,)
    assert said == ["blue is left out: is gone"]
    reached(lambda *_: None)
    assert left(Fleet((RED,), (GREEN,)), said.append) == (RED, GREEN)
    reached(lambda *_: None, refused=[0, 1])
    with pytest.raises(PlannerError, match="red, green") as told:
        left(Fleet((RED,), (GREEN,)), said.append)
    assert told.value.exit_code == 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that keeps parts of checkpoints on its hosts."""
    folder = tmp_path / "run"
    folder.mkdir()
    keep(folder, attempts.RunRequest(checkpoints=CheckpointSchedule(every="20"), kept="a1b2", place="/scratch"))
    return folder


def keep(folder: Path, asked: attempts.RunRequest) -> None:
    (folder / attempts.ASKED).write_bytes(msgspec.json.encode(asked))


def answers(folders: Mapping[int, Path], silent: Sequence[int] = (), shared: Sequence[int] = ()) -> Answering:
    def answer(place: int, request: Mapping[str, Any]) -> Any:
        if place in silent:
            return None
        if place in shared:
            return {"shared": True}
        found = holdings.held(folders[place], request.get("contents", ()))
        return {"shared": False, "held": msgspec.to_builtins(found)}

    return answer


def test_hosts_put_together_have_the_newest_checkpoint_that_was_read(run: Path, runs: dict[str, Path], reached) -> None:  # noqa: F811
    for step in (20, 40):
        written(runs, step)
    written(runs, 60, commits=("red",))
    asked = reached(answers(dict(enumerate(runs.values()))))

    found = elsewhere.newest(run, (RED, BLUE))
    assert (found.step, found.checkpoint) == (40, run / "checkpoints" / "step-40")
    assert found.found is not None and found.found.places == dict(zip(NAMES, ("red", "blue"), strict=True))
    assert found.skipped == (("step-60", "was not completed (on blue:2222)"),)
    listed, read = asked
    assert listed == (
        {"kind": "held", "folder": str(run), "place": "/scratch", "kept": "a1b2"}, elsewhere.LIST_S)  # fmt: skip
    assert read == ({**listed[0], "contents": [40]}, elsewhere.READ_S)


def test_one_whose_bytes_have_changed_is_passed_over_once_they_are_read(
    run: Path,
    runs: dict[str, Path],  # noqa: F811
    reached: Any,
) -> None:
    for step in (20, 40):
        written(runs, step)
    flip(runs["blue"] / "checkpoints" / "step-40" / NAMES[1])
    asked = reached(answers(dict(enumerate(runs.values()))))

    assert elsewhere.newest(run, (RED, BLUE)).step == 20
    assert [request.get("contents") for request, _ in asked] == [None, [40, 20], [40, 20]]  # one list, which grew
    flip(runs["red"] / "checkpoints" / "step-20" / NAMES[0])
    nothing = elsewhere.newest(run, (RED, BLUE))
    assert (nothing.step, nothing.checkpoint, len(nothing.skipped)) == (0, None, 2)


def test_a_host_that_is_silent_may_have_what_misses(run: Path, runs: dict[str, Path], reached) -> None:  # noqa: F811
    written(runs, 40)
    folders = dict(enumerate(runs.values()))
    reached(answers(folders, silent=[1]))
    with pytest.raises(PlannerError, match=r"step-40.*blue:2222") as told:
        elsewhere.newest(run, (RED, BLUE))
    assert told.value.exit_code == 3


def test_what_this_machine_has_counts_where_a_host_sees_its_folder(run: Path, runs: dict[str, Path], reached) -> None:  # noqa: F811
    written(runs, 40)
    shutil.copytree(runs["red"] / "checkpoints", run / "checkpoints")
    folders = dict(enumerate(runs.values()))
    reached(answers(folders, shared=[0]))
    assert elsewhere.newest(run, (RED, BLUE)).step == 40
    shutil.rmtree(run / "checkpoints")
    assert elsewhere.newest(run, (RED, BLUE)).step == 0


def test_where_all_see_the_folder_or_nothing_is_kept_apart_this_machine_alone_is_asked(run: Path, reached) -> None:
    asked = reached(answers({}, shared=[0, 1]))
    assert (elsewhere.newest(run, (RED, BLUE)).step, len(asked)) == (0, 1)
    for one in (attempts.RunRequest(checkpoints=CheckpointSchedule(every="20")), attempts.RunRequest(kept="a1b2")):
        keep(run, one)
        assert (elsewhere.newest(run, (RED, BLUE)).step, len(asked)) == (0, 1)

"""A search that is watched: how far it is, and the best so far when the watcher ends it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from spaces import layouts_of

from planner.ask.question import Pins, Question
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled, watching
from planner.decide.answers import Constraints
from planner.decide.recommendation import as_json_object, recommend
from planner.decide.search import Ranking, rank
from planner.decide.strategies import answer
from planner.spec import TrainingJob, presets
from planner.spec.calibration import calibration
from planner.spec.engines import ENGINES
from planner.studies.reply import ask

EVERY = 10**6
LAUNCHED = ("ddp", "fsdp2", "deepspeed")


def asked(model: str = "llama-3.2-1b", gpus: int = 4, **pins: object) -> Question:
    cluster = presets.cluster("dgx-h100", gpus)
    return Question(presets.model(model), cluster, TrainingJob(global_batch_size=8), calibration(), Pins(**pins))


class Counting:
    """Notes every call, and ends the search at the `last`."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        if self.last is not None and len(self.calls) >= self.last:
            raise Cancelled


def ended_after(calls: int, question: Question, k: int = EVERY) -> Ranking:
    with watching(Counting(calls)):
        return rank(question, k, engines=ENGINES)


@pytest.mark.slow
def test_a_watched_search_says_how_far_it_is_and_answers_the_same():
    question, watch = asked(), Counting()
    with watching(watch):
        found = rank(question, 3, engines=ENGINES)

    assert found == rank(question, 3, engines=ENGINES) and not found.interrupted and found.unseen == 0
    assert len(watch.calls) > 20
    assert all(before[0] <= after[0] for before, after in pairwise(watch.calls))
    counted = [total for _, total in watch.calls if total]
    assert set(counted) == {found.considered} and watch.calls[-1][0] <= found.considered
    assert len({done for done, _ in watch.calls}) > 10


def test_outside_of_watching_nobody_is_told():
    watch = Counting()
    with watching(watch):
        pass
    rank(asked(), engines=LAUNCHED)
    assert watch.calls == []


@pytest.mark.slow
@pytest.mark.parametrize("share", (0.02, 0.3, 0.6, 0.9))
def test_a_search_that_is_ended_has_the_best_so_far_and_accounts_for_every_layout(share: float):
    question, watch = asked(), Counting()
    with watching(watch):
        whole = rank(question, EVERY, engines=ENGINES)
    layouts = sum(1 for _ in layouts_of(question, ENGINES))

    part = ended_after(round(share * len(watch.calls)), question)

    assert part.interrupted
    assert (part.considered, part.unseen > 0) in ((layouts, True), (0, False))  # 0: ended before they were counted
    turned_away = sum(part.rejected.values())
    fitting = part.considered - turned_away - part.pruned - part.unseen
    assert len(part.best) <= fitting <= part.evaluated
    assert set(part.best) <= set(whole.best)  # what is shown fits, with the figures of the whole search


@pytest.mark.slow
def test_a_recommendation_that_is_ended_is_the_best_so_far_and_says_so():
    question, watch = asked(), Counting()
    free = Constraints(any_runtime=True)
    with watching(watch):
        whole = recommend(question, 3, free)
    under_way = [place for place, (done, total) in enumerate(watch.calls) if 0 < done < total]
    with watching(Counting(under_way[-1])):
        part = recommend(question, 3, free)

    assert part.interrupted and part.unseen > 0 and part.recommended == 0
    told = as_json_object(part)
    assert told["interrupted"] is True and told["unseen"] == part.unseen
    assert as_json_object(whole)["interrupted"] is False
    seconds = [one.time.step_s / one.case.layout.global_batch_size for one in part.estimates]
    fastest = whole.fastest or whole.estimates[0]
    assert min(seconds) >= fastest.time.step_s / fastest.case.layout.global_batch_size


def test_ended_before_anything_fits_there_is_no_answer_and_no_refusal():
    question = asked()
    for question_asked in (recommend, ask):
        with watching(Counting(1)), pytest.raises(Cancelled):
            question_asked(question)


@pytest.mark.slow
def test_a_search_for_a_way_out_is_ended_too():
    question = asked("llama-3-70b", gpus=8)  # nothing fits on the devices
    with watching(watch := Counting()):
        whole = recommend(question)
    assert whole.offload_tried
    with watching(Counting(len(watch.calls) // 2)), pytest.raises(Cancelled, match="layouts"):
        recommend(question)


def test_an_estimate_of_all_strategies_is_watched_and_ended_too():
    with watching(watch := Counting()):
        answer(asked())
    assert len(watch.calls) > 8  # one a strategy at least
    with watching(Counting(len(watch.calls) // 2)), pytest.raises(Cancelled, match="strategies had not all"):
        answer(asked())


def test_a_watcher_may_leave_with_an_exception_of_its_own():
    class Gone(Exception):
        pass

    def leave(done: int, total: int) -> None:
        raise Gone

    with watching(leave), pytest.raises(Gone):
        ask(asked())
    assert rank(asked(), engines=LAUNCHED).best


def test_a_cancelled_search_is_no_refusal():
    assert not issubclass(Cancelled, PlannerError)  # loops that pass over refusals must not swallow it

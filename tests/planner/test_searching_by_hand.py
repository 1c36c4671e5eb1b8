"""A search's small decisions by hand: what stays open to the best and to the front, searches that are joined, sizes
that a study asks about, points of a sweep, changes one step away, one node instead of several.

Layouts are made by hand, figures by the tests. Not here: whole searches (test_search.py).
"""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from planner.ask.options import question
from planner.ask.question import case_of
from planner.basics.errors import PlannerError
from planner.calibrate import collective
from planner.calibrate.asked import CannotPredict
from planner.decide import advice, blocks, levers, reasons, walker
from planner.decide.blocks import as_column
from planner.decide.bounds import memory_bound
from planner.decide.candidates import Candidate, LayoutFigures
from planner.decide.search import Ranking, together
from planner.decide.walker import FRONT_SPAN, Smallest, Walker
from planner.figures.pipelinetime import Slowest
from planner.spec import Layout
from planner.spec.options import OPTIONS
from planner.studies import fit, objectives, sweep
from planner.studies.fit import FitLimit
from planner.studies.reply import Reply

ASKED = question({"model": "llama-3.2-1b", "gpus": "8", "global_batch_size": "64"})
LIMITS = sweep.Constraints()


def one(seconds: float, size: float, name: int = 1) -> Candidate:
    return Candidate(Layout(engine="ddp", dp_replicate=8 * name), seconds, size, seconds)


def walks(k: int = 2, front: int = 0, slowest: float | None = None) -> Walker:
    smallest: Any = SimpleNamespace(walked=lambda layout, size: None)
    progress: Any = SimpleNamespace(at=lambda done: None)
    return Walker(LayoutFigures(ASKED), k, slowest, front, smallest, progress)


# -- a walk through candidates ----------------------------------------------------------------------------------------


def test_the_best_are_the_fastest_and_of_equals_the_smaller_and_each_is_there_once() -> None:
    walk = walks(k=2)
    for each in (one(3.0, 1.0, 1), None, one(1.0, 9.0, 2), one(1.0, 8.0, 4), one(1.0, 8.0, 4), one(2.0, 1.0, 8)):
        walk._offer(each)
    assert walk.best == [one(1.0, 8.0, 4), one(1.0, 9.0, 2)] and walk.front == []


def test_the_front_has_what_nothing_beats() -> None:
    walk = walks(k=1, front=9)
    for each in (one(2.0, 5.0, 1), one(1.0, 9.0, 2), one(2.0, 6.0, 4), one(3.0, 1.0, 8), one(2.0, 4.0, 16)):
        walk._offer(each)
    assert walk.front == [one(1.0, 9.0, 2), one(2.0, 4.0, 16), one(3.0, 1.0, 8)] and walk.best == [one(1.0, 9.0, 2)]
    assert walk.within_span() == walk.front[:2]
    walk.front[2] = one(FRONT_SPAN * 1.0, 1.0, 8)
    assert walk.within_span() == walk.front


def test_a_search_is_open_until_it_has_enough_and_to_what_is_no_slower() -> None:
    walk = walks(k=2)
    walk._offer(one(1.0, 5.0, 1))
    assert walk.open_to(99.0) and walk._open_to_both(99.0, 99.0)
    walk._offer(one(2.0, 5.0, 2))
    assert walk.open_to(2.0) and not walk.open_to(2.001)
    assert walk._open_to_both(2.0, 4.999) and not walk._open_to_both(2.0, 5.0) and walk._open_to_both(1.999, 9.0)


def test_a_front_is_open_up_to_twice_the_fastest_and_to_its_last_point_asked_for() -> None:
    walk = walks(k=1, front=2)
    assert walk._front_open_to(1e9)
    walk._offer(one(1.0, 9.0, 1))
    assert walk._front_open_to(FRONT_SPAN) and not walk._front_open_to(FRONT_SPAN * 1.001)
    walk._offer(one(1.5, 5.0, 2))
    walk._offer(one(1.8, 4.0, 4))
    assert walk._front_open_to(1.5) and not walk._front_open_to(1.501)
    assert walk._open_to_both(1.2, 6.0) and not walk._open_to_both(1.5, 5.0) and walk._open_to_both(1.5, 4.999)
    assert not walks(k=1)._front_open_to(0.0)


def run(bounds: list[float], exact: dict[int, Candidate | None], **more: Any) -> tuple[Walker, bool, list[int]]:
    """Walk rows of one block whose bound on memory is 1; and the rows that were walked."""
    walk, walked = walks(**more), list[int]()

    def found(layout: int, memory: float) -> Candidate | None:
        walked.append(layout)
        walk.evaluated += 1
        return exact[layout]

    walk._exact = found  # type: ignore[assignment, method-assign]
    block: Any = SimpleNamespace(memory=[1.0] * len(bounds), block=SimpleNamespace(layout=lambda row: row))
    ended = walk.run([(bound, 0, row) for row, bound in enumerate(bounds)], [block], 0)
    return walk, ended, walked


def test_a_run_ends_at_the_first_bound_that_cannot_win() -> None:
    exact = {0: one(1.0, 5.0, 1), 1: None, 2: one(1.2, 5.0, 2), 3: one(1.3, 5.0, 4)}
    walk, ended, walked = run([0.5, 0.9, 1.0, 1.1], exact, k=1)
    assert ended and walked == [0, 1, 2] and walk.seen == 3 and walk.best == [one(1.0, 5.0, 1)]


def test_rows_beyond_the_deadline_are_counted_and_not_walked() -> None:
    walk, ended, walked = run([0.5, 1.0, 1.1, 1.2], {0: None, 1: None, 2: None, 3: None}, slowest=1.0)
    assert ended and walked == [0, 1] and walk.rejected == {walker.TOO_SLOW: 2} and walk.seen == 4


@pytest.mark.parametrize(("most", "ended"), [(2, False), (3, True)])
def test_a_run_that_finds_nothing_gives_up(most: int, ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "MOST_WALKED", most)
    _, found, walked = run([0.1, 0.2, 0.3], {0: None, 1: None, 2: None})
    assert found is ended and len(walked) == min(most, 3)
    _, found, _ = run([0.1, 0.2, 0.3], {0: one(9.0, 1.0), 1: None, 2: None}, k=5)
    assert found


def test_one_thing_is_among_the_best_once_by_its_fastest_layout() -> None:
    walk = walks(k=3)
    twins = [
        each._replace(layout=msgspec.structs.replace(each.layout, micro_batch_size=micro))
        for micro, each in enumerate((one(2.0, 5.0), one(1.0, 5.0), one(3.0, 1.0)), 1)
    ]
    for each in (*twins, one(1.5, 5.0, 2)):
        walk._offer(each)
    assert walk.best == [twins[1], one(1.5, 5.0, 2)]


def test_the_smallest_is_walked_for_as_long_as_a_bound_is_below_it() -> None:
    sizes, asked = {1: 9.0, 2: 4.0, 3: 3.5, 4: 9.0}, list[int]()
    figures: Any = SimpleNamespace(bytes=lambda layout: asked.append(layout) or sizes[layout])
    progress: Any = SimpleNamespace(at=lambda done: None)
    some = Smallest(figures, progress)
    assert some.found() is None
    some.offer(zip([8.0, 2.0, 3.0, 3.5], sizes, strict=True))  # type: ignore[arg-type]
    assert some.found() == 3 and asked == [2, 3]


def test_of_a_block_in_columns_a_few_of_least_bound_may_be_the_smallest() -> None:
    block = max(blocks.blocks_of(ASKED), key=lambda one: one.size)
    assert block.size > blocks.LEAST_OF_BLOCK
    _, least = blocks.bounds(LayoutFigures(ASKED), block, math.inf)
    bound = as_column(memory_bound(case_of(ASKED, block.columns())), block.size)
    assert sorted(size for size, _ in least) == sorted(bound)[: blocks.LEAST_OF_BLOCK]


def test_searches_of_spaces_that_share_nothing_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ranking(
        (one(1.0, 9.0, 1), one(3.0, 1.0, 2)), (one(1.0, 9.0, 1), one(3.0, 1.0, 2)), None, 10, 4, 3, {"a": 1}
    )
    other = Ranking((one(2.0, 5.0, 4),), (one(2.0, 0.5, 4),), None, 20, 5, 6, {"a": 2, "b": 4}, 7, True)
    found = together([first, other], 2, ASKED)
    assert found.best == (one(1.0, 9.0, 1), one(2.0, 5.0, 4)) and found.front == (one(1.0, 9.0, 1), one(2.0, 0.5, 4))
    assert (found.considered, found.evaluated, found.pruned, found.unseen, found.interrupted) == (30, 9, 9, 7, True)
    assert found.rejected == {"a": 3, "b": 4} and found.smallest is None
    assert found.star == one(1.0, 9.0, 1) and not found.surely
    sure = together([first, other._replace(surely=True)], 2, ASKED)
    assert sure.best == other.best and sure.star == one(2.0, 5.0, 4) and sure.surely  # a `yes` comes before what fits
    monkeypatch.setattr(LayoutFigures, "bytes", lambda self, layout: layout.dp_replicate)
    none = [Ranking((), (), one(0, 0, size).layout if size else None, 1, 0, 0, {}) for size in (4, 2, None)]
    smallest = together(none, 2, ASKED).smallest
    assert smallest is not None and smallest.dp_replicate == 16
    assert together(none[2:], 2, ASKED).smallest is None and not together(none, 2, ASKED).interrupted


# -- a pipeline's slowest rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "forward", "slowest"),
    [
        ("1f1b", [1.0, 2.0, 2.0, 1.0], (1, 24.0)),
        ("1f1b", [1.0, 1.0, 1.0, 2.0], (3, 24.0)),
        ("1f1b", [1.0, 2.0, 2.0 + 1e-12, 1.0], (1, 24.0)),  # the first of equals
        ("interleaved", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0], (2, 36.0)),
        ("zb-v", [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0], (3, 36.0)),
    ],
)
def test_a_pipeline_s_slowest_rank_has_the_longest_passes(
    schedule: str, forward: list[float], slowest: tuple[int, float]
) -> None:
    """Backward takes twice as long as forward; four micro-batches."""
    layout = Layout(engine="torchtitan", pp=4, pp_schedule=schedule, virtual_stages=len(forward) // 4, grad_accum=4)
    found = Slowest.of(layout, forward, [2 * each for each in forward])
    assert (found.stage, found.passes_s) == (slowest[0], pytest.approx(slowest[1]))


# -- studies ----------------------------------------------------------------------------------------------------------


def edge(
    study: Any, *words: Any, fits: Any = lambda value: True, of: Any = lambda asked: 0
) -> tuple[FitLimit, list[int]]:
    asked: list[int] = []

    def replied(question: Any) -> Reply:
        asked.append(of(question))
        return Reply("best") if fits(asked[-1]) else Reply(None, "too much")  # type: ignore[arg-type]

    return study(*words, replied), asked


def test_a_batch_is_what_goes_through_in_one_pass() -> None:
    """Of 8 GPUs multiples of 8; below that, its divisors, where no multiple fits."""

    def batch(asked: Any) -> int:
        assert asked.pins.grad_accum == (accum or 1)
        return asked.job.global_batch_size

    accum = None
    found, asked = edge(fit._largest_batch, ASKED, fits=lambda size: size <= 40, of=batch)
    assert (found.value, found.beyond) == (40, 48) and all(size % 8 == 0 for size in asked)
    found, asked = edge(fit._largest_batch, ASKED, fits=lambda size: size <= 2, of=batch)
    assert (found.value, found.beyond) == (2, 4) and asked[0] == 8
    found, _ = edge(fit._largest_batch, ASKED, fits=lambda size: size <= 4, of=batch)
    assert (found.value, found.beyond) == (4, 8)
    found, _ = edge(fit._largest_batch, ASKED, of=batch)
    assert found.value == min(fit.MOST_VALUES, 8 * 2**16) and f"more than {found.value} are not searched" in found.limit
    accum = 3
    thrice = msgspec.structs.replace(ASKED, pins=msgspec.structs.replace(ASKED.pins, grad_accum=3))
    found, asked = edge(fit._largest_batch, thrice, fits=lambda size: size <= 48, of=batch)
    assert found.value == 48 and all(size % 24 == 0 for size in asked)
    accum = None
    given = msgspec.structs.replace(ASKED, pins=msgspec.structs.replace(ASKED.pins, micro_batch_size=2))
    found, asked = edge(fit._largest_batch, given, of=batch)
    assert (found.value, found.beyond, asked) == (16, None, [16]) and found.limit == "the micro-batch is given: 2"
    found, _ = edge(fit._largest_batch, given, fits=lambda size: size <= 4, of=batch)
    assert found.value == 4
    single = msgspec.structs.replace(ASKED, cluster=msgspec.structs.replace(ASKED.cluster, nodes=1, gpus_per_node=1))
    found, asked = edge(fit._largest_batch, single, fits=lambda size: False, of=batch)
    assert found.value is None and min(asked) == 1


def test_lengths_go_up_to_the_model_s_own_and_beyond_it_where_the_question_is() -> None:
    own = ASKED.model.max_seq_len
    found, asked = edge(fit._longest_sequence, ASKED, 3000, of=lambda asked: asked.job.seq_len)
    assert (found.value, found.beyond) == (own, None) and all(size % 3000 == 0 or size == own for size in asked)
    assert f"at most {own} tokens; a longer --seq-len looks beyond" in found.limit
    learned = msgspec.structs.replace(ASKED, model=msgspec.structs.replace(ASKED.model, positions="learned"))
    found, _ = edge(fit._longest_sequence, learned, 4096, of=lambda asked: asked.job.seq_len)
    assert found.limit.endswith(f"at most {own} tokens")
    for beyond, further in ((own, False), (own + 1, True)):
        long = msgspec.structs.replace(ASKED, job=msgspec.structs.replace(ASKED.job, seq_len=beyond))
        found, _ = edge(
            fit._longest_sequence, long, 4096, fits=lambda size: size <= own + 4096, of=lambda asked: asked.job.seq_len
        )
        assert (found.value == own + 4096) is further


def test_a_micro_batch_is_any_number_or_a_divisor_of_the_batch() -> None:
    found, asked = edge(fit._largest_micro_batch, ASKED, of=lambda asked: asked.pins.micro_batch_size)
    assert found.value == 64 and found.limit == "it is the whole global batch of 64" and set(asked) <= {1, 2, 4, 8, 16, 32, 64}  # fmt: skip  # noqa: E501
    free = msgspec.structs.replace(ASKED, job=msgspec.structs.replace(ASKED.job, global_batch_size=None))
    found, _ = edge(fit._largest_micro_batch, free, fits=lambda size: size <= 5, of=lambda a: a.pins.micro_batch_size)
    assert (found.value, found.beyond) == (5, 6)


@pytest.mark.parametrize(
    ("quantity", "value", "beyond", "adapted"),
    [
        ("gpus", 4, 2, ("resized", 4)), ("gpus", None, 2, ("resized", 99)), ("seq-len", 512, 1024, ("seq", 512)),
        ("seq-len", None, 1024, ("seq", 1024)), ("micro-batch", 4, 8, ("micro", 4)),
        ("micro-batch", None, 8, ("micro", 8)),
        ("seq-len", None, None, ("same", 0)),
    ],
)  # fmt: skip
def test_an_objective_asks_at_the_value_found_or_at_the_easiest(
    quantity: str, value: int | None, beyond: int | None, adapted: tuple[str, int]
) -> None:
    def resize(gpus: int | None) -> Any:
        return "resized", gpus

    found: Any = objectives._adapted(ASKED, resize, FitLimit(quantity, value, None, beyond, ""), 99)
    kind, figure = adapted
    if kind == "resized":
        assert found == adapted
    elif kind == "same":
        assert found is ASKED
    else:
        assert (found.job.seq_len if kind == "seq" else found.pins.micro_batch_size) == figure


def test_a_sweep_s_points_are_compared_with_the_smallest_and_the_one_before() -> None:
    def reply(speed: float | None) -> Reply:
        best = SimpleNamespace(throughput=SimpleNamespace(tokens_per_s=speed))
        return Reply(best)  # type: ignore[arg-type]

    replies = {1: Reply(None, "no"), 2: reply(100.0), 4: reply(180.0), 8: reply(None), 16: reply(450.0)}
    points = sweep._points(replies)
    assert [point.gpus for point in points] == [1, 2, 4, 8, 16] and points[0].reason == "no"
    figures = [(point.speedup, point.efficiency, point.marginal) for point in points]
    assert figures[0] == figures[3] == (None, None, None) and figures[1] == (1.0, 1.0, None)
    assert figures[2] == (1.8, 0.9, pytest.approx(0.8)) and figures[4] == (4.5, 4.5 / 8, pytest.approx(0.5))
    assert sweep.where_it_stops(points, 0.5) == (16, None) and sweep.where_it_stops(points, 0.6) == (4, 16)
    assert sweep.where_it_stops(points, 0.9) == (2, 4) and sweep.where_it_stops(points[:1], 0.5) == (None, None)


def test_a_batch_in_proportion_is_whole_and_no_larger_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        sweep, "ask", lambda question, limits: asked.append(question.job.global_batch_size) or Reply(None)
    )
    part = sweep._ask_in_proportion(ASKED, Fraction(1, 16), LIMITS)
    assert part.refused and part.reason == "0.0625 sequences a GPU do not make a whole batch here" and not asked
    sweep._ask_in_proportion(ASKED, Fraction(1, 8), LIMITS)
    sweep._ask_in_proportion(ASKED, Fraction(sweep.LARGEST_BATCH, 8), LIMITS)
    assert asked == [1, sweep.LARGEST_BATCH]
    assert sweep._ask_in_proportion(ASKED, Fraction(sweep.LARGEST_BATCH + 8, 8), LIMITS).refused and len(asked) == 2


def test_a_plan_on_fewer_nodes_takes_the_most_and_its_own_engine_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, bool, int | None]] = []
    cluster = SimpleNamespace(nodes=3)
    plan: Any = SimpleNamespace(model=SimpleNamespace(name="m"), cluster=cluster, job=ASKED.job, runtime="own",
                                layout=SimpleNamespace(engine="ddp", global_batch_size=48), inputs=())  # fmt: skip

    def replace(item: Any, **changes: Any) -> Any:
        return (
            SimpleNamespace(**(vars(item) | changes)) if isinstance(item, SimpleNamespace) else structs(item, **changes)
        )

    structs = msgspec.structs.replace
    monkeypatch.setattr(msgspec.structs, "replace", replace)
    monkeypatch.setattr(advice, "Question", lambda **given: SimpleNamespace(**given))
    monkeypatch.setattr(advice, "Pins", lambda runtime=None: SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(advice, "launchable_engines", lambda question: ("any",))

    def rank(question: Any, engines: tuple[str, ...], **rules: Any) -> Any:
        assert engines == (("ddp",) if question.pins.runtime else ("any",))
        tried.append((question.cluster.nodes, bool(question.pins.runtime), question.job.global_batch_size))
        return SimpleNamespace(star=None)

    monkeypatch.setattr(advice, "rank", rank)
    known: Any = "calibration"
    for nodes, counts in ((2, [2, 1]), (5, [3, 2, 1]), (1, [1])):
        tried.clear()
        with pytest.raises(PlannerError, match=rf"on {nodes} node{'s' if nodes > 1 else ''} or fewer") as refused:
            advice.plan_on_fewer(plan, nodes, known)
        assert refused.value.exit_code == 3
        assert tried == [(count, own, 48) for own in (True, False) for count in counts]


# -- a collective's bandwidth -----------------------------------------------------------------------------------------


def test_a_bandwidth_is_bytes_on_the_bus_over_seconds_and_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 x 3/4 of 8 GB in 2 s."""
    monkeypatch.setattr(collective, "call_seconds", lambda *words: 2.0)
    gpu = SimpleNamespace(flops_per_s={"bf16": 1.0}, name="g")

    def asked(op: str = "all_reduce", size: float | None = 8e9, gpus: int = 4, card: Any = gpu, **more: Any) -> Any:
        row = SimpleNamespace(collective=more.get("call", SimpleNamespace(op=op, bytes=size)))
        return SimpleNamespace(
            row=row, cluster=more.get("cluster", SimpleNamespace(gpus=gpus, gpu=card)), refusal="why"
        )

    known: Any = None
    assert collective.bus_bandwidth_gbps(asked(), known) == pytest.approx(6.0)
    assert collective.bus_bandwidth_gbps(asked("all_gather", gpus=2), known) == pytest.approx(2.0)
    for refused, words in (
        (asked("broadcast"), "broadcast is not predicted"), (asked(call=None), "None is not predicted"),
        (asked(size=None), "size not stated"), (asked(cluster=None), "why"), (asked(gpus=1), "one rank"),
        (asked(card=SimpleNamespace(flops_per_s={}, name="g")), "GPU g is not known"),
    ):  # fmt: skip
        with pytest.raises(CannotPredict, match=words):
            collective.bus_bandwidth_gbps(refused, known)


# -- what would be otherwise ------------------------------------------------------------------------------------------


def test_an_option_a_step_away_is_the_other_word_a_stage_more_or_less_or_half_and_twice() -> None:
    def steps(name: str, value: Any) -> tuple[Any, ...]:
        return levers._steps(OPTIONS[name], value)

    assert steps("sequence_parallel", True) == (False,) and steps("sequence_parallel", False) == (True,)
    assert steps("zero_stage", 0) == (1,) and steps("zero_stage", 2) == (1, 3) and steps("zero_stage", 3) == (2,)
    assert steps("micro_batch_size", 4) == (2, 8) and steps("micro_batch_size", 1) == (2,)
    recompute = steps("recompute", "none")
    assert "none" not in recompute and set(recompute) == set(OPTIONS["recompute"].choices) - {"none"}


def test_groups_of_twice_the_ranks_take_them_from_another_and_keep_the_batch() -> None:
    layout = Layout(engine="fsdp2", dp_shard=4, tp=2, micro_batch_size=2, grad_accum=3, zero_stage=3)
    made = [(options, other) for options, _, other in levers._regrouped(SimpleNamespace(layout=layout, job=None))]  # type: ignore[arg-type]
    assert made and all(other.world_size == 8 and other.global_batch_size == 24 for _, other in made)
    by_tp = {(other.tp, other.dp_shard): options for options, other in made}
    assert by_tp[4, 2] == {"tp": "4", "dp_shard": "2", "grad_accum": "6"}
    assert (1, 8) not in by_tp  # 24 sequences are not whole passes of 8 ranks with 2 each
    even = msgspec.structs.replace(layout, grad_accum=2)
    made = [(options, other) for options, _, other in levers._regrouped(SimpleNamespace(layout=even, job=None))]  # type: ignore[arg-type]
    assert {"dp_shard": "8", "tp": "1", "grad_accum": "1"} in [options for options, _ in made]
    assert any("grad_accum" not in options for options, other in made if other.data_parallel == 4)


def test_a_phase_s_bytes_are_of_its_fullest_moment_on_any_stage() -> None:
    def stage(**phases: float) -> Any:
        return SimpleNamespace(phases=[SimpleNamespace(phase=name, total=size) for name, size in phases.items()])

    memory: Any = SimpleNamespace(
        peak=SimpleNamespace(total=7.0), stages=[stage(load=3.0, forward=2.0), stage(load=1.0, forward=5.0)]
    )
    found = [levers.phase_bytes(memory, phase) for phase in ("load", "forward", "optimizer", levers.PEAK)]
    assert found == [3.0, 5.0, 0.0, 7.0]


@pytest.mark.parametrize(
    ("replicate", "shard", "several", "sizes"),
    [(4, 8, 4, (1, 8)), (2, 8, 4, (1, 4)), (1, 8, 4, (1, 2)), (6, 8, 4, (3, 4)), (1, 6, 4, None), (2, 3, 4, None)],
)
@pytest.mark.parametrize("batch", [None, 64])
def test_one_node_has_so_many_times_fewer_copies_and_then_shards(
    replicate: int, shard: int, several: int, sizes: tuple[int, int] | None, batch: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layout = Layout(engine="fsdp2", dp_replicate=replicate, dp_shard=shard, micro_batch_size=6, grad_accum=2)
    case = SimpleNamespace(cluster=msgspec.structs.replace(ASKED.cluster, nodes=8), layout=layout)
    job = SimpleNamespace(global_batch_size=batch)
    seen: Any = SimpleNamespace(
        layout=layout, one=SimpleNamespace(case=case), question=SimpleNamespace(job=job), usable_bytes=10.0
    )
    asked: list[tuple[int, int, int, int]] = []
    structs = msgspec.structs.replace
    monkeypatch.setattr(
        msgspec.structs, "replace",
        lambda item, **new: SimpleNamespace(**(vars(item) | new)) if isinstance(item, SimpleNamespace) else structs(item, **new),  # noqa: E501
    )  # fmt: skip
    monkeypatch.setattr(reasons, "floor_bytes", lambda case: 10.0)
    monkeypatch.setattr(reasons, "device_bytes", lambda case, live: live)
    hosts = [True]

    def what_if(
        seen: Any, cluster: Any, *, micro_batch_size: int, grad_accum: int, dp_replicate: int, dp_shard: int
    ) -> Any:
        assert cluster.nodes == 8 // several and (dp_replicate, dp_shard) == sizes
        asked.append((micro_batch_size, grad_accum, dp_replicate, dp_shard))
        return SimpleNamespace(memory=SimpleNamespace(micro=micro_batch_size, host_fits=hosts[0]))

    monkeypatch.setattr(reasons, "what_if", what_if)
    fitting = [6]
    monkeypatch.setattr(reasons, "fits", lambda seen, other: other.memory.micro <= fitting[0])
    times = several if batch else 1
    found = reasons._on_one_node(seen, several)
    if sizes is None:
        assert found is None and not asked
        return
    assert found is not None and asked == [(6, 2 * times, *sizes)]
    fitting[0] = 3
    assert reasons._on_one_node(seen, several) is not None
    assert [each[:2] for each in asked[1:]] == [(6, 2 * times), (3, 4 * times)]
    fitting[0] = 1  # 3 is odd
    assert reasons._on_one_node(seen, several) is None
    hosts[0] = False
    asked.clear()
    assert reasons._on_one_node(seen, several) is None and len(asked) == 1
    seen.usable_bytes = 9.0
    assert reasons._on_one_node(seen, several) is None and len(asked) == 1

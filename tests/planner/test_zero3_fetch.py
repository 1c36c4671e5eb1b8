"""What ZeRO-3 gathers when, on a model whose weights are counted by hand: alone, ahead, reused, kept, run again.

Not here: what that makes in bytes (test_engines.py), or where nothing is gathered (test_zero3_alone.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.engines.zero3_fetch import Codes, Fetches, Limits, WeightUse, _Whole, fetches
from planner.inventory import Moment
from planner.spec import Lora, ModelSpec

TINY = ModelSpec(name="m", layers=2, hidden=4, heads=1, kv_heads=1, head_dim=4, ffn=8, vocab=10)
TABLE, NORM, SQUARE, WIDE = 40, 4, 16, 32
LAYER = [NORM, SQUARE, SQUARE, SQUARE, SQUARE, NORM, WIDE, WIDE, WIDE]
"""In the order in which they run: norm, q, k, v, output, norm, gate, up, down."""
FORWARD = [TABLE, *LAYER, *LAYER, NORM, TABLE]
ALL = 10**9


def limits(prefetch: int = 0, persistence: int = 0, max_live: int = ALL, max_reuse: int = 0) -> Limits:
    return Limits(prefetch, persistence, max_live, max_reuse)


def calls(found: Fetches, phase: str) -> list[tuple[int, ...]]:
    return [gather.sizes for gather in found.gathers if gather.phase == phase]


def elements(found: Fetches, phase: str) -> int:
    return sum(map(sum, calls(found, phase)))


def test_without_look_ahead_each_use_gathers_its_weight_alone() -> None:
    found = fetches(TINY, None, limits())

    assert calls(found, "forward") == [(size,) for size in FORWARD]
    assert calls(found, "backward") == [(size,) for size in reversed(FORWARD)]
    assert found.persistent == ()
    assert found.live["forward", "embed", -1] == TABLE and found.live["forward", "tail", -1] == TABLE
    layers = [size for (_, unit, _), size in found.live.items() if unit not in ("embed", "tail", "loss")]
    assert layers == [WIDE] * 4
    assert found.live["forward", "loss", -1] == 0 and set(found.received.values()) == {0}


def test_weights_no_larger_than_the_threshold_are_never_gathered() -> None:
    found = fetches(TINY, None, limits(persistence=NORM))

    assert calls(found, "forward") == [(size,) for size in FORWARD if size > NORM]
    assert found.persistent == ((NORM, None),) * 5
    assert fetches(TINY, None, limits(persistence=NORM - 1)).persistent == ()


def test_with_room_for_all_everything_is_gathered_in_one_call_before_the_first_use() -> None:
    found = fetches(TINY, None, limits(prefetch=ALL, max_reuse=ALL))

    assert calls(found, "forward") == [tuple(FORWARD)] and calls(found, "backward") == []
    assert max(found.live.values()) == sum(FORWARD)


def test_what_is_reused_soon_stays_and_what_is_not_goes() -> None:
    """The head's backward follows its forward at once; the norm before it comes back after the head went by twice."""
    near, nearly, far = (fetches(TINY, None, limits(max_reuse=reuse)) for reuse in (1, 2 * TABLE, 2 * TABLE + 1))

    assert calls(near, "backward")[0] == (NORM,) and elements(near, "backward") == sum(FORWARD) - TABLE
    assert nearly.gathers == near.gathers
    assert elements(far, "backward") == elements(near, "backward") - NORM
    assert near.live["forward", "loss", -1] == TABLE


def test_a_look_ahead_takes_weights_until_they_reach_its_limit() -> None:
    """Two modules are entered before the first weight: the first look ahead takes the table, which is more than the
    limit, the next the norm and two squares, 36 of 33."""
    found = fetches(TINY, None, limits(prefetch=33))

    assert calls(found, "forward")[:2] == [(TABLE,), (NORM, SQUARE, SQUARE)]
    assert found.live["forward", "embed", -1] >= TABLE + NORM + 2 * SQUARE
    assert fetches(TINY, None, limits(prefetch=33, max_live=0)).gathers == fetches(TINY, None, limits()).gathers


@settings(max_examples=40, deadline=None)
@given(prefetch=st.integers(0, 300), max_live=st.integers(0, 300), persistence=st.sampled_from([0, 4, 16]))
def test_whatever_the_limits_a_weight_is_gathered_at_most_once_a_use_and_few_are_whole_ahead(
    prefetch: int, max_live: int, persistence: int
) -> None:
    found = fetches(TINY, None, Limits(prefetch, persistence, max_live, 0))

    sizes = [size for size in FORWARD if size > persistence]
    whole = elements(found, "forward") + elements(found, "backward")
    assert sum(sizes) <= whole <= 2 * sum(sizes)
    assert max(found.live.values()) <= max_live + prefetch + 2 * TABLE


def test_a_layer_that_runs_again_gathers_all_but_its_last_weight_again_and_backs_up_from_there() -> None:
    again, once = (calls(fetches(TINY, None, limits(), recomputes=one), "backward") for one in (True, False))

    layer = [(size,) for size in [*LAYER[:-1], *reversed(LAYER)]]
    assert again == [(TABLE,), (NORM,), *layer, *layer, (TABLE,)]
    assert len(again) == len(once) + 2 * (len(LAYER) - 1)


def test_a_frozen_weight_is_gathered_in_backward_only_where_something_before_it_is_trained() -> None:
    """Adapters of rank 1 on v, 4 and 4 elements: in the first layer's backward q and k, which read what v reads, are
    left out, and so are the norm before them and the table."""
    found = fetches(TINY, Lora(rank=1, targets=("v_proj",)), limits())

    assert elements(found, "forward") == sum(FORWARD) + 2 * 8
    backward = [size for (size,) in calls(found, "backward")]
    assert backward[:2] == [TABLE, NORM]
    second = sum(LAYER) + 8
    first = second - NORM - 3 * SQUARE
    assert sum(backward) == TABLE + NORM + second + first


@pytest.mark.parametrize("target", ["q_proj", "v_proj", "down_proj"])
def test_a_layer_runs_again_whole_where_any_of_its_weights_needs_a_backward(target: str) -> None:
    found, plain = (
        fetches(TINY, Lora(rank=1, targets=(target,)), limits(), recomputes=again) for again in (True, False)
    )

    more = elements(found, "backward") - elements(plain, "backward")
    assert more >= 2 * (sum(LAYER) - WIDE)


@given(st.lists(st.tuples(st.sampled_from(["take", "release"]), st.integers(0, 3)), max_size=40))
def test_what_is_whole_is_the_sum_of_what_was_taken_and_not_released(steps: list[tuple[str, int]]) -> None:
    sizes, scaled = [1, 10, 100, 1000], [0.5, 10.0, 50.0, 1000.0]
    whole, there = _Whole(sizes, scaled), set[int]()
    for name, index in steps:
        if name == "take" and index in there:
            continue  # the coordinator asks first
        getattr(whole, name)(index)
        if name == "take":
            there.add(index)
        else:
            there.discard(index)

        assert whole.indices == there
        assert whole.elements == sum(sizes[one] for one in there)
        assert whole.in_format == sum(scaled[one] for one in there)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("target", [None, "v_proj", "down_proj"])
def test_the_steps_of_a_layer_s_backward_make_its_gradients_one_after_the_other(
    target: str | None, recomputes: bool
) -> None:
    """From none to those of all that is trained: a frozen weight, or a forward that runs again, makes none."""
    lora = None if target is None else Lora(rank=1, targets=(target,))
    found = fetches(TINY, lora, limits(), recomputes=recomputes)
    trained = {None: sum(LAYER), "v_proj": 8, "down_proj": 8 + 4}[target]
    assert sorted(found.steps) == [("backward", "layer", 0), ("backward", "layer", 1)]
    for steps in found.steps.values():
        assert [one.before for one in steps] == [0, *(one.after for one in steps[:-1])]
        made = [one.after - one.before for one in steps]
        assert sum(made) == trained and min(made) >= 0
        if lora is None and not recomputes:
            assert made == LAYER[::-1]


def test_the_moment_of_a_use_is_found_by_the_gradients_that_are_made() -> None:
    """Between two uses the fuller one counts; in one whose gradient is under way it alone."""
    place = ("backward", "layer", 0)
    steps = (WeightUse(0, 4, 10.0, 1.0), WeightUse(4, 4, 30.0, 0.0), WeightUse(4, 9, 20.0, 2.0))
    found = Fetches((), {place: 99.0}, {place: 7.0}, {place: steps}, ())

    def at(made: int, in_flight: int = 0, unit: str = "layer") -> tuple[float, float]:
        return found.at(Moment("backward", unit, 0, (), made, in_flight))

    assert at(0) == (10.0, 1.0) and at(2) == (10.0, 1.0) and at(2, 1) == (99.0, 7.0)
    assert at(4) == (30.0, 0.0) and at(4, 1) == (30.0, 0.0) and at(9) == (20.0, 2.0)
    assert at(10) == (99.0, 7.0) and at(0, unit="tail") == (0.0, 0.0)


def test_codes_of_4_bit_weights_are_gathered_by_themselves_and_count_in_the_others_elements() -> None:
    """A byte holds two weights; stored as bytes, a call has one format. Norms, tables and adapters have no codes."""
    lora = Lora(rank=1, targets=("v_proj",))
    for storage, apart in ((1.0, True), (2.0, False)):
        codes = Codes("nf4", storage, 2.0)
        found = fetches(TINY, lora, limits(prefetch=ALL, max_reuse=ALL), codes)
        by_code = {gather.code is not None and apart: gather.sizes for gather in found.gathers}
        packed = [size // 2 // int(storage) for size in LAYER if size in (SQUARE, WIDE)] * 2
        if apart:
            assert sorted(by_code[True]) == sorted(packed)
            assert sorted(by_code[False]) == sorted([TABLE, TABLE, *[NORM] * 5, *[4] * 4])
        else:
            assert sorted(by_code[False]) == sorted([*packed, TABLE, TABLE, *[NORM] * 5, *[4] * 4])

"""What ZeRO-3 gathers when, on a model whose weights are counted by hand: alone, ahead, reused, kept, run again.

Not here: what that makes in bytes (test_engines.py), or where nothing is gathered (test_zero3_alone.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.engines.zero3_fetch import Fetches, Limits, _Whole, fetches
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


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "let_go", "release"]), st.integers(0, 3)), max_size=40))
def test_what_is_whole_is_the_sum_of_what_was_taken_and_beside_leaves_out_what_the_graph_holds(
    steps: list[tuple[str, int]],
) -> None:
    sizes, scaled = [1, 10, 100, 1000], [0.5, 10.0, 50.0, 1000.0]
    whole, there, held = _Whole(sizes, scaled), set[int](), set[int]()
    for name, index in steps:
        if name == "take" and index in there:
            continue  # the coordinator asks first
        getattr(whole, name)(index)
        if name == "take":
            there.add(index)
        elif name == "release":
            there.discard(index)
            held.discard(index)
        elif name == "hold" and index in there:
            held.add(index)
        elif name == "let_go":
            held.discard(index)

        assert (whole.indices, whole.of_graph) == (there, held)
        assert whole.elements == sum(sizes[one] for one in there)
        assert whole.beside == sum(scaled[one] for one in there - held)

"""Small laws by hand: orders and tails of errors, tokens on their way to experts, Muon's products, weights that arrive,
and what a search without an answer says.

Not here: whole fits (test_calibrate.py), or whole answers.
"""

from __future__ import annotations

import math
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_calibrate import BASE, case_of, sized, timed

from planner.ask.question import usual_runtime
from planner.calibrate import compute
from planner.calibrate.compute import GRID, LEAST, Timer, fit_compute, speeds_of
from planner.calibrate.holdout import Residual, by_model, left_out, residuals
from planner.calibrate.statistics import errors_of, factors_of, percentile, spearman
from planner.engines import common
from planner.inventory import optimizers
from planner.inventory.narrow import is_layer_linear
from planner.parallelism import expert
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, Optimizer, Quantization, Recipe, TrainingJob, presets
from planner.studies.reply import reply_of

SOME = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9)

# -- many errors together ---------------------------------------------------------------------------------------------


def ranks(values: list[float]) -> list[float]:
    """The mean of the places that a value's equals take."""
    return [sum(one < value for one in values) + (1 + sum(one == value for one in values)) / 2 for value in values]


@settings(max_examples=25, deadline=None)
@given(SOME)
def test_an_order_s_correlation_is_pearson_s_of_the_ranks(pairs: list[tuple[int, int]]) -> None:
    one, other = (ranks([float(pair[place]) for pair in pairs]) for place in (0, 1))
    found = spearman([float(first) for first, _ in pairs], [float(second) for _, second in pairs])
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(one, other)[0, 1], abs=1e-12)


def test_an_order_with_one_pair_exchanged_by_hand() -> None:
    """1 - 6 x 2 / (4 x 15)."""
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=12), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], share: float) -> None:
    enough = [one for one in values if sum(other <= one for other in values) >= share * len(values)]
    assert percentile(values, share) == min(enough)


def test_errors_are_told_by_size_and_by_sign() -> None:
    found = errors_of([-0.5, 0.1, 0.2, 0.3])
    assert (found.n, found.median, found.p90, found.bias) == (4, 0.25, 0.5, pytest.approx(0.15))


def test_factors_are_of_ratios_and_of_ratios_over_their_middle() -> None:
    """0.5, 1, 4 are factors of 2, 1, 4; of 2, 4, 8 over 4 they are 2, 1, 2."""
    found = factors_of([0.5, 1.0, 4.0])
    assert (found.n, found.median, found.p90, found.bias) == (3, 2.0, 4.0, 1.0)
    found = factors_of([2.0, 4.0, 8.0])
    assert (found.median, found.bias, found.scaled_median, found.scaled_p90) == (4.0, 4.0, 2.0, 2.0)


# -- what was predicted beside what was measured ----------------------------------------------------------------------


def test_an_error_is_predicted_over_measured_and_none_where_a_side_is_missing() -> None:
    sample = replace(sized(2, "reserved"), memory_bytes=8.0, step_s=4.0)
    both = Residual(sample, 10.0, 3.0)
    assert (both.memory_error, both.time_error) == (0.25, -0.25)
    for left in (Residual(sample, None, None), Residual(replace(sample, memory_bytes=None, step_s=None), 1.0, 1.0)):
        assert (left.memory_error, left.time_error) == (None, None)


def test_what_was_not_measured_is_not_predicted() -> None:
    one, steps = sized(2, "reserved"), timed("gpt2")[0]
    memory, time = residuals([one, steps], BASE, Timer(BASE))
    assert memory.memory_bytes is not None and memory.step_s is None
    assert time.memory_bytes is None and time.step_s is not None


def test_each_part_is_predicted_by_what_was_fitted_without_it() -> None:
    samples = [replace(sized(number, "reserved"), source="ab"[number % 2]) for number in range(1, 6)]
    seen: list[tuple[set[str], int]] = []

    def fitted(some: Any) -> Any:
        seen.append(({one.source for one in some}, len(some)))
        return BASE

    found = left_out(samples, lambda one: one.source, fitted, Timer(BASE))
    assert seen == [({"b"}, 3), ({"a"}, 2)] and [one.sample.source for one in found] == ["a", "a", "b", "b", "b"]


def test_a_runtime_measured_with_one_model_is_judged_by_fifths_of_its_rows() -> None:
    first = sized(1, "reserved")
    alone = [replace(first, id=f"{number}") for number in range(40)]
    value = by_model(alone)
    assert {value(one) for one in alone} == {f"accelerate-ddp {part}" for part in range(5)}
    two = [*alone, replace(alone[0], id="other", model="gpt2-xl")]
    assert {by_model(two)(one) for one in two} == {"gpt2", "gpt2-xl"}


# -- the search of speeds ---------------------------------------------------------------------------------------------


def test_too_few_steps_are_searched_by_nothing_and_memory_alone_is_no_step() -> None:
    few, memory = timed("gpt2")[: LEAST - 1], [sized(number, "reserved") for number in range(1, 9)]
    assert fit_compute([*few, *memory], Timer(BASE)) == compute.ComputeFit()


def test_the_grid_of_speeds_is_shares_up_to_the_whole_and_costs_from_none() -> None:
    shares = GRID["matmul_share"]
    assert (shares[0], shares[1], shares[-1], len(shares)) == (0.1, 0.125, 1.0, 37)
    assert (GRID["pace"][0], GRID["attention_pace"][0]) == (0.95, 1.0)
    assert [GRID[name][0] for name in GRID if name.startswith(("hidden", "operation"))] == [0.0, 0.0]
    assert GRID["hidden_share"][-1] == 1.0 and all(list(values) == sorted(set(values)) for values in GRID.values())


def test_attention_goes_with_products_and_stays_below_the_whole() -> None:
    speeds = speeds_of(BASE, timed("gpt2")[0])._replace(matmul_share=0.4, attention_share=0.3)
    assert compute._moved(speeds, "matmul_share", 0.8)[:2] == (0.8, pytest.approx(0.6))
    assert compute._moved(speeds, "matmul_share", 2.0).attention_share == 1.0
    assert compute._moved(speeds, "operation_s", 0.5) == speeds._replace(operation_s=0.5)


def test_errors_of_steps_are_ratios_and_their_badness_is_of_logarithms() -> None:
    """Steps that took half as long as they are predicted are 100 % too long, and as wrong as those of twice."""
    timer, steps = Timer(BASE), timed("gpt2")
    own = speeds_of(BASE, steps[0])
    exact = [replace(one, step_s=timer.seconds(one, own)) for one in steps]
    half, twice = ([replace(one, step_s=one.step_s * times) for one in exact] for times in (0.5, 2.0))
    assert compute.errors(half, timer, own) == pytest.approx([1.0] * len(half))
    assert compute.spread(twice, timer, own) == pytest.approx(0.5)
    assert compute._badness(half, timer, own) == pytest.approx(compute._badness(twice, timer, own)) != 0
    assert compute._badness(exact, timer, own) == pytest.approx(0.0, abs=1e-9)
    assert compute.errors([replace(exact[0], step_s=None)], timer, own) == []


def test_of_many_samples_of_a_model_the_same_48_are_counted() -> None:
    one = sized(1, "reserved")
    many = [replace(one, id=f"{number}", model="ab"[number % 3 == 0]) for number in range(150)]
    counted = compute._counted(many)
    assert [sum(each.model == name for each in counted) for name in "ab"] == [48, 48]
    assert {same.id for same in counted} == {same.id for same in compute._counted(many[::-1])}


# -- techniques, optimizers, loading ----------------------------------------------------------------------------------


def test_tokens_travel_to_their_experts_and_back_in_both_passes() -> None:
    """10 tokens to 2 experts each, 8 numbers of 2 bytes: 320 bytes, there and back in each of 3 layers."""
    assert expert.dispatched_bytes(10, 8, 2, 2) == 320
    for recomputes, times in ((False, 1), (True, 2)):
        forward, backward = expert.layer_collectives(320, 3, recomputes=recomputes)
        assert (forward.op, forward.axis, forward.phase, backward.phase) == ("all_to_all", "ep", "forward", "backward")
        assert (forward.payload_bytes, forward.count) == (1920, 6)
        assert (backward.payload_bytes, backward.count) == (1920 * times, 6 * times)


@pytest.mark.parametrize(
    ("shape", "shards", "flops"),
    [
        ((4, 8), 1, 5 * (4 * 16 * 8 + 2 * 64)),
        ((4, 8), 2, 5 * (4 * 16 * 8 + 2 * 64) / 2),  # split on its short side each rank has half of all
        ((8, 4), 2, 5 * (4 * 16 * 8 / 2 + 2 * 64)),  # a tall one's Gram matrix is squared by all
        ((4, 4), 2, 5 * (4 * 64 + 2 * 64) / 2),
        ((3, 4, 8), 1, 3 * 5 * (4 * 16 * 8 + 2 * 64)),  # three matrices in one tensor
        ((8,), 1, 0),
    ],
)
def test_muon_s_products_by_hand(shape: tuple[int, ...], shards: int, flops: float) -> None:
    tensor = optimizers.TrainedTensor(shape, math.prod(shape) / shards, shards)
    muon = Optimizer(name="muon")
    assert optimizers.matrix_flops(muon, [([tensor], 7)]) == 7 * flops
    assert optimizers.matrix_flops(muon, [([replace(tensor, hidden=False)], 7)]) == 0
    assert optimizers.matrix_flops(Optimizer(), [([tensor], 7)]) == 0


def loaded(precision: str = "bf16", checkpoint: str | None = "there", **job: Any) -> Case:
    layout = Layout(engine="fsdp2", dp_shard=4, zero_stage=3)
    work = TrainingJob(seq_len=64, precision=precision, recipe=Recipe(checkpoint=checkpoint), **job)
    runtime = usual_runtime("fsdp2")
    return Case(presets.model("tiny-llama"), work, layout, presets.cluster("localhost", 4), runtime)


def test_a_weight_of_a_checkpoint_arrives_in_16_bit_beside_what_is_made_of_it() -> None:
    """A rank reads its quarter of the largest weight, 2 bytes an element, and makes 4 of them; in 16 bits it reads what
    it keeps. Drawn from a seed, the weight is whole."""
    largest = max(one.elements for unit in loaded().units().values() for one in unit)

    def part(case: Case, shards: int = 4) -> float:
        return float(common.part_bytes(case, lambda weight: shards))

    assert part(loaded()) == largest / 4 * (4 + 2) and part(loaded(), 1) == largest * (4 + 2)
    assert part(loaded("pure-bf16")) == largest / 4 * 2
    assert part(loaded(checkpoint=None)) == common.whole_weight_bytes(loaded()) == largest * 4
    adapters = loaded("pure-bf16", method="lora", lora=Lora())
    assert part(adapters) == largest / 4 * 2 and common.whole_weight_bytes(adapters) == largest * 2


def test_a_weight_that_is_packed_arrives_whole_and_codes_of_gptq_do_not() -> None:
    job = {"method": "qlora", "lora": Lora(), "precision": "pure-bf16"}
    case = loaded(**job, quantization=Quantization())
    linears = [one.elements for unit in case.units().values() for one in unit if is_layer_linear(one, case.parts)]
    whole = max(one.elements for unit in case.units().values() for one in unit)
    assert common.packed_weight_bytes(case) == 2 * max(linears)
    assert common.part_bytes(case, lambda weight: 64) == max(2 * max(linears), 2 * whole / 64)
    assert common.part_bytes(case, lambda weight: 1) == max(2 * max(linears), 2 * whole)
    gptq = loaded(**job, quantization=Quantization(base="gptq"))
    assert common.packed_weight_bytes(gptq) == 0.0 == common.packed_weight_bytes(loaded())
    assert all(
        common.packed(case, one) is is_layer_linear(one, case.parts) for unit in case.units().values() for one in unit
    )


# -- a search without an answer ---------------------------------------------------------------------------------------


def found(**changes: Any) -> Any:
    usual = {"unlaunched": False, "stray": False, "interrupted": False, "missed": False, "rejected": {}, "run_s": None}
    return SimpleNamespace(**({"estimates": (), "recommended": None} | usual | changes))


def test_the_three_commonest_reasons_are_told_commonest_first() -> None:
    none = reply_of(found(rejected={"a": 2, "b": 7, "c": 1, "d": 3}))
    assert (none.best, none.reason, none.refused) == (None, "b: 7 layouts; d: 3 layouts; a: 2 layouts", False)
    empty = reply_of(found())
    assert (empty.reason, empty.refused) == ("the options given leave no layout", True)


def test_a_recommended_layout_is_the_answer_and_another_says_why_it_is_none() -> None:
    first, second = (
        SimpleNamespace(
            refusal=refusal, fits=True, reasons=[f"{refusal} reason"],
            case=SimpleNamespace(layout=SimpleNamespace(tp=16)),
        )
        for refusal in ("one", "two")
    )  # fmt: skip
    both = (first, second)
    chosen = reply_of(found(estimates=both, recommended=1, interrupted=True))
    assert chosen.best is second and chosen.interrupted
    alone = reply_of(found(estimates=both, unlaunched=True))
    assert (alone.reason, alone.refused, alone.unlaunched) == ("cannot be launched: one", True, True)
    assert "tp=16" in reply_of(found(estimates=both, stray=True)).reason
    late = reply_of(found(estimates=both, missed=True, run_s=7200.0))
    assert late.reason.startswith("one reason; cannot be launched: one; the run would take 2") and not late.refused
    first.fits = False
    assert reply_of(found(estimates=both)).reason == "one reason"
    first.fits, first.refusal = True, None
    assert reply_of(found(estimates=both)).reason == "one reason"


def test_errors_of_one_are_its_own() -> None:
    assert median([1.0]) == errors_of([1.0]).median == errors_of([1.0]).p90


def test_a_case_of_a_sample_is_as_it_was_asked() -> None:
    case = case_of("gpt2", 3)
    sample = replace(sized(1, "reserved"), case=case)
    assert (sample.runtime, sample.gpu, sample.device_kind) == (case.runtime.name, case.cluster.gpu.name, "cuda")

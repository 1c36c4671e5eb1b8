"""Claims about published runs on which nothing is fitted, row by row: memory and time of LoRA, QLoRA, offload, Ulysses.

What is far off has its figure here and its cause beside it, so that it neither hides nor drifts. Not here: tables of
many rows (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import msgspec
import pytest

from planner.calibrate.asked import asked
from planner.calibrate.predict import Replayed, replay
from planner.calibrate.rows import Row
from planner.spec.calibration import calibration
from tests.truth.published.reader import each

TRUTH = Path(__file__).resolve().parent
FITTED = calibration("published")


@cache
def rows(name: str) -> dict[int, Replayed]:
    """The rows of one file by their number."""
    found = replay(each([TRUTH / f"unfitted_{name}.jsonl"]), FITTED)
    return {int(one.row.id.rpartition("-")[2]): one for one in found}


def memory_error(one: Replayed) -> float:
    assert one.predicted.peak_memory_gib is not None and one.row.measured.peak_memory_gib is not None, one.skipped
    return one.predicted.peak_memory_gib / one.row.measured.peak_memory_gib - 1


def step_ratio(one: Replayed) -> float:
    assert one.predicted.step_time_s is not None and one.measured_step_s is not None, one.skipped
    return one.predicted.step_time_s / one.measured_step_s


# -- LoRA and QLoRA of 70B (PEFT's documents) ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_lora_and_qlora_of_70b_are_within_15_percent(number: int):
    assert abs(memory_error(rows("peft_docs")[number])) <= 0.15


def test_qlora_with_offload_is_told_a_sixth_less_than_peft_saw():
    """The same settings in another script reserve 14.92 GiB (fsdp_qlora-013, predicted 13.78): 3.3 less than this card
    shows, which is not named. Open."""
    assert memory_error(rows("peft_docs")[4]) == pytest.approx(-0.176, abs=0.02)


# -- Qwen3 fine-tuned by prime-rl -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 4, 5, 7, 8, 9])
def test_prime_rl_s_memory_is_within_8_percent(number: int):
    assert abs(memory_error(rows("prime_rl_sft")[number])) <= 0.08


def test_a_card_that_is_all_but_full_reserves_less_than_is_predicted():
    """The allocator gives back what it keeps before it fails. 206.8 GiB are predicted where the card has 178."""
    assert memory_error(rows("prime_rl_sft")[6]) == pytest.approx(0.206, abs=0.01)


@pytest.mark.parametrize("number", [1, 5, 6, 7, 9])
def test_prime_rl_s_dense_models_take_their_time_within_a_quarter(number: int):
    assert abs(step_ratio(rows("prime_rl_sft")[number]) - 1) <= 0.25


@pytest.mark.parametrize(("number", "ratio"), [(2, 0.77), (4, 0.62), (8, 0.51)])
def test_short_steps_and_experts_of_prime_rl_take_longer_than_is_predicted(number: int, ratio: float):
    """Half a second and a second on one GPU: what its loop does beside a step is not known. Of experts, the exchange
    and the padding of their rows are open."""
    assert step_ratio(rows("prime_rl_sft")[number]) == pytest.approx(ratio, abs=0.02)


# -- ZeRO-2 and 3 with offload, 7B on A800 ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 4, 6, 7, 10, 11])
def test_zero_with_and_without_offload_is_within_10_percent(number: int):
    assert abs(memory_error(rows("gist_deepspeed_a800")[number])) <= 0.10


@pytest.mark.parametrize(
    ("number", "error"),
    [
        # 19.8 GiB more than its neighbour with recomputation, which itself is below weights and states; 22.8 of
        # activations are predicted.
        (1, 0.161),
        # Weights and states alone are 22.0 GiB, more than was measured, before any gradient.
        (2, 0.290),
        # 7.2 GiB, 0.2 a layer, that modules of 2024 under PyTorch 2.2 kept beyond what those of Transformers 5 keep.
        (5, -0.102),
        # Twice row 7's micro-batch, of which logits and kept inputs are 10.4 GiB: 7.4 were measured, less than row 7.
        (8, 0.676),
    ],
)
def test_rows_that_contradict_the_others_are_as_far_off_as_they_are_told(number: int, error: float):
    assert memory_error(rows("gist_deepspeed_a800")[number]) == pytest.approx(error, abs=0.02)


def test_the_second_copy_beside_offloaded_weights_is_not_predicted():
    assert "second copy would be in host memory" in (rows("gist_deepspeed_a800")[9].skipped or "")


@pytest.mark.parametrize("number", [3, 7, 8])
def test_a_scalar_adam_on_the_host_takes_more_than_twice_what_is_predicted(number: int):
    """DeepSpeed 0.14.2 builds its Adam for scalar arithmetic (issue 6363, mended in 0.14.3): docs/decisions/0064. On
    ce5136a predicted a third of their time, and 40 to 46 % is predicted now."""
    assert 0.38 <= step_ratio(rows("gist_deepspeed_a800")[number]) <= 0.5


# -- Ulysses, 8k to 96k tokens ---------------------------------------------------------------------------------------


def on_the_device(row: Row) -> Row:
    """The row with the optimizer's states on the device."""
    kept = {name: value for name, value in (row.options or {}).items() if name != "offload_optimizer"}
    return msgspec.structs.replace(row, options=kept)


def test_ulysses_with_the_optimizer_on_the_host_is_answered_and_told_a_third_less_than_published():
    """As the blog describes the runs. The states would have to be elsewhere for the figure: see the next test."""
    errors = [memory_error(rows("hf_blog_ulysses")[number]) for number in (2, 3, 4, 5)]

    assert median(errors) == pytest.approx(-0.30, abs=0.03)


def test_ulysses_is_within_8_percent_in_the_median_where_the_states_are_on_the_device():
    """From 8k to 96k tokens the published memory grows as activations and logits do, and what is left over at none is
    14 bytes a weight over four ranks: weights, gradients and states. An inference, which the blog's text contradicts;
    its baseline of one GPU, 76 GB for 4 B weights, could not be with the states on the host either."""
    found = replay([asked(on_the_device(rows("hf_blog_ulysses")[number].row)) for number in (2, 3, 4, 5)], FITTED)

    assert median(abs(memory_error(one)) for one in found) <= 0.08


@pytest.mark.parametrize("put", [lambda row: row, on_the_device])
def test_what_was_out_of_memory_is_no_yes(put: Callable[[Row], Row]):
    (one,) = replay([asked(put(rows("hf_blog_ulysses")[6].row))], FITTED)

    assert one.predicted.verdict != "yes"

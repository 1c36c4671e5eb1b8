"""Which code computes attention: what it changes of memory and time, what refuses it, and kernels that were measured.

Not here: real runs (tests/cluster/test_attention.py), or the fits of the kernels themselves (tests/planner/kernels/).
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest

from planner.ask.options import question as asking
from planner.ask.question import Question
from planner.basics.errors import PlannerError
from planner.decide.estimation import estimate
from planner.decide.strategies import answer as decided
from planner.figures import work
from planner.figures.kernels.attention import attention_kernel_seconds
from planner.figures.kernels.products import Product, named
from planner.figures.kernels.step import kernels_seconds
from planner.figures.unitkernels import SCORES, attention_kernels
from planner.spec import Layout
from planner.spec.kernel_times import kernel_times
from planner.spec.layout import AttentionName

OWN = Path(__file__).parents[1] / "truth" / "own_attention.csv"
CODES: tuple[AttentionName, ...] = get_args(AttentionName)


def question(**given: Any) -> Question:
    asked = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8, "seq_len": 8192, "method": "full"} | given
    return asking(asked)


def layout(attention: AttentionName | None = None, **fields: Any) -> Layout:
    return Layout(engine="fsdp2", zero_stage=3, attention=attention, **({"dp_shard": 8, "recompute": "full"} | fields))


def answer(asked: Question, attention: AttentionName | None, **fields: Any) -> Any:
    return estimate(asked, "fsdp", layout(attention, **fields))


def test_a_code_s_time_is_its_own_and_memory_is_that_of_scores_or_of_none() -> None:
    answers = {code: answer(question(), code) for code in (None, *CODES)}
    steps = {code: one.time.step_s for code, one in answers.items()}
    cards = {code: one.memory.device_bytes for code, one in answers.items()}

    assert steps["sdpa"] == steps[None] == steps["flash4"]
    assert steps["flash3"] < steps["sdpa"] < steps["flex"] < steps["flash2"] < steps["eager"]
    assert len({cards[code] for code in (None, "sdpa", "flash2", "flash3", "flash4", "flex")}) == 1
    # Scores of 32 heads over 8,192 x 8,192 pairs: 2 GiB in 16 bits, the softmax twice that.
    assert cards["eager"] > cards["sdpa"] + 16 * 2**30


def test_what_is_not_known_of_a_code_on_a_device_is_said() -> None:
    said = {
        (cluster, code): any("no measured time" in reason for reason in answer(question(cluster=cluster), code).reasons)
        for cluster, code in [("dgx-h100", "flash4"), ("dgx-h100", "flash2"), ("dgx-a100", "flash3")]
    }
    assert said == {("dgx-h100", "flash4"): True, ("dgx-h100", "flash2"): False, ("dgx-a100", "flash3"): True}


def test_what_was_asked_of_one_gpu_changes_no_answer_about_another() -> None:
    asked = [(cluster, code) for code in (None, *CODES) for cluster in ("dgx-h100", "dgx-b200", "dgx-a100")]
    orders = []
    for one_order in (asked, asked[::-1]):
        work._WORKS.clear()
        orders.append({one: answer(question(cluster=one[0]), one[1]).time.step_s for one in one_order})
    assert orders[0] == orders[1]


def test_a_code_s_factor_is_of_its_generation_and_of_heads_as_wide() -> None:
    hopper, ampere = kernel_times("h200-141gb"), kernel_times("a100-sxm-40gb")
    assert hopper is not None and ampere is not None
    wide, narrow = hopper.attention_code("flash2", 80, 4096), hopper.attention_code("flash2", 64, 4096)
    assert wide is not None and wide.head_dim == 128 and narrow is not None and narrow.head_dim == 64
    assert hopper.attention_code("flash2", 512, 4096) == hopper.attention_code("flash2", 256, 4096)
    assert ampere.attention_code("flash3", 128, 4096) is None  # though a file of the chain has it


def test_a_code_s_factor_is_of_sequences_as_long() -> None:
    hopper = kernel_times("h100-sxm-80gb")
    assert hopper is not None
    short, edge, longer, longest = (hopper.attention_code("flash2", 128, one) for one in (512, 4096, 4097, 10**6))
    assert short == edge and longer == longest and edge is not None and longer is not None
    assert edge.forward < longer.forward


def test_packed_documents_need_no_mask_of_every_pair_where_a_code_takes_their_ends() -> None:
    packed = question(packing="packed", mean_seq_len=1024)
    masked, ends = answer(packed, "sdpa"), answer(packed, "flash2")

    assert ends.memory.device_bytes < masked.memory.device_bytes
    assert ends.time.step_s < masked.time.step_s  # though FlashAttention-2 is the slower code


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "fp32", "attention": "flash2"}, "16-bit queries"),
        ({"model": "gemma-2-9b", "attention": "sdpa"}, "a soft cap, which is planned with scores in memory"),
        ({"model": "bloom-560m", "attention": "flash2"}, "ALiBi's positions, which is planned with scores"),
        (
            {"runtime": "torchtitan", "attention": "flash2"},
            r"torchtitan 0\.1\.0.*does not have it\. Use another attention\.$",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, str], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        decided(question(**({"dp_shard": 8, "seq_len": 2048} | given)))


@pytest.mark.parametrize("cluster", ["dgx-h100", "cpu"])
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("documents", [{}, {"packing": "packed", "mean_seq_len": 512}])
@pytest.mark.parametrize("code", CODES)
def test_the_trainer_launches_what_it_can_and_the_rest_is_planned(
    cluster: str, recompute: str, documents: dict[str, Any], code: AttentionName
) -> None:
    where: dict[str, Any] = {"cluster": cluster} if cluster != "cpu" else {"cluster": None, "gpu": "cpu"}
    found = answer(question(model="tiny-llama", seq_len=512, **where, **documents), code, recompute=recompute)
    flash = code in ("flash2", "flash3") and (cluster, documents, recompute != "attention") == ("dgx-h100", {}, True)
    assert found.launchable is (code in ("eager", "sdpa") or flash)


def test_a_soft_cap_is_within_flash_attention_and_keeps_no_scores() -> None:
    asked = question(model="gemma-2-9b", seq_len=4096)
    assert answer(asked, "flash2").memory.device_bytes < answer(asked, None).memory.device_bytes
    assert answer(asked, "eager").memory.device_bytes == answer(asked, None).memory.device_bytes


def test_adapters_and_attention_go_together() -> None:
    lora = question(method="lora")
    assert answer(lora, "eager").memory.device_bytes > answer(lora, "sdpa").memory.device_bytes


def _rows(code: str, least_seq: int = 0) -> list[dict[str, str]]:
    with OWN.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["implementation"] == code and int(row["seq"]) >= least_seq]


@pytest.mark.parametrize("code", ["flash2", "flex"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_factors_of_an_h100_are_those_of_its_measured_rows(code: str, way: str) -> None:
    """Each is the median over rows of its head size and lengths, as its source says: rounded to two digits."""
    device, back = named("h100-sxm-80gb"), way == "backward"
    assert device is not None
    times = device.times.attend(back)
    assert times is not None
    ratios: dict[tuple[int, int], list[float]] = {}
    for row in _rows({"flash2": "flash"}.get(code, code), 2048):
        batch, seq, heads, kv_heads, head_dim = (
            int(row[key]) for key in ("batch", "seq", "heads", "kv_heads", "head_dim")
        )
        alone_s = attention_kernel_seconds(batch, seq, heads, kv_heads, head_dim, device, times, backward=back)
        longest = 16384 if code == "flex" or seq > 4096 else 4096
        ratios.setdefault((head_dim, longest), []).append(float(row[f"{way}_us"]) * 1e-6 / float(alone_s))
    for (head_dim, longest), found in ratios.items():
        known = device.times.attention_code(code, head_dim, longest)
        assert known is not None and getattr(known, way) == pytest.approx(median(found), abs=0.006)


@pytest.mark.parametrize("row", _rows("eager"), ids=lambda row: f"{row['seq']}-{row['head_dim']}-{row['kv_heads']}")
def test_eager_attention_of_an_h100_is_within_a_tenth_of_what_was_measured(row: dict[str, str]) -> None:
    device = named("h100-sxm-80gb")
    assert device is not None
    rows, seq, head_dim = int(row["batch"]) * int(row["heads"]) * int(row["seq"]), int(row["seq"]), int(row["head_dim"])
    products = (Product(rows, seq, head_dim), Product(rows, head_dim, seq))
    back = tuple(turned for one in products for turned in (one._replace(n=one.k, k=one.n), one))
    for way, kernels, each in zip(("forward", "backward"), (products, back), SCORES["eager"], strict=True):
        took_s = kernels_seconds(kernels, device) + each * rows * seq / (0.8 * device.bytes_per_s)
        assert took_s * 1e6 == pytest.approx(float(row[f"{way}_us"]), rel=0.1)


def test_attention_of_a_code_is_the_same_kernels_times_its_factor() -> None:
    plain, flash = (attention_kernels(answer(question(), code).case, 1.0) for code in (None, "flash2"))
    assert [b.times / a.times for a, b in zip(plain.forward, flash.forward, strict=True)] == [1.56]
    assert [b.times / a.times for a, b in zip(plain.backward, flash.backward, strict=True)] == [1.75]

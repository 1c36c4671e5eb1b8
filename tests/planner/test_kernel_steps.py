"""Claims about a step whose products, experts and attention are timed by measured kernels.

Not here: the kernels themselves (test_kernel_seconds.py), or what other coefficients do (test_clock.py).
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from planner.ask.question import Question, case_of
from planner.basics.formula import trace
from planner.figures.kernels.attention import attention_kernel_seconds
from planner.figures.kernels.products import Device, named, product_seconds
from planner.figures.kernels.step import (
    Attention,
    Grouped,
    KernelCall,
    Product,
    distinct_rows,
    grouped_kernel_seconds,
    kernels_seconds,
    least_seconds,
)
from planner.figures.passes import coefficients, device_of, kernels_of, loads_by_unit, loads_of
from planner.figures.steptime import step_time
from planner.figures.work import unit_work
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import Calibration, ComputeEntry, calibration
from planner.spec.kernel_times import kernel_times

WITH_NUMBERS = [name for name in presets.names("gpus") if kernel_times(name) is not None]
BASE = calibration("uncalibrated")
H100 = named("h100-sxm-80gb")
SIZES: tuple[KernelCall, ...] = (
    Product(4096, 14336, 4096),
    Product(17, 40, 64),
    Product(4096, 4096, 14336, format="fp8"),
    Grouped(8, 512, 1408, 2048),
    Grouped(16, 3.5, 1408, 2048),
    Attention(2, 4096, 32, 8, 128, 128),
    Attention(2, 4096, 32, 8, 128, 128, True),
)


def paced(pace: float, **shares: float) -> Calibration:
    return Calibration(name="test", base=BASE, compute=(ComputeEntry(source="test", pace=pace, **shares),))


def asked(model: str = "1b", cluster: str = "dgx-h100", **job: object) -> Question:
    return Question(presets.model(model), presets.cluster(cluster, 8), TrainingJob(**job), BASE)


DDP = Layout(engine="ddp", dp_replicate=8)


def alone(one: KernelCall, device: Device) -> float:
    if isinstance(one, Product):
        times = device.times.product(one.format)
        assert times is not None
        return float(product_seconds(one.m, one.n, one.k, device, times))
    if isinstance(one, Grouped):
        return float(grouped_kernel_seconds(one.rows, one.experts, one.n, one.k, device, one.format))
    attention = device.times.attend(one.backward)
    assert attention is not None
    return float(attention_kernel_seconds(*one[:5], device, attention, one.value_dim, one.backward))


@pytest.mark.parametrize("one", SIZES)
def test_a_size_asked_for_again_takes_what_the_kernel_takes(one: KernelCall):
    assert H100 is not None
    first, again = (kernels_seconds([one._replace(times=3.0)], H100) for _ in range(2))

    assert first == again == pytest.approx(3 * alone(one, H100))


@pytest.mark.parametrize("gpu", WITH_NUMBERS)
def test_the_bound_in_proportion_to_flop_is_below_every_kernel(gpu: str):
    device = named(gpu)
    assert device is not None
    known = [one for one in SIZES if isinstance(one, Attention) or device.peak(one.format) is not None]

    assert len(known) >= 6
    for one in known:
        assert 0 < least_seconds([one], device) <= alone(one, device), one


@pytest.mark.parametrize("one", [one for one in SIZES if isinstance(one, Product)])
def test_columns_take_what_each_of_their_rows_takes(one: Product):
    assert H100 is not None
    micro = np.array([1.0, 2.0, 2.0, 8.0, 1.0])
    tp = np.array([1.0, 2.0, 2.0, 4.0, 1.0])
    rows = distinct_rows(micro, tp)
    assert rows is not None and len(rows.first) == 3
    column = kernels_seconds([one._replace(m=one.m * micro, n=one.n / tp)], H100, rows)
    each = [
        kernels_seconds([one._replace(m=one.m * some, n=one.n / ranks)], H100)
        for some, ranks in zip(micro.tolist(), tp.tolist(), strict=True)
    ]

    assert column.tolist() == pytest.approx(each)


def test_numbers_alone_have_no_rows():
    assert distinct_rows(1, 8, 2) is None


def test_rows_of_any_whole_numbers_are_told_apart():
    large = 2.0**40
    columns = np.array([large, large, large + 1, large]), np.array([0.0, 1.0, 0.0, 1.0]), np.array([large] * 3 + [7.0])

    rows = distinct_rows(*columns, 3)

    assert rows is not None and sorted(rows.first.tolist()) == [0, 1, 2, 3]
    again = distinct_rows(*(np.tile(column, 2) for column in columns))
    assert again is not None and again.first.tolist() == rows.first.tolist()
    assert again.place.tolist() == 2 * rows.place.tolist()


def test_kernels_of_rows_asked_for_in_part_before_take_what_they_take_alone():
    columns = {"micro_batch_size": np.array([1.0, 2.0, 1.0, 4.0]), "tp": np.array([1.0, 2.0, 1.0, 8.0])}
    layout = Layout(engine="megatron", sequence_parallel=True, dp_shard=8, zero_stage=1, grad_accum=2)
    question = Question(presets.model("7b"), presets.cluster("dgx-h100", 64), TrainingJob(seq_len=2048), BASE)

    for some in ([3, 0], [0, 1, 2, 3]):
        chosen = msgspec.structs.replace(layout, **{name: column[some] for name, column in columns.items()})
        case = case_of(question, chosen)
        work, known = unit_work(case), coefficients(case, BASE)
        device = device_of(case, work, known)
        assert device is not None and device.kernels is not None
        found = loads_by_unit(case, work, device)
        for unit, one in work.items():
            for load, alone in zip(found[unit], loads_of(one, device), strict=True):
                assert (
                    np.broadcast_to(load.busy_s, len(some)).tolist()
                    == np.broadcast_to(alone.busy_s, len(some)).tolist()
                )


def test_a_step_takes_a_pace_times_its_kernels():
    question = asked()
    case = case_of(question, DDP)
    once, twice = (step_time(case, paced(pace)).compute_s for pace in (1.0, 2.0))
    assert H100 is not None
    times = case.whole_repeats
    kernels_s = sum(
        times[unit] * float(kernels_seconds(load.kernels, H100))
        for unit, one in unit_work(case).items()
        for load in (one.forward, one.backward, one.again)
    )

    assert twice - once == pytest.approx(kernels_s)


def test_the_pace_of_attention_is_of_its_kernels_alone():
    """An entry that gives none, as files of before have it, means the pace of all kernels."""
    case = case_of(asked(seq_len=8192), DDP)
    fields = ({"attention_pace": 2.0}, {"attention_pace": 1.0}, {})
    slower, plain, unsaid = (step_time(case, paced(1.5, **some)).compute_s for some in fields)
    assert H100 is not None
    times = case.whole_repeats
    attention_s = sum(
        times[unit] * float(kernels_seconds([some for some in load.kernels if isinstance(some, Attention)], H100))
        for unit, one in unit_work(case).items()
        for load in (one.forward, one.backward, one.again)
    )

    assert slower - plain == pytest.approx(1.5 * attention_s) and attention_s > 0
    assert unsaid == plain


def test_the_kernels_of_a_unit_are_its_flop():
    for model in ("1b", "llama-3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt2"):
        case = case_of(asked(model), DDP)
        for unit, one in unit_work(case).items():
            for load, times in ((one.forward, 1.0), (one.backward, 2.0)):
                flops = 0.0
                for kernel in load.kernels:
                    if isinstance(kernel, Attention):
                        each = kernel.batch * kernel.heads * kernel.seq**2 * (kernel.head_dim + kernel.value_dim)
                        flops += times * kernel.times * each
                    else:
                        rows = kernel.rows * kernel.experts if isinstance(kernel, Grouped) else kernel.m
                        flops += kernel.times * 2 * rows * kernel.n * kernel.k
                assert flops == pytest.approx(load.flops), (model, unit)


def test_a_share_of_the_peak_holds_where_a_calibration_gives_one_and_no_pace():
    case = case_of(asked(), DDP)
    mine = Calibration(name="test", base=BASE, compute=(ComputeEntry(source="test", gpu="cuda", matmul_share=0.5),))

    assert kernels_of(case, coefficients(case, BASE).compute) is not None
    assert kernels_of(case, coefficients(case, mine).compute) is None
    assert step_time(case, mine).compute_s != step_time(case, BASE).compute_s


@pytest.mark.parametrize(("cluster", "precision"), [("dgx-h100", "fp32"), ("localhost", "fp32"), ("mi300x-8x", "bf16")])
def test_what_nobody_measured_is_timed_by_shares(cluster: str, precision: str):
    case = case_of(asked(cluster=cluster, precision=precision), DDP)

    assert kernels_of(case, coefficients(case, BASE).compute) is None
    assert step_time(case, BASE).compute_s is not None


def test_fewer_bits_take_less_time():
    layout = Layout(engine="megatron", dp_shard=8, zero_stage=1, micro_batch_size=2)
    sixteen, eight, four = (
        step_time(case_of(asked("llama-3-8b", "dgx-b200", precision=precision), layout), BASE).compute_s
        for precision in ("bf16", "mxfp8", "nvfp4")
    )

    assert four < eight < sixteen


def test_what_a_step_takes_names_the_formulas_of_its_kernels():
    case = case_of(asked(), DDP)
    with trace("test") as seen:
        step_time(case, BASE)

    def names(step: object) -> set[str]:
        assert isinstance(step, msgspec.Struct)
        return {step.name}.union(*(names(one) for one in step.steps))  # type: ignore[attr-defined]

    assert {"paced_seconds", "product_seconds", "attention_kernel_seconds"} <= names(seen)

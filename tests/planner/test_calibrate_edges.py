"""What of a measurement is used, left out and counted, a bound tried on each side, on figures made by hand.

Not here: fits that find what made their samples (test_calibrate.py, test_links.py), or real rows (test_replay.py).
"""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_calibrate import sized
from test_replay import one

from planner.basics.quantities import GIB
from planner.calibrate import bands, links, score, tables
from planner.calibrate.allocator import badness, fit_allocator
from planner.calibrate.asked import asked
from planner.calibrate.collective import bus_bytes
from planner.calibrate.fit import timed
from planner.calibrate.predict import Figures, Replayed, replay
from planner.calibrate.rows import _known
from planner.calibrate.samples import of_rows
from planner.spec import Allocator, TrainingJob
from planner.spec.calibration import UNCALIBRATED, Calibration, calibration
from tests.truth.published.coverage import coverage

BASE = calibration(UNCALIBRATED)


# -- samples of rows --------------------------------------------------------------------------------------------------


def samples(**measured: Any) -> list[tuple[str, str | None, float | None, float | None, float | None]]:
    """(id, kind, GiB, seconds, GiB of context) of each sample that a row with these figures alone makes."""
    row = msgspec.structs.replace(one(), measured=msgspec.convert(measured, type(one().measured)))
    found = of_rows([asked(row)], BASE).samples
    return [
        (
            s.id,
            s.memory_kind,
            s.memory_bytes and s.memory_bytes / GIB,
            s.step_s,
            s.context_bytes and s.context_bytes / GIB,
        )
        for s in found
    ]


def test_each_figure_alone_makes_a_sample_and_none_makes_none() -> None:
    memory = {"peak_memory_gib": 20.0, "memory_kind": "allocated"}
    assert samples(**memory) == [("mine-1", "allocated", 20.0, None, None)]
    assert [entry[2:4] for entry in samples(step_time_s=1.5)] == [(None, 1.5)]
    assert [entry[2:] for entry in samples(step_time_s=1.5, context_gib=0.5)] == [(None, 1.5, 0.5)]
    assert samples(oom=False) == []
    # 8 ranks at 1,000 tokens/s each, of 8 sequences of 2,048 tokens.
    assert [entry[3] for entry in samples(tokens_per_s_per_gpu=1000.0)] == [8 * 2048 / 8000]


def test_reserved_memory_beside_the_live_one_is_a_sample_of_both() -> None:
    memory = {"peak_memory_gib": 20.0, "memory_kind": "allocated"}
    both = samples(**memory, reserved_gib=24.0, context_gib=0.5)
    assert both == [("mine-1", "allocated", 20.0, None, 0.5), ("mine-1 reserved", "reserved", 24.0, None, None)]
    row = one(measured__reserved_gib=24.0)
    _, reserved = of_rows([asked(row)], BASE).samples
    assert reserved.live_bytes == 20.0 * GIB
    assert len(samples(peak_memory_gib=20.0, memory_kind="reserved", reserved_gib=24.0)) == 1


# -- an allocator's and runtimes' figures -----------------------------------------------------------------------------


def test_memory_of_processors_and_rows_without_memory_are_no_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [sized(number, "reserved") for number in range(1, 12)]
    unmeasured = [msgspec.structs.replace(sample, memory_bytes=None) for sample in many]
    assert fit_allocator(many, Allocator()).n == 11
    assert fit_allocator(unmeasured, Allocator()).n == 0
    cpu = many[0].case
    gpu = msgspec.structs.replace(cpu.cluster.gpu, kind="cpu")
    on_cpu = msgspec.structs.replace(cpu, cluster=msgspec.structs.replace(cpu.cluster, gpu=gpu))
    assert fit_allocator([msgspec.structs.replace(sample, case=on_cpu) for sample in many], Allocator()).n == 0


def test_the_badness_of_errors_is_their_median_and_a_little_of_their_capped_mean() -> None:
    from planner.calibrate.allocator import CAP, TAIL_WEIGHT

    assert badness([0.01, -0.02, 0.03]) == pytest.approx(0.02 + TAIL_WEIGHT * 0.02)
    wild = badness([0.01, 0.02, 9.0])
    assert wild == pytest.approx(0.02 + TAIL_WEIGHT * (0.01 + 0.02 + CAP) / 3)


def residuals(
    runtime: str, memory: list[float | None], time: list[float | None], kind: str = "cuda", model: str = "one"
) -> list[Any]:
    return [
        SimpleNamespace(
            sample=SimpleNamespace(runtime=runtime, device_kind=kind, model=model), memory_error=m, time_error=t
        )
        for m, t in zip(memory, time, strict=True)
    ]


NONE: list[float | None] = [None] * 10
WIDE = {name: [-size + 2 * size * at / 9 for at in range(10)] for name, size in {"a": 0.2, "b": 0.3, "c": 0.5}.items()}


def test_a_runtime_has_a_band_from_ten_residuals_and_all_others_one_from_three_runtimes() -> None:
    assert bands.bands(residuals("a", WIDE["a"][:9], NONE[:9]), []) == []
    (alone,) = bands.bands(residuals("a", WIDE["a"], NONE), [])
    assert (alone.runtime, alone.n, alone.time_low) == ("a", 10, None)
    # Measured over predicted: 1/1.2 is the least and 1/0.8 the most, each with more weight than lies beyond an end.
    assert (alone.memory_low, alone.memory_high) == (pytest.approx(1 / 1.2, abs=1e-3), pytest.approx(1 / 0.8, abs=1e-3))

    several = [one for name, errors in WIDE.items() for one in residuals(name, errors, NONE)]
    shared, *own = bands.bands([*several, *residuals("d", WIDE["a"], NONE, kind="cpu")], several)
    assert [entry.runtime for entry in own] == ["a", "b", "c"] and (shared.runtime, shared.gpu) == (None, "cuda")
    assert shared.time_low is None and shared.n == 30
    assert len(bands.bands(several[:20], several[:20])) == 2  # of two runtimes no third is told
    # Of times alone the same, and memory and time of one runtime are one entry.
    times = [one for name, errors in WIDE.items() for one in residuals(name, NONE, errors)]
    assert bands.bands(times, times)[0].memory_low is None and bands.bands(times, times)[0].time_low is not None
    (both,) = bands.bands(residuals("a", WIDE["a"], WIDE["b"]), [])
    assert both.n == 10 and both.spread == pytest.approx(
        statistics.median(map(abs, (*WIDE["a"], *WIDE["b"]))), rel=0.01)  # fmt: skip


def test_runtimes_count_once_in_what_others_are_told_however_often_they_were_measured() -> None:
    def told(often: int) -> tuple[float | None, float | None]:
        outside = [one for name, errors in WIDE.items() for one in residuals(name, errors * often, NONE * often)]
        (shared, *_) = bands.bands(outside, outside)
        return shared.memory_low, shared.memory_high

    assert told(1) == pytest.approx(told(7), rel=0.06)


def test_other_software_counts_as_one_model_more_of_a_runtime_so_that_few_models_have_a_wider_band() -> None:
    outside = [one for name in ("b", "c", "d") for one in residuals(name, WIDE["c"], NONE)]

    def of_models(count: int) -> tuple[float, float]:
        mine = [one for at in range(count) for one in residuals("a", WIDE["a"], NONE, model=str(at))]
        (own,) = [entry for entry in bands.bands(mine, outside) if entry.runtime == "a"]
        assert own.memory_low is not None and own.memory_high is not None
        return own.memory_low, own.memory_high

    (low, high), (lower, higher) = of_models(20), of_models(1)
    assert lower < low <= 1 / 1.19 and 1 / 0.81 <= high < higher


def test_a_band_made_without_a_model_or_a_source_is_what_judges_it() -> None:
    def sample(runtime: str, model: str, source: str, at: int, method: str = "full", tp: int = 1) -> Any:
        layout, job = SimpleNamespace(tp=tp, pp=1), SimpleNamespace(method=method)
        case = SimpleNamespace(layout=layout, job=job)
        return SimpleNamespace(
            id=f"{model} {source} {at}", runtime=runtime, model=model, source=source, device_kind="cuda",
            gpu="h100-sxm-80gb", case=case)  # fmt: skip

    def measured(factor: float, *about: Any, **more: Any) -> list[Any]:
        made = [sample(*about, at, **more) for at in range(10)]
        return [SimpleNamespace(sample=one, memory_error=factor - 1, time_error=None) for one in made]

    # One runtime's second model is far off its first; two other runtimes are as predicted.
    found = [*measured(1.0, "a", "x", "s", tp=2), *measured(2.0, "a", "y", "s", tp=2),
             *measured(1.0, "b", "z", "t", method="lora"), *measured(1.0, "c", "z", "u")]  # fmt: skip
    guesses = calibration("uncalibrated")
    base = Calibration(name="mine", based_on=guesses.name, base=guesses)
    without = dict.fromkeys("stu", base)
    splits, *others = (one for one in coverage(found, found, base, without) if one.what == "memory")
    by_kind = {one.software: one for one in (splits, *others)}

    assert (by_kind["tensors or layers are split"].n, by_kind["all"].n, by_kind["all"].runtimes) == (20, 40, 3)
    assert by_kind["fine-tuning"].left_source == by_kind["states are sharded only"].left_source == 1
    # The base's band, 0.95 to 1.05, has no room for half of a; nor has one that never saw the model that is off.
    assert by_kind["tensors or layers are split"].left_source == 0.5
    assert by_kind["tensors or layers are split"].left_model <= 0.5
    assert (by_kind["all"].left_source, by_kind["all"].each_runtime) == (0.75, pytest.approx(2.5 / 3))


def test_a_device_is_as_fast_as_its_timed_runs_say_in_whatever_format() -> None:
    def sample(precision: str, gpu: str, step_s: float | None = 1.0) -> Any:
        case = SimpleNamespace(job=TrainingJob(precision=precision))
        return SimpleNamespace(runtime="megatron-core", gpu=gpu, step_s=step_s, case=case)

    wide, narrow, alone = sample("bf16", "a"), sample("mxfp8", "a"), sample("fp8", "b")

    assert dict(timed([wide, narrow, alone, sample("bf16", "b", None)])) == {
        ("megatron-core", "a"): [wide, narrow],
        ("megatron-core", "b"): [alone],
    }


# -- collectives ------------------------------------------------------------------------------------------------------


def test_bytes_on_the_bus_are_those_of_nccl_tests() -> None:
    assert bus_bytes("all_reduce", 800.0, 4) == 2 * 3 / 4 * 800
    assert bus_bytes("all_gather", 800.0, 4) == bus_bytes("reduce_scatter", 800.0, 4) == 3 / 4 * 800


def collective(**changed: Any) -> Any:
    gpu = SimpleNamespace(flops_per_s={"bf16": 1e15})
    cluster = SimpleNamespace(gpus=8, gpu=gpu)
    return SimpleNamespace(
        row=SimpleNamespace(
            collective=SimpleNamespace(op="all_reduce", bytes=1e9) if "call" not in changed else changed["call"],
            measured=SimpleNamespace(busbw_gbps=changed.get("busbw", 100.0)),
        ),
        cluster=changed.get("cluster", cluster),
    )


def test_a_measured_bandwidth_is_a_sample_of_seconds_where_everything_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CollectiveSample", lambda **fields: SimpleNamespace(**fields))
    (sample,) = links.samples_of([collective()])
    assert sample.seconds == pytest.approx(2 * 7 / 8 * 1e9 / 100e9) and (sample.ranks, sample.payload_bytes) == (8, 1e9)
    unknown = SimpleNamespace(gpus=8, gpu=SimpleNamespace(flops_per_s={}))
    nothing = [
        collective(call=None),
        collective(call=SimpleNamespace(op="all_reduce", bytes=None)),
        collective(call=SimpleNamespace(op="gossip", bytes=1e9)),
        collective(busbw=None),
        collective(cluster=None),
        collective(cluster=unknown),
    ]
    assert links.samples_of(nothing) == []


# -- scores -----------------------------------------------------------------------------------------------------------


def replayed(
    name: str, *, predicted: float = 1.0, step_s: float | None = 1.0, fits: bool | None = True, **more: Any
) -> Any:
    """A row of one layout, with its predicted and measured step time."""
    row = one(id=name, measured__step_time_s=step_s, **more)
    found = replay([asked(row)], BASE)[0]
    said = msgspec.structs.replace(found.predicted, step_time_s=predicted, fits=fits)
    return msgspec.structs.replace(found, predicted=said)


def test_the_worst_rows_are_three_by_the_factor_of_time_and_by_the_error_of_memory() -> None:
    ratios = {"half": 0.5, "exact": 1.0, "more": 1.9, "slow": 2.1, "near": 1.1}
    rows = [replayed(name, predicted=ratio) for name, ratio in ratios.items()]
    (speed,) = score.summary(rows).speed
    assert [worst.id for worst in speed.worst] == ["slow", "half", "more"]
    assert speed.worst[0].error == pytest.approx(1.1) and speed.worst[0].phase is None and not speed.worst[0].terms_gib
    sizes = {"half": 10.0, "exact": 20.0, "more": 38.0, "slow": 42.0}
    for place, row in enumerate(rows[:4]):
        said = msgspec.structs.replace(row.predicted, peak_memory_gib=sizes[row.row.id])
        rows[place] = msgspec.structs.replace(row, predicted=said)
    rows = rows[:4]
    (memory,) = [kind for kind in score.summary(rows).memory if kind.kind == "allocated"]
    assert [worst.id for worst in memory.worst] == ["slow", "more", "half"]
    terms = memory.worst[0].terms_gib
    # Parameters of a 7 B model in fp32 over 8 ranks: 6.74e9 x 4 / 8 bytes.
    assert terms["params"] == pytest.approx(6.738e9 * 4 / 8 / 2**30, rel=0.01)
    assert list(terms.values()) == sorted(terms.values(), reverse=True) and min(terms.values()) > 0


def test_memory_of_the_kind_that_the_peak_has_is_one_point_and_of_another_two() -> None:
    row = replayed("a", measured__reserved_gib=24.0, measured__device_gib=26.0)
    assert [kind for kind, _ in score.memory_points([row])] == ["allocated", "reserved", "device"]
    row = replayed("a", measured__reserved_gib=24.0, measured__memory_kind="reserved")
    points = dict(score.memory_points([row]))
    assert list(points) == ["reserved"] and points["reserved"][2] == 20.0
    skipped = msgspec.structs.replace(row, skipped="no")
    assert list(score.memory_points([skipped])) == []


def test_five_layouts_have_an_order_and_the_first_choice_a_regret() -> None:
    def of(predicted: list[float], measured: list[float | None], fits: list[bool]) -> Any:
        rows = [
            replayed(f"r{at}", predicted=p, step_s=m, fits=f)
            for at, (p, m, f) in enumerate(zip(predicted, measured, fits, strict=True))
        ]
        return score.summary(rows).ranks

    five = [1.0, 2.0, 3.0, 4.0, 5.0]
    (same,) = of(five, list(five), [True] * 5)
    assert (same.layouts, same.gpus, same.spearman, same.regret) == (5, 8, pytest.approx(1.0), 0.0)
    (other,) = of(five, [2.0, 1.0, 3.0, 4.0, 5.0], [True] * 5)
    assert other.regret == pytest.approx(1.0)  # took twice as long as the best
    (fits,) = of(five, list(five), [False, False, True, True, True])
    assert fits.regret == pytest.approx(2.0)
    (nothing,) = of(five, list(five), [False] * 5)
    assert (nothing.chosen, nothing.regret) == (None, None)
    assert of(five[:4], list(five[:4]), [True] * 4) == ()


def test_runs_that_ended_are_counted_by_what_was_predicted() -> None:
    rows = [replayed("a"), replayed("b", fits=False), replayed("c", fits=None), replayed("d", measured__oom=True)]
    refused = msgspec.structs.replace(replayed("e"), skipped="refused by a rule: x")
    left = msgspec.structs.replace(replayed("f"), skipped="seq_len not stated")
    found = {entry.outcome: entry for entry in score.summary([*rows, refused, left]).fit}
    ran = found["ran"]
    assert (ran.fits, ran.does_not_fit, ran.refused, ran.not_predicted) == (1, 1, 1, 2)
    oom = found["out of memory"]
    assert (oom.fits, oom.does_not_fit) == (1, 0) and list(found) == ["ran", "out of memory"]
    summary = score.summary([*rows, refused, left])
    assert list(summary.rows.values()) == [(6, 4)] and sorted(entry.rows for entry in summary.skipped) == [1, 1]


def test_what_is_not_known_of_a_row_is_left_out_of_its_line_and_a_row_without_figures_keeps_their_place() -> None:
    assert _known({"a": None, "b": {}, "c": {"d": None, "e": 0}, "measured": {"x": None}, "f": False, "g": ""}) == {
        "c": {"e": 0}, "measured": {}, "f": False, "g": ""}  # fmt: skip
    assert _known({"inner": {"measured": {}}}) == {"inner": {"measured": {}}}


def test_a_row_without_a_figure_predicts_kinds_in_order() -> None:
    found: Replayed = replay([asked(one())], BASE)[0]
    said: Figures = found.predicted
    assert said.allocated_gib is not None and said.reserved_gib is not None and said.device_gib is not None
    assert said.allocated_gib <= said.reserved_gib <= said.device_gib and said.peak_memory_gib == said.allocated_gib
    assert tables.share_text(0.1234) == "12.3%"

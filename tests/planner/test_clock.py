"""Claims about what each coefficient of a calibration does to a step's time.

Not here: where coefficients come from (test_calibration.py), or collectives on links (test_linktime.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from planner.ask.question import Question, case_of
from planner.decide.candidates import passed_seconds
from planner.figures.steptime import StepTime, least_loads, step_time
from planner.figures.work import unit_work
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import Calibration, ComputeEntry, OverlapEntry, calibration

NAKED = {"half_size": 0.0, "operation_s": 0.0}


def known(overlap: dict[str, float] | None = None, **compute: float) -> Calibration:
    return Calibration(
        name="test",
        compute=(ComputeEntry(source="test", **(NAKED | compute)),),
        overlap=(OverlapEntry(source="test", **(overlap or {})),),
        base=calibration(),
    )


def timed(
    given: Calibration,
    layout: Layout,
    cluster: str = "dgx-h100",
    gpus: int = 8,
    **job: object,
) -> StepTime:
    asked = Question(presets.model("1b"), presets.cluster(cluster, gpus), TrainingJob(**job), given)
    return step_time(case_of(asked, layout), given)


DDP = Layout(engine="ddp", dp_replicate=8)
CPU = Layout(engine="ddp", dp_replicate=2)


def test_a_gpu_hides_the_starting_of_operations_and_a_cpu_does_not():
    none, some, many = (timed(known(operation_s=each), DDP).compute_s for each in (0.0, 1e-7, 1e-3))
    idle, busy = (timed(known(operation_s=each), CPU, "localhost", 2).compute_s for each in (0.0, 1e-7))

    assert none == some < many
    assert busy > idle


def test_where_starting_decides_larger_micro_batches_cost_nothing_more():
    one, four = (
        timed(known(operation_s=1.0), msgspec.structs.replace(DDP, micro_batch_size=micro)).compute_s
        for micro in (1, 4)
    )

    assert one == four


def test_small_products_reach_less_of_the_peak_rate_than_large_ones():
    def lost(micro: int) -> float:
        layout = msgspec.structs.replace(DDP, micro_batch_size=micro)
        plain, curved = (
            timed(known(half_size=half, pace=0.0), layout, seq_len=1024).compute_s for half in (0.0, 500.0)
        )
        return float(curved / plain)

    assert lost(1) > lost(4) > lost(64) > 1


def test_a_cube_of_three_half_sizes_reaches_half_the_share():
    from planner.figures.passes import matmul_seconds

    size = 3 * 500.0
    full, curved = (matmul_seconds(2 * size**3, 3 * size**2, 1e15, 0.8, half) for half in (0.0, 500.0))

    assert curved == pytest.approx(2 * full)


def test_communication_that_is_not_hidden_is_waited_for():
    hidden, half, none = (timed(known({"hidden_share": share}), DDP).exposed_comm_s for share in (1.0, 0.5, 0.0))
    raw = timed(known(), DDP).comm_s

    assert hidden < half < none == pytest.approx(raw)


SPLIT = Layout(engine="nanotron", tp=8, pp=2, grad_accum=4, zero_stage=1)


def test_an_older_calibrations_straggling_is_read_and_changes_nothing(tmp_path: Path):
    def step_s(straggling: str) -> float:
        file = tmp_path / f"old{len(straggling)}.toml"
        file.write_text(f'[[overlap]]\nhidden_share = 1.0\n{straggling}source = "of before"\n')
        return float(timed(calibration(str(file)), SPLIT, gpus=16).step_s)

    assert step_s("straggle_s = 1.0\n") == step_s("")


def test_accumulated_gradients_are_added_up_in_every_micro_batch_but_the_first():
    def moved(accum: int) -> float:
        asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 8), TrainingJob(), calibration())
        case = case_of(asked, msgspec.structs.replace(DDP, grad_accum=accum))
        return float(accum * unit_work(case)["layer"].backward.fixed_bytes)

    once, four = moved(1), moved(4)
    assert once == 0
    assert four == pytest.approx(3 * moved(2))


@pytest.mark.parametrize("micro", [1, 4, 64])
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_the_searchs_floor_is_below_the_compute_of_every_micro_batch(micro: int, method: str):
    given = calibration()
    layout = msgspec.structs.replace(DDP, micro_batch_size=micro)
    asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 8), TrainingJob(method=method), given)
    one = case_of(asked, msgspec.structs.replace(layout, micro_batch_size=1))
    floor = passed_seconds(least_loads(one, given), one.whole_repeats)

    assert 0 < floor <= step_time(case_of(asked, layout), given).compute_s / micro

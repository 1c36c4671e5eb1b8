"""A profiler's events as spans, on a process and on a device; and which steps a run may record.

Not here: recording (test_recording.py, tests/cluster/test_profile.py), or drawing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.cli import executor
from executor.folder.joining import Joining
from executor.run import attempts
from executor.run.launch import worker_arguments
from executor.run.prepare import RunOptions, check_profile
from executor.worker.meter.spans import PASS, STEP, Event, NamedCollective, bounded, in_lanes, spans_of
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.spec import Layout, Recipe, TrainingJob
from planner.spec.plan import Plan
from planner.spec.spans import FOLDER, Profile, Span, read_profiles

MS = 1e-3


def event(name: str, start: float, end: float, thread: int = 1, *, device: bool = False) -> Event:
    """Times in milliseconds."""
    return Event(name, start * MS, end * MS, thread, device)


def told(spans: list[Span]) -> list[tuple[str, str, float, float]]:
    return [(span.stream, span.name, round(span.start_s / MS, 6), round(span.end_s / MS, 6)) for span in spans]


PROCESS = [
    event(STEP, 10, 30),
    event(f"{PASS}forward 0", 10, 14),
    event("aten::mm", 10, 12),
    event("gloo:all_gather", 12, 13, 2),  # nothing is computed meanwhile
    event("aten::mm", 13, 14),
    event(f"{PASS}backward 0", 14, 24),
    event("aten::mm", 14, 20),
    event("gloo:all_reduce", 16, 19, 2),  # hidden
    event("gloo:all_reduce", 18, 23, 3),  # most of it is waited for
    event("aten::add_", 23, 24),
    event(f"{PASS}optimizer 0", 25, 30),
    event("aten::_fused_adamw_", 25, 30),
    event("gloo:barrier", 5, 9.5, 2),  # before the step
]


def test_passes_of_a_process_are_without_what_it_waits_for():
    step_s, spans = spans_of(PROCESS, [])

    assert step_s == pytest.approx(20 * MS)
    assert told(spans) == [
        ("compute", "forward 0", 0, 2),
        ("compute", "forward 0", 3, 4),
        ("compute", "backward 0", 4, 10),
        ("compute", "backward 0", 13, 14),
        ("compute", "optimizer step", 15, 20),
        ("collectives", "all_gather", 2, 3),
        ("collectives", "all_reduce", 6, 9),
        ("collectives", "all_reduce", 8, 13),
    ]
    assert [span.exposed for span in spans if span.stream == "collectives"] == [True, False, True]
    assert [span.lane for span in spans if span.stream == "collectives"] == [0, 0, 1]


def test_a_collective_bears_group_and_unit_where_the_measured_step_made_as_many():
    calls = [NamedCollective("all_gather", "dp_shard", "layer"), NamedCollective("reduce_scatter", "dp_shard", "layer")]
    more = [*calls, NamedCollective("all_reduce", "tp", "layer")]

    _, some = spans_of(PROCESS, calls)
    _, known = spans_of(PROCESS, more)

    assert {span.name for span in some if span.stream == "collectives"} == {"all_gather dp_shard layer", "all_reduce"}
    names = [(span.stream, span.name) for span in known if span.kind == "collective"]
    assert ("collectives", "reduce_scatter dp_shard layer") in names  # which gloo does as an all-reduce
    assert ("in passes", "all_reduce tp layer") in names


DEVICE = [
    event(STEP, 0, 12),
    event(f"{PASS}forward 0", 0, 1),  # the host is done long before the device
    event(f"{PASS}backward 0", 1, 2),
    event(f"{PASS}forward 0", 2, 5, 7, device=True),
    event(f"{PASS}backward 0", 5, 11, 7, device=True),
    event("ampere_bf16_gemm", 2, 3, 7, device=True),
    event("elementwise_kernel", 3.01, 4, 7, device=True),
    event("ampere_bf16_gemm", 5, 8, 7, device=True),
    event("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 1, 2.5, 20, device=True),
    event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 8, 11, 20, device=True),
    event("nccl:_reduce_scatter_base", 8, 11, 20, device=True),
    event("Memcpy DtoH (Device -> Pinned)", 9, 10, 21, device=True),
    event("c10d::_allgather_base_", 0.1, 0.2),
]


def test_passes_of_a_device_are_its_kernels_and_what_it_sends_and_copies_stands_beside():
    _, spans = spans_of(DEVICE, [NamedCollective("all_gather", "dp_shard", "tail")])

    assert told(spans) == [
        ("compute", "forward 0", 2, 4),
        ("compute", "backward 0", 5, 8),
        ("collectives", "all_gather dp_shard tail", 1, 2.5),
        ("collectives", "reduce_scatter", 8, 11),
        ("copies", "host link, out", 9, 10),
    ]
    assert [span.exposed for span in spans] == [False, False, True, True, True]


def test_what_is_under_way_at_once_takes_a_lane_each_and_a_lane_is_taken_again():
    spans = [Span("sends", "send", "x", start, end) for start, end in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 5.0))]

    assert [span.lane for span in in_lanes(spans)] == [0, 1, 0, 2]


def test_a_file_takes_the_longest_spans_and_says_what_it_leaves_out():
    spans = [Span("compute", "forward", "x", number * 10.0, number * 10.0 + number) for number in range(1, 6)]

    kept, count, seconds = bounded(spans, 3)

    assert [span.seconds for span in kept] == [3, 4, 5]
    assert (count, seconds) == (2, 3)
    assert bounded(spans, 5) == (tuple(spans), 0, 0.0)


def plan(steps: int) -> Plan:
    from planned import make_plan

    return make_plan(Layout(engine="single"), TrainingJob(recipe=Recipe(steps=steps)), nodes=1, per_node=1)


@pytest.mark.parametrize(
    ("step", "steps", "said"),
    [
        (5, 20, "is not a steady step: the meter instruments it or an earlier one. Try 6"),
        (21, 20, "the run has 20 steps. Try 20"),
        (6, 5, "the run has 5 steps, and those before step 6 are not steady. Add --steps 6"),
        (0, 20, "is not a steady step"),
    ],
)
def test_a_step_that_is_not_steady_or_not_there_is_not_recorded(step, steps, said):
    with pytest.raises(PlannerError, match="--profile") as refused:
        check_profile(plan(steps), step)

    assert said in refused.value.sentence


@pytest.mark.parametrize(("step", "steps"), [(None, 1), (6, 6), (20, 20)])
def test_other_steps_are(step, steps):
    assert check_profile(plan(steps), step) is None


def test_every_rank_of_every_node_is_told_the_step():
    options = RunOptions(run_dir=Path("run"), nodes=1, profile=7)

    assert worker_arguments(options)[-2:] == ("--profile", "7")
    assert "--profile" not in worker_arguments(RunOptions(run_dir=Path("run"), nodes=1))
    assert Joining(run_id="x", plan_hash="y", version="1", code="z", port=1).profile is None
    assert FOLDER in attempts.MOVED


def test_a_script_of_one_s_own_is_not_recorded(capsys):
    code = command.exit_code(executor, ["run", "plan.json", "--script", "train.py", "--profile"], name="executor")

    assert code == 2
    assert "--profile apply to the built-in trainer" in capsys.readouterr().err


def test_a_run_folder_without_profiles_has_none_and_a_damaged_one_is_refused(tmp_path):
    assert read_profiles(tmp_path) == ()

    (tmp_path / FOLDER).mkdir()
    file = tmp_path / FOLDER / "rank-0.json"
    for text, said in (
        ("{", "cannot be read"),
        ('{"schema":"profile/2","rank":0,"stage":0,"step":6,"device":"cpu","step_s":1,"spans":[]}', "profile/1"),
        (
            '{"rank":0,"stage":0,"step":6,"device":"cpu","step_s":1,"spans":'
            '[{"stream":"magic","kind":"x","name":"x","start_s":0,"end_s":1}]}',
            "stream=magic",
        ),
    ):
        file.write_text(text)
        with pytest.raises(PlannerError, match=said):
            read_profiles(tmp_path)


def test_a_profile_is_read_as_it_was_written_and_ranks_come_in_order(tmp_path):
    from executor.folder.rundir import write_of_rank

    made = [
        Profile(
            rank=rank, stage=0, step=6, device="cpu", step_s=1.0, spans=(Span("compute", "forward", "x", 0.0, 1.0),)
        )
        for rank in (10, 2)
    ]
    for one in made:
        write_of_rank(tmp_path, FOLDER, one.rank, one)

    assert read_profiles(tmp_path) == (made[1], made[0])
    assert (made[0].left_out, made[0].left_out_s) == (0, 0.0)

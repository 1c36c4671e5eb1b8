"""The join of prediction and measurement: nothing is dropped, signs are right, the verdict can fail."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from test_rundir import make_plan

from executor.folder import rundir
from executor.measure import lines, report
from executor.measure.report_page import report_page
from executor.measure.report_text import render
from executor.run.export import check_weights
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes
from planner.spec import Layout, Moe
from planner.spec.plan import Collective, PhaseMemory, Plan, Prediction, StagePrediction
from planner.spec.record import RankMeasurements, RunRecord, Wire
from tests.browser import Opened

MIB = 2**20


def call(op: str, payload: float, *, unit: str = "bucket", count: float = 1) -> Collective:
    return Collective(
        op=op, group="dp_replicate", ranks=2, unit=unit, phase="backward", count=count, payload_bytes=payload
    )


def rank(
    number: int, backward: float, *, calls: tuple[Collective, ...] = (), step_s: tuple[float, ...] = ()
) -> RankMeasurements:
    memory = (
        PhaseMemory(phase="forward", terms={"params": 100 * MIB}),
        PhaseMemory(phase="backward", terms={"params": 100 * MIB, "grads": backward * MIB, "buckets": 1 * MIB}),
    )
    return RankMeasurements(
        rank=number,
        node=number,
        local_rank=0,
        memory_source="live-tensors",
        memory=memory,
        collectives=calls,
        step_s=step_s,
    )


def predicted() -> Plan:
    prediction = Prediction(
        memory=(
            PhaseMemory(phase="forward", terms={"params": 100 * MIB}),
            PhaseMemory(phase="backward", terms={"params": 100 * MIB, "grads": 110 * MIB, "logits": 20 * MIB}),
        ),
        collectives=(call("all_reduce", 1000.0), call("all_gather", 50.0)),
        ideal_collectives=(call("all_reduce", 900.0),),
        step_s=0.2,
    )
    return msgspec.structs.replace(make_plan(Layout(engine="ddp", dp_replicate=2)), prediction=prediction).sealed()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run whose rank 1 is the heaviest."""
    plan = predicted()
    rundir.create(tmp_path / "run", plan, {})
    ranks = (
        rank(0, 90, calls=(call("all_reduce", 1000.0),), step_s=(0.1, 0.3)),
        rank(1, 99, calls=(call("all_reduce", 1000.0), call("broadcast", 7.0)), step_s=(0.1, 0.1)),
    )
    for one in ranks:
        (tmp_path / "run" / "measured" / f"rank-{one.rank}.json").write_bytes(msgspec.json.encode(one))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"loss": 6.0}\n{"loss": 5.0}\n')
    rundir.write_json(tmp_path / "run" / rundir.RECORD, ended())
    return tmp_path / "run"


def ended() -> RunRecord:
    """Of a run that completed."""
    return RunRecord(
        plan_hash=predicted().content_hash, status="completed", exit_code=0, started="2026-03-01T00:00:00+00:00",
        seconds=1.0, backend="accelerate", launcher="local/loopback", world_size=2, nodes=2,
    )  # fmt: skip


def test_the_peak_is_the_heaviest_ranks_fullest_phase_with_a_signed_error(folder):
    memory = report.build(folder).memory

    assert (memory.rank, memory.predicted_phase, memory.measured_phase) == (1, "backward", "backward")
    assert (memory.peak.predicted, memory.peak.measured) == (230 * MIB, 200 * MIB)
    assert memory.peak.error_percent == pytest.approx(15.0)


def test_a_term_on_one_side_only_is_missing_on_the_other_and_small_ones_stand_apart(folder):
    memory = report.build(folder).memory

    lines = {line.name: (line.predicted, line.measured) for line in memory.lines}
    assert lines["backward/logits"] == (20 * MIB, None)
    assert [line.name for line in memory.small] == ["backward/buckets"]
    assert memory.small[0].predicted is None and memory.small[0].error_percent is None


def test_collectives_join_by_key_and_none_is_dropped(folder):
    traffic = report.build(folder).traffic

    assert traffic.rank == 1 and traffic.differing_ranks == (0,)
    assert {line.name: (line.predicted, line.measured) for line in traffic.lines} == {
        "all_reduce/dp_replicate/bucket/backward": (1000.0, 1000.0),
        "all_gather/dp_replicate/bucket/backward": (50.0, None),
        "broadcast/dp_replicate/bucket/backward": (None, 7.0),
    }
    assert (traffic.payload.predicted, traffic.payload.measured) == (1050.0, 1007.0)
    assert traffic.ideal_payload_bytes == 900.0
    assert traffic.wire.measured is None  # ranks do not see what crossed


def with_wire(one: RankMeasurements, *step_bytes: float, ranks: int = 1) -> RankMeasurements:
    wire = Wire(interfaces=("eth0", "lo"), ranks=ranks, step_bytes=step_bytes, step_packets=(2.0,) * len(step_bytes))
    return msgspec.structs.replace(one, wire=wire)


def test_bytes_on_the_wire_are_the_mean_over_ranks_and_steps_and_headers_are_told(folder):
    plan = predicted()
    ring = msgspec.structs.replace(call("all_reduce", 1000.0), wire_bytes_per_rank=1000.0)
    plan = msgspec.structs.replace(plan, prediction=msgspec.structs.replace(plan.prediction, collectives=(ring,)))
    first, second = rank(0, 90), rank(1, 99)

    both = report.join_traffic(plan, (with_wire(first, 1100.0, 1140.0), with_wire(second, 1080.0, 1080.0)))
    assert (both.wire.predicted, both.wire.measured, both.wire_headers) == (1000.0, 1100.0, 2 * report.PACKET_HEADERS)
    one_node = report.join_traffic(plan, (with_wire(first, 2200.0, ranks=2), second))
    assert one_node.wire.measured == 1100.0
    half = report.join_traffic(plan, (with_wire(first, 1100.0), second))  # the other node's counter is not known
    assert (half.wire.measured, half.wire_headers) == (None, None)


@pytest.mark.parametrize(("probed", "said"), [(False, True), (True, False), (None, False)])
def test_a_step_time_that_no_probe_stands_behind_says_so(folder, probed, said):
    built = msgspec.structs.replace(report.build(folder), probed=probed)
    text = render(built)

    assert ("median step time, unprobed machine" in text) is said
    assert "median step time" in text


def test_validation_losses_are_read_from_between_the_steps_also_of_a_run_that_died(folder):
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "loss": 6.0}\n{"step": 1, "validation_loss": 5.5, "validation_tokens": 9}\n'
        '{"step": 1, "loss": 5.0}\n{"step": 2, "validation_loss": 5.25, "validation_tokens": 9}\n{"step": 2, "lo'
    )
    built = report.build(folder)

    assert built.validation == ((1, 5.5), (2, 5.25))
    assert (built.first_loss, built.last_loss, built.steps) == (6.0, 5.0, 2)


def test_checkpoints_are_no_steps_and_the_pause_that_each_cost_is_said(folder):
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "loss": 6.0}\n'
        '{"step": 1, "checkpoint_bytes": 2097152, "pause_s": 0.05, "write_s": 0.2, "time": 1.0, "error": ""}\n'
        '{"step": 1, "loss": 5.0}\n'
        '{"step": 2, "checkpoint_bytes": 2097152, "pause_s": 0.03, "write_s": 0.3, "time": 2.0, "error": ""}\n'
        '{"step": 3, "checkpoint_bytes": 0, "pause_s": 0.0, "write_s": 0.0, "time": 3.0, "error": "rank 1: no room"}\n'
    )
    built = report.build(folder)
    text = render(built)

    assert (built.first_loss, built.last_loss, built.steps) == (6.0, 5.0, 2)
    assert (
        "2 checkpoints of 2.00 MiB: training paused 40.0 ms for one (median; 50.0 ms at most), "
        "complete after 250.0 ms; none after step 3: rank 1: no room"
    ) in text


def test_the_step_time_is_the_median_over_all_ranks_and_losses_run_from_first_to_last(folder):
    built = report.build(folder)

    assert built.step_s.measured == pytest.approx(0.1)
    assert built.step_s.error_percent == pytest.approx(100.0)
    assert (built.first_loss, built.last_loss, built.steps) == (6.0, 5.0, 2)


def test_the_check_names_each_figure_outside_and_is_silent_inside(folder):
    built = report.build(folder)

    assert report.check(built, lines.Tolerances()) == (
        "memory peak: +15.00 % where 5 % is allowed",
        "all_gather payload: none was measured",
        "broadcast payload: none was predicted",
    )
    only_reduce = msgspec.structs.replace(built.traffic, by_op=built.traffic.by_op[:1])
    agreeing = msgspec.structs.replace(built, traffic=only_reduce)
    assert report.check(agreeing, lines.Tolerances(memory=15.1)) == ()
    assert report.check(agreeing, lines.Tolerances(memory=15.1, time=50)) == (
        "step time: +100.00 % where 50 % is allowed",
    )


def test_a_run_without_measurements_still_reports_and_fails_the_check(tmp_path):
    rundir.create(tmp_path / "run", predicted(), {})
    built = report.build(tmp_path / "run")

    assert built.memory.peak.measured is None and built.memory.rank is None
    assert "memory peak: none was measured" in report.check(built, lines.Tolerances())
    assert "no run.json" in built.status


def test_a_run_of_ones_own_script_has_no_rows_of_missing_figures(tmp_path):
    rundir.create(tmp_path / "run", predicted(), {})
    (tmp_path / "run" / "mesh" / "rank-0.json").write_text('{"rank": 0, "script": "/home/me/train.py"}')
    built = report.build(tmp_path / "run")
    text = render(built)

    assert built.script == "/home/me/train.py"
    assert "not measured (see docs/launching.md)" in text and "missing" not in text
    with pytest.raises(PlannerError, match=r"your own script, /home/me/train\.py"):
        rundir.write_json(tmp_path / "run" / rundir.RECORD, ended())
        check_weights(tmp_path / "run", predicted())


def test_json_carries_the_schema_and_an_error_on_every_line(folder):
    built = report.build(folder)
    whole = json.loads(lines.as_json(report.SCHEMA, built, ("x",), lines.Tolerances()))

    assert whole["schema"] == "report/1"
    assert whole["memory"]["peak"]["error_percent"] == pytest.approx(15.0)
    assert all("error_percent" in line for line in whole["memory"]["lines"] + whole["traffic"]["lines"])
    assert whole["check"]["ok"] is False


def test_people_see_both_sides_units_and_missing_and_names_are_never_markup(folder):
    built = msgspec.structs.replace(report.build(folder), model="[red]evil[/red]")
    text = render(built)

    assert "[red]evil[/red]" in text and "\x1b[" not in text
    assert "PEAK in backward" in text and "230.00 MiB" in text and "+15.00 %" in text
    assert "missing" in text and "rank 1 on node 1" in text and "6.0000 → 5.0000" in text


def test_the_page_of_a_report_has_the_figures_of_its_json_and_both_sides_as_bars(folder):
    built = report.build(folder)
    page = Opened(report_page(built, rundir.read_run_plan(folder), "executor report run").decode(), (), frozenset())
    whole = json.loads(lines.as_json(report.SCHEMA, built))
    expected = {
        f"{key}.{side}": line[side]
        for key, line in (
            ("memory.peak", whole["memory"]["peak"]),
            ("traffic.payload", whole["traffic"]["payload"]),
            ("step_s", whole["step_s"]),
        )
        for side in ("predicted", "measured")
    }
    assert page.figures == {key: value for key, value in expected.items() if value is not None}
    totals = [format_bytes(built.memory.peak.predicted), format_bytes(built.memory.peak.measured)]
    assert all(page.text.count(total) >= 3 for total in totals), "as a figure, beside its bar and in the table"
    assert "executor report run" in page.text


def test_the_peak_of_loading_stands_beside_its_prediction_whichever_rank_needed_most():
    def moments(load: float, backward: float) -> tuple[PhaseMemory, ...]:
        sizes = {"load": load, "backward": backward}
        return tuple(PhaseMemory(phase=phase, terms={"params": size * MIB}) for phase, size in sizes.items())

    ranks = tuple(
        msgspec.structs.replace(rank(number, 1), memory=moments(load, backward))
        for number, (load, backward) in enumerate([(44.0, 100.0), (40.0, 110.0)])
    )
    found = report.join_memory(moments(40.0, 110.0), ranks)

    assert found.rank == 1
    assert (found.load.predicted, found.load.measured) == (40.0 * MIB, 44.0 * MIB)
    assert found.load.error_percent == pytest.approx(-100 / 11)
    assert report.join_memory((), ()).load.measured is None


def test_notes_say_what_explains_a_difference_and_nothing_else(tmp_path):
    plan = predicted()
    moe = Moe(experts=4, top_k=2, expert_ffn=96)
    experts = msgspec.structs.replace(
        plan, model=msgspec.structs.replace(plan.model, family="mixtral", moe=moe)
    ).sealed()
    full = plan.layout.global_batch_size * plan.job.seq_len

    def notes(of: Plan, tokens: int, step_s: tuple[float, ...]) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        rundir.create(folder, of, {})
        (folder / "metrics.jsonl").write_text(f'{{"loss": 6.0, "tokens": {tokens}}}\n')
        (folder / "measured" / "rank-0.json").write_bytes(msgspec.json.encode(rank(0, 1, step_s=step_s)))
        return "\n".join(report.build(folder).notes)

    assert notes(plan, full, (0.1,)) == ""
    assert "router" in notes(experts, full, (0.1,))
    assert f"had from {full - 1:,}" in notes(plan, full - 1, (0.1,))
    assert "the time of a step is not measured: a run of at least 6 steps measures it" in notes(plan, full, ())


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("alone", [True, False], ids=["one rank", "two ranks"])
def test_a_short_run_compares_what_it_measured_and_says_how_many_steps_measure_the_rest(tmp_path, steps, alone):
    calls = () if alone else (call("all_reduce", 1000.0),)
    load = PhaseMemory(phase="load", terms={"params": 10 * MIB})
    plan = predicted()
    prediction = msgspec.structs.replace(
        plan.prediction, collectives=calls, ideal_collectives=calls, memory=(load, *plan.prediction.memory)
    )
    plan = msgspec.structs.replace(plan, prediction=prediction).sealed()
    times = (0.2,) * max(0, steps - 5)
    whole = rank(0, 110, calls=calls if steps > 4 else (), step_s=times)
    one = msgspec.structs.replace(whole, memory=(load, *whole.memory) if steps > 3 else (load,))
    rundir.create(tmp_path / "run", plan, {})
    (tmp_path / "run" / "measured" / "rank-0.json").write_bytes(msgspec.json.encode(one))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"loss": 6.0}\n' * steps)
    built = report.build(tmp_path / "run")
    text = render(built)

    seen = {"memory": steps > 3, "traffic": steps > 4 or alone, "time": steps > 5}
    figures = {"memory": built.memory.peak, "traffic": built.traffic.payload, "time": built.step_s}
    for (part, measured), least in zip(seen.items(), (4, 5, 6), strict=True):
        line = figures[part]
        said = f"the {part} of a step is not measured: a run of at least {least} steps measures it"
        assert (line.measured is not None) == measured and (said in text) == (not measured), (part, text)
        assert line.error_percent is None or abs(line.error_percent) < 30
    assert ("not measured" in text.split("note: ")[0]) == (not all(seen.values()))
    assert built.memory.load.measured == 10 * MIB


def test_tolerances_are_read_by_name_and_nonsense_is_refused():
    assert lines.parse_tolerances(["3", "payload=1.5", "time=40"]) == lines.Tolerances(memory=3, payload=1.5, time=40)
    for wrong in ("speed=3", "memory=much", "memory=-1", "memory=nan"):
        with pytest.raises(PlannerError, match="--tolerance"):
            lines.parse_tolerances([wrong])


def test_a_rank_is_held_against_its_own_stage():
    plan = make_plan(Layout(engine="deepspeed-pipeline", pp=2, zero_stage=1))
    first, last = (
        StagePrediction(
            stage=stage,
            memory=(PhaseMemory(phase="backward", terms={"grads": size * MIB}),),
            collectives=(call("send", size),),
        )
        for stage, size in enumerate((10.0, 30.0))
    )
    prediction = Prediction(memory=last.memory, collectives=first.collectives, stages=(first, last))
    plan = msgspec.structs.replace(plan, prediction=prediction)
    ranks = (rank(0, 10, calls=(call("send", 10.0),)), rank(1, 30, calls=(call("send", 30.0),)))

    assert [report.prediction_of(plan, one).memory for one in ranks] == [first.memory, last.memory]
    for one in ranks:
        assert report.join_traffic(plan, (one,)).payload.error_percent == 0.0
    assert report.join_traffic(plan, ranks).payload.predicted == 30.0

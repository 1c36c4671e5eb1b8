"""Measured cells as rows: what a row says is what ran, files that were cut short, exit codes, and the command's face.

Not here: real runs (tests/cluster/test_measure.py, tests/gpu).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from test_matrix import card

from executor import cli
from executor.folder.rundir import RankError
from executor.measure import measure, measure_text
from executor.measure.machine import Machine, this_machine
from executor.measure.matrix import MatrixCell, cells
from executor.measure.measured_row import made_row
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.quantities import GIB
from planner.calibrate.asked import asked
from planner.calibrate.rows import Row, append_rows, encode_row, read_rows, row_of
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec.plan import PhaseMemory
from planner.spec.record import RankMeasurements, RunRecord

CPU = this_machine("cpu")
TWO = {"load": 1.0, "backward": 3.0}


def record(cell: MatrixCell, *measured: RankMeasurements, code: int = 0, message: str = "") -> RunRecord:
    return RunRecord(
        plan_hash=cell.plan.content_hash,
        status="completed" if code == 0 else "training failed",
        exit_code=code,
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        backend="accelerate",
        launcher="local/loopback",
        world_size=2,
        nodes=1,
        versions={"torch": "2.13.0"},
        step_s=0.5 if measured else None,
        measured=measured,
        message=message,
    )


def rank(number: int, phases: dict[str, float], **allocator: float) -> RankMeasurements:
    memory = tuple(PhaseMemory(phase=name, terms={"params": gib * GIB}) for name, gib in phases.items())
    return RankMeasurements(
        rank=number,
        node=0,
        local_rank=number,
        memory_source="live-tensors",
        memory=memory,
        allocator_peak_bytes={name: gib * GIB for name, gib in allocator.items()},
        step_s=(0.4 + number, 0.5 + number),
    )


@pytest.fixture(scope="module")
def small() -> list[MatrixCell]:
    return cells("small", CPU)


@pytest.mark.parametrize("world", [None, 8])
@pytest.mark.parametrize("machine", [CPU, card(), card(8)], ids=["cpu", "1-gpu", "8-gpus"])
def test_a_row_asks_the_planner_the_very_question_its_cell_was_predicted_by(machine: Machine, world: int | None):
    for cell in cells("small", machine, world):
        row = row_of(encode_row(made_row(cell, record(cell), {}, machine)), "rows:1")
        found = asked(row)

        assert row.plan == cell.plan
        assert found.case == Case.of(cell.plan)
        assert found.assumptions == ()
        assert memory_breakdown(found.case).phases == cell.estimate.memory.phases
        if cell.memory_limit is not None:
            assert found.case.cluster.gpu.memory_bytes == cell.memory_limit


def test_a_cpu_row_has_the_fullest_rank_s_live_tensors_and_no_mfu(small: list[MatrixCell]):
    cell = small[0]
    row = made_row(cell, record(cell, rank(0, {"load": 2.0}), rank(1, TWO)), {}, CPU)
    measured = row.measured

    assert (measured.peak_memory_gib, measured.memory_kind, measured.phases_gib) == (3.0, "allocated", TWO)
    assert measured.terms_gib == {"params": 3.0}
    assert (measured.reserved_gib, measured.device_gib, measured.mfu) == (None, None, None)
    assert measured.step_time_s == 0.5 and measured.step_times_s == (1.4, 1.5)
    tokens = cell.plan.layout.global_batch_size * cell.plan.job.seq_len
    assert measured.tokens_per_s_per_gpu == pytest.approx(tokens / 0.5 / 2, rel=1e-5)
    assert measured.oom is False and row.status == "completed"


def test_a_gpu_row_has_the_allocator_s_figures_and_utilisation_of_the_rated_peak():
    cell = cells("small", card())[0]
    seen = rank(0, {"backward": 9.0}, load=1.0, backward=3.0, steps=3.5, reserved=4.0, device=4.75)
    measured = made_row(cell, record(cell, seen), {}, card()).measured

    assert (measured.peak_memory_gib, measured.reserved_gib, measured.device_gib) == (3.5, 4.0, 4.75)
    assert measured.context_gib == 0.75
    assert measured.phases_gib == {"load": 1.0, "backward": 3.0, "steps": 3.5}
    assert measured.mfu == pytest.approx(measured.tflops_per_gpu / 989.4, rel=1e-3)


def test_a_fake_world_s_row_says_so_and_claims_no_time():
    cell = cells("small", CPU, 4)[0]
    row = made_row(cell, record(cell, rank(0, TWO)), {}, CPU, built_on_meta=True)

    assert row.measured.step_time_s is None and row.measured.tokens_per_s_per_gpu is None
    assert row.plan.cluster.gpus == 4 and "memory only" in row.notes
    assert row.measured.phases_gib == {"backward": 3.0} and "loading was not measured" in row.notes


def test_out_of_memory_a_crash_and_a_kill_are_told_apart(small: list[MatrixCell]):
    cell = small[0]

    def ended(message: str, *, told: bool, cause: str = "") -> Row:
        errors = {0: RankError(message=message, exit_code=5, out_of_memory=told)}
        crashed = msgspec.structs.replace(record(cell, code=5, message=message), cause=cause)
        return made_row(cell, crashed, errors, CPU)

    spent, crashed = ended("memory: out of device memory", told=True), ended("rank 0: ValueError: no", told=False)
    killed = ended("rank 1 failed first: killed by SIGKILL (often the kernel's out-of-memory killer)", told=False)
    assert (spent.measured.oom, spent.status, spent.failed) == (True, "out of memory", True)
    assert (crashed.measured.oom, crashed.status) == (False, "crashed: rank 0: ValueError: no")
    assert killed.measured.oom is None and killed.failed  # whose kill it was is not known
    counted = ended("rank 1 failed first: killed by SIGKILL", told=False, cause="out-of-memory killer")
    others = ended("rank 1 failed first: killed by SIGKILL", told=False, cause="killed")
    assert (counted.measured.oom, counted.status) == (True, "out of memory")
    assert others.measured.oom is False and (others.status or "").startswith("crashed")
    assert spent.measured.peak_memory_gib is None and spent.measured.step_time_s is None
    assert measure.exit_code([measure.Result(cell, spent)]) == 0
    assert measure.exit_code([measure.Result(cell, spent), measure.Result(cell, crashed)]) == 5
    assert measure.exit_code([measure.Result(cell, crashed, known=True)]) == 0
    assert measure.exit_code([measure.Result(cell, refusal="no GPU")]) == 3


def test_rows_that_are_there_are_not_run_again(small: list[MatrixCell], tmp_path: Path):
    output, chosen, said = tmp_path / "rows.jsonl", small[:2], []
    append_rows(output, [made_row(cell, record(cell, rank(0, TWO)), {}, CPU) for cell in chosen])
    before = output.read_bytes()

    results = list(measure.run_cells(chosen, CPU, output, said.append))

    assert [(result.known, result.row.id) for result in results] == [(True, cell.id) for cell in chosen]
    assert output.read_bytes() == before and said == []
    assert measure_text.results_text(results).count("measured before") == 2


@pytest.mark.parametrize("kept", [1, 40, -1, -20])
def test_a_last_line_that_was_cut_off_is_taken_away_or_ended(small: list[MatrixCell], tmp_path: Path, kept: int):
    output = tmp_path / "rows.jsonl"
    rows = [made_row(cell, record(cell, rank(0, TWO)), {}, CPU) for cell in small[:2]]
    append_rows(output, rows[:1])
    whole, last = output.read_bytes(), encode_row(rows[1])
    output.write_bytes(whole + last[:kept])

    found = measure.measured_rows(output)

    complete = kept == -1  # only the end of the line is missing
    assert list(found) == [row.id for row in (rows if complete else rows[:1])]
    assert output.read_bytes() == (whole + last if complete else whole)
    append_rows(output, rows[1:] if not complete else [])
    assert [row.id for row in read_rows([output])] == [row.id for row in rows]


def test_a_file_of_something_else_is_refused_before_anything_runs(small: list[MatrixCell], tmp_path: Path):
    (tmp_path / "text.jsonl").write_text("first\nsecond\n")
    for path in (tmp_path / "text.jsonl", tmp_path, tmp_path / "absent" / "rows.jsonl"):
        with pytest.raises(PlannerError) as refused:
            list(measure.run_cells(small[:1], CPU, path, print))
        assert refused.value.exit_code == 2
    assert (tmp_path / "text.jsonl").read_text() == "first\nsecond\n"


def test_the_command_lists_predictions_runs_nothing_and_refuses_in_one_line(capsys, tmp_path: Path):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = command.exit_code(cli.executor, ["measure", "--device", "cpu", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    code, out, err = run("--list", "--json", "--only", "*fsdp*")
    told = json.loads(out)
    assert (code, err, told["schema"]) == (0, "", "measure/1")
    assert told["cells"] and all("fsdp" in cell["id"] for cell in told["cells"])
    assert all(cell["predicted"]["peak_memory_gib"] > 0 and cell["measured"] is None for cell in told["cells"])

    code, out, _ = run("--list")
    assert code == 0 and "out of memory expected" in out
    for arguments, words in (
        ((), "give -o"),
        (("--list", "--only", "nothing"), "has no cell"),
        (("--list", "--matrix", "absent.toml"), "cannot be read"),
        (("--list", "--fake-world", "1"), "--fake-world"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err

"""Claims about replaying measured rows: what is read, refused, predicted, counted and printed.

Not here: how good the predictions are (docs/accuracy.md says so).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from planner import command
from planner.calibration import calibration
from planner.cli import planner
from planner.errors import PlannerError
from planner.memory import memory_breakdown
from planner.truth.cases import CannotPredict, case_of, row_case
from planner.truth.predict import replay
from planner.truth.rows import (
    Collective,
    Hardware,
    Measured,
    Row,
    RowLayout,
    RowLora,
    RowModel,
    Source,
    append_rows,
    encode_row,
    read_rows,
)
from planner.truth.score import summary
from planner.truth.statistics import errors_of, factors_of, spearman
from planner.units import GIB

TRUTH = Path(__file__).resolve().parents[1] / "truth"

ROW = {
    "id": "mine-1",
    "source": {"repo_or_paper": "mine"},
    "runtime": "accelerate-fsdp2",
    "method": "full",
    "model": {"name": "llama-2-7b"},
    "hardware": {"gpu": "h100-sxm-80gb", "gpus": 8, "gpus_per_node": 8},
    "layout": {
        "dp": 8, "tp": 1, "pp": 1, "zero_or_fsdp": "zero3", "micro_batch": 1, "grad_accum": 1, "seq": 2048,
        "recompute": "full", "precision": "bf16", "optimizer": "adamw",
    },
    "measured": {"peak_memory_gib": 20.0, "memory_kind": "allocated", "step_time_s": 1.0},
}  # fmt: skip


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def changed(row: dict, **changes: object) -> dict:
    """The row with dotted fields replaced (layout__tp=2)."""
    found = json.loads(json.dumps(row))
    for path, value in changes.items():
        *tables, field = path.split("__")
        table = found
        for name in tables:
            table = table.setdefault(name, {})
        table[field] = value
    return found


def one(**changes: object) -> Row:
    return msgspec.convert(changed(ROW, **changes), Row)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.exit_code(planner, ["replay", *arguments], name="planner")
    told = capsys.readouterr()
    return code, told.out, told.err


# -- reading and writing -------------------------------------------------------------------------------------------


def test_a_row_that_is_written_is_the_row_that_is_read(tmp_path):
    rows = read_rows(sorted(TRUTH.glob("*.jsonl")))[::97]
    path = tmp_path / "again.jsonl"
    append_rows(path, rows[:3])
    append_rows(path, rows[3:])

    assert read_rows([path]) == [msgspec.structs.replace(row, file="again") for row in rows]
    assert b"null" not in encode_row(rows[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":2: is not a line of JSON"),
        (json.dumps(changed(ROW, id="b", layout__tp="two")), ":2: layout.tp=two: expected `int | null`, got `str`"),
        (json.dumps(changed(ROW, id="b", layout__tp=0)), ":2: layout.tp=0: expected `int` >= 1"),
        (
            json.dumps(changed(ROW, id="b", layout__micro_batches=2)),
            ":2: layout.micro_batches: is not a field of a row",
        ),
        (
            json.dumps({key: value for key, value in ROW.items() if key != "measured"}),
            "missing required field `measured`",
        ),
        (json.dumps(ROW), ":2: id=mine-1: was given in"),
        ("[1]", ":2: expected `object`"),
        (json.dumps(ROW | {"id": "b", "layuot": {}}), ":2: layuot: is not a field of a row. Did you mean layout?"),
        (json.dumps(changed(ROW, id="b", measured__mfu=38)), ":2: measured.mfu=38: expected `float` <= 1.0"),
    ],
)
def test_a_line_that_breaks_the_format_is_a_row_with_its_reason(tmp_path, capsys, line, said):
    path = written(tmp_path / "rows.jsonl", ROW, line, changed(ROW, id="mine-3"))
    code, out, err = run(capsys, path, "--json")

    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("note: passed over: ") and said in err
    rows = json.loads(out)["rows"]
    assert [row["skipped"] is None for row in rows] == [True, False, True]
    assert said in rows[1]["skipped"] and rows[1]["id"] == "rows:2"
    with pytest.raises(PlannerError, match=re.escape(said)):
        read_rows([path])


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "b", "layout": {"seq": "many"}, "measured": {"mfu": Infinity}}',
        b'{"id": "b", "layout": {"seq": "many"}, "measured": {"mfu": 1e999}}',
        b'{"id": "b", "layout": {"seq": "many"}, "notes": "\xff\xfe"}',
        b'{"id": "b\xe2"',
        b"\x00\xff",
        b"[" * 10**5,
        json.dumps(changed(ROW, id="b", layout__seq=99999999999999999999)).encode(),
        json.dumps(changed(ROW, id="b", model__layers=2**30)).encode(),
        json.dumps(changed(ROW, id="b", layout__micro_batch=2**31)).encode(),
        json.dumps(changed(ROW, id="b", measured__step_time_s=float("inf"))).encode(),
    ],
)
def test_no_line_ends_a_replay_of_the_others(tmp_path, capsys, line):
    """B2 and B4: bad bytes, Infinity and 1e999 were internal errors, and a sequence of 10^20 tokens never ended."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n")
    code, out, err = run(capsys, str(path), "--json")

    assert (code, err.count("\n")) == (0, 1)
    assert "internal" not in err and len(err) - 2 * len(str(path)) < 300
    assert [row["skipped"] is None for row in json.loads(out)["rows"]] == [True, False]


def test_a_file_of_bad_lines_alone_is_one_line_of_error(tmp_path, capsys):
    code, out, err = run(capsys, written(tmp_path / "rows.jsonl", "{", "[1]"))

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert ":1: is not a line of JSON" in err


def test_measurements_are_never_written_over(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", ROW)
    code, _, err = run(capsys, path, "-o", str(tmp_path / "." / "rows.jsonl"), "--force")

    assert (code, read_rows([path])[0].id) == (2, "mine-1")
    assert "is one of the files that are replayed" in err


def test_a_row_that_cannot_be_written_is_one_line_of_error(tmp_path):
    with pytest.raises(PlannerError, match="cannot be written"):
        append_rows(tmp_path / "none" / "rows.jsonl", [one()])


def test_files_without_a_row_are_one_line_of_error(tmp_path, capsys):
    code, out, err = run(capsys, written(tmp_path / "rows.jsonl"))

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "hold no row" in err


def test_a_file_that_is_not_there_is_one_line_of_error(tmp_path, capsys):
    code, _, err = run(capsys, str(tmp_path / "none.jsonl"))

    assert code == 2
    assert "cannot be read" in err
    assert err.count("\n") == 1


def test_the_format_is_documented_field_by_field():
    told = (TRUTH / "README.md").read_text()
    parts = {"model": RowModel, "hardware": Hardware, "lora": RowLora, "layout": RowLayout, "measured": Measured}
    for name, part in (parts | {"source": Source, "collective": Collective}).items():
        (listed,) = re.findall(rf"`{name}\{{([^}}]*)\}}`", told)
        assert sorted(listed.split(", ")) == sorted(part.__struct_fields__), name
    assert [field for field in Row.__struct_fields__ if f"`{field}" not in told and field != "file"] == []


def test_the_rows_of_the_documentation_are_predicted_every_one(tmp_path, capsys):
    page = (TRUTH.parents[1] / "docs" / "adding-a-measurement.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    code, out, _ = run(capsys, written(tmp_path / "rows.jsonl", *example.splitlines()))

    assert code == 0
    assert out.startswith("3 of 3 rows predicted")


# -- what a row means ----------------------------------------------------------------------------------------------


def test_rows_of_one_device_are_predicted_as_one_device():
    engines = {}
    for row in read_rows(sorted(TRUTH.glob("*.jsonl"))):
        if row.method == "collective" or row.hardware.gpus != 1 or row.layout.zero_or_fsdp != "ddp":
            continue
        try:
            engines[row.id] = case_of(row).layout.engine
        except CannotPredict:
            continue

    assert set(engines.values()) == {"single"}
    own = "own-cpu-mini-llama-ddp-x1-b6-s512-fp32-limited-5a18bb"
    assert {"qwen_finetune_profile-019", "torchtune-013", own} <= set(engines)


def test_every_published_row_is_a_case_or_has_a_reason():
    reasons = set()
    cases = 0
    for row in read_rows(sorted(TRUTH.glob("*.jsonl"))):
        try:
            row_case(row)
            cases += 1
        except CannotPredict as error:
            assert str(error).strip()
            reasons.add(str(error))

    assert cases > 1500
    assert "micro-batch not stated" in reasons


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": "none"}, "runtime none is unknown here"),
        ({"runtime": None}, "runtime not stated"),
        ({"layout__seq": None}, "sequence length not stated"),
        ({"layout__micro_batch": None}, "micro-batch not stated"),
        ({"layout__tp": None, "layout__dp": 4}, "tensor or pipeline parallelism not stated"),
        ({"layout__tp": None, "layout__dp": None}, "tensor or pipeline parallelism not stated"),
        ({"runtime": "acelerate-fsdp2"}, "runtime acelerate-fsdp2 is unknown here: did you mean accelerate-fsdp2?"),
        ({"hardware__cluster": "dgx-h10"}, "cluster dgx-h10 is unknown here: did you mean dgx-h100?"),
        ({"hardware__gpus": 10**8, "layout__dp": 10**8}, "gpus=100000000: must be a whole number from 1 to 1000000"),
        ({"layout__switches": {"dp_shard": -1}}, "layout.switches: dp_shard is below zero"),
        ({"layout__dp": 4}, "dp x tp x pp x cp = 4 is not the 8 GPUs"),
        ({"layout__zero_or_fsdp": None}, "sharding not stated"),
        ({"layout__precision": "int3"}, "precision int3 is not modelled"),
        ({"model__name": "blorp"}, "model blorp is unknown here"),
        ({"hardware__gpus": None}, "number of GPUs not stated"),
        ({"method": "adapter"}, "method adapter is not modelled"),
        (
            {"layout__optimizer": "adamw8bit"},
            "refused by a rule: adamw-8bit does not work on FSDP2's sharded tensors (torchao's does, and is not "
            "modelled)",
        ),
        ({"layout__switches": {"no_such": 1}}, "layout.switches: Object contains unknown field `no_such`"),
    ],
)
def test_a_row_without_a_case_says_why(changes, reason):
    with pytest.raises(CannotPredict) as error:
        case_of(one(**changes))

    assert str(error.value) == reason


@pytest.mark.parametrize(
    ("field", "assumption"),
    [
        ("layout__recompute", "recompute not stated: none"),
        ("layout__optimizer", "optimizer not stated: adamw"),
        ("layout__precision", "precision not stated: bf16"),
        ("layout__grad_accum", "accumulation not stated: 1"),
    ],
)
def test_what_is_not_stated_is_an_assumption_of_the_row(field, assumption):
    assert row_case(one()).assumptions == ()
    assert row_case(one(**{field: None})).assumptions == (assumption,)


def test_as_many_replicas_as_gpus_say_that_nothing_else_is_split():
    assert row_case(one(layout__tp=None, layout__pp=None)) == row_case(one())


@pytest.mark.parametrize(("word", "name"), [("sgd", "sgd"), ("Lion", "lion"), ("adam", "adamw")])
def test_the_planners_own_optimizers_are_words_of_a_row(word, name):
    row = one(layout__optimizer=word, runtime="accelerate-ddp", layout__zero_or_fsdp="ddp")

    assert case_of(row).job.optimizer.name == name


def test_a_word_for_memory_that_nobody_knows_is_counted():
    assert row_case(one(measured__memory_kind="alocated")).assumptions == (
        "memory kind alocated: held against reserved",
    )


def test_a_row_may_name_presets_of_ones_own(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    text = (TRUTH.parents[1] / "presets" / "models" / "llama-2-7b.toml").read_text()
    (tmp_path / "models" / "my-7b.toml").write_text(text)
    rows = written(tmp_path / "rows.jsonl", changed(ROW, model__name="my-7b"))

    assert run(capsys, rows)[1].startswith("0 of 1 rows predicted")
    assert run(capsys, rows, "--presets", str(tmp_path))[1].startswith("1 of 1 rows predicted")
    assert run(capsys, rows, "--presets", str(tmp_path / "none"))[::2] == (
        2,
        f"error: presets={tmp_path / 'none'}: is not a folder. Name a folder laid out like presets/.\n",
    )


def test_a_row_with_a_mistake_leaves_the_others_predicted(tmp_path, capsys):
    rows = [ROW, changed(ROW, id="b", hardware__cluster="nowhere"), changed(ROW, id="c", layout__offload="tape")]
    code, out, _ = run(capsys, written(tmp_path / "rows.jsonl", *rows))

    assert code == 0
    assert out.startswith("1 of 3 rows predicted")
    assert "cluster nowhere is unknown here" in out


def test_a_model_of_no_known_name_has_the_blocks_of_its_family():
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 1000, "tied": True}
    model = case_of(one(model={"name": "mine", "family": "gpt2", **sizes})).model

    assert (model.name, model.family, model.positions, model.layers, model.head_dim) == (
        "mine",
        "gpt2",
        "learned",
        2,
        16,
    )


def test_switches_win_over_everything_else():
    layout = case_of(one(layout__switches={"reshard_after_forward": False, "dp_shard": 4, "dp_replicate": 2})).layout

    assert (layout.reshard_after_forward, layout.dp_shard, layout.dp_replicate) == (False, 4, 2)


def test_an_unknown_card_has_a_memory_prediction_and_nothing_else():
    (found,) = replay([one(hardware__gpu="some card")], calibration())

    assert found.predicted.allocated_gib
    assert (found.predicted.step_time_s, found.predicted.fits) == (None, None)


# -- prediction ----------------------------------------------------------------------------------------------------


def test_shared_walks_give_what_a_walk_of_its_own_gives():
    rows = read_rows([TRUTH / "ultrascale_playbook.jsonl", TRUTH / "llm_foundry.jsonl"])[::40]
    for found in replay(rows, calibration()):
        if found.case is not None:
            assert found.predicted.allocated_gib == pytest.approx(memory_breakdown(found.case).peak.total / GIB)


def test_the_peak_is_held_against_the_kind_that_was_measured():
    kinds = ("allocated", "reserved", "nvidia-smi")
    found = replay([one(id=kind, measured__memory_kind=kind) for kind in kinds], calibration())

    said = [(each.predicted.memory_kind, each.predicted.peak_memory_gib) for each in found]
    figures = found[0].predicted
    assert said == [
        ("allocated", figures.allocated_gib),
        ("reserved", figures.reserved_gib),
        ("device", figures.device_gib),
    ]
    assert figures.allocated_gib < figures.reserved_gib < figures.device_gib


def test_tokens_per_second_are_the_step_time_of_the_same_batch():
    (found,) = replay([one(measured__step_time_s=None, measured__tokens_per_s_per_gpu=1024.0)], calibration())

    assert found.measured_step_s == pytest.approx(8 * 2048 / (1024 * 8))


# -- statistics ----------------------------------------------------------------------------------------------------


def test_errors_and_factors_by_hand():
    errors = errors_of([-0.5, 0.1, 0.2, -0.1, 0.3])
    factors = factors_of([0.5, 1.0, 2.0, 4.0])

    assert (errors.n, errors.median, errors.p90, errors.bias) == (5, 0.2, 0.5, 0.1)
    assert (factors.median, factors.p90, factors.bias) == (2.0, 4.0, 1.5)
    assert factors.scaled_p90 == 3.0


def test_rank_correlation_by_hand():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 1, 3]) == pytest.approx(1)
    assert spearman([1, 2, 3], [5, 5, 5]) is None


def test_no_row_is_dropped_and_failures_are_counted():
    rows = [
        one(),
        one(id="b", measured={"oom": True}),
        one(id="c", measured={}, status="crashed_or_oom"),
        one(id="d", runtime="none"),
        one(id="e", measured={}),
    ]
    found = summary(replay(rows, calibration()))

    assert found.rows == {"": (5, 3)}
    assert [(each.text, each.rows) for each in found.skipped] == [
        ("runtime none is unknown here", 1),
        ("nothing was measured", 1),
    ]
    outcomes = {each.outcome: (each.fits, each.does_not_fit, each.not_predicted) for each in found.fit}
    assert outcomes == {"ran": (1, 0, 2), "failed": (1, 0, 0), "out of memory": (1, 0, 0)}


def test_regret_is_what_the_first_choice_costs_and_a_failed_one_has_none():
    def layouts(**of_first: object) -> list[Row]:
        """Equal work in six ways; the first is the fastest by prediction."""
        micros = (8, 4, 2, 1)
        rows = [
            one(id=f"{m}", layout__micro_batch=m, layout__grad_accum=8 // m, measured={"step_time_s": 2.0})
            for m in micros
        ]
        rows.append(one(id="again", layout__micro_batch=1, layout__grad_accum=8, measured={"step_time_s": 1.0}))
        return [msgspec.convert(msgspec.to_builtins(rows[0]) | of_first, Row), *rows[1:]]

    fastest = min(replay(layouts(), calibration()), key=lambda found: found.predicted.step_time_s)
    slow = summary(replay(layouts(), calibration())).ranks[0]
    crashed = summary(
        replay([*layouts(measured={"oom": True}), one(id="5", layout__grad_accum=8)], calibration())
    ).ranks[0]

    assert fastest.row.id == "8"
    assert (slow.layouts, slow.regret) == (5, pytest.approx(1.0))
    assert (crashed.layouts, crashed.chosen, crashed.regret) == (5, slow.chosen, None)


# -- the command ---------------------------------------------------------------------------------------------------


def test_json_is_the_contract_and_the_output_file_has_its_rows(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", ROW, changed(ROW, id="b", runtime="none"))
    code, out, _ = run(capsys, path, "--json", "-o", str(tmp_path / "out.jsonl"))
    answer = json.loads(out)

    assert code == 0
    assert answer["schema"] == "replay/1"
    assert [(row["id"], row["source"], row["skipped"]) for row in answer["rows"]] == [
        ("mine-1", "rows", None),
        ("b", "rows", "runtime none is unknown here"),
    ]
    assert {"peak_memory_gib", "reserved_gib", "tokens_per_s_per_gpu", "step_time_s", "fits"} <= set(
        answer["rows"][0]["predicted"]
    )
    assert answer["summary"]["memory"][0]["worst"][0]["terms_gib"]
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == answer["rows"]


def test_several_files_are_several_sources(tmp_path, capsys):
    first = written(tmp_path / "one.jsonl", ROW)
    second = written(tmp_path / "two.jsonl", changed(ROW, id="b"))
    code, out, _ = run(capsys, first, second)

    assert code == 0
    assert "2 of 2 rows predicted, calibration published." in out
    assert {"one", "two"} <= {line.split()[0] for line in out.splitlines() if line}


def test_another_calibration_gives_other_figures(tmp_path, capsys):
    folder = tmp_path / "calibrations"
    folder.mkdir()
    (folder / "mine.toml").write_text(
        '[[allocator]]\nruntime = "accelerate-fsdp2"\nfragmentation = 1.0\nsource = "test"\n'
    )
    path = written(tmp_path / "rows.jsonl", changed(ROW, measured__memory_kind="reserved"))
    figures = [
        json.loads(run(capsys, path, "--json", *more)[1])["rows"][0]["predicted"]
        for more in ((), ("--calibration", "mine", "--presets", str(tmp_path)))
    ]

    assert figures[1]["peak_memory_gib"] == pytest.approx(2 * figures[1]["allocated_gib"])
    assert figures[0]["peak_memory_gib"] < figures[1]["peak_memory_gib"]

"""Claims about replaying measured rows: what is read, refused, predicted, counted and printed.

Not here: how good the predictions are (docs/accuracy.md says so).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from planner.ask.options import question
from planner.ask.question import exact_layout
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.quantities import GIB
from planner.calibrate.asked import RowQuestion, asked, each
from planner.calibrate.predict import Replayed, replay
from planner.calibrate.rows import Measured, MeasuredCall, Row, Source, append_rows, encode_row, read_rows
from planner.calibrate.score import summary
from planner.calibrate.statistics import errors_of, factors_of, spearman
from planner.cli import planner
from planner.figures.memory import memory_breakdown
from planner.spec.calibration import calibration
from planner.spec.plan import Plan
from planner.studies.fit import fit

TRUTH = Path(__file__).resolve().parents[1] / "truth"
PAGE = TRUTH.parents[1] / "docs" / "adding-a-measurement.md"
NO_RUNTIME = "runtime=none: is not among the runtimes known here. Did you mean nanotron?"
PLANNED = json.loads((TRUTH / "own_cpu.jsonl").read_text().splitlines()[0])
EDITED = PLANNED["plan"] | {"made_by": "somebody"}

ROW = {
    "schema": "row/2",
    "id": "mine-1",
    "source": {"repo_or_paper": "mine"},
    "options": {
        "model": "llama-2-7b", "cluster": "h100-sxm-80gb", "gpus": 8, "gpus_per_node": 8, "runtime": "accelerate-fsdp2",
        "dp_shard": 8, "micro_batch_size": 1, "grad_accum": 1, "seq_len": 2048, "recompute": "full",
        "precision": "bf16", "optimizer": "adamw",
    },
    "measured": {"peak_memory_gib": 20.0, "memory_kind": "allocated", "step_time_s": 1.0},
}  # fmt: skip


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def changed(row: dict, **changes: object) -> dict:
    """The row with dotted fields replaced (options__tp=2)."""
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


def planned() -> Row:
    """The same as a row that carries its plan."""
    case = asked(one()).case
    plan = Plan(model=case.model, cluster=case.cluster, job=case.job, layout=case.layout, runtime=case.runtime)
    return msgspec.structs.replace(one(), id="plan", options=None, plan=plan)


def predicted(*rows: Row) -> list[Replayed]:
    return replay(map(asked, rows), calibration())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.exit_code(planner, ["replay", *arguments], name="planner")
    told = capsys.readouterr()
    return code, told.out, told.err


# -- reading and writing -------------------------------------------------------------------------------------------


def test_a_row_that_is_written_is_the_row_that_is_read(tmp_path):
    rows = [*read_rows([TRUTH / "own_cpu.jsonl"])[:4], one()]
    path = tmp_path / "again.jsonl"
    append_rows(path, rows[:3])
    append_rows(path, rows[3:])

    # A plan of before a field is written with it, and so with another hash.
    plans = [row.plan.sealed() if row.plan is not None else None for row in rows]
    written = [msgspec.structs.replace(row, plan=plan, file="again") for row, plan in zip(rows, plans, strict=True)]
    assert read_rows([path]) == written
    assert b"null" not in encode_row(rows[-1])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":2: is not a line of JSON"),
        ('{"schema": ' + "9" * 10**5 + "}", ":2"),
        (
            json.dumps(changed(ROW, id="b", measured__oom="yes")),
            ":2: measured.oom=yes: expected `bool | null`, got `str`",
        ),
        (json.dumps(changed(ROW, id="b", measured__peak=2)), ":2: measured.peak: is not a field of a row"),
        (json.dumps(ROW | {"id": "b", "measured": {"a [`[ b": 2}}), ":2: measured.a [: is not a field of a row"),
        (json.dumps(changed(ROW, id="b", schema="row/3")), ":2: schema=row/3: this version reads row/2"),
        (json.dumps(changed(ROW, id="b", plan={})), ":2: plan: must be given, or options, and not both"),
        (json.dumps(PLANNED | {"id": "b", "plan": EDITED}), ":2: plan: content_hash="),
        (json.dumps(PLANNED | {"id": "b", "plan": EDITED | {"schema": "plan/9"}}), ":2: plan: schema=plan/9"),
        (
            json.dumps({key: value for key, value in ROW.items() if key != "measured"}),
            "missing required field `measured`",
        ),
        (json.dumps(ROW), ":2: id=mine-1: was given in"),
        ("[1]", ":2: expected `object`"),
        (json.dumps(ROW | {"id": "b", "optons": {}}), ":2: optons: is not a field of a row. Did you mean options?"),
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
        b'{"id": "b", "versions": "many", "measured": {"mfu": Infinity}}',
        b'{"id": "b", "versions": "many", "measured": {"mfu": 1e999}}',
        b'{"id": "b", "versions": "many", "notes": "\xff\xfe"}',
        b'{"id": "b\xe2"',
        b"\x00\xff",
        b"[" * 10**5,
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
    told = PAGE.read_text()
    for name, part in (("measured", Measured), ("source", Source), ("collective", MeasuredCall)):
        (listed,) = re.findall(rf"`{name}\{{([^}}]*)\}}`", told)
        assert sorted(listed.split(", ")) == sorted(part.__struct_fields__), name
    assert [field for field in Row.__struct_fields__ if f"`{field}" not in told and field != "file"] == []


def test_the_rows_of_the_documentation_are_predicted_every_one(tmp_path, capsys):
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code, out, _ = run(capsys, written(tmp_path / "rows.jsonl", *example.splitlines()))

    assert code == 0
    assert out.startswith("4 of 4 rows predicted")


# -- the question of a row -----------------------------------------------------------------------------------------


def test_options_are_read_as_the_command_line_reads_them():
    options = {name: str(value) for name, value in ROW["options"].items()}
    asked_for = question(options)
    case = asked(one()).case

    assert (case.layout, case.job) == (exact_layout(asked_for), asked_for.job)
    assert (case.layout.dp_shard, case.layout.recompute, case.cluster.gpus) == (8, "full", 8)


def test_a_plan_is_predicted_as_the_options_it_was_made_of(tmp_path):
    append_rows(tmp_path / "rows.jsonl", [planned(), one(id="options")])
    plan, options = (found.predicted for found in predicted(*read_rows([tmp_path / "rows.jsonl"])))

    assert plan == options
    assert plan.allocated_gib > 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options__model": None}, "options.model: is missing. A measurement says what was run"),
        ({"options__runtime": None}, "options.runtime: is missing. A measurement says what was run"),
        ({"options__seq_len": None}, "options.seq_len: is missing. A measurement says what was run"),
        ({"options__micro_batch_size": None}, "options.micro_batch_size: is missing. A measurement says what was run"),
        ({"options__cluster": None}, "options.cluster: is missing. A measurement says what was run"),
        ({"options__strategy": "fsdp"}, "options.strategy=fsdp: chooses a layout. Give runtime and group sizes"),
        ({"options__sequence_length": 2}, "options.sequence_length=2: is not an option of planner estimate"),
        ({"options__precision": "int3"}, "options.precision=int3: must be fp32, bf16, fp16, pure-bf16"),
        ({"options__offload_params": "yes"}, "options.offload_params=yes: must be true or false"),
        ({"options__seq_len": "many"}, "seq_len=many"),
        ({"options__seq_len": 10**20}, "seq_len=100000000000000000000: "),
        ({"options__micro_batch_size": 2**31}, "micro_batch_size=2147483648: "),
        ({"options__gpus": 10**8}, "gpus=100000000: must be a whole number from 1 to 1000000"),
        ({"options__runtime": "acelerate-fsdp2"}, "runtime=acelerate-fsdp2: "),
        ({"options__model": "blorp"}, "model=blorp: "),
        ({"options__global_batch_size": 12}, "global_batch_size=12: "),
        ({"options__dp_shard": 4, "options__dp_replicate": 1}, "refused by a rule: "),
        (
            {"options__optimizer": "adamw-8bit"},
            "refused by a rule: adamw-8bit does not work on FSDP2's sharded tensors",
        ),
    ],
)
def test_options_that_leave_a_fact_open_or_break_a_rule_are_a_reason(changes, reason):
    found = asked(one(**changes))

    assert found.case is None
    assert found.refusal.startswith(reason)


def test_a_word_for_memory_that_nobody_knows_is_counted():
    assert asked(one(measured__memory_kind="alocated")).assumptions == ("memory kind alocated: compared with reserved",)


def test_a_row_may_name_presets_of_ones_own(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    text = (TRUTH.parents[1] / "presets" / "models" / "llama-2-7b.toml").read_text()
    (tmp_path / "models" / "my-7b.toml").write_text(text)
    rows = written(tmp_path / "rows.jsonl", changed(ROW, options__model="my-7b"))

    assert run(capsys, rows)[1].startswith("0 of 1 rows predicted")
    assert run(capsys, rows, "--presets", str(tmp_path))[1].startswith("1 of 1 rows predicted")
    assert run(capsys, rows, "--presets", str(tmp_path / "none"))[::2] == (
        2,
        f"error: presets={tmp_path / 'none'}: is not a folder. Name a folder laid out like presets/.\n",
    )


def test_a_row_with_a_mistake_leaves_the_others_predicted(tmp_path, capsys):
    rows = [ROW, changed(ROW, id="b", options__cluster="nowhere"), changed(ROW, id="c", options__tape=1)]
    code, out, _ = run(capsys, written(tmp_path / "rows.jsonl", *rows))

    assert code == 0
    assert out.startswith("1 of 3 rows predicted")
    assert "cluster=nowhere" in out


# -- rows of before ------------------------------------------------------------------------------------------------

OLD = {
    "id": "mine-1",
    "source": {"repo_or_paper": "mine"},
    "runtime": "accelerate-fsdp2",
    "method": "full",
    "model": {"name": "llama-2-7b"},
    "hardware": {"gpu": "h100-sxm-80gb", "gpus": 8, "gpus_per_node": 8},
    "layout": {
        "dp": 8, "tp": 1, "pp": 1, "zero_or_fsdp": "zero3", "micro_batch": 1, "grad_accum": 1, "seq": 2048,
        "recompute": "full", "precision": "bf16", "optimizer": "adamw", "optimizer_implementation": "fused",
    },
    "measured": {"peak_memory_gib": 20.0, "memory_kind": "allocated", "step_time_s": 1.0},
}  # fmt: skip


def old(tmp_path: Path, **changes: object) -> RowQuestion:
    (found,) = each([written(tmp_path / "old.jsonl", changed(OLD, **changes))])
    assert isinstance(found, RowQuestion)
    return found


def test_a_row_of_before_is_predicted_as_its_options(tmp_path):
    now = one(options__optimizer_implementation="fused")

    assert replay([old(tmp_path)], calibration())[0].predicted == predicted(now)[0].predicted


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"layout__switches": {"reshard_after_forward": False}}, {"reshard_after_forward": False, "dp_shard": 8}),
        ({"layout__switches": {"dp_replicate": 2, "dp_shard": 4}}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"runtime": "accelerate-ddp", "layout__zero_or_fsdp": "ddp"}, {"engine": "ddp", "dp_replicate": 8}),
        ({"runtime": "deepspeed-zero", "layout__zero_or_fsdp": "zero2"}, {"engine": "deepspeed", "zero_stage": 2}),
    ],
)
def test_the_words_of_a_row_of_before_are_its_layout(tmp_path, changes, layout):
    case = old(tmp_path, **changes).case

    assert {name: getattr(case.layout, name) for name in layout} == layout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": "nanotron-of-mine"}, "runtime=nanotron-of-mine: "),
        ({"runtime": None}, "options.runtime: is missing"),
        ({"method": "pretrain"}, "method=pretrain: must be full, lora or qlora. Measure it again"),
        ({"layout__seq": None}, "options.seq_len: is missing"),
        ({"layout__zero_or_fsdp": "zero1 (subgroup 4)"}, "layout.zero_or_fsdp=zero1 (subgroup 4): must be one of"),
        ({"layout__compile": True}, "layout.compile=True: is a word of published tables. Measure it again"),
        ({"layout__switches": {"no_such": 1}}, "options.no_such=1: is not an option of planner estimate"),
        ({"layout__dp": 4}, "layout.dp=4: is not the 8 data-parallel ranks of 8 GPUs. Measure it again"),
        ({"model": {"name": "llama-2-7b", "layers": 2}}, "model.layers=2: is not llama-2-7b's 32. Measure it again"),
        ({"model": {"layers": 2}}, "model.name: must be the name of a preset"),
        ({"layout__switches": [1]}, "layout.switches=[1]: must be an object"),
        ({"layout__zero_or_fsdp": [1]}, "layout.zero_or_fsdp=[1]: must be one of"),
        ({"layout__optimizer_implementation": "slow"}, "layout.optimizer_implementation=slow: must be one of fused"),
        ({"hardware__memory_gib": "lots"}, "hardware.memory_gib=lots: must be a number above 0"),
        ({"hardware__inter_link": "HDR IB"}, "hardware.inter_link=HDR IB: names a network in words. Measure it again"),
    ],
)
def test_a_row_of_before_in_words_that_are_not_ours_says_how_to_make_it_again(tmp_path, changes, reason):
    assert old(tmp_path, **changes).refusal.startswith(reason)


# -- prediction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "field", "option"),
    [("micro-batch", "largest_micro_batch", "micro_batch_size"), ("seq-len", "largest_seq_len", "seq_len")],
)
def test_the_largest_is_what_fit_finds_with_all_of_the_card_whatever_the_row_says_of_it(quantity, field, option):
    """Llama 2 7B on 8 cards, recomputed: beyond its own 4,096 tokens, as its positions allow."""
    with_own = {option: 5120 if option == "seq_len" else 7}
    given = {name: str(value) for name, value in (ROW["options"] | {"seq_len": 5120}).items()}
    if quantity == "micro-batch":
        del given["micro_batch_size"]
    found = fit(question(given | {"headroom": "0%"}), lambda gpus: question(given), [quantity])

    measured = {field: 1000}
    (named,) = predicted(one(options__seq_len=5120, measured=measured))
    (other,) = predicted(
        one(**{"options__seq_len": 5120} | {f"options__{option}": with_own[option]}, measured=measured)
    )
    (without,) = predicted(one(**{"options__seq_len": 5120} | {f"options__{option}": None}, measured=measured))

    assert getattr(named.predicted, field) == found.found[0].value > 1
    assert [getattr(row.predicted, field) for row in (other, without)] == [found.found[0].value] * 2
    (score,) = summary([named]).largest
    assert (score.what, score.factors.bias) == (field.removeprefix("largest_"), found.found[0].value / 1000)


def test_the_largest_is_half_of_the_smallest_where_not_even_that_fits():
    (found,) = predicted(one(options__model="llama-2-70b", options__seq_len=65536, measured={"largest_micro_batch": 1}))

    assert found.predicted.largest_micro_batch == 0.5


def test_figures_of_one_batch_need_the_batch_beside_the_largest():
    refused = asked(one(options__micro_batch_size=None, measured__largest_micro_batch=4))

    assert refused.refusal == "options.micro_batch_size: is missing. A measurement says what was run"


def test_the_peak_is_held_against_the_kind_that_was_measured():
    kinds = ("allocated", "reserved", "nvidia-smi")
    found = predicted(*(one(id=kind, measured__memory_kind=kind) for kind in kinds))

    said = [(each.predicted.memory_kind, each.predicted.peak_memory_gib) for each in found]
    figures = found[0].predicted
    assert said == [
        ("allocated", figures.allocated_gib),
        ("reserved", figures.reserved_gib),
        ("device", figures.device_gib),
    ]
    assert figures.allocated_gib < figures.reserved_gib < figures.device_gib


def test_tokens_per_second_are_the_step_time_of_the_same_batch():
    (found,) = predicted(one(measured__step_time_s=None, measured__tokens_per_s_per_gpu=1024.0))

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
        one(id="d", options__runtime="none"),
        one(id="e", measured={}),
    ]
    found = summary(predicted(*rows))

    assert found.rows == {"": (5, 3)}
    assert [(each.text, each.rows) for each in found.skipped] == [
        (NO_RUNTIME, 1),
        ("nothing was measured", 1),
    ]
    outcomes = {each.outcome: (each.fits, each.does_not_fit, each.not_predicted) for each in found.fit}
    assert outcomes == {"ran": (1, 0, 2), "failed": (1, 0, 0), "out of memory": (1, 0, 0)}


def test_regret_is_what_the_first_choice_costs_and_a_failed_one_has_none():
    def layouts(**of_first: object) -> list[Row]:
        """Equal work in six ways; the first is the fastest by prediction."""
        micros = (8, 4, 2, 1)
        rows = [
            one(id=f"{m}", options__micro_batch_size=m, options__grad_accum=8 // m, measured={"step_time_s": 2.0})
            for m in micros
        ]
        rows.append(one(id="again", options__grad_accum=8, measured={"step_time_s": 1.0}))
        return [msgspec.convert(msgspec.to_builtins(rows[0]) | of_first, Row), *rows[1:]]

    fastest = min(predicted(*layouts()), key=lambda found: found.predicted.step_time_s)
    slow = summary(predicted(*layouts())).ranks[0]
    crashed = summary(predicted(*layouts(measured={"oom": True}), one(id="5", options__grad_accum=8))).ranks[0]

    assert fastest.row.id == "8"
    assert (slow.layouts, slow.regret) == (5, pytest.approx(1.0))
    assert (crashed.layouts, crashed.chosen, crashed.regret) == (5, slow.chosen, None)


# -- the command ---------------------------------------------------------------------------------------------------


def test_json_is_the_contract_and_the_output_file_has_its_rows(tmp_path, capsys):
    path = written(tmp_path / "rows.jsonl", ROW, changed(ROW, id="b", options__runtime="none"))
    code, out, _ = run(capsys, path, "--json", "-o", str(tmp_path / "out.jsonl"))
    answer = json.loads(out)

    assert code == 0
    assert answer["schema"] == "replay/1"
    assert [(row["id"], row["source"], row["skipped"]) for row in answer["rows"]] == [
        ("mine-1", "rows", None),
        ("b", "rows", NO_RUNTIME),
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
        '[[allocator]]\nruntime = "accelerate-fsdp2"\nfragmentation = 1.0\nworkspace_bytes = 0.0\nchurn = 0.0\n'
        'source = "test"\n'
    )
    path = written(tmp_path / "rows.jsonl", changed(ROW, measured__memory_kind="reserved"))
    figures = [
        json.loads(run(capsys, path, "--json", *more)[1])["rows"][0]["predicted"]
        for more in ((), ("--calibration", "mine", "--presets", str(tmp_path)))
    ]

    assert figures[1]["peak_memory_gib"] == pytest.approx(2 * figures[1]["allocated_gib"])
    assert figures[0]["peak_memory_gib"] < figures[1]["peak_memory_gib"]


# -- who loads the model -------------------------------------------------------------------------------------------

LOADED_LARGEST = [
    {"runtime": "deepspeed-zero", "zero_stage": 2, "offload_optimizer": True},
    {"runtime": "deepspeed-zero", "zero_stage": 1, "offload_optimizer": True},
    {"runtime": "accelerate-ddp", "dp_shard": 1, "dp_replicate": 8, "method": "lora"},
    {"runtime": "accelerate-fsdp2", "offload_optimizer": True, "offload_params": True},
    {"runtime": "torchtune-fsdp2"},
    {"runtime": "pytorch-fsdp1", "method": "lora"},
]
"""Layouts of which loading is much or most of the peak; the last two by others' software alone."""


@pytest.mark.parametrize("options", LOADED_LARGEST, ids=lambda options: f"{options['runtime']}-{len(options)}")
@pytest.mark.parametrize("source", ["others", "meshwright"])
def test_what_this_trainer_loads_is_in_the_peak_of_its_own_rows_alone(options: dict[str, object], source: str):
    row = one(**{f"options__{name}": value for name, value in options.items()}, source__repo_or_paper=source)
    (found,) = predicted(row)
    phases = {phase.phase: phase.total for phase in memory_breakdown(asked(row).case).phases}

    planned_alone = options["runtime"] in ("torchtune-fsdp2", "pytorch-fsdp1")
    counted = source == "meshwright" or options["runtime"] == "pytorch-fsdp1"  # whose own wrapping is predicted
    left = {name: size for name, size in phases.items() if counted or name != "load"}
    assert found.skipped is None
    assert found.predicted.allocated_gib * GIB == pytest.approx(max(left.values()))
    assert ("load" in phases) == (not planned_alone or options["runtime"] == "pytorch-fsdp1")


@pytest.mark.parametrize(("phases", "loaded"), [({"load": 5.0, "forward": 1.0}, True), ({"forward": 1.0}, False)])
def test_a_row_of_this_trainer_says_by_its_phases_whether_loading_was_measured(phases: dict, loaded: bool):
    options = {f"options__{name}": value for name, value in LOADED_LARGEST[0].items()}
    row = one(**options, source__repo_or_paper="meshwright", measured__phases_gib=phases)

    (found,) = predicted(row)

    assert (found.predicted.allocated_gib > 20) == loaded

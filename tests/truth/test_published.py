"""Claims about rows in the words of published tables: what they mean, what is assumed, and why some are not question.

Not here: rows of our own, or the replay of either (planner/test_replay.py).
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from test_replay import changed

from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.quantities import GIB
from planner.calibrate.asked import CannotPredict, each
from planner.calibrate.predict import replay
from planner.calibrate.rows import Measured, MeasuredCall, Source, each_row
from planner.figures.memory import memory_breakdown
from planner.spec.calibration import calibration
from tests.truth.published import reader, sources
from tests.truth.published.__main__ import published as commands
from tests.truth.published.cases import case_of, memory_stage, row_case
from tests.truth.published.conditions import NONE
from tests.truth.published.rows import Hardware, RowLayout, RowLora, RowModel, WordRow, word_row

TRUTH = Path(__file__).resolve().parent

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


def one(**changes: object) -> WordRow:
    return msgspec.convert(changed(ROW, **changes), WordRow)


def published_rows() -> list[WordRow]:
    return [row for row in each_row(sorted(TRUTH.glob("*.jsonl")), word_row) if isinstance(row, WordRow)]


# -- nothing is looked up ------------------------------------------------------------------------------------------


def noisy(row: WordRow, chance: random.Random) -> WordRow:
    """The row under another name, with other figures for all that was measured, and nothing said of how it compares."""
    figures = {
        name: value * chance.uniform(0.1, 10)
        for name in Measured.__struct_fields__
        if isinstance(value := getattr(row.measured, name), float | int) and not isinstance(value, bool)
    }
    measured = msgspec.structs.replace(row.measured, **figures, oom=chance.random() < 0.5)
    return msgspec.structs.replace(
        row, id=f"noise-{chance.random()}", measured=measured, best_reported=not row.best_reported, boundary="noise",
        per_rank_max_allocated_mb=None, derived_label=None,
    )  # fmt: skip


def test_names_and_figures_of_rows_replaced_by_noise_change_no_question():
    chance = random.Random(13)
    for row in published_rows():
        asked, other = reader.question(row), reader.question(noisy(row, chance))

        assert (asked.case, asked.cluster, asked.refusal) == (other.case, other.cluster, other.refusal), row.id
        assert (asked.memory_kind, asked.assumptions) == (other.memory_kind, other.assumptions), row.id


def test_a_source_s_facts_are_a_dozen_at_most_and_no_figure_of_a_row():
    measured = {row.measured.peak_memory_gib for row in published_rows()} - {None}
    for quirk in sources.QUIRKS.values():
        assert sum(getattr(quirk, name) != getattr(sources.NO_QUIRK, name) for name in quirk.__struct_fields__) <= 12
        numbers = {float(number) for number in re.findall(r"\d+\.\d+", repr(quirk))}
        assert not measured & {number for number in numbers if number > 2}  # smaller ones are shares and versions


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout__tp": "two"}, "layout.tp=two: expected `int | null`, got `str`"),
        ({"layout__tp": 0}, "layout.tp=0: expected `int` >= 1"),
        ({"layout__micro_batches": 2}, "layout.micro_batches: is not a field of a row"),
        ({"model__layers": 2**30}, "model.layers"),
        ({"layout__seq": 99999999999999999999}, "layout.seq"),
    ],
)
def test_a_word_that_breaks_the_format_is_refused_with_its_place(changes, said):
    with pytest.raises(PlannerError, match=re.escape(said)):
        word_row(json.dumps(changed(ROW, **changes)).encode(), "rows.jsonl:1")


def test_the_format_is_documented_field_by_field():
    told = (TRUTH / "README.md").read_text()
    parts = {"model": RowModel, "hardware": Hardware, "lora": RowLora, "layout": RowLayout, "measured": Measured}
    for name, part in (parts | {"source": Source, "collective": MeasuredCall}).items():
        (listed,) = re.findall(rf"`{name}\{{([^}}]*)\}}`", told)
        assert sorted(listed.split(", ")) == sorted(part.__struct_fields__), name
    fields = set(WordRow.__struct_fields__) - {"file", "schema", "plan", "options"}
    assert [field for field in fields if f"`{field}" not in told] == []


# -- what a row means ----------------------------------------------------------------------------------------------


def test_rows_of_one_device_are_predicted_as_one_device():
    """But for Qwen's GPTQ bases and whole models, whose scripts start DeepSpeed on one device too."""
    engines = {}
    for row in published_rows():
        if (
            "gptq" in str(row.layout.quant)
            or (row.source.repo_or_paper == "QwenLM/Qwen" and row.method == "full")
            or row.method == "collective"
            or row.hardware.gpus != 1
            or row.layout.zero_or_fsdp != "ddp"
        ):
            continue
        try:
            engines[row.id] = case_of(row).layout.engine
        except CannotPredict:
            continue

    assert set(engines.values()) == {"single"}
    assert {"qwen_finetune_profile-001", "torchtune-013"} <= set(engines)


def test_every_published_row_is_a_case_or_has_a_reason():
    reasons = set()
    cases = 0
    for row in published_rows():
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
        ({"method": "adapter"}, "which LLaMA-Adapter is not stated, nor how much it trains"),
        (
            {"layout__optimizer": "adamw8bit"},
            "refused by a rule: adamw-8bit does not work on FSDP2's sharded tensors",
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


def test_blooms_sections_say_how_gradients_were_summed_and_what_counts_as_a_layer():
    rows = {row.id: row for row in published_rows() if row.id.startswith("bigscience_bloom")}
    before, after = (case_of(rows[f"bigscience_bloom-{place}"]) for place in ("065", "139"))

    assert (before.layout.engine, before.job.precision, before.layout.stage_layers) == (
        "deepspeed-pipeline",
        "fp16",
        None,
    )
    # 70 layers and two ends on 12 stages
    assert (after.job.precision, after.layout.stage_layers) == ("bf16", (5, *[6] * 10, 5))


def test_bridge_s_recipes_overlap_tensor_collectives_of_llamas_but_in_nvfp4_and_of_qwen3_in_25_09_alone():
    bridge = [path for path in TRUTH.glob("*.jsonl") if path.name in ("megatron_bridge.jsonl", "simumax_b200.jsonl")]
    split = [found for found in reader.each(bridge) if found.case is not None and found.case.layout.tp > 1]

    def says(row: WordRow) -> bool:
        name, title = str(row.model.name).lower(), row.source.path_or_table or ""
        llama = name.startswith("llama") and row.layout.precision != "NVFP4" and "Container" in title
        return llama or ("25.09" in title and name.startswith("qwen3"))

    words = {row.id: row for row in published_rows()}
    on = {found.row.id for found in split if found.case.layout.tp_comm_overlap}

    assert on == {found.row.id for found in split if says(words[found.row.id])}
    assert 20 < len(on) < len(split) - 20


def test_conditions_are_those_of_simumax_b200_and_of_recipes_that_exchange_beside_the_other_pass():
    found = {one.row.id: one for one in reader.each([TRUTH / "megatron_bridge.jsonl", TRUTH / "simumax_b200.jsonl"])}
    words = {row.id: row for row in published_rows()}
    beside = {name for name, one in found.items() if one.conditions.exchanges_beside}
    slower = {name for name, one in found.items() if one.conditions.product_times != 1.0}
    alone = {name for name, one in found.items() if one.conditions.sent_alone}
    ours = {name for name, one in found.items() if name.startswith("simumax") and one.case is not None}

    assert slower == alone == ours
    said = {(words[name].hardware.gpu[:4], str(words[name].model.name)) for name in beside}
    assert said == {
        ("H100", "DeepSeekV3 (dropless)"),
        ("H100", "qwen3-235b-a22b"),
        ("H100", "qwen3-30b-a3b"),
        ("B200", "qwen3-235b-a22b"),
        ("B300", "qwen3-235b-a22b"),
        ("GB20", "gpt-oss-120b"),
    }
    # the recipes of 26.02.01 and later run Qwen3 30B on H100 without
    titles = {words[name].source.path_or_table for name in beside if words[name].model.name == "qwen3-30b-a3b"}
    assert len(titles) == 2 and all("25.11" in one or "26.02 " in one for one in titles)
    assert all(found[name].case.model.moe for name in beside)


def test_bridge_s_rows_have_the_dispatcher_of_their_recipe():
    found = {one.row.id: one for one in reader.each([TRUTH / "megatron_bridge.jsonl"]) if one.case is not None}
    words = {row.id: row for row in published_rows()}

    def of(container: str, model: str, gpu: str) -> set[str]:
        """moe_flex_dispatcher_backend of rows of a container, a model and a GPU."""
        said = [(words[name], one.case.layout.token_dispatcher) for name, one in found.items()]
        return {
            sender
            for row, sender in said
            if f" {container} NeMo" in str(row.source.path_or_table)
            and model in str(row.model.name).lower()
            and str(row.hardware.gpu).startswith(f"{gpu}-")
        }

    # v0.4.2, v0.4.0, v0.3.1, v0.3.0, v0.2.0 and v0.1.0rc4, each recipe as it was run through its own code
    assert of("26.04.01", "qwen3-235b", "B300") == {"hybridep"}
    assert of("26.04", "qwen3-235b", "B300") == of("26.04.01", "qwen3-235b", "B200") == {"alltoall"}
    assert of("26.04", "gpt-oss", "B200") == of("26.04.01", "gpt-oss", "B300") == {"hybridep"}
    assert of("26.04.01", "gpt-oss", "B200") == of("26.04", "gpt-oss", "GB300") == {"alltoall"}
    assert of("26.02.01", "qwen3-30b", "B200") == {"hybridep"}
    assert of("26.02", "qwen3-30b", "B200") == of("25.11", "qwen3-30b", "B200") == {"alltoall"}
    assert of("26.02", "qwen3-30b", "H100") == of("25.09", "deepseek", "H100") == {"deepep"}
    assert of("26.02", "qwen3-30b", "B300") == of("25.11", "deepseek", "GB200") == {"hybridep"}
    assert of("25.11", "deepseek", "B200") == of("25.09", "deepseek", "GB200") == {"alltoall"}
    assert {one.case.layout.token_dispatcher for one in found.values() if one.case.model.moe is None} == {"alltoall"}


def test_bridge_s_table_of_25_11_has_columns_that_its_recipes_have_not():
    rows = {row.id: row for row in published_rows() if row.id.startswith("megatron_bridge")}
    gpt_oss, qwen = rows["megatron_bridge-255"], rows["megatron_bridge-256"]

    stated = gpt_oss.layout
    assert stated.dp * stated.micro_batch * stated.grad_accum == 128 != stated.global_batch
    layout = case_of(gpt_oss).layout
    assert (layout.micro_batch_size, layout.grad_accum, layout.global_batch_size) == (1, 32, 512)
    layout = case_of(qwen).layout
    assert (layout.micro_batch_size, layout.grad_accum, layout.virtual_stages) == (1, 64, 12)
    assert layout.global_batch_size == qwen.layout.global_batch
    assert any("as its recipe" in note for note in row_case(qwen).assumptions)


def test_layers_of_runs_that_drop_tokens_were_graphs_where_the_recipe_says_so():
    found = {one.row.id: one for one in reader.each([TRUTH / "megatron_bridge.jsonl"])}
    words = {row.id: row for row in published_rows()}
    graphed = {name for name, one in found.items() if one.conditions.layers_graphed}

    assert {(words[name].hardware.gpu[:4], str(words[name].model.name)) for name in graphed} == {
        ("B200", "Qwen3_30B_a3B (tokendrop)"),
        ("GB20", "Qwen3_30B_a3B (tokendrop)"),
        ("GB20", "Qwen3_235B_a22B (tokendrop)"),
    }


def test_galvatrons_rows_are_of_4096_tokens_and_of_the_stage_whose_rank_is_named():
    rows = {row.id: row for row in published_rows() if row.id.startswith("galvatron")}
    first, last = (rows[f"galvatron_profile-{place}"] for place in ("033", "034"))

    assert case_of(first).job.seq_len == 4096
    assert [memory_stage(row) for row in (first, last)] == ["first", "fullest"]
    whole, split = (case_of(rows[f"galvatron_profile-{place}"]).runtime.parts for place in ("035", "037"))
    assert (whole.vocab_parallel, split.vocab_parallel) == (False, True)


def test_as_many_replicas_as_gpus_say_that_nothing_else_is_split():
    assert row_case(one(layout__tp=None, layout__pp=None)) == row_case(one())


@pytest.mark.parametrize(("word", "name"), [("sgd", "sgd"), ("Lion", "lion"), ("adam", "adamw")])
def test_the_planners_own_optimizers_are_words_of_a_row(word, name):
    row = one(layout__optimizer=word, runtime="accelerate-ddp", layout__zero_or_fsdp="ddp")

    assert case_of(row).job.optimizer.name == name


def test_a_word_for_memory_that_nobody_knows_is_counted():
    assert row_case(one(measured__memory_kind="alocated")).assumptions == (
        "memory kind alocated: compared with reserved",
    )


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
    (found,) = replay([reader.question(one(hardware__gpu="some card"))], calibration())

    assert found.predicted.allocated_gib
    assert (found.predicted.step_time_s, found.predicted.fits) == (None, None)


# -- prediction ----------------------------------------------------------------------------------------------------


def test_shared_walks_give_what_a_walk_of_its_own_gives():
    rows = list(reader.each([TRUTH / "ultrascale_playbook.jsonl", TRUTH / "llm_foundry.jsonl"]))[::40]
    for found in replay(rows, calibration()):
        if found.case is not None:
            assert found.predicted.allocated_gib == pytest.approx(memory_breakdown(found.case).peak.total / GIB)


def test_a_published_row_with_its_plan_by_value_is_predicted_alike_by_the_planner_alone(tmp_path):
    for name in ("simumax_b200", "qwen_finetune_profile", "torchtitan", "nccl_bandwidth"):
        # A row of one's own has no conditions of a source's runs.
        published = [msgspec.structs.replace(one, conditions=NONE) for one in reader.each([TRUTH / f"{name}.jsonl"])]
        path = tmp_path / f"{name}.jsonl"
        assert command.exit_code(commands, ["plans", str(TRUTH / path.name), "-o", str(path)]) == 0

        alone = {one.row.id: one.predicted for one in replay(each([path]), calibration())}

        assert len(alone) >= 5
        for found in replay(published, calibration()):
            if found.skipped is None:
                assert alone[found.row.id] == found.predicted


@pytest.mark.parametrize("folder", ["truth/own_cpu.jsonl", "executor/old/rows.jsonl"])
def test_our_own_rows_are_predicted_as_they_were_read_from_words(folder):
    """own_cpu.jsonl was converted once from the rows of before, which are kept in executor/old."""
    words = replay(reader.each([TRUTH.parent / "executor" / "old" / "rows.jsonl"]), calibration())
    today = replay(each([TRUTH.parent / folder]), calibration())

    assert [one.row.id for one in today] == [one.row.id for one in words]
    assert [one.predicted for one in today] == [one.predicted for one in words]
    assert [one.skipped for one in today] == [None] * 11


def test_a_wall_time_over_stated_samples_is_a_step_time() -> None:
    """1024 samples in batches of 8 x 4 are 32 steps."""
    changes = {"source__repo_or_paper": "AnswerDotAI/fsdp_qlora", "layout__micro_batch": 4, "layout__grad_accum": None}
    wall = {"measured__step_time_s": None, "measured__wall_time_s": 640.0}

    assert reader.question(one(**changes, **wall)).row.measured.step_time_s == 640 / 32
    assert reader.question(one(**changes, measured__wall_time_s=640.0)).row.measured.step_time_s == 1.0  # as measured
    assert reader.question(one(layout__micro_batch=4, **wall)).row.measured.step_time_s is None  # of how many, unsaid


def test_a_machine_of_unstated_lanes_tells_no_time_of_sharded_weights() -> None:
    found = {row.id: reader.question(row) for row in published_rows() if "280W" in (row.hardware.gpu or "")}
    assert len(found) == 12
    for one in found.values():
        assert one.case is not None and one.row.measured.peak_memory_gib is not None
        crosses = one.case.layout.dp_shard > 1
        assert (one.row.measured.step_time_s is None) is crosses
        assert any("lanes" in text for text in one.assumptions) is crosses


def test_the_largest_that_fits_is_asked_whatever_value_ran() -> None:
    rows = [row for row in published_rows() if row.boundary]
    asked = [reader.question(row) for row in rows]
    others = [reader.question(msgspec.structs.replace(row, layout=other_batch(row))) for row in rows]

    assert [one.row.measured.largest_micro_batch for one in asked] == [row.layout.micro_batch for row in rows]
    found, again = (
        [one.predicted.largest_micro_batch for one in replay(some, calibration())] for some in (asked, others)
    )
    assert found == again
    assert len(found) == 10 and None not in found


def other_batch(row: WordRow) -> RowLayout:
    return msgspec.structs.replace(row.layout, micro_batch=5, global_batch=5)


@pytest.mark.parametrize(
    ("boundary", "largest"),
    [("max_seq_len that fits", (None, 2048)), ("Largest micro-batch", (1, None)), ("fastest", (None, None))],
)
def test_a_boundary_names_its_quantity_in_words(boundary: str, largest: tuple[int | None, int | None]) -> None:
    measured = reader.question(one(boundary=boundary)).row.measured

    assert (measured.largest_micro_batch, measured.largest_seq_len) == largest


def test_no_shard_of_fsdp_qlora_is_replicas_of_its_own_engine() -> None:
    layout = case_of(one(source__repo_or_paper="AnswerDotAI/fsdp_qlora", layout__zero_or_fsdp="ddp")).layout

    assert (layout.engine, layout.dp_replicate, layout.dp_shard) == ("fsdp1", 8, 1)


# -- hosts that were ahead of their devices ------------------------------------------------------------------------

SWEEP = "huggingface nanotron ultrascale-playbook (copy in vinjn/nanotron-ultrascale-playbook)"


def swept(gpus: int = 64, **sizes: int) -> float | None:
    """Forwards that the host was ahead in a run of the sweep, of a 1B model unless `layers` say more."""
    model = {"name": "nanotron-llama-1B", "params_b": 1.3, "layers": sizes.pop("layers", 16), "hidden": 2048,
             "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131072, "tied": True}  # fmt: skip
    split = sizes.get("tp", 1) * sizes.get("pp", 1)
    row = one(
        source__repo_or_paper=SWEEP, runtime="nanotron", method="pretrain", model=model, hardware__gpus=gpus,
        layout__zero_or_fsdp="zero1", layout__dp=gpus // split, layout__grad_accum=32, layout__recompute="none",
        layout__sequence_parallel=sizes.get("tp", 1) > 1, **{f"layout__{name}": size for name, size in sizes.items()},
    )  # fmt: skip
    found = reader.question(row)
    assert found.refusal is None, found.refusal
    return found.row.measured.forwards_ahead


def test_a_slow_host_is_two_forwards_less_ahead_than_a_pipeline_has_stages_and_a_fast_one_as_many() -> None:
    slow, fast = (swept(tp=4, pp=4, micro_batch=size) for size in (1, 64))

    assert slow == 2 and fast == 4
    assert swept(tp=8, pp=2) == 0


def test_a_host_that_waits_for_sends_or_for_many_ranks_is_not_ahead() -> None:
    assert swept(tp=32, pp=4, gpus=128) == 0
    assert swept(tp=4, pp=4, micro_batch=64, gpus=512) == swept(tp=8, gpus=512) == 0


def test_without_a_pipeline_a_host_is_as_far_ahead_as_its_driver_lets_it() -> None:
    assert swept(tp=8, layers=16) == pytest.approx(1 + (1024 / (34 * 16 + 20) - 1) / 2)
    assert one().measured.forwards_ahead is None and reader.question(one()).row.measured.forwards_ahead is None


def test_what_is_pending_counts_in_reserved_memory_as_far_as_the_device_has_room_and_never_in_what_fits() -> None:
    runs = [row for row in published_rows() if row.source.repo_or_paper == SWEEP and row.layout.tp == 16]
    run = next(row for row in runs if row.layout.pp == 1 and row.layout.micro_batch == 16)
    asked = reader.question(run)
    known = calibration()

    def replayed(forwards: float | None) -> tuple[float | None, float | None]:
        measured = msgspec.structs.replace(asked.row.measured, forwards_ahead=forwards)
        (found,) = replay(
            [msgspec.structs.replace(asked, row=msgspec.structs.replace(asked.row, measured=measured))], known
        )
        return found.predicted.peak_memory_gib, found.predicted.fits_probability

    (none, sure), (ahead, as_sure), (far, _) = (replayed(forwards) for forwards in (None, 1.0, 1000.0))
    assert none is not None and ahead is not None and far is not None
    layers, hidden = asked.case.model.layers, asked.case.model.hidden  # type: ignore[union-attr]
    assert ahead - none == pytest.approx(4 * 16 * 4096 * hidden * layers / GIB)
    assert sure == as_sure and ahead < far < 80

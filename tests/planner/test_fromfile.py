"""People's own configurations: what each file is understood to mean, that no key is lost, and that the file and the
command line ask one question.

Regenerate the golden accounts with `python tests/planner/test_fromfile.py` after a change that is meant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.backends.accelerate import AccelerateBackend
from executor.backends.deepspeed import DeepSpeedBackend
from planner.ask import fromfile, options
from planner.ask.fromfile import files, hub, merge, torchrun
from planner.ask.fromfile.classes import classes
from planner.ask.fromfile.functions import FUSED_ADAPTERS
from planner.ask.fromfile.sheet import Sheet, Understood
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide import planning, strategies
from planner.engines.common import allgather_bucket_elements, reduce_bucket_elements
from planner.inventory import parameters
from planner.spec import Layout
from planner.spec.options import OPTIONS

CONFIGS = Path(__file__).parent / "configs"
GOLDEN = CONFIGS / "golden"
FILES = sorted(path for path in CONFIGS.rglob("*") if path.suffix in files.SUFFIXES and path.parent.name != "third")
NAMES = [str(path.relative_to(CONFIGS)) for path in FILES]


def account(found: Understood) -> str:
    """A file's account as text, without where it lies."""
    lines = [found.format, ""]
    for line in found.lines:
        value = getattr(line.value, "text", line.value)
        note = f" ({line.note})" if line.note else ""
        moved = "" if line.memory == "same" else f" [{line.memory}]"
        lines.append(f"{line.option} = {value} <- {', '.join(line.keys) or 'absent'}{note}{moved}")
    lines.append("")
    moves = {one.key: "" if one.memory == "same" else f", {one.memory}" for one in found.ignored}
    lines += [f"[{one.effect}{moves[one.key]}] {one.key}: {one.why}" for one in found.ignored]
    return "\n".join(lines).replace(f"{CONFIGS}/", "") + "\n"


def golden(path: Path) -> Path:
    return GOLDEN / f"{path.stem}.txt"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a table (written apart from the reader's own)."""
    for key, value in table.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]


def said(found: Understood) -> list[str]:
    """Every key of the account, understood ones once each."""
    return [*{key for line in found.lines for key in line.keys}, *(one.key for one in found.ignored)]


def read_table(name: str, data: dict[str, Any]) -> Understood:
    """A table read as the format of that name, as if it lay among the examples."""
    kind = next(one for one in fromfile.FORMATS if name == one.NAME)
    sheet = Sheet(kind.NAME, str(CONFIGS / "table.yaml"), data)
    kind.read(sheet)
    return sheet.close(classes(kind.KEYS))


def assert_refused_unless(found: Understood, answered: dict[str, str] | None) -> None:
    """A file that is refused in one line, and with these options (None: with none) is answered."""
    with pytest.raises(PlannerError) as refused:
        merge.merged(found, {"gpus": "8"})
    assert len(refused.value.sentence) < 300
    if answered is not None:
        merge.merged(found, {"gpus": "8"} | answered)


def written(folder: Path, text: str, name: str = "config.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# -- what is understood --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_each_example_is_understood_as_agreed(path: Path):
    assert account(fromfile.read(path)) == golden(path).read_text()


def test_every_format_has_an_example():
    without_files = {torchrun.NAME}  # options of a command line
    assert {fromfile.read(path).format for path in FILES} == {one.NAME for one in fromfile.FORMATS} - without_files


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_key_is_understood_or_ignored_and_never_both(path: Path):
    found = fromfile.read(path)
    keys = said(found)
    own = set(leaves(files.load(path)))

    assert own <= set(keys)
    assert len(keys) == len(set(keys))
    # What is there beside the file's own keys came from a file it names, or Axolotl turns on by itself.
    silent = {one.key for one in found.ignored if one.key in FUSED_ADAPTERS and one.value is None}
    assert all(key.startswith(("deepspeed.", "deepspeed_config.")) for key in set(keys) - own - silent)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_ignored_key_says_why(path: Path):
    assert all(one.why for one in fromfile.read(path).ignored)


def test_a_key_nobody_knows_is_told_apart_from_a_harmless_one():
    found = fromfile.read(CONFIGS / "axolotl-zero3.yaml")
    effects = {one.key: one.effect for one in found.ignored}

    assert effects["my_own_key"] == "unknown"
    assert effects["tiled_mlp"] == "not modelled"
    assert effects["datasets"] == "none"


WORDS = st.sampled_from(["true", "none", "auto", "2", "1e-5", "op", "full", "cpu", "", "Ω"])
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 10**30, 0.5, float("inf"), float("nan")])
TABLES = st.dictionaries(st.just("a"), st.just(1))  # made anew each time: the test takes them apart
VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.lists(WORDS, max_size=2), TABLES)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutilated_file_is_accounted_for_whole_or_refused_in_one_line(data: st.DataObject):
    path = data.draw(st.sampled_from(FILES))
    table, name = deepcopy(files.load(path)), fromfile.read(path).format
    for _ in range(data.draw(st.integers(1, 4))):
        place = table
        while tables := [key for key, value in place.items() if isinstance(value, dict) and value]:
            if data.draw(st.booleans()):
                break
            place = place[data.draw(st.sampled_from(tables))]
        key = data.draw(st.sampled_from([*place, "unheard_of"]))
        if data.draw(st.booleans()):
            place.pop(key, None)
        else:
            place[key] = data.draw(VALUES)
    try:
        found = read_table(name, table)
        assert set(leaves(table)) <= set(said(found))
        assert len(said(found)) == len(set(said(found)))
        options.question(merge.merged(found, {"model": "1b"}).given)
    except PlannerError as error:
        assert "\n" not in error.sentence


def test_an_inline_deepspeed_table_is_read_as_the_file_is():
    table = files.load(CONFIGS / "axolotl-zero3.yaml")
    inline = table | {"deepspeed": files.load(CONFIGS / "deepspeed/zero3-auto.json")}
    found = read_table("Axolotl", inline)

    assert found.options == read_table("Axolotl", table).options
    assert set(said(found)) == set(leaves(inline))


def test_older_torchtitan_files_have_their_degrees_elsewhere():
    old = {
        "model": {"name": "llama3", "flavor": "8B"},
        "training": {"batch_size": 4, "data_parallel_shard_degree": 4, "tensor_parallel_degree": 2},
        "experimental": {"pipeline_parallel_degree": 2, "context_parallel_degree": 1},
    }
    found = read_table("torchtitan", old).options

    assert (found["dp_shard"], found["tp"], found["pp"], found["gpus"]) == (4, 2, 2, 16)
    # A pipeline cuts the local batch of 4 into micro-batches of 1.
    assert (found["micro_batch_size"], found["grad_accum"]) == (1, 4)


@pytest.mark.parametrize(
    ("changes", "engine", "unmodelled"),
    [
        ({}, "torchtitan", []),
        ({"compile": {"enable": False, "components": ["loss"]}}, "torchtitan", []),
        ({"compile": {"enable": True}}, "torchtitan-compiled", []),
        ({"compile": {"enable": True, "components": ["loss", "model"]}}, "torchtitan-compiled", []),
        ({"compile": {"enable": True, "components": ["model"]}}, "torchtitan-compiled", ["compile.components"]),
        (
            {"compile": {"enable": True, "components": ["loss"]}}, "torchtitan",
            ["compile.components", "compile.enable"],
        ),
        ({"training": {"compile": True}}, "torchtitan-compiled", []),
        ({"compile": {"enable": True}, "parallelism": {"data_parallel_shard_degree": 1}}, "ddp", ["compile.enable"]),
    ],
)  # fmt: skip
def test_torchtitans_compiled_layers_are_a_runtime(changes: dict[str, Any], engine: str, unmodelled: list[str]):
    found = read_table("torchtitan", {"model": {"name": "llama3", "flavor": "8B"}} | changes)

    assert found.options["engine"][0] == engine
    assert sorted(one.key for one in found.ignored if one.effect == "not modelled") == unmodelled


def test_hybrid_sharding_keeps_a_copy_on_each_node():
    table = {"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2}
    found = read_table("Accelerate", table | {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}).options

    assert (found["dp_replicate"], found["dp_shard"]) == (2, 8)


def test_sizes_that_accelerate_ignores_for_want_of_a_prefix_are_ignored_here_too():
    table = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
    found = read_table("Accelerate", table | {"parallelism_config": {"tp_size": 8}})

    assert "tp" not in found.options
    assert "without the prefix" in next(one.why for one in found.ignored if one.key == "parallelism_config.tp_size")


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "pure-bf16"),  # Axolotl loads bf16 weights, and under DDP nothing keeps fp32 ones
        ({"deepspeed": "deepspeed/zero3-auto.json"}, "bf16"),  # DeepSpeed keeps its fp32 copy
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "bf16"),  # so does Accelerate's FSDP2
        ({"adapter": "lora"}, "bf16"),  # a frozen 16-bit base beside fp32 adapters
        ({"bf16": False}, "fp32"),
        ({"bf16": False, "fp16": True}, "fp16"),
    ],
)
def test_axolotls_bf16_means_what_its_engine_makes_of_it(changes: dict[str, Any], precision: str):
    assert read_table("Axolotl", {"base_model": "x", "bf16": "auto"} | changes).options["precision"] == precision


# -- the command line beside the file ------------------------------------------------------------------------------


def layout_of(path: str | Path, **typed: Any) -> Layout:
    """The one layout a file and some options mean."""
    asked = merge.merged(fromfile.read(path), typed)
    found = strategies.answer(options.question(asked.given))
    assert len(found.estimates) == 1
    return found.estimates[0].case.layout


def test_what_is_typed_wins_and_is_said_to():
    asked = merge.merged(fromfile.read(CONFIGS / "axolotl-lora.yaml"), {"micro_batch_size": "8", "gpus": "4"})

    assert asked.given["micro_batch_size"] == "8"
    assert asked.given["grad_accum"] == 4
    assert [(line.option, line.value) for line, _ in asked.replaced] == [("micro_batch_size", 2)]
    assert "--micro-batch-size stands" in merge.as_text(asked)


@pytest.mark.parametrize(
    ("name", "typed", "gone"),
    [
        ("accelerate-fsdp2.yaml", {"gpus": "32"}, {"gpus", "nodes"}),
        ("accelerate-fsdp1.yaml", {"dp_shard": "4"}, {"strategy"}),
        ("deepspeed/zero2.json", {"grad_accum": "8"}, {"grad_accum", "global_batch_size"}),
        (
            "axolotl-lora.yaml",
            {"method": "full"},
            {"method", "lora_rank", "lora_alpha", "lora_targets", "lora_dropout"},
        ),
        ("axolotl-lora.yaml", {"method": "lora"}, {"method"}),
        ("axolotl-lora.yaml", {"model": "7b"}, {"model"}),
    ],
)
def test_an_option_replaces_those_that_make_sense_only_with_it(name: str, typed: dict[str, str], gone: set[str]):
    asked = merge.merged(fromfile.read(CONFIGS / name), {"model": "8b"} | typed)

    assert {line.option for line, _ in asked.replaced} - {"model"} == gone - {"model"}


def test_another_strategy_takes_the_files_engine_and_its_switches_with_it():
    layout = layout_of(CONFIGS / "deepspeed/zero2.json", model="1b", strategy="ddp", seq_len="512")

    assert (layout.engine, layout.zero_stage, layout.micro_batch_size) == ("ddp", 0, 2)


def test_ddp_on_one_device_is_that_device_alone_and_its_buckets_are_accounted_for(tmp_path: Path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 1\nmixed_precision: bf16\n")

    alone = merge.merged(fromfile.read(path), {"model": "1b"})
    several = merge.merged(fromfile.read(path), {"model": "1b", "gpus": "2"})

    assert (alone.given["strategy"], alone.given["runtime"]) == ("single", "accelerate-single")
    assert all("one device is not DDP" in line.note for line in alone.found.lines if line.option == "strategy")
    assert (several.given["strategy"], several.given["runtime"]) == ("ddp", "accelerate-ddp")
    assert layout_of(path, model="1b", seq_len="512").engine == "single"


@pytest.mark.slow
def test_auto_is_filled_in_as_trainer_fills_it_in():
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    path, hidden = CONFIGS / "llamafactory-full.yaml", 4096  # Llama 3 8B
    arguments = SimpleNamespace(
        world_size=8, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_grad_norm=1.0,
        learning_rate=1e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        save_on_each_node=False, fp16=False, fp16_full_eval=False, bf16=True, bf16_full_eval=False,
        get_warmup_steps=lambda steps: 0,
    )  # fmt: skip
    filled = HfTrainerDeepSpeedConfig(str(CONFIGS / "deepspeed/zero3-auto.json"))
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=hidden)), 100)
    zero = filled.config["zero_optimization"]

    layout = layout_of(path, gpus="8")

    assert layout.global_batch_size == filled.config["train_batch_size"]
    assert layout.micro_batch_size == filled.config["train_micro_batch_size_per_gpu"]
    assert layout.reduce_bucket_elements == zero["reduce_bucket_size"]
    assert layout.zero3_prefetch_elements == zero["stage3_prefetch_bucket_size"]
    assert layout.zero3_persistence_elements == zero["stage3_param_persistence_threshold"]


ACCELERATE = [path for path in FILES if path.stem.startswith("accelerate")]


@pytest.mark.slow
@pytest.mark.parametrize("path", ACCELERATE, ids=[path.stem for path in ACCELERATE])
def test_accelerate_reads_our_examples_of_its_files(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    theirs = load_config_from_file(str(path))  # refuses keys it does not know

    assert theirs.num_processes == fromfile.read(path).options["gpus"]
    assert theirs.num_machines == fromfile.read(path).options["nodes"]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_means_options_and_words_that_the_planner_has(path: Path):
    lines = {line.option: line.value for line in fromfile.read(path).lines if line.option != "engine"}

    assert lines.keys() <= OPTIONS.keys()
    assert all(str(value) in OPTIONS[name].choices for name, value in lines.items() if OPTIONS[name].choices)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "llama-3.2-1b"),
        ("llama-3-70b", "llama-3-70b"),
    ],
)
def test_a_hub_id_or_its_mirror_is_a_preset(name: str, preset: str):
    assert hub.find(name, "config.yaml", ())[0] == preset


def test_a_local_model_folder_is_read_for_its_sizes(tmp_path: Path):
    (tmp_path / "base").mkdir()
    written(tmp_path / "base", "{}", "config.json")

    found, _ = hub.find("base", str(tmp_path / "config.yaml"), ())

    assert Path(found) == tmp_path / "base" / "config.json"


# -- our own files, read back --------------------------------------------------------------------------------------

ASKED = {
    "ddp": {"strategy": "ddp", "micro_batch_size": "2", "grad_accum": "3"},
    "fsdp, no reshard": {"dp_shard": "8", "reshard_after_forward": False},
    "hsdp": {"dp_replicate": "2", "dp_shard": "4", "recompute": "full", "micro_batch_size": "4"},
    "fsdp in fp32": {"dp_shard": "8", "precision": "fp32"},
    "zero1": {"strategy": "zero1", "micro_batch_size": "2"},
    "zero2, overlapped": {"strategy": "zero2", "overlap_comm": True, "grad_accum": "2", "micro_batch_size": "1"},
    "zero2 in fp32": {"strategy": "zero2", "precision": "fp32", "micro_batch_size": "1"},
    "zero3, pure": {"strategy": "zero3", "precision": "pure-bf16", "micro_batch_size": "1"},
    "zero3, limits": {
        "strategy": "zero3", "micro_batch_size": "1", "reduce_bucket_elements": "5000", "zero3_prefetch_elements": "10",
        "zero3_persistence_elements": "20", "zero3_max_live_elements": "30", "zero3_max_reuse_elements": "40",
    },
}  # fmt: skip
WORKLOAD = {"model": "tiny", "seq_len": "128", "method": "full"}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_the_executor_writes_for_a_plan_reads_back_as_its_layout(asked: dict[str, Any], tmp_path: Path):
    typed = WORKLOAD | {"gpus": "8", "cluster": "dgx-a100"} | asked
    plan = planning.plan_of(strategies.answer(options.question(typed)).estimates[0])
    backend = DeepSpeedBackend() if plan.layout.engine == "deepspeed" else AccelerateBackend()
    ((name, text),) = backend.files(plan).items()
    # Accelerate's file knows no batch; DeepSpeed's knows no ranks; recompute is the trainer's own.
    batch = {"micro_batch_size": plan.layout.micro_batch_size, "grad_accum": plan.layout.grad_accum}
    rest = {"gpus": "8"} if backend.name == "deepspeed" else batch
    beside = WORKLOAD | {"cluster": "dgx-a100", "recompute": plan.layout.recompute} | rest

    again = merge.merged(fromfile.read(written(tmp_path, text, Path(name).name)), beside)
    found = strategies.answer(options.question(again.given)).estimates[0].case

    assert resolved(found.layout, plan) == resolved(plan.layout, plan)
    assert found.job.precision == plan.job.precision
    assert found.cluster.gpus == plan.cluster.gpus
    assert found.runtime == plan.runtime


def resolved(layout: Layout, plan: Any) -> Layout:
    """Bucket sizes as the backend writes them: 0 means sized to the model."""
    from msgspec.structs import replace

    if layout.engine != "deepspeed":
        return layout
    elements = parameters(plan.model, plan.job.adapters, trainable=True)
    return replace(
        layout,
        reduce_bucket_elements=reduce_bucket_elements(layout, elements),
        allgather_bucket_elements=allgather_bucket_elements(layout, elements),
    )


# -- the command ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command.exit_code(planner, ["estimate", *arguments], name="planner")
    out, err = capsys.readouterr()
    return code, out, err


def test_a_file_asks_the_question_its_options_ask(capsys: pytest.CaptureFixture[str]):
    file = ["--from", str(CONFIGS / "axolotl-zero3.yaml"), "--gpus", "8", "--json"]
    typed = (
        "--model llama-2-7b --gpus 8 --seq-len 2048 --micro-batch-size 1 --grad-accum 2 --method full --lr 1e-5 "
        "--optimizer adamw --optimizer-implementation fused "
        "--strategy zero3 --zero-stage 3 --runtime deepspeed-zero --recompute full --no-overlap-comm "
        "--reduce-bucket-elements 16777216 --zero3-prefetch-elements 15099494 --zero3-persistence-elements 40960 "
        "--precision bf16 --json"
    )
    code, out, err = run(capsys, *file)
    found = json.loads(out)
    account = found.pop("from")

    options_alone = json.loads(run(capsys, *typed.split())[1])
    assert code == 0
    # The file has keys that add memory and take it away, which no option says.
    assert found.pop("uncounted") == {"more": ["my_own_key"], "less": ["tiled_mlp"], "bound": "unsure"}
    assert options_alone.pop("uncounted")["bound"] is None
    assert len(found.pop("warnings")) == len(options_alone.pop("warnings")) + 1
    for one in (found, options_alone):
        words = {name: one["estimates"][0].pop(name) for name in ("verdict", "fits_probability", "room_probability")}
        assert one["estimates"][0].pop("fits") is (None if one is found else True)
        assert (words["verdict"] == "unsure") is (words["fits_probability"] is None) is (one is found)
    assert found == options_alone
    assert account["format"] == "Axolotl"
    assert {line["option"]: line["value"] for line in account["understood"]}["model"] == "llama-2-7b"
    assert {one["key"] for one in account["ignored"] if one["effect"] == "unknown"} == {"my_own_key"}
    assert "Axolotl configuration" in err
    assert "my_own_key" in err


CONTRADICTIONS = {
    "two formats": ("base_model: x\ndistributed_type: NO\n", "has keys of Accelerate and Axolotl"),
    "no format": ("a: 1\n", "is not a configuration known here"),
    "not a table": ("- 1\n- 2\n", "holds no table"),
    "empty": ("", "holds no table"),
    "truncated": ("base_model: [a, b\n", "is not YAML"),
    "a wrong type": ("base_model: 7b\nsequence_len: long\n", "sequence_len=long: must be a number"),
    "a list for a number": ("base_model: 7b\nsequence_len: [1]\n", "sequence_len"),
    "an unknown model": ("base_model: nobody/Nothing-9B\n", "--model NAME"),
    "a missing file": ("base_model: 7b\ndeepspeed: zero9.json\n", "names zero9.json, which is not a file"),
    "both engines": ("base_model: 7b\ndeepspeed: z.json\nfsdp: [full_shard]\n", "fsdp=['full_shard']: cannot be"),
    "4 bits alone": ("base_model: 7b\nload_in_4bit: true\n", "without adapters"),
    "half qlora": ("base_model: 7b\nadapter: qlora\n", "load_in_4bit"),
    "another adapter": ("base_model: 7b\nadapter: llama-adapter\n", "Known: lora, qlora"),
    "a TPU": ("distributed_type: XLA\nnum_processes: 8\n", "distributed_type=XLA: is not planned for"),
    "sizes that do not multiply": (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_shard_size: 4}\n", "multiply to 4, num_processes is 8"),
    "oft": ("model_name_or_path: x\nstage: sft\nfinetuning_type: oft\n", "Known: lora, full"),
    "an endless alias": ("base_model: 7b\nd: &d {e: *d}\n", "has an alias of itself"),
    "aliases that multiply": (
        "base_model: 7b\na0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(9))}}}\n" for n in range(1, 10)),
        "repeats itself by its aliases to more than 100000 values"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "rule"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_bad_file_is_refused_in_one_line(text: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "--from", written(tmp_path, text))

    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert rule in err
    assert "internal error" not in err


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("ds.json", '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
         "is not a multiple of micro-batch 2 x accumulation 2"),
        ("ds.json", '{"zero_optimization": {"stage": 4}}', "must be 0, 1, 2 or 3"),
        ("ds.json", '{"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}',
         "Trainer does not fill in"),
        ("ds.json", '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
         "bf16"),
        ("ds.json", '{"zero_optimization": {', "is not JSON"),
        ("tt.toml", "[parallelism\n", "is not TOML"),
        ("tt.toml", "[parallelism]\ntensor_parallel_degree = 0\npipeline_parallel_degree = -2\n", "must be 1 or more"),
        ("notes.txt", "hello", "Known endings"),
    ],
)  # fmt: skip
def test_other_bad_files_are_too(name: str, text: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "--from", written(tmp_path, text, name), "--model", "7b")

    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert rule in err


def test_deepspeed_values_must_be_the_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    written(tmp_path, '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}', "ds.json")
    text = "base_model: 7b\nmicro_batch_size: 2\ngradient_accumulation_steps: 1\ndeepspeed: ds.json\n"
    code, _, err = run(capsys, "--from", written(tmp_path, text))

    assert code == 2
    assert "train_micro_batch_size_per_gpu=4: is not the trainer's micro_batch_size 2" in err


def test_without_pyyaml_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, _, err = run(capsys, "--from", str(CONFIGS / "axolotl-lora.yaml"))

    assert code == 2
    assert err.count("\n") == 1
    assert "meshwright[yaml]" in err


@pytest.mark.parametrize(
    ("arguments", "owner"),
    [
        ("--dp-replicate 8 --overlap-comm", "deepspeed"),
        ("--strategy fsdp --reduce-bucket-elements 5", "deepspeed"),
        ("--strategy zero2 --ddp-bucket-bytes 5", "ddp"),
    ],
)
def test_a_switch_of_another_engine_is_refused(arguments: str, owner: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "--model", "tiny", "--gpus", "8", *arguments.split())

    assert code == 2
    assert f"is a switch of {owner} alone" in err


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for one in FILES:
        golden(one).write_text(account(fromfile.read(one)))

"""A plan as files of other tools: they are read back to the same layout and memory, by their own programs too, and what
they cannot say is told or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ended import Ended

from executor.backends.common import read_back
from planner.ask import fromfile, tofile
from planner.ask.fromfile import commandline, merge, torchtitan
from planner.ask.tofile.fields import FIELDS, values_of
from planner.ask.tofile.text import NOTES, Line, json_of, yaml_of
from planner.basics import reading
from planner.basics.errors import PlannerError
from planner.basics.output import write_all
from planner.basics.quoting import yaml_value
from planner.inventory import parameters
from planner.spec.plan import Plan, encode_plan
from tests.planner.written_plans import plan_of, plans

SEED = 2026
FEW, MANY = 14, 60
"""Plans in CI, and in the long variant."""
FLAGS = Path(__file__).parents[1] / "recorded" / "tofile" / "megatron_flags.json"
MACHINE = {"cluster": "dgx-h100"}
"""No format names the machine."""
OF_THE_SCRIPT = (
    "model",
    "gpus",
    "seq_len",
    "method",
    "micro_batch_size",
    "grad_accum",
    "precision",
    "optimizer",
    "recompute",
)


def drawn(count: int) -> list[Plan]:
    return list(islice(plans(SEED), count))


@pytest.fixture(scope="module")
def few() -> list[Plan]:
    return drawn(FEW)


def readable(word: str) -> bool:
    """Whether what is written in a format is read here: torchtitan's jobs have a reader of their own."""
    known = {one.NAME for one in fromfile.FORMATS}
    return tofile.FORMATS[word].NAME in known and (word != "torchtitan" or hasattr(torchtitan, "jobs"))


def written(plan: Plan, word: str, folder: Path) -> tuple[tofile.WrittenPlan, list[str]]:
    """The files on disk, and those that --from is given: DeepSpeed's is named by another."""
    found = tofile.files_of(plan, word)
    for name, text in found.files.items():
        (folder / name).write_text(text)
    named = [name for name in found.files if len(found.files) == 1 or name != "deepspeed.json"]
    return found, [str(folder / name) for name in named]


def back(plan: Plan, found: tofile.WrittenPlan, names: list[str]) -> Plan:
    """The plan that the files ask for, with what they leave to the command line."""
    said, left = values_of(plan), {one.field for one in found.unsaid}
    given: dict[str, Any] = dict(MACHINE) | {name: str(said[name]) for name in OF_THE_SCRIPT if name in left}
    if "lora_targets" in left:
        given["lora_targets"] = ",".join(said["lora_targets"])
    if "recompute" in left and said["recompute"] not in ("none", "full"):  # outside a search: sizes make it one layout
        given |= {axis: str(said[axis]) for axis in ("dp_replicate", "dp_shard")}
    return plan_of(merge.merged(fromfile.read(*names), given).given)


def differing(plan: Plan, again: Plan, left: set[str]) -> dict[str, Any]:
    """Fields that the files say and that were read otherwise."""
    before, after = values_of(plan), values_of(again)
    skipped = left | {"nodes", "counted_ends"}  # what the machine and the stages' layers say
    return {
        field: (before.get(field), after.get(field))
        for field in before.keys() | after.keys()
        if before.get(field) != after.get(field) and field not in skipped
    }


BY_SIZES = {"megatron": {"model", "recompute", "recompute_modules"}}
"""Fields of which a format has no name: a model that is written by its sizes, and Megatron's recompute=attention, which
is its module core_attn."""


def peak(plan: Plan) -> float:
    return max(one.total for one in plan.prediction.memory)


def check(plan: Plan, word: str, folder: Path) -> str:
    """WrittenPlan and read back, or refused as the table says."""
    values = tofile.values(plan)
    try:
        found, names = written(plan, word, folder)
    except PlannerError as refused:
        field = refused.field.removeprefix("plan: ")
        assert word not in tofile.can_say(field, values)
        assert all(one in refused.fix for one in tofile.can_say(field, values))
        return "refused"
    if not readable(word):
        return "unread"
    again = back(plan, found, names)
    left = {one.field for one in found.unsaid}
    assert not differing(plan, again, left | BY_SIZES.get(word, set()))
    if left <= {"gpus", "nodes"}:
        assert peak(again) == peak(plan)
        return "whole"
    return "part"


@pytest.mark.parametrize("word", sorted(tofile.FORMATS))
def test_drawn_plans_are_read_back_as_they_are(few: list[Plan], word: str, tmp_path: Path):
    assert {check(plan, word, tmp_path) for plan in few} >= {"refused"}


@pytest.mark.long
@pytest.mark.parametrize("word", sorted(tofile.FORMATS))
def test_many_drawn_plans_are_read_back_as_they_are(word: str, tmp_path: Path):
    ended = [check(plan, word, tmp_path) for plan in drawn(MANY)]
    if readable(word) and word not in ("accelerate", "deepspeed", "torchtitan", "megatron"):
        assert ended.count("whole") > 5


@pytest.mark.long
def test_drawn_plans_of_megatron_are_read_back_whole(tmp_path: Path):
    own = islice((plan for plan in plans(SEED) if plan.layout.engine in tofile.FORMATS["megatron"].ENGINES), 16)
    ended = [check(plan, "megatron", tmp_path) for plan in own]
    assert ended.count("whole") > 8


@pytest.mark.long
def test_every_engine_that_a_format_has_is_drawn():
    engines = {plan.layout.engine for plan in drawn(2 * MANY)}
    assert engines >= {engine for kind in tofile.FORMATS.values() for engine in kind.ENGINES}


TITANS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")


def titan(number: int) -> dict[str, Any]:
    chance = Random(number)
    tp, pp, cp = chance.choice((1, 2, 4)), chance.choice((1, 2, 4)), chance.choice((1, 2))
    shards = 8 if tp * cp == 1 else 4 * chance.choice((2, 4))
    given: dict[str, Any] = {
        "model": chance.choice(TITANS), "cluster": "dgx-h100",
        "runtime": chance.choice(("torchtitan@0.3", "torchtitan-compiled@0.3")),
        "tp": str(tp), "pp": str(pp), "cp": str(cp), "dp_shard": str(shards), "gpus": str(tp * pp * cp * shards),
        "seq_len": "4096", "recompute": chance.choice(("none", "full", "sac:matmul")), "micro_batch_size": "1",
        "grad_accum": str(2 * pp), "precision": chance.choice(("bf16", "pure-bf16", "fp32")),
    }  # fmt: skip
    if pp > 1:
        given["counted_ends"] = chance.choice(("none", "both", "head", "embedding"))
    if cp > 1:
        given["cp_method"] = "allgather"
    return given


@pytest.mark.parametrize("number", range(6))
def test_torchtitan_s_jobs_are_read_back(number: int, tmp_path: Path):
    plan = plan_of(titan(number))
    found, names = written(plan, "torchtitan", tmp_path)
    assert commandline.is_one(commandline.of_script(names[0]))
    assert f"--parallelism.tensor_parallel_degree {plan.layout.tp} " in found.files["torchtitan.sh"]
    if not readable("torchtitan"):
        pytest.skip("torchtitan's jobs of 2026 are not read here")
    again = back(plan, found, names)
    assert not differing(plan, again, {one.field for one in found.unsaid} | {"attention"})
    assert peak(again) == peak(plan)


# -- the tools themselves ------------------------------------------------------------------------------------------


def test_accelerate_and_deepspeed_read_what_is_written(few: list[Plan], tmp_path: Path):
    """Accelerate knows every key, and DeepSpeed holds the values of the plan."""
    seen = set()
    for plan in few:
        layout = plan.layout
        if layout.engine not in ENGINES_OF_BOTH or layout.engine in seen:
            continue
        seen.add(layout.engine)
        found, _ = written(plan, "accelerate", tmp_path)
        told = read_back("accelerate", str(tmp_path), "accelerate.yaml")
        assert not told["unknown"]
        assert told["counts"]["num_processes"] == str(layout.world_size)
        if "deepspeed.json" in found.files:
            # One process reads it here, and DeepSpeed divides the batch by the processes there are.
            table = json.loads(found.files["deepspeed.json"])
            (tmp_path / "deepspeed.json").write_text(
                json.dumps({key: value for key, value in table.items() if key != "train_batch_size"})
            )
            own = read_back("deepspeed", str(tmp_path), "deepspeed.json")["effective"]
            assert own["zero_optimization"]["stage"] == layout.zero_stage
            assert own["train_micro_batch_size_per_gpu"] == layout.micro_batch_size
            assert own["gradient_accumulation_steps"] == layout.grad_accum
            assert own["zero_optimization"]["overlap_comm"] == layout.overlap_comm
        elif layout.engine == "fsdp2":
            environment = told["environment"]
            assert environment["FSDP_VERSION"] == "2"
            assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == str(layout.dp_shard)
            assert environment["FSDP_RESHARD_AFTER_FORWARD"] == str(layout.reshard_after_forward).lower()
    assert {"fsdp2", "deepspeed"} <= seen


ENGINES_OF_BOTH = ("ddp", "fsdp2", "deepspeed")


def flags_of(text: str) -> dict[str, list[str]]:
    """Flags of a written command line and their words, read apart from the planner's own reader."""
    words = [word for line in text.splitlines() if not line.startswith("#") for word in line.removesuffix("\\").split()]
    found: dict[str, list[str]] = {}
    for word in words[words.index("pretrain_gpt.py") + 1 :]:
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[list(found)[-1]].append(word)
    return found


MEGATRON = [
    "tp=4 pp=4 dp_shard=4 cp=2 gpus=128 grad_accum=8 pp_schedule=interleaved virtual_stages=2",
    "tp=2 pp=2 dp_shard=8 gpus=32 grad_accum=4 counted_ends=both precision=fp8-delayed",
    "tp=8 dp_shard=4 gpus=32 recompute=full precision=fp8-blockwise",
    "model=qwen3-30b-a3b tp=2 dp_shard=8 ep=8 gpus=16 token_dispatcher=deepep recompute=attention",
    "model=deepseek-v3 tp=2 pp=8 dp_shard=32 ep=32 gpus=512 grad_accum=16 recompute_modules=mla_up_proj",
    "pp=2 dp_shard=8 gpus=16 grad_accum=4 stage_layers=15,17",
    "tp=2 dp_shard=8 gpus=16 narrow_gradients=on narrow_moments=on optimizer=adamw",
]


@pytest.mark.parametrize("number", range(len(MEGATRON)))
def test_every_flag_of_megatron_is_one_of_its_parser(number: int, tmp_path: Path):
    known = json.loads(FLAGS.read_text())["flags"]
    own: dict[str, Any] = dict(word.split("=") for word in MEGATRON[number].split())
    own = {name: True if value == "on" else value for name, value in own.items()}
    plain = {"model": "llama-3.1-8b", "runtime": "megatron-core", "seq_len": "4096", "micro_batch_size": "1"}
    plan = plan_of(MACHINE | plain | own)
    found, names = written(plan, "megatron", tmp_path)
    flags = flags_of(Path(names[0]).read_text())
    layout = plan.layout

    for flag, words in flags.items():
        assert flag in known
        if known[flag] == "flag":
            assert not words
        elif isinstance(known[flag], list):
            assert set(words) <= set(known[flag])
        else:
            assert words
    assert flags["tensor-model-parallel-size"] == [str(layout.tp)]
    assert flags["pipeline-model-parallel-size"] == [str(layout.pp)]
    assert flags["global-batch-size"] == [str(layout.global_batch_size)]
    assert flags.get("context-parallel-size", ["1"]) == [str(layout.cp)]
    assert ("sequence-parallel" in flags) == (layout.tp > 1 and layout.sequence_parallel)
    assert flags["num-layers"] == [str(plan.model.layers)]
    assert commandline.is_one(commandline.of_script(names[0]))
    assert not found.unsaid
    again = back(plan, found, names)
    assert not differing(plan, again, BY_SIZES["megatron"])
    assert peak(again) == peak(plan)
    assert parameters(again.model) == parameters(plan.model)


def test_every_row_of_megatron_names_flags_of_its_parser():
    known = json.loads(FLAGS.read_text())["flags"]
    rows = tofile.FORMATS["megatron"].ROWS
    assert {key for row in rows.values() for key in row.keys} - {"nproc-per-node", "nnodes"} <= known.keys()


@pytest.mark.long
def test_torchtitan_parses_what_is_written(tmp_path: Path):
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan is not installed")
    training = pytest.importorskip("torchtitan.config").TrainingConfig
    if not hasattr(training, "num_tokens_per_train_step"):
        pytest.skip("this torchtitan is older than b5bcd76, and counts batches by other keys")
    for number in range(6):
        text = tofile.files_of(plan_of(titan(number)), "torchtitan").files["torchtitan.sh"]
        (tmp_path / "t.sh").write_text(text)
        words = commandline.of_script(tmp_path / "t.sh").split()
        config = manager.ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
        assert config.parallelism.tensor_parallel_degree == int(titan(number)["tp"])


@pytest.mark.long
def test_trl_parses_what_is_written(few: list[Plan], tmp_path: Path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    for plan in few:
        if plan.layout.engine != "fsdp2":
            continue
        written(plan, "trl", tmp_path)
        parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
        *_, rest = parser.parse_args_and_config(
            ["--config", str(tmp_path / "recipe.yaml"), "--use_cpu", "true", "--bf16", "false"],
            return_remaining_strings=True,
        )
        assert not rest


# -- what is not said ----------------------------------------------------------------------------------------------


def test_what_a_format_cannot_say_is_a_comment_and_a_warning(
    few: list[Plan], tmp_path: Path, run: Callable[..., Ended]
):
    plan = next(one for one in few if one.layout.engine == "deepspeed")
    found = tofile.files_of(plan, "deepspeed")
    notes = json.loads(found.files["deepspeed.json"])[NOTES]
    assert found.unsaid
    for one in found.unsaid:
        assert any(note.startswith(f"{tofile.UNSAID}{one.field} ") for note in notes)
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    ended = run("config", str(tmp_path / "plan.json"), "--to", "deepspeed")
    assert ended.code == 0
    assert all(one.field in ended.err for one in found.unsaid)


def test_pipeline_stages_are_refused_by_name_and_the_formats_that_say_them():
    plan = plan_of(titan(1) | {"pp": "2", "tp": "1", "cp": "1", "dp_shard": "8", "gpus": "16", "grad_accum": "4"})
    with pytest.raises(PlannerError) as refused:
        tofile.files_of(plan, "trl")
    assert "torchtitan" in refused.value.fix
    staged = tofile.values(plan) | {"engine": "fsdp2"}
    with pytest.raises(PlannerError) as refused:
        tofile.said_by(tofile.FORMATS["trl"], tofile.FORMATS["trl"].parts(staged), staged)
    assert refused.value.field == "plan: pp"
    assert len(refused.value.sentence) < 300


# -- a command's manners -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory, few: list[Plan]) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_bytes(encode_plan(next(one for one in few if one.layout.engine == "fsdp2")))
    return path


def test_files_go_to_stdout_a_file_or_a_folder(plan_file: Path, tmp_path: Path, run: Callable[..., Ended]):
    both = tmp_path / "new"
    assert run("config", str(plan_file), "--to", "trl").out.startswith("==> recipe.yaml <==")
    assert run("config", str(plan_file), "--to", "trl", "-o", str(both)).code == 0
    assert sorted(one.name for one in both.iterdir()) == ["accelerate.yaml", "recipe.yaml"]
    assert run("config", str(plan_file), "--to", "axolotl", "-o", str(tmp_path / "one.yaml")).code == 0
    assert run("config", str(plan_file), "--to", "axolotl", "-o", f"{both}/").code == 0
    assert (both / "axolotl.yaml").read_text() == (tmp_path / "one.yaml").read_text()
    found = json.loads(run("config", str(plan_file), "--to", "axolotl", "--json").out)
    assert found["schema"] == "config/1"
    assert found["files"] == {"axolotl.yaml": (tmp_path / "one.yaml").read_text()}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--to", "nemo"), "is not a format that is written"),
        (("--to", "trl", "-o", "plan.json"), "is a file, and these are 2"),
        (("--to", "trl", "-o", "there"), "exists already"),
        (("--to", "trl", "-o", "no/such/folder"), "lies in no folder that exists"),
        (("--to", "axolotl", "-o", "no/such/file.yaml"), "cannot be written"),
        (("--to", "axolotl", "-o", "plan.json"), "exists already"),
        (("--to", "deepspeed"), "cannot be said in a file of DeepSpeed"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    plan_file: Path,
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Ended],
):
    (tmp_path / "plan.json").write_bytes(plan_file.read_bytes())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "accelerate.yaml").write_text("mine")
    monkeypatch.chdir(tmp_path)
    ended = run("config", "plan.json", *words)
    assert ended.code == 2
    assert told in ended.err
    assert len(ended.err.splitlines()) == 1
    assert len(ended.err) <= 300
    assert not ended.out
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["accelerate.yaml", "plan.json", "there"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("[]", "not a plan"), ("{", "not complete JSON"), ('{"schema": "plan/9"}', "this version reads plan/1"),
     ('{"schema": "run/1"}', "must be plan/1")],
)  # fmt: skip
def test_what_is_no_plan_is_refused(text: str, told: str, tmp_path: Path, run: Callable[..., Ended]):
    (tmp_path / "plan.json").write_text(text)
    ended = run("config", str(tmp_path / "plan.json"), "--to", "trl", "-o", str(tmp_path / "out"))
    assert told in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["b.yaml", "c" * 300])
def test_of_several_files_all_are_written_or_none(name: str, tmp_path: Path):
    (tmp_path / "out" / "b.yaml").mkdir(parents=True)
    with pytest.raises(PlannerError):
        write_all(tmp_path / "out", {"a.yaml": b"1", name: b"2"})
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["b.yaml"]
    with pytest.raises(PlannerError):
        write_all(tmp_path / "new", {"a.yaml": b"1", "c" * 300: b"2"})
    assert not (tmp_path / "new").exists()


# -- texts ---------------------------------------------------------------------------------------------------------

STRANGE = ("a: b", "yes", "NO", "1e5", "x # y", "- a", "'", '"', "\n", "\x1b[31m", "{a}", "", "ünï", "${HOME}", "`id`")


@pytest.mark.parametrize("text", STRANGE)
def test_any_text_is_read_back_of_yaml_and_json(text: str):
    lines = [Line("a.b", text, f"why\n{text}"), Line("a.c", [text, 1], ""), Line("d", 1e-05, "")]
    expected = {"a": {"b": text, "c": [text, 1]}, "d": 1e-05}
    assert reading.read_yaml(yaml_of(lines, [f"note\n{text}"]).encode()) == expected
    found = reading.read_json(json_of(lines, [text]).encode())
    assert {key: value for key, value in found.items() if key != NOTES} == expected


def test_yaml_s_numbers_have_a_point():
    assert [yaml_value(number) for number in (1e-05, 2.5e-07, 0.1, 3, True)] == [
        "1.0e-05",
        "2.5e-07",
        "0.1",
        "3",
        "true",
    ]


def test_every_row_is_of_a_field_that_a_plan_says():
    for kind in tofile.FORMATS.values():
        assert set(tofile.rows_of(kind)) <= set(FIELDS)

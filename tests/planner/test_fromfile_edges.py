"""What keys of others' configurations mean one at a time, defaults included: each bound and each way out.

Not here: whole files (test_fromfile.py).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_fromfile import read_table

from planner.ask.fromfile import sheet as sheets
from planner.ask.fromfile import torchtitan, trainer
from planner.ask.fromfile.classes import NONE
from planner.ask.fromfile.merge import merged
from planner.ask.fromfile.sheet import Sheet
from planner.basics.errors import PlannerError


def titan(**keys: Any) -> dict[str, Any]:
    """Options of a torchtitan file whose keys are typed as table__key."""
    data: dict[str, Any] = {"model": {"name": "llama3", "flavor": "8B"}}
    for name, value in keys.items():
        table, _, key = name.partition("__")
        data.setdefault(table, {})[key] = value
    return read_table("torchtitan", data).options


def degrees(**sizes: int) -> dict[str, Any]:
    words = {option: key for key, option in torchtitan.DEGREES.items()}
    return {f"parallelism__{words[name]}": size for name, size in sizes.items()}


def test_torchtitan_s_degrees_make_the_gpus_and_experts_divide_those_that_are_there() -> None:
    found = titan(**degrees(dp_shard=4, tp=2, pp=3, cp=5, dp_replicate=2, ep=4))
    assert found["gpus"] == 4 * 2 * 3 * 5 * 2 and found["ep"] == 4
    assert [found[name] for name in ("dp_shard", "tp", "pp", "cp", "dp_replicate")] == [4, 2, 3, 5, 2]
    assert "gpus" not in titan(**degrees(dp_shard=-1, tp=2)) and "dp_shard" not in titan(**degrees(dp_shard=-1))
    assert titan()["dp_replicate"] == 1
    for name in ("tp", "pp", "cp", "dp_replicate", "ep"):
        assert titan(**degrees(dp_shard=2, **{name: 1}))[name] == 1
        with pytest.raises(PlannerError, match="must be 1 or more"):
            titan(**degrees(dp_shard=2, **{name: -1}))


def test_torchtitan_shards_by_fsdp2_unless_copies_are_all_there_is() -> None:
    assert titan(**degrees(dp_shard=1, dp_replicate=4))["engine"] == ("ddp",)
    for sizes in ({"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "dp_replicate": 2, "cp": 2}, {}):
        found = titan(**degrees(**sizes))
        assert (found["engine"], found["zero_stage"]) == (("torchtitan", "fsdp2"), 3)
    assert titan(**degrees(dp_shard=2))["reshard_after_forward"] is True
    assert titan(**degrees(dp_shard=2, pp=1))["reshard_after_forward"] is True
    assert titan(**degrees(dp_shard=2, pp=2))["reshard_after_forward"] is False
    for policy, means in (("always", True), ("never", False), ("default", False)):
        found = titan(**degrees(dp_shard=2, pp=2), parallelism__fsdp_reshard_after_forward=policy)
        assert found["reshard_after_forward"] is means
    assert "reshard_after_forward" not in titan(**degrees(dp_shard=1, tp=2))


def test_torchtitan_s_switches_come_with_their_parallelism_alone() -> None:
    assert titan(**degrees(dp_shard=2, cp=2))["cp_method"] == "allgather"
    assert titan(**degrees(dp_shard=2, cp=2), parallelism__context_parallel_rotate_method="alltoall")["cp_method"] == "ring"  # fmt: skip  # noqa: E501
    one = titan(**degrees(dp_shard=2, cp=1), parallelism__context_parallel_rotate_method="alltoall")
    assert "cp_method" not in one
    assert titan(**degrees(dp_shard=2, tp=2))["sequence_parallel"] is True
    assert "sequence_parallel" not in titan(**degrees(dp_shard=2, tp=1))


@pytest.mark.parametrize(
    ("keys", "micro", "whole", "accum"),
    [
        ({}, 8, None, 1),
        ({"training__local_batch_size": 6}, 6, None, 1),
        ({"training__batch_size": 5}, 5, None, 1),
        ({"training__local_batch_size": 6, "training__global_batch_size": 48}, 6, 48, None),
        ({"training__local_batch_size": 6, "training__global_batch_size": 1}, 6, 1, None),
        ({"training__local_batch_size": 6, "training__global_batch_size": -1}, 6, None, 1),
        ({"training__local_batch_size": 1}, 1, None, 1),
        ({"training__local_batch_size": 6, "pp": 2}, 1, None, 6),
        ({"training__local_batch_size": 6, "pp": 2, "micro": 3}, 3, None, 2),
        ({"training__local_batch_size": 6, "pp": 1, "micro": 3}, 6, None, 1),
    ],
)
def test_torchtitan_s_local_batch_is_the_micro_batch_or_is_cut_for_a_pipeline(
    keys: dict[str, Any], micro: int, whole: int | None, accum: int | None
) -> None:
    more = degrees(dp_shard=2, pp=keys.pop("pp", 1))
    if "micro" in keys:
        more["parallelism__pipeline_parallel_microbatch_size"] = keys.pop("micro")
    found = titan(**more, **keys)
    assert (found["micro_batch_size"], found.get("global_batch_size"), found.get("grad_accum")) == (micro, whole, accum)


def test_a_local_batch_that_no_micro_batch_divides_is_refused() -> None:
    for local, micro in ((6, 4), (-1, 1), (6, -1)):
        with pytest.raises(PlannerError, match="is not a multiple of the pipeline's micro-batch"):
            titan(
                **degrees(dp_shard=2, pp=2),
                training__local_batch_size=local,
                parallelism__pipeline_parallel_microbatch_size=micro,
            )


@pytest.mark.parametrize(
    ("schedule", "means", "stages"),
    [
        (None, "1f1b", None),
        ("GPipe", "gpipe", None),
        ("Interleaved1F1B", "interleaved", 2),
        ("ZBVZeroBubble", "zb-v", 2),
    ],
)
def test_torchtitan_s_looped_schedules_have_two_stages_a_rank(schedule: str | None, means: str, stages: Any) -> None:
    more = {} if schedule is None else {"parallelism__pipeline_parallel_schedule": schedule}
    found = titan(**degrees(dp_shard=2, pp=2), **more)
    assert (found["pp_schedule"], found.get("virtual_stages")) == (means, stages)
    assert "pp_schedule" not in titan(**degrees(dp_shard=2, pp=1), **more)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "bf16"),
        ({"training__mixed_precision_param": "float32"}, "fp32"),
        ({"training__dtype": "bfloat16"}, "pure-bf16"),
        ({"training__dtype": "float32"}, "bf16"),
        ({"model__converters": ["float8"]}, "fp8"),
        ({"model__converters": ["quantize.linear.float8"]}, "fp8"),
        ({"model__converters": ["mx"], "training__dtype": "bfloat16"}, "pure-bf16"),
    ],
)
def test_torchtitan_s_numbers(keys: dict[str, Any], precision: str) -> None:
    assert titan(**keys)["precision"] == precision


@pytest.mark.parametrize(
    ("mode", "option", "recompute"),
    [
        ("none", None, "none"), ("full", None, "full"), ("full", "op", "full"), ("selective", "op", "sac:matmul"),
        ("selective", "2", "none"), (None, None, "none"), (None, "op", "sac:matmul"), ("memory_budget", "op", "none"),
    ],
)  # fmt: skip
def test_torchtitan_s_recomputation(mode: str | None, option: str | None, recompute: str) -> None:
    keys = {"activation_checkpoint__mode": mode, "activation_checkpoint__selective_ac_option": option}
    assert titan(**{key: value for key, value in keys.items() if value is not None})["recompute"] == recompute


@pytest.mark.parametrize(
    ("keys", "optimizer", "implementation"),
    [
        ({}, "adamw", None),
        ({"name": "Adam", "implementation": "for-loop"}, "adamw", "for-loop"),
        ({"fused": True}, "adamw", "fused"),
        ({"fused": False}, "adamw", "foreach"),
        ({"implementation": "foreach", "fused": True}, "adamw", "foreach"),
        ({"implementation": "fused_opt_states_bf16"}, "adamw", None),
        ({"name": "Muon", "implementation": "fused"}, "muon", None),
        ({"name": "Lion"}, None, None),
    ],
)
def test_torchtitan_s_optimizers(keys: dict[str, Any], optimizer: str | None, implementation: str | None) -> None:
    found = titan(**{f"optimizer__{key}": value for key, value in keys.items()})
    assert (found.get("optimizer"), found.get("optimizer_implementation")) == (optimizer, implementation)


# -- what a sheet looks up, and the trainer's arguments ---------------------------------------------------------------


def test_a_file_of_more_than_so_many_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "MOST_KEYS", 3)
    assert len(Sheet("x", "p", {"a": 1, "b": {"c": 2, "d": 3}}).data) == 3
    with pytest.raises(PlannerError, match="more than 3 keys"):
        Sheet("x", "p", {"a": 1, "b": {"c": 2, "d": 3}, "e": 4})


def said(read: Any, data: dict[str, Any], *more: Any, **named: Any) -> dict[str, Any]:
    """Options that one reader finds in a table."""
    sheet = Sheet("x", "p", data)
    read(sheet, *more, **named)
    return sheet.close(NONE).options


def test_every_optimizer_of_the_trainer_is_planned_or_bounded_or_refused_by_name() -> None:
    """Refused in one line with its name and what to do; bounded by AdamW, which keeps more."""
    from transformers.training_args import OptimizerNames

    kinds: dict[str, set[str]] = {"planned": set(), "bounded": set(), "refused": set()}
    for name in (one.value for one in OptimizerNames):
        sheet = Sheet("x", "p", {"optim": name})
        try:
            trainer.optimizer(sheet, "optim")
            found = merged(sheet.close(NONE), {}).given["optimizer"]
        except PlannerError as error:
            kinds["refused"].add(name)
            assert re.search(rf"optim.*\b{name} is not planned for.*--optimizer adamw", error.sentence), error.sentence
            assert "\n" not in error.sentence
        else:
            kinds["bounded" if name in trainer.SMALLER else "planned"].add(name)
            assert found == trainer.OPTIMIZERS.get(name, "adamw")
    assert kinds["planned"] >= {
        "adamw_torch_4bit", "adamw_torch_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit",
        "paged_lion_32bit", "paged_lion_8bit",
    }  # fmt: skip
    assert {"ademamix", "rmsprop_bnb_8bit", "adamw_torch_xla", "grokadamw"} <= kinds["refused"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("adamw_torch_4bit", {"optimizer": "adamw-4bit-torchao", "state_block": 256}),
        ("ao_adamw_4bit", {"optimizer": "adamw-4bit-torchao"}),
        ("ao_adamw_fp8", {"optimizer": "adamw-fp8-torchao"}),
        ("lion_8bit", {"optimizer": "lion-8bit"}),
        ("paged_lion_8bit", {"optimizer": "lion-8bit", "paged_states": True}),
        ("paged_lion_32bit", {"optimizer": "lion", "paged_states": True}),
    ],
)
def test_an_optimizer_s_maker_bits_and_pages_are_read(name: str, found: dict[str, Any]) -> None:
    assert said(trainer.optimizer, {"optim": name}, "optim") == found


def test_pages_and_blocks_go_with_an_optimizer_that_deepspeed_s_file_replaces() -> None:
    inner = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    for optim in ("adamw_torch_4bit", "paged_lion_8bit"):
        table = {"model_name_or_path": "llama-2-7b", "stage": "sft", "optim": optim, "deepspeed": inner}
        found = read_table("LLaMA-Factory", table).options
        assert found["optimizer"] == "adamw"
        assert not {"state_block", "paged_states"} & found.keys()


def test_a_bucket_s_megabytes_are_of_2_to_the_20() -> None:
    assert said(trainer.gradient_buckets, {"ddp_bucket_cap_mb": 25}) == {"ddp_bucket_bytes": 26_214_400}
    assert said(trainer.gradient_buckets, {}) == {}


@pytest.mark.parametrize(
    ("name", "optimizer", "implementation"),
    [
        (None, "adamw", None), ("adamw_torch", "adamw", "foreach"), ("ADAMW_TORCH_FUSED", "adamw", "fused"),
        ("adamw_hf", "adamw", "for-loop"), ("paged_adamw_8bit", "adamw-8bit", None), ("sgd", "sgd", None),
        ("galore_adamw", "adamw", None), ("unheard_of", None, None),
    ],
)  # fmt: skip
def test_the_trainer_s_optimizers(name: str | None, optimizer: str | None, implementation: str | None) -> None:
    found = said(trainer.optimizer, {} if name is None else {"optim": name}, "optim")
    assert (found.get("optimizer"), found.get("optimizer_implementation")) == (optimizer, implementation)


@pytest.mark.parametrize(
    ("value", "absent_all", "targets"),
    [
        (None, False, None), ([], False, None), (None, True, "all"), ([], True, "all"), ("all", False, "all"),
        (["all-linear"], False, "all"), ("q_proj, v_proj", False, "q_proj,v_proj"), (["o_proj"], True, "o_proj"),
    ],
)  # fmt: skip
def test_adapted_modules(value: Any, absent_all: bool, targets: str | None) -> None:
    every = trainer.ALL_LINEAR
    found = said(trainer.targets, {} if value is None else {"t": value}, "t", absent_all=absent_all)
    assert found.get("lora_targets") == (every if targets == "all" else targets)


def test_adapters_keys_mean_nothing_without_adapters() -> None:
    keys = {"lora_rank": 8, "peft_x": 1, "other": 2}
    for method, ignored in (("full", {"lora_rank", "peft_x"}), ("lora", set())):
        sheet = Sheet("x", "p", keys)
        trainer.adapters(sheet, method, note="")
        found = sheet.close(NONE)
        assert {one.key for one in found.ignored if one.why == "there are no adapters"} == ignored
        assert found.options["method"] == method


@pytest.mark.parametrize(
    ("kind", "bits", "method"),
    [
        (None, None, "lora"),
        ("lora", 4, "qlora"),
        ("lora", 8, "qlora"),
        ("lora", 3, "lora"),
        ("full", None, "full"),
        ("full", 4, None),
        ("oft", None, None),
    ],
)
def test_llama_factory_s_methods(kind: str | None, bits: int | None, method: str | None) -> None:
    data = {"stage": "sft", "model_name_or_path": "meta-llama/Llama-2-7b-hf", "do_train": True, "template": "llama2"}
    data |= {key: value for key, value in (("finetuning_type", kind), ("quantization_bit", bits)) if value is not None}
    if method is None:
        with pytest.raises(PlannerError):
            read_table("LLaMA-Factory", data)
        return
    found = read_table("LLaMA-Factory", data)
    assert found.options["method"] == method
    assert ("lora_rank" in found.options) == (method != "full")
    assert any(one.key == "quantization_bit" for one in found.ignored) == (bits == 3)

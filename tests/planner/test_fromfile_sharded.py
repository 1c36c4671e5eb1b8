"""What keys of DeepSpeed's, Accelerate's and FSDP's configurations mean one at a time, defaults included.

Not here: whole files (test_fromfile.py), or other formats (test_fromfile_edges.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from test_fromfile import read_table

from planner.ask.fromfile import deepspeed, fsdp
from planner.ask.fromfile.classes import NONE
from planner.ask.fromfile.deepspeed import OfHidden
from planner.ask.fromfile.sheet import Sheet
from planner.basics.errors import PlannerError

BATCH = {"train_micro_batch_size_per_gpu": 2}


def zero(stage: Any = 2, **keys: Any) -> dict[str, Any]:
    """Options of a DeepSpeed file with these keys of zero_optimization."""
    return read_table("DeepSpeed", BATCH | {"zero_optimization": {"stage": stage, **keys}}).options


def of(**tables: Any) -> dict[str, Any]:
    """Options of a DeepSpeed file at stage 1 with these tables."""
    return read_table("DeepSpeed", BATCH | {"zero_optimization": {"stage": 1}} | tables).options


def test_deepspeed_s_stages_and_what_each_reads() -> None:
    assert (zero(0)["strategy"], zero(0)["engine"]) == ("ddp", ("ddp",)) and "zero_stage" not in zero(0)
    for stage in (1, 2, 3, True):
        found = zero(stage)
        assert (found["strategy"], found["zero_stage"]) == (f"zero{int(stage)}", int(stage))
        assert found["engine"] == ("deepspeed",) and found["overlap_comm"] is (stage == 3 and stage is not True)
        assert found["reduce_bucket_elements"] == 500_000_000
        assert found.get("allgather_bucket_elements") == (None if stage == 3 else 500_000_000)
    assert zero(2, overlap_comm=True)["overlap_comm"] is True and zero(3, overlap_comm=False)["overlap_comm"] is False
    for stage in (4, -1):
        with pytest.raises(PlannerError, match="must be 0, 1, 2 or 3"):
            zero(stage)


def test_deepspeed_s_stage_3_alone_reads_its_limits() -> None:
    limits = {
        "stage3_prefetch_bucket_size": 7, "stage3_param_persistence_threshold": 8, "stage3_max_live_parameters": 9,
        "stage3_max_reuse_distance": 10,
    }  # fmt: skip
    wanted = ("zero3_prefetch_elements", "zero3_persistence_elements", "zero3_max_live_elements", "zero3_max_reuse_elements")  # fmt: skip  # noqa: E501
    assert [zero(3, **limits)[name] for name in wanted] == [7, 8, 9, 10]
    assert not set(wanted) & zero(2, **limits).keys() and not set(wanted) & zero(3).keys()
    sizes = zero(2, reduce_bucket_size=11, allgather_bucket_size=12)
    assert (sizes["reduce_bucket_elements"], sizes["allgather_bucket_elements"]) == (11, 12)


def test_buckets_that_trainer_sizes_follow_the_hidden_width() -> None:
    found = zero(3, **{key.partition(".")[2]: "auto" for key in deepspeed.HIDDEN})
    sizes = {name: one.elements(100) for name, one in found.items() if isinstance(one, OfHidden)}
    assert sizes == {
        "reduce_bucket_elements": 10_000, "zero3_prefetch_elements": 9_000, "zero3_persistence_elements": 1_000}  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("keys", "optimizer", "params"),
    [
        ({}, None, None),
        ({"offload_optimizer": {"device": "cpu"}}, True, None),
        ({"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "CPU"}}, True, True),
        ({"offload_optimizer": {"device": "none"}, "offload_param": {}}, None, None),
        ({"cpu_offload": True}, True, None),
        ({"cpu_offload": False, "cpu_offload_param": True}, None, True),
    ],
)
def test_deepspeed_s_states_in_host_memory(keys: dict[str, Any], optimizer: Any, params: Any) -> None:
    found = zero(3, **keys)
    assert (found.get("offload_optimizer"), found.get("offload_params")) == (optimizer, params)


@pytest.mark.parametrize(
    ("fp16", "bf16", "pure", "precision"),
    [
        (None, None, (), "fp32"), (False, None, (), "fp32"), (None, False, (), "fp32"), (True, None, (), "fp16"),
        (True, False, (), "fp16"), (None, True, (), "bf16"), (False, True, (), "bf16"), (None, True, (1,), "bf16"),
        (None, True, (2,), "bf16"), (None, True, (1, 2), "pure-bf16"), (None, False, (1, 2), "fp32"),
        ("auto", None, (), None), (None, "auto", (), None),
    ],
)  # fmt: skip
def test_deepspeed_s_numbers(fp16: Any, bf16: Any, pure: tuple[int, ...], precision: str | None) -> None:
    both = {1: "bf16_master_weights_and_grads", 2: "bf16_optimizer_states"}
    tables: dict[str, Any] = {"bf16": {both[one]: True for one in pure}}
    tables["bf16"] |= {} if bf16 is None else {"enabled": bf16}
    tables |= {} if fp16 is None else {"fp16": {"enabled": fp16}}
    assert of(**tables).get("precision") == precision


def test_deepspeed_s_two_formats_exclude_each_other_and_an_older_name_is_read() -> None:
    with pytest.raises(PlannerError, match="cannot be together"):
        of(fp16={"enabled": True}, bf16={"enabled": True})
    assert of(bfloat16={"enabled": True})["precision"] == "bf16"


def test_deepspeed_s_groups_begin_at_two() -> None:
    assert not {"tp", "cp"} & of(tensor_parallel={"autotp_size": 1}, sequence_parallel_size=1).keys()
    split = of(tensor_parallel={"autotp_size": 2}, sequence_parallel_size=1)
    assert (split["tp"], split["engine"], "cp" in split) == (2, ("deepspeed-autotp",), False)
    both = of(tensor_parallel={"autotp_size": 2}, sequence_parallel_size=4)  # no engine has both: its rules refuse them
    assert (both["tp"], both["cp"], both["engine"]) == (2, 4, ("deepspeed",))
    long = of(sequence_parallel_size=2)
    assert (long["cp"], long["cp_method"], long["engine"]) == (2, "ulysses", ("deepspeed-ulysses",))
    assert zero(3, zero_hpz_partition_size=2)["zero_secondary_shard"] == 2
    assert "zero_secondary_shard" not in zero(3, zero_hpz_partition_size=1)


def test_deepspeed_s_three_batches_are_so_many_ranks() -> None:
    sizes = {"train_batch_size": 48, "gradient_accumulation_steps": 3}
    assert of(**sizes)["gpus"] == 48 // (2 * 3)
    assert "gpus" not in of(train_batch_size=48) and "gpus" not in of(gradient_accumulation_steps=3)
    assert "gpus" not in of(**sizes, sequence_parallel_size=2)
    assert "gpus" not in of(**sizes, tensor_parallel={"autotp_size": 2})
    with pytest.raises(PlannerError, match="is not a multiple of micro-batch 2 x accumulation 3"):
        of(train_batch_size=49, gradient_accumulation_steps=3)


@pytest.mark.parametrize(
    ("optimizer", "named", "implementation"),
    [
        ({"type": "AdamW"}, "adamw", "fused"), ({"type": "Adam", "params": {"torch_adam": True}}, "adamw", "foreach"),
        ({"type": "AdamW", "params": {"torch_adam": False}}, "adamw", "fused"), ({"type": "Lion"}, "lion", None),
        ({"type": "DeepSpeedCPUAdam"}, "adamw", None), ({"type": "OneBitAdam"}, None, None), ({}, None, None),
    ],
)  # fmt: skip
def test_deepspeed_s_optimizers(optimizer: dict[str, Any], named: str | None, implementation: str | None) -> None:
    found = of(optimizer=optimizer)
    assert (found.get("optimizer"), found.get("optimizer_implementation")) == (named, implementation)


def test_values_beside_the_trainer_s_must_be_equal_and_only_known_ones_are_filled_in() -> None:
    sheet = Sheet("DeepSpeed", "p", {"gradient_clipping": 1, "gradient_accumulation_steps": "auto"})
    deepspeed.agree(sheet, {"max_grad_norm": 1.0, "grad_accum": 4})
    deepspeed.agree(sheet, {})
    with pytest.raises(PlannerError, match=r"is not the trainer's max_grad_norm 0.5"):
        deepspeed.agree(sheet, {"max_grad_norm": 0.5})
    with pytest.raises(PlannerError, match="Trainer does not fill in"):
        of(steps_per_print="auto")
    assert of(gradient_accumulation_steps="auto").get("grad_accum") is None
    for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"):
        assert deepspeed.detect({key: 1})
    assert not deepspeed.detect({"fp16": {}})


# -- Accelerate -------------------------------------------------------------------------------------------------------


def accelerate(kind: Any, **keys: Any) -> dict[str, Any]:
    return read_table("Accelerate", {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind} | keys).options


def test_accelerate_s_processes_are_gpus_that_its_machines_divide() -> None:
    for kind in ("NO", False):
        alone = accelerate(kind, num_processes=4, num_machines=2)
        assert (alone["gpus"], "nodes" in alone, alone["engine"]) == (1, False, ("ddp",))
    found = accelerate("MULTI_GPU", num_processes=4, num_machines=2)
    assert (found["gpus"], found["nodes"], found["strategy"], found["precision"]) == (4, 2, "ddp", "fp32")
    assert accelerate("MULTI_GPU", num_processes=1, num_machines=1)["gpus"] == 1
    later = accelerate("MULTI_GPU", num_processes=-1, num_machines=2)
    assert ("gpus" in later, later["nodes"]) == (False, 2)
    for processes, machines in ((4, 3), (4, -1)):
        with pytest.raises(PlannerError, match="does not divide the 4 processes"):
            accelerate("MULTI_GPU", num_processes=processes, num_machines=machines)
    with pytest.raises(PlannerError, match="is not planned for"):
        accelerate("XLA")


def test_accelerate_s_hybrid_shards_inside_a_node() -> None:
    hybrid = {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    found = accelerate("FSDP", num_processes=16, num_machines=2, **hybrid)
    assert (found["dp_replicate"], found["dp_shard"], found["zero_stage"]) == (2, 8, 3)
    assert "dp_shard" not in accelerate("FSDP", num_processes=16, **hybrid)
    assert "dp_shard" not in accelerate("FSDP", num_processes=16, num_machines=2, fsdp_config={})


def sizes(**named: int | str) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{key}": value for key, value in named.items()}}


def test_accelerate_s_sizes_multiply_to_its_processes() -> None:
    found = accelerate("FSDP", num_processes=8, **sizes(dp_shard_size=4, tp_size=2, cp_size=1))
    assert (found["dp_shard"], found["tp"], found["cp"]) == (4, 2, 1)
    with pytest.raises(PlannerError, match="multiply to 8, num_processes is 16"):
        accelerate("FSDP", num_processes=16, **sizes(dp_shard_size=4, tp_size=2))
    assert accelerate("FSDP", **sizes(dp_shard_size=4, tp_size=2))["tp"] == 2
    two = accelerate("FSDP", num_processes=4, **sizes(dp_shard_size=2, cp_size=2, cp_comm_strategy="alltoall"))
    assert (two["cp"], two["cp_method"]) == (2, "ring")
    one = accelerate("FSDP", num_processes=2, **sizes(dp_shard_size=2, cp_size=1, cp_comm_strategy="alltoall"))
    assert "cp_method" not in one
    ulysses = accelerate("FSDP", num_processes=4, **sizes(dp_shard_size=2, sp_size=2))
    assert (ulysses["cp"], ulysses["cp_method"]) == (2, "ulysses")
    assert "cp" not in accelerate("FSDP", num_processes=2, **sizes(dp_shard_size=2, sp_size=1))


def test_accelerate_s_own_keys_of_deepspeed_and_megatron() -> None:
    assert accelerate("DEEPSPEED", deepspeed_config={})["zero_stage"] == 2
    found = accelerate(
        "DEEPSPEED", deepspeed_config={"zero_stage": 3, "offload_param_device": "cpu", "gradient_accumulation_steps": 4}
    )
    assert (found["zero_stage"], found["offload_params"], found["grad_accum"]) == (3, True, 4)
    words = {"tp_degree": 2, "pp_degree": 4, "num_micro_batches": 8, "use_distributed_optimizer": True}
    words |= {"sequence_parallelism": True, "recompute_activations": True}
    found = accelerate("MEGATRON_LM", megatron_lm_config={f"megatron_lm_{key}": one for key, one in words.items()})
    assert [found[name] for name in ("tp", "pp", "grad_accum", "zero_stage")] == [2, 4, 8, 1]
    assert (found["sequence_parallel"], found["recompute"], found["engine"]) == (True, "attention", ("megatron",))
    plain = accelerate("MEGATRON_LM", megatron_lm_config={"megatron_lm_use_distributed_optimizer": False})
    assert plain["zero_stage"] == 0 and not {"sequence_parallel", "recompute"} & plain.keys()


# -- FSDP -------------------------------------------------------------------------------------------------------------


def sharded(*words: str, version: int | None = None, **keys: Any) -> dict[str, Any]:
    """Options of a section of FSDP keys."""
    sheet = Sheet("x", "p", {"fsdp_config": keys})
    fsdp.read(sheet, "fsdp_config", "fsdp", version=version, words=words)
    return sheet.close(NONE).options


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize(
    ("word", "strategy", "reshard"),
    [("FULL_SHARD", "fsdp", True), ("SHARD_GRAD_OP", "fsdp", False), ("NO_SHARD", "ddp", None), ("1", "fsdp", True),
     ("HYBRID_SHARD", "hsdp", True), ("HYBRID_SHARD_ZERO2", "hsdp", False), ("2", "fsdp", False)],
)  # fmt: skip
def test_fsdp_s_strategies(prefix: str, word: str, strategy: str, reshard: bool | None) -> None:
    found = sharded(**{f"{prefix}sharding_strategy": word})
    assert (found["strategy"], found.get("reshard_after_forward")) == (strategy, reshard)
    assert found.get("zero_stage") == (None if strategy == "ddp" else 3)
    second = sharded(**{f"{prefix}sharding_strategy": word}, version=2)
    assert (second["strategy"], second["reshard_after_forward"]) == ("fsdp", True)
    by_word = sharded(word.lower())
    assert (by_word["strategy"], by_word.get("reshard_after_forward")) == (strategy, reshard)


def test_fsdp_s_other_keys() -> None:
    assert sharded(fsdp_version=2, reshard_after_forward=False)["reshard_after_forward"] is False
    assert sharded(fsdp_version=2, reshard_after_forward=True)["reshard_after_forward"] is True
    assert sharded(reshard_after_forward="shard_grad_op")["reshard_after_forward"] is False
    for version in (3, -1):
        with pytest.raises(PlannerError, match="must be 1 or 2"):
            sharded(fsdp_version=version)
    for found in (sharded("full_shard", "offload"), sharded(offload_params=True)):
        assert found["offload_params"] is found["offload_optimizer"] is True
    assert not {"offload_params", "offload_optimizer"} & sharded("full_shard", offload_params=False).keys()
    assert sharded(activation_checkpointing=True)["recompute"] == "full"

"""What a script is found in beside what the plan has, as a table; real scripts are in tests/cluster/test_script.py."""

from __future__ import annotations

import pytest

from executor.preflight.contract import WrappedScript, differences, refusal, script_differences
from planner.spec import Layout

DDP = Layout(engine="ddp", dp_replicate=4)
FSDP2 = Layout(engine="fsdp2", dp_shard=4, zero_stage=3)
HSDP = Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3)
ZERO2 = Layout(engine="deepspeed", dp_shard=4, zero_stage=2)
AUTOTP = Layout(engine="deepspeed-autotp", tp=2, dp_shard=2, zero_stage=1)
PIPELINE = Layout(engine="deepspeed-pipeline", pp=2, dp_shard=2, zero_stage=1)
TP = Layout(engine="transformers-tp", tp=2, dp_shard=2, zero_stage=3)
FOUND = {
    "ddp": {"engine": "ddp", "wrapper": "DistributedDataParallel", "ranks": 4},
    "fsdp2": {"engine": "fsdp2", "wrapper": "FSDPModule", "ranks": 4, "shards": 4},
    "hsdp": {"engine": "fsdp2", "wrapper": "FSDPModule", "ranks": 4, "shards": 2},
    "fsdp1": {"engine": "fsdp1", "wrapper": "FullyShardedDataParallel", "ranks": 4},
    "tp": {"engine": "dtensor", "wrapper": "DTensor", "ranks": 4},
    "zero1": {"engine": "deepspeed", "wrapper": "DeepSpeedEngine", "zero_stage": 1, "ranks": 4},
    "zero2": {"engine": "deepspeed", "wrapper": "DeepSpeedEngine", "zero_stage": 2, "ranks": 4},
    "pipeline": {"engine": "deepspeed-pipeline", "wrapper": "PipelineEngine", "zero_stage": 1, "ranks": 2},
    "nothing": {},
}
MEANT = {
    "ddp": {"ddp"}, "fsdp2": {"fsdp2"}, "hsdp": {"hsdp"}, "zero2": {"zero2"}, "autotp": {"zero1"},
    "pipeline": {"pipeline"}, "tp": {"tp", "fsdp2", "hsdp"},
}  # fmt: skip
LAYOUTS = {"ddp": DDP, "fsdp2": FSDP2, "hsdp": HSDP, "zero2": ZERO2, "autotp": AUTOTP, "pipeline": PIPELINE, "tp": TP}


@pytest.mark.parametrize("planned", LAYOUTS)
@pytest.mark.parametrize("name", FOUND)
def test_a_layout_is_met_by_its_own_engine_and_by_no_other(planned, name):
    found = WrappedScript(world_size=4, rank=0, **FOUND[name])

    assert (differences(LAYOUTS[planned], found) == []) is (name in MEANT[planned])


def test_the_world_comes_first_and_one_rank_needs_no_wrapper():
    assert differences(DDP, WrappedScript(world_size=1, rank=0)) == ["trains alone, the plan has 4 ranks"]
    assert differences(DDP, WrappedScript(world_size=2, rank=0)) == ["trains in a world of 2, the plan has 4 ranks"]
    assert differences(Layout(engine="ddp"), WrappedScript(world_size=1, rank=0)) == []


def test_half_a_world_under_one_wrapper_is_another_run():
    half = WrappedScript(world_size=4, rank=0, engine="ddp", wrapper="DistributedDataParallel", ranks=2)

    assert differences(DDP, half) == [
        "has DistributedDataParallel over 2 ranks, the plan has DistributedDataParallel over 4"
    ]


def test_a_refusal_names_the_script_and_the_way_out_and_has_exit_code_4():
    error = refusal(ZERO2, WrappedScript(world_size=1, rank=0), "train.py")

    assert error is not None and error.exit_code == 4 and error.cause == "another world"
    assert "--script=train.py: trains alone" in error.sentence and "MESHWRIGHT_DEEPSPEED_CONFIG" in error.sentence
    assert refusal(DDP, WrappedScript(world_size=4, rank=0, **FOUND["ddp"]), "train.py") is None


def test_what_all_ranks_have_alike_is_said_once_and_a_rank_that_never_stepped_is_named():
    stepped = {"world_size": 4, "stepped": True, "engine": "ddp", "wrapper": "DistributedDataParallel"}
    mesh = {rank: {"rank": rank} | stepped for rank in (0, 1, 2)} | {3: {"rank": 3, "world_size": 4, "stepped": False}}

    assert script_differences(FSDP2, 4, mesh) == [
        "ranks [3] took no optimizer step",
        "rank 0 trains in DistributedDataParallel, the plan has FSDP2 (fully_shard)",
    ]
    assert script_differences(DDP, 4, {}) == ["ranks [0, 1, 2, 3] took no optimizer step"]


def test_an_engine_that_another_package_launches_is_met_by_its_own_name():
    layout = Layout(engine="torchtitan", zero_stage=3, dp_shard=2)

    assert differences(layout, WrappedScript(world_size=2, rank=0, engine="torchtitan", wrapper="torchtitan")) == []
    assert differences(
        layout, WrappedScript(world_size=2, rank=0, engine="ddp", wrapper="DistributedDataParallel")
    ) == ["trains in DistributedDataParallel, the plan has torchtitan"]

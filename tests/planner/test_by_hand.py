"""Small formulas by hand, one after the other: figures on paper, or every case counted out.

Not here: what is made of them (test_engines.py, test_comm.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import TINY

from planner.calibrate import bands
from planner.engines import fsdp2
from planner.figures.comm import ranks_inside
from planner.inventory.tape import Storage, Tape
from planner.inventory.tensors import Size
from planner.parallelism.case import Case, axis_groups, axis_stride
from planner.spec import Layout, TrainingJob, presets
from planner.spec.huggingface import config_dict, read_config


@given(*[st.integers(1, 9) for _ in range(3)], st.integers(2, 16))
@settings(max_examples=300)
def test_of_any_numbers_of_ranks_a_group_reaches_as_many_domains_as_one_that_crosses_a_border(
    replicas: int, shards: int, tp: int, domain: int
) -> None:
    layout = Layout(engine="fsdp2", dp_replicate=replicas, dp_shard=shards, tp=tp)
    if layout.world_size % domain or domain >= layout.world_size:
        return
    for axis in ("dp_replicate", "dp_shard", "tp"):
        ranks = getattr(layout, axis)
        reached = {len({rank // domain for rank in group}) for group in axis_groups(layout, axis)}
        crossing = {count for count in reached if count > 1} or {1}
        assert round(ranks / ranks_inside(ranks, axis_stride(layout, axis), domain)) in crossing, axis


@pytest.mark.parametrize(
    ("ranks", "stride", "inside"), [(3, 1, 1.5), (6, 1, 3), (8, 3, 8 / 3), (4, 6, 4 / 3), (24, 1, 8), (2, 4, 2)]
)
def test_ranks_inside_a_node_of_eight_of_twenty_four(ranks: int, stride: int, inside: float) -> None:
    assert ranks_inside(ranks, stride, 8) == pytest.approx(inside)


# -- pipelines -----------------------------------------------------------------------------------------------------
def piped(schedule: str, **fields: int) -> Case:
    layout = Layout(engine="torchtitan", pp=4, dp_shard=2, grad_accum=8, pp_schedule=schedule, **fields)  # type: ignore[arg-type]
    model = msgspec.structs.replace(TINY, layers=10)
    return Case(model, TrainingJob(), layout, presets.cluster("dgx-h100", nodes=1), presets.runtime("torchtitan"))


@pytest.mark.parametrize(("schedule", "first", "last"), [("1f1b", 0, 3), ("gpipe", 0, 3), ("zb-v", 0, 0)])
def test_a_folded_model_has_its_head_where_its_table_is(schedule: str, first: int, last: int) -> None:
    stages = piped(schedule, virtual_stages=2 if schedule == "zb-v" else 1).every_stage()

    assert [place for place, stage in enumerate(stages) if stage.first] == [first]
    assert [place for place, stage in enumerate(stages) if stage.last] == [last]
    assert [stage.place for stage in stages] == [0, 1, 2, 3]
    assert [sum(stage.layers) for stage in stages] == [3, 3, 2, 2]


# -- loading -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "beside_gpu", "beside_cpu"),
    [("full", 0, 32_768 * 4), ("qlora", 11_264 * 2, 32_768 * 2)],  # the table of 512 x 64; a matrix of 176 x 64
)
def test_a_gpu_is_given_shards_and_a_cpu_holds_one_whole_weight_beside_them(
    method: str, beside_gpu: int, beside_cpu: int
) -> None:
    cluster = presets.cluster("dgx-h100", nodes=1)
    on_cpu = msgspec.structs.replace(cluster, gpu=msgspec.structs.replace(cluster.gpu, name="cpu", kind="cpu"))
    job = TrainingJob(method=method, precision="fp32" if method == "full" else "bf16")  # type: ignore[arg-type]
    layout = Layout(engine="fsdp2", dp_shard=8, zero_stage=3)
    gpu, cpu = (
        fsdp2.ENGINE.load(Case(TINY, job, layout, where, presets.runtime("accelerate-fsdp2")))
        for where in (cluster, on_cpu)
    )

    assert gpu["temporaries"] == beside_gpu
    assert cpu["temporaries"] == beside_cpu
    assert gpu["params"] == cpu["params"] > 0


# -- autograd ------------------------------------------------------------------------------------------------------
def test_a_second_gradient_of_a_tensor_is_added_out_of_place() -> None:
    """Three are alive while the sum is made: both gradients, and the sum."""
    tape = Tape()
    x = tape.new(Size(fixed=8.0), needs_grad=True)
    y = tape.record(tape.new(Size(fixed=1.0), needs_grad=True), (), lambda grad: tape.grad_of(x))
    z = tape.new(Size(fixed=1.0), needs_grad=True)

    def to_both(grad: Storage) -> None:
        tape.grad_of(y)
        tape.grad_of(x)

    tape.record(z, (), to_both)
    tape.drop(x, y, z)

    tape.backward(z, Size(fixed=1.0))

    alive = [sum(size.fixed for size in moment.live) for moment in tape.moments if moment.phase == "backward"]
    assert max(alive) == 3 * 8
    assert tape.grads[x].size == Size(fixed=8.0)
    assert tape.grads.keys() == {x}


# -- files of others -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "theta"),
    [("llama-3-8b", 1e4), ("mixtral-8x7b", 1e6), ("gemma-3-1b", 1e6), ("gpt-oss-20b", 1.5e5), ("pythia-6.9b", 1e4)],
)
def test_a_config_without_a_rotary_base_has_the_one_that_transformers_takes(
    name: str, theta: float, tmp_path: Path
) -> None:
    config = config_dict(presets.model(name))
    for key in ("rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base", "rope_local_base_freq"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = read_config(tmp_path / "config.json")

    assert model.rope_theta == theta
    assert model.rope_theta_local == (1e4 if name == "gemma-3-1b" else None)


# -- calibration ---------------------------------------------------------------------------------------------------
def test_a_bands_ends_leave_a_fortieth_of_the_weight_on_each_side_and_it_is_never_narrower_than_it_may_be() -> None:
    """Measured over predicted in even steps from 0.5 to 2: of 101 equal weights 2.525 lie below each end, that is two
    whole ones and the half of a third before the middle of its own."""
    ratios = [(0.5 + 0.015 * step, 1.0) for step in range(101)]

    assert bands.ends(ratios, 0.05) == (0.53, 1.97)  # 0.5 + 0.015 x 2.025, and as much below 2
    assert bands.ends([(1.0, 1.0)] * 10, 0.05) == (0.95, 1.05)
    assert bands.quantile([(1.0, 1.0), (2.0, 3.0)], 0.5) == 1.75  # 2 of 4: between the middles at 0.5 and at 2.5

"""Bytes on the wire: what a reader checks by hand, and how a group's traffic splits over links."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask.question import Question, case_of
from planner.engines import engine_of
from planner.engines.base import Call
from planner.figures.comm import comm_volume, leaving_bytes, tier_seconds, traffic
from planner.figures.steptime import step_time
from planner.parallelism.collectives import all_reduce_bytes, gloo_reduce_scatter_bytes
from planner.spec import Cluster, Layout, Link, Lora, Tier, TrainingJob, presets
from planner.spec.calibration import LinkCurve, calibration

SMALL = presets.model("tiny")


def volume(layout: Layout, gpus: int = 32, model: str = "7b", cluster: str = "dgx-h100", **job: object):
    asked = Question(presets.model(model), presets.cluster(cluster, gpus), TrainingJob(**job), calibration())
    return comm_volume(case_of(asked, layout))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 32])
def test_an_all_reduce_sends_2_n_minus_1_over_n_of_its_bytes(ranks: int):
    assert all_reduce_bytes(1e9, ranks) == pytest.approx(2 * (ranks - 1) / ranks * 1e9)


def test_ddp_all_reduces_every_gradient_once_a_step_whatever_the_accumulation():
    once = volume(Layout(engine="ddp", dp_replicate=32), precision="pure-bf16")
    four = volume(Layout(engine="ddp", dp_replicate=32, grad_accum=4), precision="pure-bf16")

    assert once.all_reduce_bytes == four.all_reduce_bytes == 2 * 6_738_415_616
    assert once.wire_bytes_per_rank == pytest.approx(2 * 31 / 32 * 2 * 6_738_415_616)


def test_lora_gradients_of_llama_2_7b_are_8_4_mb_in_bf16_and_16_8_mb_as_peft_keeps_them():
    layout = Layout(engine="ddp", dp_replicate=32)
    narrow, peft = Lora(upcast_adapters=False), Lora()

    assert volume(layout, method="lora", lora=narrow, precision="pure-bf16").all_reduce_bytes == 8_388_608
    assert volume(layout, method="lora", lora=peft, precision="pure-bf16").all_reduce_bytes == 16_777_216


def test_two_levels_send_the_same_bytes_and_a_gth_of_an_all_reduce_leaves_the_node():
    """4 nodes of 8: inside 2 x 7/8 S, between nodes 2 x 3/4 S/8."""
    one = volume(Layout(engine="ddp", dp_replicate=32), precision="pure-bf16")
    size = one.all_reduce_bytes

    assert one.inter_node_bytes_per_rank == pytest.approx(2 * 3 / 4 * size / 8)
    assert one.wire_bytes_per_rank - one.inter_node_bytes_per_rank == pytest.approx(2 * 7 / 8 * size)


def test_one_node_sends_nothing_to_others():
    one = volume(Layout(engine="fsdp2", dp_shard=8, zero_stage=3), gpus=8)

    assert one.wire_bytes_per_rank > 0
    assert one.inter_node_bytes_per_rank == 0
    assert {call.link for call in one.engine} == {"NVLink 4"}


def test_hsdp_with_shards_inside_nodes_sends_only_shards_between_them():
    one = volume(Layout(engine="fsdp2", dp_replicate=4, dp_shard=8, zero_stage=3))
    links = {call.group: call.link for call in one.engine}
    reduced = sum(call.wire_bytes_per_rank for call in one.engine if call.op == "all_reduce")

    assert links == {"dp_shard": "NVLink 4", "dp_replicate": "InfiniBand NDR"}
    assert one.inter_node_bytes_per_rank == pytest.approx(reduced)


def test_gloo_reduce_scatter_moves_all_reduce_bytes():
    layout = Layout(engine="fsdp2", dp_shard=4, zero_stage=3)
    on_cpu = volume(layout, gpus=4, model="tiny", cluster="localhost", precision="fp32")
    scattered = [call for call in on_cpu.engine if call.op == "reduce_scatter"]

    assert scattered
    for call in scattered:
        assert call.wire_bytes_per_rank == pytest.approx(gloo_reduce_scatter_bytes(call.payload_bytes, 4))
        assert call.wire_bytes_per_rank == pytest.approx(1.5 * call.payload_bytes)


def test_the_ideal_of_zero_3_is_three_times_the_model_a_micro_batch():
    one = volume(Layout(engine="fsdp2", dp_shard=32, zero_stage=3), precision="pure-bf16")

    assert sum(call.payload_bytes for call in one.ideal) == pytest.approx(3 * 2 * 6_738_415_616)
    assert one.ideal_wire_bytes_per_rank == pytest.approx(31 / 32 * 3 * 2 * 6_738_415_616)


def test_a_group_of_one_rank_is_left_out():
    assert volume(Layout(engine="ddp"), gpus=1).engine == ()


def test_every_collective_of_every_engine_has_a_join_key_of_its_own():
    for layout in (Layout(engine="ddp", dp_replicate=32),
                   Layout(engine="fsdp2", dp_replicate=4, dp_shard=8, zero_stage=3),
                   *(Layout(engine="deepspeed", dp_shard=32, zero_stage=stage) for stage in (1, 2, 3))):  # fmt: skip
        keys = [call.key for call in volume(layout).engine]
        assert len(keys) == len(set(keys)), layout


def test_intra_and_inter_node_bytes_add_up_for_every_call():
    asked = Question(SMALL, presets.cluster("dgx-h100", 32), TrainingJob(seq_len=256), calibration())
    case = case_of(asked, Layout(engine="fsdp2", dp_replicate=2, dp_shard=16, zero_stage=3))
    for call in traffic(case, engine_of("fsdp2").collectives(case)):
        inside = call.wire_bytes - call.inter_bytes
        assert inside >= 0
        assert call.inter_bytes > 0


# --- more than two tiers -----------------------------------------------------------------------------------------

THREE = Cluster(
    name="two pods of two racks of two nodes of four",
    gpu=presets.gpu("h100"),
    nodes=8,
    gpus_per_node=4,
    intra_link=Link(name="in", bytes_per_s_per_direction=400e9, latency_s=1e-6),
    inter_link=Link(name="spine", bytes_per_s_per_direction=5e9, latency_s=10e-6),
    tiers=(
        Tier(name="pod", gpus=16, link=Link(name="leaf", bytes_per_s_per_direction=20e9, latency_s=5e-6)),
        Tier(name="rack", gpus=8, link=Link(name="rack", bytes_per_s_per_direction=100e9, latency_s=2e-6)),
    ),
)


def sent_by(layout: Layout, cluster: Cluster = THREE):
    asked = Question(SMALL, cluster, TrainingJob(seq_len=256, precision="pure-bf16"), calibration())
    case = case_of(asked, layout)
    return case, traffic(case, engine_of(layout.engine).collectives(case))


def test_an_all_reduce_over_four_tiers_sends_a_part_over_each():
    """32 = 4 x 2 x 2 x 2: 2 x 3/4 S in the node, then 2 x 1/2 of S/4, S/8 and S/16 over rack, pod and spine."""
    case, calls = sent_by(Layout(engine="ddp", dp_replicate=32))
    for call in calls:
        size = call.payload_bytes
        assert call.inside == (4, 8, 16)
        assert call.wire_bytes == pytest.approx(2 * 31 / 32 * size)
        assert call.leaving == pytest.approx((2 * 7 / 8 * size / 4, 2 * 3 / 4 * size / 8, 2 * 1 / 2 * size / 16))
        assert call.inter_bytes == call.leaving[0]
        alone = [
            call.wire_bytes - call.leaving[0],
            call.leaving[0] - call.leaving[1],
            call.leaving[1] - call.leaving[2],
        ]
        assert alone == pytest.approx([2 * 3 / 4 * size, 2 * 1 / 2 * size / 4, 2 * 1 / 2 * size / 8])
    assert {one.link for one in comm_volume(case).engine} == {"spine"}


def plain(cluster: Cluster, share: float, half_bytes: float = 0.0) -> list[LinkCurve]:
    """Every tier at this share of its rate and at its own latency."""
    return [LinkCurve(share=share, half_bytes=half_bytes) for _ in cluster.levels]


def test_time_over_four_tiers_is_the_slowest_and_the_ring_steps_at_the_pace_of_the_widest():
    _, calls = sent_by(Layout(engine="ddp", dp_replicate=32))
    for call in calls:
        rates = (call.wire_bytes / 400e9, call.leaving[0] / 100e9, call.leaving[1] / 20e9, call.leaving[2] / 5e9)
        expected = max(rates) / 0.5 + 2 * call.count * 31 * 10e-6

        assert tier_seconds(call, THREE.levels, plain(THREE, 0.5)) == pytest.approx(expected)


def test_a_group_uses_only_the_tiers_it_crosses():
    """Shards of 8 fill a rack; the four replicas of each shard stand one to a rack."""
    case, calls = sent_by(Layout(engine="fsdp2", dp_replicate=4, dp_shard=8, zero_stage=3))
    links = {one.group: one.link for one in comm_volume(case).engine}

    assert links == {"dp_shard": "rack", "dp_replicate": "spine"}
    for call in calls:
        if call.axis == "dp_shard":
            assert call.inside == (4, 8, 8)
            assert call.leaving[1:] == (0, 0)
            assert tier_seconds(call, THREE.levels, plain(THREE, 1.0)) == pytest.approx(
                max(call.wire_bytes / 400e9, call.leaving[0] / 100e9) + call.count * 7 * 2e-6
            )
        else:
            assert call.inside == (1, 1, 2)
            assert call.leaving[:2] == (call.wire_bytes, call.wire_bytes)
            assert tier_seconds(call, THREE.levels, plain(THREE, 1.0)) == pytest.approx(
                max(call.wire_bytes / 20e9, call.leaving[2] / 5e9) + 2 * call.count * 3 * 10e-6
            )


def test_a_group_of_72_stays_in_the_nvlink_domain_and_one_of_144_does_not():
    rack, two = presets.cluster("gb200-nvl72"), presets.cluster("gb200-nvl72", 144)
    inside, calls = sent_by(Layout(engine="fsdp2", dp_shard=72, zero_stage=3), rack)
    hybrid, _ = sent_by(Layout(engine="fsdp2", dp_replicate=2, dp_shard=72, zero_stage=3), two)
    outside, _ = sent_by(Layout(engine="fsdp2", dp_shard=144, zero_stage=3), two)

    assert {one.link for one in comm_volume(inside).engine} == {"NVLink 5"}
    assert comm_volume(inside).inter_node_bytes_per_rank == 0 < comm_volume(inside).wire_bytes_per_rank
    assert all(
        tier_seconds(call, rack.levels, plain(rack, 1.0)) < call.wire_bytes / 500e9 + call.count * 1e-3
        for call in calls
    )
    assert {one.group: one.link for one in comm_volume(hybrid).engine} == {
        "dp_shard": "NVLink 5",
        "dp_replicate": "InfiniBand NDR",
    }
    assert {one.link for one in comm_volume(outside).engine} == {"InfiniBand NDR"}


def test_ranks_beside_each_other_send_through_their_own_share_of_the_cards():
    """Replicas outside, 8 shards inside: each rank's ring leaves through that rank's own card, and the same bytes in
    one ring over all ranks leave in eighths."""
    apart, _ = sent_by(Layout(engine="fsdp2", dp_replicate=4, dp_shard=8, zero_stage=3), presets.cluster("dgx-h100"))
    shards = {one.group: one for one in comm_volume(apart).engine}
    _, calls = sent_by(Layout(engine="ddp", dp_replicate=32), presets.cluster("dgx-h100"))

    assert comm_volume(apart).inter_node_bytes_per_rank == pytest.approx(
        sum(one.wire_bytes_per_rank for one in comm_volume(apart).engine if one.group == "dp_replicate")
    )
    assert shards["dp_replicate"].link == "InfiniBand NDR"
    for call in calls:
        assert call.leaving[0] == pytest.approx(2 * 3 / 4 * call.payload_bytes / 8)


def test_what_goes_to_single_peers_is_not_gathered_first():
    """8 ranks, 4 to a domain: each sends 7/8 of its tensor, 4/8 of it to the other domain."""
    assert leaving_bytes("all_to_all", "nccl", 8e9, 8, 4) == pytest.approx(4e9)
    assert leaving_bytes("all_to_all", "nccl", 8e9, 8, 8) == 0
    assert leaving_bytes("all_gather", "nccl", 8e9, 8, 4) == pytest.approx(1e9)


def test_a_chain_sends_everything_over_the_border_of_the_widest_tier_in_one_hop():
    """A ring of 16 in a pod of two racks: neighbours at the border hand all of it over the leaf."""
    asked = Question(SMALL, THREE, TrainingJob(seq_len=256), calibration())
    case = case_of(asked, Layout(engine="fsdp2", dp_replicate=2, dp_shard=16, zero_stage=3))
    (call,) = traffic(case, [Call("send", "dp_shard", "layer", "forward", 30, 6e9)])

    assert (call.inside, call.wire_bytes, call.leaving) == ((4, 8, 16), 6e9, (6e9, 6e9, 0))
    assert tier_seconds(call, THREE.levels, plain(THREE, 1.0)) == pytest.approx(6e9 / 20e9 + 30 * 5e-6)


@pytest.mark.parametrize("name", ["frontier", "gb200-nvl72", "llama-3-24k"])
def test_columns_and_numbers_agree_on_any_number_of_tiers(name: str):
    import numpy as np

    cluster = presets.cluster(name, nodes=1152)
    asked = Question(SMALL, cluster, TrainingJob(seq_len=256), calibration())
    shards = [shard for shard in range(2, cluster.gpus) if cluster.gpus % shard == 0]
    replicas = [cluster.gpus // shard for shard in shards]
    template = Layout(engine="fsdp2", zero_stage=3)
    column = msgspec.structs.replace(
        template, dp_replicate=np.array(replicas, dtype=float), dp_shard=np.array(shards, dtype=float)
    )

    times = step_time(case_of(asked, column), asked.calibration)

    assert len(cluster.levels) == {"frontier": 3, "gb200-nvl72": 2, "llama-3-24k": 3}[name]
    for place, (replica, shard) in enumerate(zip(replicas, shards, strict=True)):
        one = step_time(
            case_of(asked, msgspec.structs.replace(template, dp_replicate=replica, dp_shard=shard)), asked.calibration
        )
        assert times.comm_s[place] == pytest.approx(one.comm_s, rel=1e-12)
        assert times.step_s[place] == pytest.approx(one.step_s, rel=1e-12)

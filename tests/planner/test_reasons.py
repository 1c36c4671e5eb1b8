"""Reasons: each is said where its figures call for it, with those figures, and not where they do not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from planner.ask.options import question
from planner.ask.question import Question, limit_bytes
from planner.basics import command
from planner.basics.quantities import format_bytes, format_seconds, format_volume
from planner.cli import planner
from planner.decide.answers import Answer, Estimate
from planner.decide.reasons import RULES, reasons_of
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.figures.comm import comm_volume
from planner.figures.memory import memory_breakdown
from planner.figures.steptime import step_time
from planner.parallelism.case import Case
from planner.spec.plan import Collective

RULE = "shard_inside_nodes_when_the_network_is_slow"
SLOW = {"cluster": "pcie-8x4090", "gpus": "32"}
"""Four nodes whose eight GPUs share one 25 GbE card."""


def asked(**given: object) -> Question:
    return question({"model": "7b", "gpus": "32", **given})


def said(found: Answer) -> dict[str, str]:
    return {reason.reason: reason.text for reason in reasons_of(found)}


def told(**given: object) -> dict[str, str]:
    """What is said of a question's best layout, by reason."""
    return said(answer(asked(**given)))


def best(**given: object) -> Estimate:
    found = answer(asked(**given))
    return found.estimates[found.recommended or 0]


def changed(one: Estimate, **fields: Any) -> Case:
    """The estimate's case with another layout."""
    return replace(one.case, layout=msgspec.structs.replace(one.case.layout, **fields))


def alone(one: Estimate, found: Answer) -> dict[str, str]:
    """What is said when this one is the answer."""
    return said(Answer(question=found.question, estimates=(one,), recommended=0))


# -- what limits ---------------------------------------------------------------------------------------------------


def test_compute_limits_a_fast_cluster_and_communication_a_slow_one():
    fast, slow = best(), best(model="1b", **SLOW, dp_shard="32", micro_batch_size="1")

    assert told()["what_limits"].startswith(
        f"What limits the step is compute, {fast.time.compute_s / fast.time.step_s:.1%} of "
        f"{format_seconds(fast.time.step_s)};"
    )
    share = slow.time.exposed_comm_s / slow.time.step_s
    assert share > 0.8
    assert f"communication that nothing hides, {share:.1%}" in told(
        model="1b", **SLOW, dp_shard="32", micro_batch_size="1"
    )["what_limits"]  # fmt: skip


def test_memory_limits_when_nothing_fits_and_the_layout_that_needs_least_is_named():
    found = answer(asked(model="70b", gpus="8", method="full", offload_optimizer=False))
    least = min(found.estimates, key=lambda one: one.memory.device_bytes)
    term, size = max(least.memory.peak.terms.items(), key=lambda pair: pair[1])
    text = said(found)["what_limits"]

    assert text.startswith(f"Memory limits: {least.strategy} needs least, {format_bytes(least.memory.device_bytes)}")
    assert f"{term}, {format_bytes(size)}" in text


def test_nothing_is_said_to_limit_a_step_of_unknown_time():
    known = asked(model="1b", gpus="8")
    gpu = msgspec.structs.replace(known.cluster.gpu, flops_per_s={})
    unknown = msgspec.structs.replace(known, cluster=msgspec.structs.replace(known.cluster, gpu=gpu))
    names = set(said(answer(unknown)))

    assert "what_limits" in said(answer(known))
    assert names.isdisjoint({"what_limits", "more_nodes_stop_helping", RULE})
    assert "memory_limits_the_micro_batch" in names


def test_the_next_micro_batch_that_does_not_fit_is_told_with_its_largest_term():
    one = best()
    memory = memory_breakdown(changed(one, micro_batch_size=2 * one.case.layout.micro_batch_size))
    text = told()["memory_limits_the_micro_batch"]
    usable = limit_bytes(asked(), one.case)

    assert usable < one.case.cluster.gpu.memory_bytes
    assert f"{format_bytes(memory.device_bytes)} on a card of which {format_bytes(usable)}" in text
    assert f"activations, {format_bytes(memory.peak.terms['activations'])}" in text


def test_memory_does_not_limit_a_micro_batch_that_could_grow_or_was_fixed():
    assert "memory_limits_the_micro_batch" not in told(model="1b", global_batch_size="32")
    assert "memory_limits_the_micro_batch" not in told(micro_batch_size="4")


def test_logits_dominate_a_small_model_with_many_words_and_not_a_large_one_with_few():
    one = best(model="1b")
    text = told(model="1b")["logits_dominate"]

    assert f"{format_bytes(one.memory.peak.terms['logits'])} of {format_bytes(one.memory.peak.total)}" in text
    assert "a vocabulary of 128,256" in text
    assert "logits_dominate" not in told(model="7b")


# -- what is sharded -----------------------------------------------------------------------------------------------


def test_ddp_that_fits_needs_no_sharding_and_sends_twice_the_gradients_once():
    one = best(model="1b", gpus="8", strategy="ddp")
    text = told(model="1b", gpus="8", strategy="ddp")["ddp_when_it_fits"]
    gradients = 4 * one.case.total()

    assert text.startswith(f"DDP fits, {format_bytes(one.memory.device_bytes)} on a card of")
    assert f"{format_volume(gradients)}, and sends twice that" in text
    assert format_volume(2 * gradients * 7 / 8) in text


def test_ddp_that_fits_beside_a_faster_sharded_layout_is_told_with_what_sharding_gains():
    found = answer(asked(model="1b", gpus="16"))
    fastest, ddp = found.estimates[found.recommended], found.estimates[0]
    text = said(found)["ddp_when_it_fits"]

    assert ddp.strategy == "ddp" and fastest.case.layout.dp_shard == 16
    assert f"DDP fits too, {format_bytes(ddp.memory.device_bytes)}" in text
    assert f"{fastest.throughput.tokens_per_s / ddp.throughput.tokens_per_s:.2f} times" in text
    assert "8 sequences a pass instead of 4" in text


def test_ddp_is_not_praised_where_it_does_not_fit_or_there_is_one_gpu():
    assert "ddp_when_it_fits" not in told()
    assert "ddp_when_it_fits" not in told(model="1b", gpus="1", gpus_per_node="1")


def test_lora_under_ddp_comes_before_sharding_where_the_base_fits_whole():
    found = answer(asked(lora_upcast=False))
    lora = next(one for one in found.estimates if one.strategy == "lora")
    fsdp = found.estimates[found.recommended]
    text = said(found)["lora_before_sharding"]

    assert format_bytes(lora.memory.device_bytes) in text
    assert (
        f"{format_volume(lora.comm.wire_bytes_per_rank)} a GPU and step instead of "
        f"{format_volume(fsdp.comm.wire_bytes_per_rank)}" in text
    )


def test_lora_under_ddp_says_what_fsdp_would_gather():
    given = {"method": "lora", "dp_replicate": "32"}
    one = best(**given)
    gathered = best(method="lora", dp_shard="32").comm.wire_bytes_per_rank

    assert format_volume(one.comm.wire_bytes_per_rank) in told(**given)["lora_before_sharding"]
    assert f"FSDP would gather the base, {format_volume(gathered)}." in told(**given)["lora_before_sharding"]


def test_lora_is_not_told_to_stay_whole_where_its_base_does_not_fit_or_nothing_is_sharded():
    assert "lora_before_sharding" not in told(model="70b", gpus="64")
    assert "lora_before_sharding" not in told(model="1b", gpus="8", strategy="ddp")


def test_recomputation_costs_a_third_of_the_compute_less_the_head_and_saves_the_activations():
    given = {"model": "70b", "gpus": "64", "seq_len": "4096"}
    one = best(**given)
    kept = memory_breakdown(changed(one, recompute="none")).device_bytes
    text = told(**given)["recompute_costs"]

    without = step_time(changed(one, recompute="none"), asked(**given).calibration)
    extra = float(one.time.compute_s / without.compute_s) - 1
    assert 0.30 < extra < 1 / 3
    assert text.startswith(
        f"Recomputing every layer adds {extra:.1%} to the compute, for a step of {format_seconds(one.time.step_s)} "
        f"instead of {format_seconds(without.step_s)}, and saves "
        f"{format_bytes(kept - one.memory.device_bytes)} on the card:"
    )
    assert f"{format_bytes(kept)} on the card would be needed, more than" in text
    assert "recompute_costs" not in told()


def test_recomputation_that_saves_nothing_is_told_to():
    """D16: "saves 0 B"."""
    given = {"model": "1b", "gpus": "8", "dp_shard": "8", "micro_batch_size": "1", "seq_len": "128"}
    one, without = best(**given, recompute="full"), best(**given)
    text = told(**given, recompute="full")["recompute_costs"]

    assert one.memory.device_bytes == without.memory.device_bytes
    assert ", and saves no memory: without it" in text and text.endswith("which fits.")


# -- the network ---------------------------------------------------------------------------------------------------


def test_one_node_that_would_hold_it_is_told_with_what_several_send_and_give():
    given = {"model": "1b", **SLOW, "dp_shard": "32", "micro_batch_size": "1"}
    several = best(**given)
    one = best(model="1b", cluster="pcie-8x4090", gpus="8", dp_shard="8", micro_batch_size="1")
    text = told(**given)["one_node_before_several"]

    assert text.startswith(
        f"One node would hold it, {format_bytes(one.memory.device_bytes)} on the card of each of 8 GPUs:"
    )
    assert "4 nodes are no gain" in text
    assert f"{format_volume(several.comm.inter_node_bytes_per_rank)} a GPU and step over 25 GbE" in text
    assert f"{several.throughput.tokens_per_s / one.throughput.tokens_per_s:.2f} times one node's tokens/s" in text
    assert "4 nodes are for speed" in told()["one_node_before_several"]


def test_one_node_is_not_told_of_where_it_is_too_small_or_alone():
    assert "one_node_before_several" not in told(model="70b", gpus="64")
    assert "one_node_before_several" not in told(model="1b", gpus="8")


def test_hsdp_is_told_of_where_gathers_between_nodes_are_waited_for():
    given = {"model": "1b", **SLOW, "micro_batch_size": "1"}
    flat, inside = best(**given, dp_shard="32"), best(**given, dp_shard="8")
    text = told(**given, dp_shard="32")[RULE]

    assert f"{flat.time.exposed_comm_s / flat.time.step_s:.1%}" in text
    assert (
        f"{format_volume(inside.comm.inter_node_bytes_per_rank)} a GPU between nodes instead of "
        f"{format_volume(flat.comm.inter_node_bytes_per_rank)}" in text
    )
    assert f"{format_seconds(inside.time.step_s)} instead of {format_seconds(flat.time.step_s)}" in text


def test_hsdp_says_what_it_spares():
    given = {"model": "1b", **SLOW, "micro_batch_size": "1"}
    flat, inside = best(**given, dp_shard="32"), best(**given, dp_shard="8")

    assert told(**given, dp_shard="8")[RULE].endswith(
        f"{format_seconds(inside.time.exposed_comm_s)} are waited for instead of "
        f"{format_seconds(flat.time.exposed_comm_s)}."
    )


def test_secondary_shards_are_told_of_where_hsdp_does_not_fit():
    given = {"model": "13b", **SLOW, "dp_shard": "32", "micro_batch_size": "1", "recompute": "full"}
    one, text = best(**given), told(**given)[RULE]
    hsdp = memory_breakdown(changed(one, dp_shard=8, dp_replicate=4))

    assert one.fits
    assert f"HSDP inside nodes does not fit ({format_bytes(hsdp.device_bytes)} on the card)" in text
    assert "hpZ) would serve backward's gathers inside nodes, 50% of all gathers, for a copy of " in text
    assert format_bytes(2 * one.case.total() / 8) in text


def test_no_hsdp_is_told_of_where_tensor_groups_fill_the_node():
    """ "HSDP inside nodes does not fit (993.27 GiB)" of a layout whose shards inside a node would be one."""
    given = {"model": "405b", "gpus": "128", "runtime": "torchtitan", "tp": "8", "dp_shard": "16", "recompute": "full"}
    text = told(**given, seq_len="8192")[RULE]

    assert text.startswith("The network is slow for this:") and "HSDP" not in text and "hpZ" not in text


def test_secondary_shards_that_do_not_fit_are_not_advised():
    """A copy of 131 GiB was advised on cards of 24."""
    one = best(model="70b", gpu="rtx-4090-24gb", gpus="64", strategy="fsdp", offload_optimizer=False)

    assert not one.fits
    assert "hpZ" not in told(model="70b", gpu="rtx-4090-24gb", gpus="64", strategy="fsdp", offload_optimizer=False).get(
        RULE, ""
    )


def test_a_fast_network_one_node_or_whole_replicas_need_no_other_sharding():
    assert RULE not in told()
    assert RULE not in told(model="1b", gpus="8", dp_shard="8", micro_batch_size="1")
    assert RULE not in told(model="1b", **SLOW, dp_replicate="32", micro_batch_size="1")


def test_more_nodes_stop_helping_where_the_network_takes_what_they_add():
    given = {"model": "1b", "dp_shard": "8", "micro_batch_size": "1", "cluster": "pcie-8x4090"}
    one, two = best(**given, gpus="8"), best(**{**given, "dp_shard": "16"}, gpus="16")
    gain = two.throughput.tokens_per_s / one.throughput.tokens_per_s
    text = told(**given, gpus="8")["more_nodes_stop_helping"]

    assert gain < 1.6
    assert f"2 instead of 1 would give {gain:.2f} times the tokens/s" in text
    assert f"{two.time.exposed_comm_s / two.time.step_s:.1%} of the step waiting" in text
    assert f"(now {one.time.exposed_comm_s / one.time.step_s:.1%})" in text


def test_more_nodes_stop_helping_where_the_batch_leaves_them_nothing_to_do():
    text = told(gpus="64", global_batch_size="64")["more_nodes_stop_helping"]

    assert "a global batch of 64 gives each of 64 data-parallel ranks 1 sequence," in text


def test_more_nodes_help_on_a_fast_network_with_work_to_share():
    assert "more_nodes_stop_helping" not in told()
    assert "more_nodes_stop_helping" not in told(global_batch_size="512")


# -- tensor and pipeline parallelism, experts ----------------------------------------------------------------------


def tensor_parallel(tp: int) -> tuple[Estimate, Answer]:
    found = answer(asked(gpus="64"))
    one = found.estimates[1]
    sent = Collective(
        op="all_reduce", group="tp", ranks=tp, unit="layer", phase="forward", count=64, payload_bytes=1e9,
        wire_bytes_per_rank=12.5e9,
    )  # fmt: skip
    case = changed(one, dp_shard=64 // tp, tp=tp)
    return msgspec.structs.replace(one, case=case, comm=msgspec.structs.replace(one.comm, engine=(sent,))), found


def test_tensor_parallelism_stays_inside_the_node_with_its_bytes_on_the_fast_link():
    text = alone(*tensor_parallel(8))["tensor_parallel_inside_the_node"]

    assert text == (
        "Tensor parallelism stays inside the node: tp=8 keeps 12.50 GB a GPU and step on NVLink 4, "
        "9 times as fast as InfiniBand NDR."
    )


def test_tensor_parallelism_that_leaves_the_node_is_told_the_size_that_does_not():
    text = alone(*tensor_parallel(16))["tensor_parallel_inside_the_node"]

    assert "tp=16 on nodes of 8" in text
    assert text.endswith("Use tp=8 or less.")
    assert "tensor_parallel_inside_the_node" not in told()


def test_an_nvlink_rack_is_where_tensor_parallelism_and_the_first_nodes_stay():
    found = answer(asked(model="8b", cluster="gb200-nvl72", gpus="144", dp_shard="144", micro_batch_size="1"))
    one = found.estimates[0]
    wide = msgspec.structs.replace(one, case=changed(one, dp_shard=18, tp=8))
    text = said(found)["one_node_before_several"]

    assert alone(wide, found)["tensor_parallel_inside_the_node"].startswith(
        "Tensor parallelism stays inside the NVLink rack: tp=8 "
    )
    assert text.startswith("One NVLink rack would hold it,")
    assert "on the card of each of 72 GPUs: 2 NVLink racks are" in text
    rack = answer(asked(model="8b", cluster="gb200-nvl72", gpus="72", dp_shard="72", micro_batch_size="1"))
    assert said(rack).keys().isdisjoint({"one_node_before_several", RULE})


PIPED = {"model": "8b", "gpus": "32", "dp_shard": "8", "pp": "4", "runtime": "megatron", "micro_batch_size": "2"}


def test_a_pipeline_s_slowest_stage_is_named_apart_from_the_ramp_that_more_micro_batches_shorten():
    given = PIPED | {"grad_accum": "8"}
    time, twice = best(**given).time, best(**PIPED, grad_accum="16").time
    waits = float(time.bubble_s) - time.ramp_s

    assert time.slowest_stage == 3  # it has the head
    assert waits > 0.01 * time.step_s
    assert told(**given)["pipeline_bubble"] == (
        f"Stage 3 of the pipeline's 4 is the slowest: the first waits for it {format_seconds(waits)} of a step of "
        f"{format_seconds(time.step_s)}, {waits / time.step_s:.1%}, which more micro-batches do not shorten. Even the "
        f"slowest stands idle for {time.ramp_s / time.step_s:.1%} of the step, in the ramp and for sends, with 8 "
        f"micro-batches; 16 would make it {twice.ramp_s / twice.step_s:.1%}."
    )
    assert twice.ramp_s == pytest.approx(time.ramp_s, rel=0.05)
    assert "pipeline_bubble" not in told()


def test_a_pipeline_whose_first_stage_is_the_slowest_only_has_a_ramp():
    given = PIPED | {"grad_accum": "8", "stage_layers": "11,7,7,7"}
    time = best(**given).time

    assert (time.slowest_stage, float(time.bubble_s)) == (0, pytest.approx(time.ramp_s))
    assert told(**given)["pipeline_bubble"].startswith(
        f"The pipeline of 4 stages stands idle for {time.ramp_s / time.step_s:.1%} of the step"
    )


def test_a_fixed_global_batch_has_more_micro_batches_only_if_they_are_smaller():
    given = PIPED | {"grad_accum": "8", "global_batch_size": "128"}
    twice = best(**given | {"grad_accum": "16", "micro_batch_size": "1"}).time
    text = told(**given)["pipeline_bubble"]

    assert f"; 16 of 1 instead of 2 sequences would make it {twice.ramp_s / twice.step_s:.1%}." in text
    one_each = given | {"grad_accum": "16", "micro_batch_size": "1"}
    assert "would make it" not in told(**one_each)["pipeline_bubble"]


def test_the_wait_for_the_slowest_stage_is_what_limits_a_lopsided_pipeline():
    given = PIPED | {"grad_accum": "16", "stage_layers": "2,10,10,10"}
    time = best(**given).time
    waits = float(time.bubble_s) - time.ramp_s

    assert told(**given)["what_limits"].startswith(
        f"What limits the step is the wait for stage 3, the pipeline's slowest, {waits / time.step_s:.1%} of "
    )


def test_experts_padded_to_more_shards_than_there_are_experts_are_told_of():
    """mixtral on 64 GPUs under torchtitan: 16 shards need 116 GiB, 32 need 137 and 64 need 181."""
    given = {"model": "mixtral-8x7b", "gpus": "64", "runtime": "torchtitan"}
    few, many = (best(**given, dp_shard=shard, dp_replicate=copies) for shard, copies in (("8", "8"), ("64", "1")))
    rule = "experts_padded_to_the_shards"

    assert many.memory.device_bytes > 1.5 * few.memory.device_bytes
    assert (
        f"the weights of 8 experts are padded to 64 shards. With dp_shard=8 {format_bytes(few.memory.device_bytes)} "
        "on the card would be needed"
    ) in told(**given, dp_shard="64")[rule]
    assert rule not in told(**given, dp_shard="8", dp_replicate="8")
    assert rule not in told(model="7b", gpus="64", runtime="torchtitan", dp_shard="64")


# -- the batch -----------------------------------------------------------------------------------------------------


def test_layouts_with_other_global_batches_are_other_trainings():
    found = answer(asked(model="1b", gpus="16"))
    text = said(found)["a_changed_global_batch"]

    assert f"A step of {found.estimates[found.recommended].strategy} has a batch of 128, one of ddp of 64" in text
    assert "0.5 times the steps" in text
    assert "learning rate (now 0.0003)" in text


def test_one_global_batch_for_all_changes_nothing():
    assert "a_changed_global_batch" not in told(model="1b", gpus="16", global_batch_size="128")
    assert "a_changed_global_batch" not in told(dp_shard="32")


def test_accumulation_saves_memory_and_costs_the_time_that_it_costs():
    given = {"global_batch_size": "512"}
    found = recommend(asked(**given))
    one = found.estimates[0]
    layout = one.case.layout
    micro, accum = layout.micro_batch_size, layout.grad_accum
    assert accum > 1
    together = changed(one, micro_batch_size=16, grad_accum=1)
    text = said(found)["accumulation_saves_memory"]

    assert f"all 16 sequences of a rank at once instead of {accum} x {micro}" in text
    assert f"{format_bytes(memory_breakdown(together).device_bytes)} on the card would be needed, more than" in text
    at_once = step_time(together, found.question.calibration).step_s
    assert text.startswith(f"Accumulation saves memory and costs time, {one.time.step_s / at_once - 1:.1%}: ")
    assert text.endswith(f"for a step of {format_seconds(at_once)} instead of {format_seconds(one.time.step_s)}.")
    assert "accumulation_saves_memory" not in told()


# -- all of them ---------------------------------------------------------------------------------------------------


def test_every_rule_has_a_name_of_its_own_and_says_what_it_is_for():
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert all(rule.__doc__ for rule in RULES)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": "70b", "gpus": "64"},
        {"model": "405b", "gpus": "8"},
        {"model": "tiny", "cluster": "localhost", "gpus": "2"},
        {"gpus": "1", "gpus_per_node": "1", "model": "1b"},
        {**SLOW, "method": "lora"},
    ],
)
def test_reasons_are_told_in_the_order_of_the_rules_and_end_as_sentences(given):
    order = [rule.__name__ for rule in RULES]
    names = list(told(**given))

    assert names == sorted(names, key=order.index)
    assert all(text.endswith(".") and "None" not in text and "nan" not in text for text in told(**given).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["estimate", "recommend"])
def test_both_commands_tell_them_as_text_and_as_json(name, capsys):
    assert command.exit_code(planner, [name, "--model", "7b", "--gpus", "32", "--json"], name="planner") == 0
    reasons = json.loads(capsys.readouterr().out)["reasons"]
    assert command.exit_code(planner, [name, "--model", "7b", "--gpus", "32"], name="planner") == 0
    words = " ".join(capsys.readouterr().out.split())

    assert reasons[0]["reason"] == "what_limits"
    assert all(f"- {reason['text']}" in words for reason in reasons)


def test_what_is_asked_beside_the_answer_is_the_planner_s_own_prediction():
    """The figures of a layout one step away are those its own question would get."""
    given = {"model": "1b", **SLOW, "micro_batch_size": "1"}
    assert format_volume(comm_volume(best(**given, dp_shard="8").case).inter_node_bytes_per_rank) in told(
        **given, dp_shard="32"
    )[RULE]  # fmt: skip

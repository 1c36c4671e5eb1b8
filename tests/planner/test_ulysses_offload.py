"""Claims about Ulysses with states on hosts: what ZeRO over all ranks keeps and moves. Not here: real runs
(cluster/test_prediction.py)."""

from __future__ import annotations

import pytest

from planner.ask.options import question
from planner.ask.question import case_of, exact_layout
from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.figures.host import host_terms, offload_traffic, update_seconds
from planner.parallelism.case import Case
from planner.parallelism.rule import check


def asked(**options: str) -> Case:
    given = {"model": "qwen3-4b", "gpu": "h100-sxm-80gb", "gpus": "4", "gpus_per_node": "4", "method": "full"}
    found = question(given | {"seq_len": "8192", "micro_batch_size": "1", "grad_accum": "2"} | options)
    return case_of(found, exact_layout(found))


WEIGHTS = {"offload_optimizer": "true", "offload_params": "true"}


@pytest.mark.parametrize("shared", [("1", "4"), ("2", "2")])
@pytest.mark.parametrize(("stage", "where"), [("2", {"offload_optimizer": "true"}), ("3", WEIGHTS)])
def test_hosts_hold_and_move_what_they_do_for_as_many_data_parallel_ranks(
    stage: str, shared: tuple[str, str], where: dict[str, str]
):
    shards, cp = shared
    ulysses = asked(runtime="deepspeed-ulysses", zero_stage=stage, dp_shard=shards, cp=cp, **where)
    alone = asked(runtime="deepspeed-zero", zero_stage=stage, dp_shard="4", **where)
    check(ulysses, engine_of("deepspeed-ulysses").rules)

    assert host_terms(ulysses) == host_terms(alone)
    assert offload_traffic(ulysses) == offload_traffic(alone)
    assert update_seconds(ulysses) == update_seconds(alone) != 0


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"zero_stage": "2", "offload_optimizer": "true", "offload_params": "true"}, "at ZeRO stage 2"),
        ({"zero_stage": "3", "offload_optimizer": "true", "optimizer": "sgd"}, "has no sgd that runs on the host"),
        ({"zero_stage": "3", "offload_activations": "true"}, "keeps nothing in host memory"),
    ],
)
def test_what_zero_asks_of_offload_is_asked_of_ulysses(options: dict[str, str], rule: str):
    case = asked(runtime="deepspeed-ulysses", dp_shard="1", cp="4", **options)

    with pytest.raises(PlannerError, match=rule):
        check(case, engine_of("deepspeed-ulysses").rules)

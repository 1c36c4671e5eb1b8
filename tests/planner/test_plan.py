"""plan.json: what its hash covers, and what later versions may add."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask import options
from planner.basics.errors import PlannerError
from planner.decide.planning import plan_of
from planner.decide.strategies import answer
from planner.spec.plan import Plan, decode_plan, encode_plan, hash_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = answer(options.question({"model": "tiny", "gpus": "4", "cluster": "localhost", "dp_shard": "4"}))
    return plan_of(found.estimates[0])


def test_an_edited_number_is_refused(plan: Plan):
    raw = encode_plan(plan).replace(b'"dp_shard": 4', b'"dp_shard": 2')

    with pytest.raises(PlannerError, match="edited after it was made"):
        decode_plan(raw)


def test_a_plan_without_a_field_that_was_added_since_is_the_same_plan(plan: Plan):
    # As a version wrote it that did not know the field: it hashed what it wrote.
    raw = msgspec.json.decode(encode_plan(plan))
    del raw["layout"]["zero_secondary_shard"]
    raw["content_hash"] = hash_of(raw)

    assert decode_plan(msgspec.json.encode(raw)).layout == plan.layout


def test_reading_and_writing_again_keeps_the_hash(plan: Plan):
    once = decode_plan(encode_plan(plan))

    assert once.sealed().content_hash == plan.sealed().content_hash == once.content_hash

"""An engine is added by one record and what reads it: a patch, applied to a copy and asked there.

Not here: the engines there are (test_engine_records.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from patched import answers_of

ASKED = ("--model", "1b", "--gpus", "2")

ASK = f"""
import json
from scripts.fuzz import captured
from tui import inputs

asked = {ASKED!r}
print(json.dumps({{
    "recommend": captured(["recommend", *asked, "--runtime", "toy", "--json"])[1],
    "written": captured(["recommend", *asked, "--runtime", "toy", "-o", "plan.json"])[0],
    "groups": captured(["groups", "plan.json"])[:2],
    "why_not": captured(["recommend", *asked, "--why-not", "engine=toy,dp_shard=2"])[1],
    "split": captured(["recommend", *asked, "--runtime", "toy", "--tp", "2"])[2],
    "backends": captured(["backends", "--json"])[1],
    "presets": captured(["presets"])[1],
    "suggested": [one.shown for one in inputs.suggestions(inputs.MORE, "--runtime toy")],
}}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the project with the patch answers, in one process."""
    return answers_of("engine.patch", ASK, tmp_path_factory.mktemp("patched"))


def test_the_engine_is_searched_recommended_and_read_back_from_its_plan(answers):
    best = json.loads(answers["recommend"])["estimates"][0]

    assert (best["layout"]["engine"], best["layout"]["dp_replicate"]) == ("toy", 2)
    assert (answers["written"], answers["groups"][0]) == (0, 0) and "dp_replicate" in answers["groups"][1]


def test_the_engine_refuses_what_its_record_does_not_split_or_shard(answers):
    assert "DDP keeps the whole model on every rank" in answers["why_not"]
    assert answers["split"].startswith("error: tp=2: no layout of 2 GPUs has it")


def test_the_engine_is_listed_with_what_launches_it(answers):
    (toy,) = (one for one in json.loads(answers["backends"])["engines"] if one["engine"] == "toy")

    assert (toy["backend"], toy["splits"], toy["methods"]) == ("accelerate", ["data"], ["full", "lora", "qlora"])
    assert "toy" in answers["presets"].split()


def test_the_explorer_suggests_the_engines_runtime(answers):
    assert answers["suggested"] == ["toy"]

"""An engine is added by one record and what reads it: a patch, applied to a copy and asked there.

Not here: the engines there are (test_engine_records.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PATCH = PROJECT / "tests" / "patches" / "engine.patch"
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
    copy = tmp_path_factory.mktemp("patched")
    for package in ("planner", "executor", "tui", "presets", "scripts"):
        shutil.copytree(PROJECT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(PATCH)], cwd=copy, check=True, timeout=60)
    there = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-c", ASK], cwd=copy, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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

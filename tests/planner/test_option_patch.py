"""An option is added by one record and what reads it: a patch of five places, applied to a copy and asked there.

Not here: the options there are (test_options.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from patched import answers_of

OPTION, FIELD, SPARE = "--zero3-spare-elements", "zero3_spare_elements", 10**9
ZERO3 = ("--model", "1b", "--gpus", "2", "--runtime", "deepspeed", "--zero-stage", "3")

ASK = f"""
import json, sys
from pathlib import Path
from executor.measure.machine import this_machine
from executor.measure.matrix import cells
from scripts.fuzz import captured
from tui import inputs

zero3, spare = {ZERO3!r}, ({OPTION!r}, {str(SPARE)!r})
Path("ds.json").write_text(json.dumps({{
    "bf16": {{"enabled": True}}, "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {{"stage": 3, "stage3_spare": {SPARE}}},
}}))
Path("mine.toml").write_text('''[[cells]]
on = "cpu"
model = "tiny-llama"
layout = "zero3"
gpus = 2
{FIELD} = 5
''')
(cell,) = cells("mine.toml", this_machine("cpu"))
print(json.dumps({{
    "help": captured(["estimate", "--help-all"])[1],
    "refused": captured(["estimate", *zero3, spare[0], "-1"])[2],
    "foreign": captured(["estimate", "--model", "1b", "--gpus", "2", "--dp-replicate", "2", *spare])[2],
    "plain": captured(["recommend", *zero3, "--top", "1", "--json"])[1],
    "spared": captured(["recommend", *zero3, *spare, "--top", "1", "--json"])[1],
    "from": captured(["estimate", "--model", "1b", "--gpus", "2", "--from", "ds.json", "--json"])[1],
    "suggested": [one.shown for one in inputs.suggestions(inputs.MORE, "--zero3-sp")],
    "typed": inputs.given(inputs.typed({{"model": "1b"}}) | {{inputs.MORE: " ".join(spare)}})[{FIELD!r}],
    "cell": cell.estimate.case.layout.{FIELD},
}}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the project with the patch answers, in one process."""
    return answers_of("option.patch", ASK, tmp_path_factory.mktemp("patched"))


def resident_buckets(estimate: dict[str, Any]) -> float:
    """Bytes of buckets in the forward pass, whatever the micro-batch."""
    phases = {phase["phase"]: phase["terms"] for phase in estimate["memory"]["stages"][0]["phases"]}
    return phases["forward"]["buckets"]


def test_the_option_is_in_the_help(answers):
    assert OPTION in answers["help"]


def test_the_option_is_checked_for_its_range_and_its_engine(answers):
    assert f"{FIELD}=-1: must be a whole number from 0 to 1000000000000" in answers["refused"]
    assert f"{FIELD}={SPARE}: is a switch of deepspeed alone" in answers["foreign"]


def test_the_option_reaches_the_search_and_its_figures(answers):
    (plain,), (spared,) = (json.loads(answers[name])["estimates"] for name in ("plain", "spared"))

    assert (plain["layout"][FIELD], spared["layout"][FIELD]) == (0, SPARE)
    assert resident_buckets(spared) - resident_buckets(plain) == 2 * SPARE


def test_the_option_is_read_from_a_file(answers):
    asked = json.loads(answers["from"])

    assert [one["layout"][FIELD] for one in asked["estimates"]] == [SPARE]
    assert [one["keys"] for one in asked["from"]["understood"] if one["option"] == FIELD] == [
        ["zero_optimization.stage3_spare"]
    ]


def test_the_option_can_be_typed_into_the_explorer_and_written_into_a_matrix(answers):
    assert answers["suggested"] == [OPTION]
    assert answers["typed"] == str(SPARE)
    assert answers["cell"] == 5

"""Claims about configurations of published models: Transformers builds each with the parameters that were counted, and
those of planned families are read with as many.

Each row of published.jsonl names the public file or page that its sizes come from, and who states its parameters. Not
here: presets (tests/test_presets.py).
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from planner.inventory import parameters
from planner.spec.formats import FORMATS
from planner.spec.huggingface import spec_of

FILE = Path(__file__).parents[1] / "recorded" / "described" / "published.jsonl"
ROWS: dict[str, dict[str, Any]] = {row["id"]: row for row in map(msgspec.json.decode, FILE.read_bytes().splitlines())}
IN_CI = Random(7).sample(sorted(ROWS), 4)
PLANNED = sorted(name for name, row in ROWS.items() if row["config"]["model_type"] in FORMATS)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in IN_CI else pytest.mark.long) for one in sorted(ROWS)]
)
def test_a_published_configuration_builds_the_parameters_that_were_counted(name: str) -> None:
    row = ROWS[name]
    config = AutoConfig.for_model(**row["config"])
    sees = not {"vision_config", "audio_config"}.isdisjoint(row["config"])
    with torch.device("meta"):
        model = (AutoModelForMultimodalLM if sees else AutoModelForCausalLM).from_config(config)

    assert sum(weight.numel() for weight in model.parameters()) == row["built_parameters"]


@pytest.mark.parametrize("name", PLANNED)
def test_a_published_configuration_of_a_planned_family_is_read_with_its_parameters(name: str) -> None:
    row = ROWS[name]

    assert parameters(spec_of(row["config"], Path("config.json"), name)) == row["built_parameters"]


def test_every_published_configuration_says_where_it_is_from() -> None:
    for row in ROWS.values():
        assert row["source"].startswith("https://"), row["id"]
        assert row["parameters_source"].startswith("https://"), row["id"]
        assert row["stated_parameters"] > 0, row["id"]
    assert len({row["hub"] for row in ROWS.values()}) == len(ROWS)

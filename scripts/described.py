"""Makes the model presets that are described by their own code: `python scripts/described.py [ID ...]`.

Each row of tests/recorded/described/published.jsonl has a configuration, where it was published and who states its
parameters. For a row whose family is not written by hand this writes presets/models/ID.toml and, beside it, what
`executor import` says of the configuration, compressed. Without ids every row is made whose preset is not there.
"""

from __future__ import annotations

import argparse
import lzma
import tempfile
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import msgspec

from planner.basics.errors import PlannerError
from planner.inventory import parameters
from planner.spec.formats import FORMATS
from planner.spec.importing import read_described, run_import

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests" / "recorded" / "described" / "published.jsonl"
MODELS = ROOT / "presets" / "models"
MOST_BYTES = 30_000
"""Of a preset's file."""


def rows() -> dict[str, dict[str, Any]]:
    """Published configurations by id, of families that no branch describes."""
    found = map(msgspec.json.decode, ROWS.read_bytes().splitlines())
    return {row["id"]: row for row in found if row["config"]["model_type"] not in FORMATS}


def make(row: dict[str, Any]) -> str:
    """Write one preset, or nothing; a sentence that says what became of it."""
    name = row["id"]
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder) / "config.json", Path(folder) / "model.json"
        config.write_bytes(msgspec.json.encode(row["config"]))
        try:
            run_import(config, out, name, name, images=True)
        except PlannerError as error:
            return error.sentence
        raw, model = lzma.compress(out.read_bytes(), preset=9 | lzma.PRESET_EXTREME), read_described(out)
    if parameters(model) != row["built_parameters"]:
        return f"{name}: {parameters(model):,} parameters, and its module has {row['built_parameters']:,}"
    if len(raw) > MOST_BYTES:
        return f"{name}: {len(raw):,} bytes"
    (MODELS / f"{name}.json.xz").write_bytes(raw)
    (MODELS / f"{name}.toml").write_text(preset(row))
    return f"{name}: {len(raw):,} bytes"


def preset(row: dict[str, Any]) -> str:
    """The preset's file: the model's id on the Hub, its description, who says so. What its maker states of its
    parameters is there where it is the exact number."""
    exact = row["stated_parameters"] == row["built_parameters"]
    lines = [
        f"# {row['hub']}, by its own code (executor import).",
        f'described = "{row["id"]}.json.xz"',
        *([f"parameters = {row['built_parameters']:_}"] if exact else []),
        "",
        "[sources]",
        f'"*" = "https://huggingface.co/{row["hub"]}: {row["source"]}"',
        *([f'parameters = "{row["parameters_source"]}"'] if exact else []),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the presets that are asked for, and say what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ids", nargs="*", metavar="ID")
    known = rows()
    asked = parser.parse_args(arguments).ids
    wanted = asked or [one for one in known if not (MODELS / f"{one}.toml").exists()]
    with Pool() as pool:
        for sentence in pool.imap_unordered(make, (known[one] for one in wanted)):
            print(sentence, flush=True)


if __name__ == "__main__":
    main()

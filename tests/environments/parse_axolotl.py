"""What Axolotl makes of files, in an environment of its own: its schema with its checks, for the GPUs of the plans, and
what it derives of them for a model. One process for many folders, each with axolotl.yaml and the files beside it;
`parsed.json` beside them has a table for each.

Not here: what the files should say (test_parsed.py).

    .venvs/axolotl/bin/python tests/environments/parse_axolotl.py FOLDER
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import yaml
from axolotl.utils.config import normalize_config, prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from parsing import parse_all

RECIPE = "axolotl.yaml"
NOT_IN_A_FILE = {"datasets": [{"path": "planned", "type": "alpaca"}]}
"""What a file of a plan leaves to a person."""
H100 = {"bf16": True, "fp8": True, "tf32": True, "compute_capability": "sm_90"}


def parsed(folder: Path) -> dict[str, Any]:
    """One folder's file."""
    os.chdir(folder)
    processes = int(Path("processes").read_text()) if Path("processes").exists() else 1
    os.environ["WORLD_SIZE"] = str(processes)
    table = yaml.safe_load(Path(RECIPE).read_text())
    if Path("model").is_dir():
        table |= NOT_IN_A_FILE | {"base_model": str(folder / "model")}
    config = DictDefault(table)
    prepare_plugins(config)
    torch_version = torch.__version__.partition("+")[0]
    found = validate_config(config, H100 | {"n_gpu": processes}, {"torch_version": torch_version})
    answer = found.to_dict()
    if Path("model").is_dir():
        normalize_config(found)
        names = ("batch_size", "torch_dtype", "deepspeed", "ddp", "gradient_checkpointing_kwargs")
        answer["derived"] = {name: found[name] for name in names}
    return answer


if __name__ == "__main__":
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    parse_all(parsed)

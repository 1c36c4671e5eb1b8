"""Other training programs that train a plan from their own files: TRL, Axolotl, LLaMA-Factory. One record each of how a
rank starts it, what its file says of a run beside the plan, and what it lacks.

Sources: TRL 1.14.2 (trl/scripts/sft.py), Axolotl 0.18.0 (067b021, src/axolotl/cli/train.py; its `accelerate launch -m
axolotl.cli.train FILE` starts the same), LLaMA-Factory 0.9.5 (src/llamafactory/launcher.py: `llamafactory-cli
train` starts torchrun, which starts that module once a rank). Not here: their files of a plan
(tool_backend.py), or running one (executor/worker/tool.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

CONFIG = "config"
INPUTS, OUTPUT = "inputs", "output"
"""Folders of a run folder, in which a rank stands: the model and the data that the tool is given, and what it saves."""
MODEL, DATA, ROWS, ARROW = f"{INPUTS}/model", f"{INPUTS}/data", "train.parquet", f"{INPUTS}/arrow"


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One program. `arguments` follow the module; those of a resumed run have {checkpoint} too. `keys` stand in its
    file for a run. `releases` are those whose keys the file has; empty where any is taken. `arrow`: it reads rows as
    `datasets` saves them to a disk."""

    package: str
    install: str
    module: str
    arguments: tuple[str, ...]
    resumed: tuple[str, ...]
    keys: Mapping[str, Any]
    releases: tuple[str, ...] = ()
    arrow: bool = False


TOOLS = {
    "trl": Tool(
        package="trl",
        install="pip install 'trl>=1.14,<1.15'",
        module="trl.scripts.sft",
        arguments=("--config", "config/recipe.yaml"),
        resumed=("--resume_from_checkpoint", "{checkpoint}"),
        # From 1.15 on loss_type nll never has whole logits; until 1.13 the script resumes from nothing.
        releases=("1.14",),
        keys={
            "model_name_or_path": MODEL,
            "dataset_name": DATA,
            "train_sampling_strategy": "sequential",
            "report_to": "none",
        },
    ),
    "axolotl": Tool(
        package="axolotl",
        install="pip install axolotl",
        module="axolotl.cli.train",
        arguments=("config/axolotl.yaml",),
        resumed=("--resume_from_checkpoint={checkpoint}",),
        keys={
            "base_model": MODEL,
            "datasets": [{"path": f"{DATA}/{ROWS}", "ds_type": "parquet", "type": None}],
            "dataset_prepared_path": f"{INPUTS}/prepared",
            "curriculum_sampling": True,
        },
    ),
    "llamafactory": Tool(
        package="llamafactory",
        install="pip install llamafactory",
        module="llamafactory.launcher",
        arguments=("config/llamafactory.yaml",),
        resumed=("resume_from_checkpoint={checkpoint}",),
        arrow=True,
        keys={
            "model_name_or_path": MODEL,
            "dataset": "planned",  # it wants a name, and reads the rows of tokenized_path
            "tokenized_path": ARROW,
            "disable_shuffling": True,
            "report_to": "none",
        },
    ),
}
"""By the word of --with, which is that of `planner config --to`."""

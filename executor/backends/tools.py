"""Other training programs that train a plan from their own files: TRL, Axolotl, LLaMA-Factory. One record each of how a
rank starts it, what its file says of a run beside the plan, and what it lacks.

Sources: TRL 1.14.2 (trl/scripts/sft.py), Axolotl 0.18.0 (067b021, src/axolotl/cli/train.py; its `accelerate launch -m
axolotl.cli.train FILE` starts the same), LLaMA-Factory 0.9.6 (ff6d4d1, src/llamafactory/launcher.py: `llamafactory-cli
train` starts torchrun, which starts that module once a rank). Not here: the plan in their words (planner/ask/tofile),
or running one (executor/worker/tool.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from executor.backends.accelerate import AccelerateBackend
from executor.backends.common import read_back, readable
from executor.backends.launched import launched_by
from planner.ask import tofile
from planner.ask.tofile.text import Line
from planner.basics.errors import PlannerError
from planner.parallelism.rule import Rule
from planner.spec.plan import Plan

CONFIG = "config"
INPUTS, OUTPUT = "inputs", "output"
"""Folders of a run folder, in which a rank stands: the model and the data that the tool is given, and what it saves."""
MODEL, DATA, ROWS, ARROW = f"{INPUTS}/model", f"{INPUTS}/data", "train.parquet", f"{INPUTS}/arrow"
LAUNCHER_FILE = f"{CONFIG}/accelerate.yaml"
ENGINES = ("single", "ddp", "fsdp2", "deepspeed")
"""Those under which the tools' data and checkpoints were tried: one copy of the data a rank."""
OF_THE_LAUNCH = ("runtime", "gpus", "nodes", "optimizer_implementation")
"""Fields that a file need not say: the launcher does, or no tool asks."""
NOT_COMPARED = ("FSDP_CPU_RAM_EFFICIENT_LOADING",)
"""Accelerate's way to load a model, which the trainer has otherwise and a plan does not name."""


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
        install="pip install 'meshwright[trl]'",
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

RULES = (
    Rule(
        name="rows of one document",
        field="packing",
        holds=lambda case: case.job.packing == "padded" and case.job.mean_seq_len is None,
        sentence=lambda case: "other tools pack rows in their own way, which is not what is predicted",
        fix=lambda case: "Plan without packing and mean_seq_len",
    ),
    Rule(
        name="text alone",
        field="image_tokens",
        holds=lambda case: case.job.image_tokens == 0,
        sentence=lambda case: "rows that are made for other tools hold no images",
        fix=lambda case: "Plan without image_tokens",
    ),
)


class ToolBackend:
    """Backend of a plan that another tool trains, with a checkpoint every `save_steps` steps (None: none), of which
    `keep` stay."""

    engines = ENGINES
    rules = RULES

    def __init__(self, word: str, save_steps: int | None = None, keep: int = 2) -> None:
        self.name, self._save_steps, self._keep = word, save_steps, keep

    def files(self, plan: Plan) -> dict[str, str]:
        """The plan's files as `planner config` writes them, with what a run adds. PlannerError (exit code 3) for a
        field of the plan that they cannot say: it would be another training."""
        try:
            found = tofile.files_of(plan, self.name, self._lines(plan))
        except PlannerError as error:
            raise PlannerError(error.field, error.value, error.rule, error.fix, exit_code=3) from None
        for field, value in found.unsaid:
            if field not in OF_THE_LAUNCH:
                rule = f"cannot be said in a file of {found.format}, so it would train otherwise"
                raise PlannerError(f"plan: {field}", tofile.told(value), rule, "Plan without it", exit_code=3)
        return {f"{CONFIG}/{name}": text for name, text in found.files.items()}

    def _lines(self, plan: Plan) -> list[Line]:
        saving: dict[str, Any] = {"save_strategy": "no"}
        if self._save_steps is not None:
            saving = {"save_strategy": "steps", "save_steps": self._save_steps, "save_total_limit": self._keep}
        shared = {"output_dir": OUTPUT, "max_steps": plan.job.recipe.steps, "logging_steps": 1, "disable_tqdm": True}
        if plan.layout.engine in launched_by("accelerate"):
            shared["ddp_find_unused_parameters"] = False  # the Trainer's default walks the graph of every step
        keys = dict(TOOLS[self.name].keys) | shared | saving
        if self.name == "axolotl" and plan.layout.engine in launched_by("deepspeed"):
            keys["deepspeed"] = f"{CONFIG}/deepspeed.json"  # the others find it by a variable
        return [Line(key, value, "of this run, from its folder") for key, value in keys.items()]

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """Differences between Accelerate's file as its launcher reads it and the plan; a tool's own file it reads
        itself."""
        if not self._by_accelerate(plan):
            return []
        found = read_back("accelerate", folder, LAUNCHER_FILE)
        if "error" in found:
            return [f"{LAUNCHER_FILE}: Accelerate cannot read it: {found['error']}"]
        effective = found["environment"]
        expected = AccelerateBackend().expected_environment(plan)
        return [
            f"{LAUNCHER_FILE}: {key} is {effective.get(key, 'unset')}, the plan says {value}"
            for key, value in expected.items()
            if key not in NOT_COMPARED and effective.get(key) != value
        ]

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """The variables that Accelerate's launcher exports for its file, where the plan has one."""
        if not self._by_accelerate(plan):
            return {}
        found = readable("accelerate", "Accelerate", folder, LAUNCHER_FILE)
        return dict(sorted(found["environment"].items()))

    def expected_environment(self, plan: Plan) -> dict[str, str]:
        """The same as the plan has them."""
        return AccelerateBackend().expected_environment(plan) if self._by_accelerate(plan) else {}

    def _by_accelerate(self, plan: Plan) -> bool:
        """Whether Accelerate's file configures the ranks; DeepSpeed's is named by a variable, Axolotl's by its own."""
        return plan.layout.engine in AccelerateBackend.engines and LAUNCHER_FILE in self.files(plan)

"""The backend of a plan that another tool trains: the files that `planner config` writes, with what a run adds, and
what of a plan no tool trains as it is predicted.

Not here: what each tool is (tools.py), or how a plan is said in its words (planner/ask/tofile).
"""

from __future__ import annotations

from typing import Any

from executor.backends.accelerate import AccelerateBackend, exported
from executor.backends.common import read_back
from executor.backends.launched import launched_by
from executor.backends.tools import CONFIG, OUTPUT, TOOLS
from planner.ask import tofile
from planner.ask.fromfile.accelerate import PARALLEL
from planner.ask.tofile import accelerate
from planner.ask.tofile.deepspeed import WEIGHTS_SHARDED
from planner.ask.tofile.fields import told
from planner.ask.tofile.text import Line
from planner.basics.errors import PlannerError
from planner.parallelism.rule import Rule
from planner.spec.plan import Plan

LAUNCHER_FILE = f"{CONFIG}/accelerate.yaml"
ENGINES = ("single", "ddp", "fsdp2", "deepspeed")
"""Those under which the tools' data and checkpoints were tried: one copy of the data a rank."""
OF_THE_LAUNCH = ("runtime", "gpus", "nodes", "optimizer_implementation")
"""Fields that a file need not say: the launcher does, or no tool asks."""
NOT_COMPARED = ("FSDP_CPU_RAM_EFFICIENT_LOADING", "PARALLELISM_CONFIG_SP_SIZE")
"""Accelerate's way to load a model, which the trainer has otherwise and a plan does not name; and a size that is 1 in
all of these plans, and that Accelerate 1.11, which LLaMA-Factory 0.9.5 pins, does not know."""

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
    Rule(
        name="training alone",
        field="validation_data",
        holds=lambda case: case.job.recipe.validation_data is None,
        sentence=lambda case: "rows are made for other tools of the training data alone",
        fix=lambda case: "Plan without validation_data",
    ),
)


class ToolBackend:
    """Backend of a plan that another tool trains, with a checkpoint every `save_steps` steps (None: none), of which
    `keep` stay."""

    engines: tuple[str, ...] = ENGINES
    rules: tuple[Rule, ...] = RULES

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
                raise PlannerError(f"plan: {field}", told(value), rule, "Plan without it", exit_code=3)
        return {f"{CONFIG}/{name}": text for name, text in found.files.items()}

    def _lines(self, plan: Plan) -> list[Line]:
        # Weights in shards are saved in checkpoints alone, so the last step writes one in any case.
        sharded = accelerate.sharded(tofile.values(plan)) or plan.layout.zero_stage == WEIGHTS_SHARDED
        every = self._save_steps or (plan.job.recipe.steps if sharded else None)
        saving: dict[str, Any] = {"save_strategy": "no"}
        if every is not None:
            saving = {"save_strategy": "steps", "save_steps": every, "save_total_limit": self._keep}
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
        expected = self.expected_environment(plan)
        return [
            f"{LAUNCHER_FILE}: {key} is {effective.get(key, 'unset')}, the plan says {value}"
            for key, value in expected.items()
            if key not in NOT_COMPARED and effective.get(key) != value
        ]

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """The variables that Accelerate's launcher exports for its file, where the plan has one."""
        return exported(folder, LAUNCHER_FILE) if self._by_accelerate(plan) else {}

    def expected_environment(self, plan: Plan) -> dict[str, str]:
        """The same as the plan has them; sizes of groups where the file has any, and states as it saves them."""
        if not self._by_accelerate(plan):
            return {}
        file, found = self.files(plan)[LAUNCHER_FILE], AccelerateBackend().expected_environment(plan)
        if f"{PARALLEL}:" not in file:
            found = {key: value for key, value in found.items() if PARALLEL.upper() not in key}
        for whole, _ in accelerate.WHOLE_STATES.values():
            found |= {"FSDP_STATE_DICT_TYPE": whole} if whole in file else {}
        return found

    def _by_accelerate(self, plan: Plan) -> bool:
        """Whether Accelerate's file configures the ranks; DeepSpeed's is named by a variable, Axolotl's by its own."""
        return plan.layout.engine in AccelerateBackend.engines and LAUNCHER_FILE in self.files(plan)

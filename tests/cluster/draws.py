"""Draws by seed over everything that is launched: engine, method, precision, recomputation, batch, optimizer, offload,
the engine's switches, modules trained whole beside adapters, and the small models.

Not here: the runs, or what is claimed of them (test_draws.py).
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, get_args

from agents import make_plan
from cases import ZERO3
from combinations import RUN, TRACED, Combination, model_of, on_gpus, refusal
from msgspec.structs import asdict, replace

from planner.inventory.units import savable_modules
from planner.spec import Layout, ModelSpec, Optimizer, TrainingJob
from planner.spec.engines import ENGINES
from planner.spec.job import OptimizerName
from planner.spec.plan import Plan
from planner.spec.record import MEMORY_STEP

MODELS = ("tiny-llama", "mini-llama", "tiny-llama-tied")
MICRO_BATCHES, ACCUMULATIONS, LENGTHS, MOMENTA = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (64, 128, 256), (0.0, 0.9)
OFFLOADS = ({}, {"offload_optimizer": True}, {"offload_optimizer": True, "offload_params": True})
NO_LOOK_AHEAD = {field: value for field, value in asdict(ZERO3).items() if field.startswith("zero3_")}
"""ZeRO-3 as its paper has it; DeepSpeed's own limits are the layout's defaults."""


UNDRAWN = "adamw-8bit"
"""Run by test_optimizer_steps.py: draws stay as they were when nothing launched it."""


class Draw(NamedTuple):
    """One draw, which rules let through."""

    model: str | ModelSpec
    job: TrainingJob
    layout: Layout

    @property
    def plan(self) -> Plan:
        """Its plan for CPU processes."""
        return make_plan(self.layout, self.job, nodes=1, per_node=self.layout.world_size, model=model_of(self.model))

    @property
    def text(self) -> str:
        """In words, for a person who runs it again."""
        job, layout, plain = self.job, self.layout, Layout(engine=self.layout.engine)
        fields = {field: value for field, value in asdict(layout).items() if value != getattr(plain, field)}
        saved = (
            f" and {' '.join(job.adapters.modules_to_save)}" if job.adapters and job.adapters.modules_to_save else ""
        )
        momentum = f" momentum {job.optimizer.momentum}" if job.optimizer.name == "sgd" else ""
        packed = " packed" if job.packing == "packed" else ""
        return (
            f"{model_of(self.model).name}, {job.method}{saved}, {job.precision}, {job.optimizer.name}{momentum}, "
            f"{job.seq_len} tokens{packed}, {layout.engine} "
            f"{' '.join(f'{field}={value}' for field, value in fields.items())}"
        )


def draws(seed: int, count: int) -> dict[str, Draw]:
    """By name, which says the seed and the place: as many draws as asked, the same for the same seed.

    Engines are drawn alike, and of each its combinations.
    """
    dice = random.Random(seed)
    launched = tuple(dict.fromkeys((*TRACED.values(), *RUN.values())))
    engines = tuple(dict.fromkeys(one.engine for one in launched))
    by_engine = {engine: [one for one in launched if one.engine == engine] for engine in engines}
    found = [_launched(dice, dice.choice(by_engine[dice.choice(engines)])) for _ in range(count)]
    return {f"seed{seed}-{place:02}": drawn for place, drawn in enumerate(found)}


def _launched(dice: random.Random, one: Combination) -> Draw:
    """The first draw of the combination's batch, optimizer, offload, switches and model that no rule refuses."""
    while True:
        drawn = _saving(any_batch(dice, one))
        if drawn.job.optimizer.name != UNDRAWN and refusal(on_gpus(*drawn)) is None:
            return drawn


def _saving(drawn: Draw) -> Draw:
    """The draw with modules beside layers trained whole, where it has adapters and its engine can: all, the head alone,
    or none, by the draw itself, so that others stay as they were."""
    adapters, legal = drawn.job.adapters, savable_modules(model_of(drawn.model))
    if adapters is None or not legal or not drawn.layout.facts.saves_modules:
        return drawn
    saved = random.Random(drawn.text).choice(((), legal[-1:], legal))
    return drawn._replace(job=replace(drawn.job, lora=replace(adapters, modules_to_save=saved)))


def any_batch(dice: random.Random, one: Combination) -> Draw:
    """The combination with a batch, an optimizer, offload, switches and a model, legal or not."""
    varies = ENGINES[one.engine]
    # Those that a trainer here may have: torchao's are planned alone, and draws stay as they were.
    names: tuple[OptimizerName, ...] = get_args(OptimizerName)[:6]
    optimizer = dice.choice(names)
    momentum = dice.choice(MOMENTA) if optimizer == "sgd" else 0.0
    switches: dict[str, Any] = {
        "micro_batch_size": dice.choice(MICRO_BATCHES),
        "grad_accum": dice.choice(ACCUMULATIONS),
        "reshard_after_forward": dice.choice(varies.reshard),
        "sync_each_micro_batch": dice.choice(varies.sync),
        **dice.choice(OFFLOADS),
        **(dice.choice(({}, NO_LOOK_AHEAD)) if one.zero_stage == 3 and one.engine.startswith("deepspeed") else {}),
    }
    lr = one.job.optimizer.lr / 10
    trained = replace(
        one.job,
        seq_len=dice.choice(LENGTHS),
        optimizer=Optimizer(name=optimizer, lr=lr, momentum=momentum),
        recipe=replace(one.job.recipe, steps=MEMORY_STEP + 1),
    )
    return Draw(dice.choice(MODELS), trained, replace(one.layout, **switches))

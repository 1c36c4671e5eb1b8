"""How long a run is and how it steps, in steps and in passes over the data, as an answer, a run and a script say it.

Not here: counting the examples (lengths.py), or what must not be launched (executor/preflight/meant.py).
"""

from __future__ import annotations

import math

import msgspec

from planner.spec.job import Recipe, TrainingJob


def in_steps(recipe: Recipe, global_batch_size: int) -> Recipe:
    """The recipe with its epochs as steps of that batch: the fewest that show every row so often."""
    if recipe.epochs is None or recipe.rows is None:
        return recipe
    steps = max(1, math.ceil(recipe.epochs * recipe.rows / global_batch_size - 1e-9))
    return msgspec.structs.replace(recipe, steps=steps, warmup_steps=min(recipe.warmup_steps, steps))


def course(recipe: Recipe, global_batch_size: int) -> str:
    """ "20 steps = 3.2 epochs of 400 examples", as far as it is known."""
    steps = f"{recipe.steps:,} step{'s' * (recipe.steps > 1)}"
    if recipe.data is None:
        return f"{steps} of the demo's text, for trying: --data FILE trains on yours"
    if not recipe.rows:
        return steps
    epochs = f"{steps} = {recipe.steps * global_batch_size / recipe.rows:,.3g} epochs of"
    if recipe.examples is None:
        return f"{epochs} {recipe.rows:,} sequences"
    packed = f" in {recipe.rows:,} sequences" if recipe.rows != recipe.examples else ""
    return f"{epochs} {recipe.examples:,} examples{packed}"


def stepping(job: TrainingJob) -> str:
    """The optimizer's numbers, those that were not typed included."""
    one = job.optimizer
    betas = f", betas {one.beta1:g} and {one.beta2:g}" if one.name in ("adamw", "adamw-8bit", "lion") else ""
    return f"learning rate {one.lr:g}{betas}, weight decay {one.weight_decay:g}"


def told(job: TrainingJob, global_batch_size: int) -> str:
    """Both, and whose tokenizer makes tokens of the text."""
    recipe = in_steps(job.recipe, global_batch_size)
    parts = [course(recipe, global_batch_size), stepping(job)]
    if recipe.checkpoint is not None:
        own = recipe.own_tokenizer
        named = "the checkpoint's" if own == recipe.checkpoint else "another folder's" if own else "bytes"
        parts.append(f"tokenizer: {named}")
    return "; ".join(parts)

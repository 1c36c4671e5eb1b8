"""Hunks of a person's own files as text that patch and git apply take: each a diff under what it changes and why.

Not here: which changes there are, or any figure (planner/decide/fixing.py).
"""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.ask.tofile.fields import told
from planner.ask.tofile.theirs import TheirFile
from planner.basics.errors import visible
from planner.basics.quantities import format_bytes
from planner.decide.fixing import FixedFiles, FixHunk, Trial
from planner.views.render import headline

SCHEMA = "fix/1"
LINE = 100
"""Columns of a comment where there is no terminal."""
WHY = {
    "gpus": "Each step is done by fewer GPUs with more accumulation, which wait less for each other.",
    "engine": "Weights, gradients and optimizer states are sharded over the ranks instead of copied to each.",
    "tp": ("Tensor ranks split every layer.", "Fewer tensor ranks wait less for each other in every layer."),
    "pp": ("Pipeline stages hold a part of the layers each.", "A shorter pipeline stands idle for less of a step."),
    "cp": ("Context ranks hold a part of each sequence.", "Fewer context ranks exchange less for each sequence."),
    "ep": ("Experts are dealt to the ranks.", "Fewer ranks exchange the tokens of experts."),
    "zero_stage": ("More of the states is sharded over the ranks.", "Less is sharded, so ranks gather less in a step."),
    "dp_shard": ("States are sharded over more ranks.", "States are sharded over fewer ranks, which gather less."),
    "reshard_after_forward": (
        "Gathered weights are given back after forward, and gathered again for backward.",
        "Gathered weights stay until backward, and are not gathered twice.",
    ),
    "offload_params": ("States wait in host memory.", "States stay on the card: nothing is copied from the host."),
    "offload_optimizer": (
        "Optimizer states wait in host memory, and are stepped there.",
        "The optimizer steps on the card: nothing is copied from the host.",
    ),
    "offload_activations": (
        "Inputs of layers wait in host memory until backward.",
        "Inputs of layers stay on the card until backward.",
    ),
    "recompute": (
        "Layers run forward again in backward, so what they compute is not kept.",
        "Layers keep what backward needs, and do not run forward again.",
    ),
    "micro_batch_size": (
        "Fewer sequences at a time hold fewer activations; accumulation keeps the batch of a step.",
        "Larger micro-batches use the GPU better and reduce gradients less often; the batch of a step stays.",
    ),
    "attention": "This implementation of attention is faster, or keeps less; its package has to be installed.",
    "liger": "Liger's kernels, which have to be installed, keep less and read memory less often.",
    "loss": ("Logits are made a piece at a time, and never held whole.", "Logits are made whole, in fewer operations."),
    "experts": "How a mixture's experts are run decides how many operations they are.",
    "compile": "Compiled layers keep less and start fewer kernels; the first steps are slow.",
    "overlap_comm": ("Gradients are not sent beside backward: one buffer less.", "Gradients are sent beside backward."),
    "optimizer": "This optimizer keeps less for each weight.",
    "optimizer_implementation": "This implementation of the same optimizer holds less, or starts fewer kernels.",
    "paged_states": "States that do not fit are moved to the host by pages.",
    "precision": "Weights rest in this format, and the optimizer steps it.",
    "method": "Adapters alone are trained, beside frozen weights.",
    "seq_len": "Shorter sequences hold fewer activations.",
    "virtual_stages": "The pipeline's order of passes decides how long it stands idle.",
    "pp_schedule": "The pipeline's order of passes decides how long it stands idle.",
}
"""Why a field that moves changes memory or speed: of two sentences the first where there is more of it, or less of one
in LESS, which saves memory."""
LESS = ("micro_batch_size", "overlap_comm")
BUFFERS = ("Buffers for what is sent or gathered are smaller.", "Larger buffers send and gather less often.")
FOLLOWING = {
    "engine": ("zero_stage", "dp_shard", "reshard_after_forward", "overlap_comm", "optimizer_implementation"),
    **dict.fromkeys(("gpus", "tp", "cp", "pp"), ("dp_shard",)),
    "zero_stage": ("overlap_comm", "reshard_after_forward"),
    "method": ("precision", "optimizer_implementation"),
    "optimizer": ("optimizer_implementation",),
}
"""Fields that are not named beside one that decides them."""


def fixes_text(found: FixedFiles, width: int | None) -> str:
    """The files as they are, each hunk, and all together."""
    before, after = found.before, found.after
    lines = [line for one in headline(before.question).split("\n") for line in _comment(one, width)]
    lines += _comment(f"{'As they are' if found.theirs[1:] else 'As it is'}: {_state(before)}.", width)
    texts = {one.real: one.text for one in found.theirs}
    for place, hunk in enumerate(found.hunks, 1):
        lines += ["#", *_comment(f"{place}. {_moved(hunk)}: {_won(before, hunk.alone)}. {why(hunk)}", width)]
        lines.append(diff(found.theirs, texts, texts | hunk.together).rstrip("\n"))
        texts |= hunk.together
    if not found.hunks:
        none = "No change of the files makes it fit" if not before.fits else f"Goal {found.goal}: no change gains 3%"
        none = "It fits: nothing has to change" if before.fits and found.goal == "fit" else none
        return "\n".join([*lines, *_comment(f"{none}.", width)])
    count = len(found.hunks)
    together = "With it" if count == 1 else "Both together" if count == 2 else f"All {count} together"
    missed = "" if after.fits else ", which no change of these files makes fit"
    lines += ["#", *_comment(f"{together}: {_state(after)}; {_won(before, after)}{missed}.", width)]
    return "\n".join(lines)


def _comment(text: str, width: int | None) -> list[str]:
    # A word of a person's file may hold a line break, which would end the comment.
    return textwrap.wrap(" ".join(text.split()), (width or LINE) - 1, initial_indent="# ", subsequent_indent="# ",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _state(trial: Trial) -> str:
    """What it takes, and how fast it is."""
    capacity, bound = trial.one.case.cluster.gpu.memory_bytes, trial.question.uncounted.bound
    fits = "which fits" if trial.one.fits else "which may fit" if trial.may_fit else "which does not fit"
    if trial.one.memory.host_fits is False:
        fits = "and more host memory than there is"
    qualified = f"{bound} " if bound in ("at least", "at most") else ""
    speed = "" if trial.tokens_per_s is None else f"; {trial.tokens_per_s:,.0f} tokens/s"
    return f"{qualified}{format_bytes(trial.device_bytes)} on a card of {format_bytes(capacity)}, {fits}{speed}"


def _won(before: Trial, after: Trial) -> str:
    """Memory saved and speed won, or the other way."""
    saved = before.device_bytes - after.device_bytes
    memory = "memory as before"
    if abs(saved) >= 0.005 * 2**30:
        memory = f"saves {format_bytes(saved)}" if saved > 0 else f"takes {format_bytes(-saved)} more"
    if after.tokens_per_s is None or not before.tokens_per_s:
        return memory
    ratio = after.tokens_per_s / before.tokens_per_s
    each = "" if after.gpus == before.gpus else f", {100 * (ratio * before.gpus / after.gpus - 1):+.1f}% for each GPU"
    return f"{memory}, tokens/s {100 * (ratio - 1):+.1f}%{each}"


def _moved(hunk: FixHunk) -> str:
    """The fields that moved, and what else is not as before."""
    named = _named(hunk)
    moved = ", ".join(
        f"{name} {_value(old)} to {_value(new)}" for name, (old, new) in hunk.options.items() if name in named
    )
    return moved if hunk.same_training else f"{moved}, which CHANGES THE TRAINING"


def _named(hunk: FixHunk) -> list[str]:
    """The fields that say what a hunk does: those that follow are left out."""
    follow = {name for field in hunk.options for name in FOLLOWING.get(field, ())}
    if hunk.same_training:
        follow.add("precision")
    return [name for name in hunk.options if name in WHY and name not in follow] or list(hunk.options)


def _value(value: Any) -> str:
    return "none" if value in ((), None) else told(value)


def why(hunk: FixHunk) -> str:
    """A sentence for each of the fields that decide."""
    found: dict[str, None] = {}
    for name in _named(hunk):
        old, new = (_rank(value) for value in hunk.options[name])
        sentence = WHY.get(name, BUFFERS)
        saves = new <= old if name in LESS or name not in WHY else new >= old
        found[sentence if isinstance(sentence, str) else sentence[0 if saves else 1]] = None
    return " ".join(found)


def _rank(value: Any) -> float:
    """A value among those of its field, from least to most."""
    return float(value) if isinstance(value, int | float) else float(value not in ("none", "whole", None))


def diff(theirs: Sequence[TheirFile], before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """One unified diff of the files that differ."""
    parts: list[str] = []
    for one in theirs:
        old, new = (_lines(texts.get(one.real, one.text)) for texts in (before, after))
        name = _name(one.path)
        parts += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in parts)


def _lines(text: str) -> list[str]:
    """By line feeds alone: other signs that end a line somewhere are a part of it here."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.split("\n")[-1]) else [])


def _name(path: str) -> str:
    """A path as a diff has it: from here where it is below, else from the root."""
    whole = os.path.abspath(path)
    below = Path(whole).is_relative_to(Path.cwd())
    return visible(os.path.relpath(whole) if below else whole.lstrip("/")).replace("\n", "\\n")


def as_json_object(found: FixedFiles, written: bool) -> dict[str, Any]:
    """fix/1. Diffs of hunks are of each alone, `diff` is of all together."""
    original = {one.real: one.text for one in found.theirs}
    return {
        "schema": SCHEMA,
        "goal": found.goal,
        "files": [one.path for one in found.theirs],
        "before": _figures(found.before),
        "after": _figures(found.after),
        "hunks": [
            {
                "options": {name: {"before": old, "after": new} for name, (old, new) in hunk.options.items()},
                "same_training": hunk.same_training,
                "saved_bytes": found.before.device_bytes - hunk.alone.device_bytes,
                "speed_ratio": hunk.alone.tokens_per_s / found.before.tokens_per_s
                if hunk.alone.tokens_per_s is not None and found.before.tokens_per_s
                else None,
                "alone": _figures(hunk.alone),
                "why": why(hunk),
                "diff": diff(found.theirs, original, hunk.alone.texts),
            }
            for hunk in found.hunks
        ],
        "diff": diff(found.theirs, original, found.after.texts),
        "written": written,
    }


def _figures(trial: Trial) -> dict[str, Any]:
    return {
        "device_bytes": trial.device_bytes,
        "fits": trial.one.fits if trial.question.uncounted.bound is None else None,
        "tokens_per_s": trial.tokens_per_s,
        "gpus": trial.gpus,
    }

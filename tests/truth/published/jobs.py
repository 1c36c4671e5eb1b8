"""What a measured row trains: its method, adapters, formats and optimizer, in the planner's words.

Not here: what sources' words mean (sources.py), or how the work was split (cases.py).
"""

from __future__ import annotations

import re
from typing import Any, get_args

from planner.calibrate.asked import CannotPredict
from planner.inventory import default_lora, lora_targets, parameters
from planner.spec import Lora, ModelSpec, Optimizer, Quantization, TrainingJob
from planner.spec.job import BaseFormat, OptimizerName
from tests.truth.published import sources
from tests.truth.published.models import stated_seq_len
from tests.truth.published.notes import Notes
from tests.truth.published.rows import WordRow
from tests.truth.published.sources import RowRuntime


def quirk_of(row: WordRow) -> sources.Quirk:
    """What holds for every row of the row's source."""
    return sources.QUIRKS.get(row.source.repo_or_paper, sources.NO_QUIRK)


def said_of(row: WordRow) -> str:
    """What a row says of itself in words: the title of its table, its notes, how its base is quantised, which model
    ran on which GPU in which precision, and how it was trained."""
    words = (row.source.path_or_table, row.notes, row.layout.quant, row.model.name, row.hardware.gpu)
    return " ".join(str(word or "") for word in (*words, row.layout.precision, row.method))


def filled_of(row: WordRow) -> dict[str, Any]:
    """What the row's source fills in where the row says nothing."""
    filled: dict[str, Any] = {}
    for pattern, guesses in quirk_of(row).layout:
        filled |= guesses if re.search(pattern, said_of(row)) else {}
    return filled


def columns_of(row: WordRow) -> dict[str, int]:
    """The row's columns that its source states wrongly, as they were."""
    found: dict[str, int] = {}
    for pattern, columns in quirk_of(row).columns:
        found |= columns if re.search(pattern, said_of(row)) else {}
    return found


def job_of(row: WordRow, model: ModelSpec, facts: RowRuntime | None, notes: Notes) -> TrainingJob:
    """The row's job (CannotPredict with the reason)."""
    layout = row.layout
    seq_len = stated_seq_len(row) or filled_of(row).get("seq_len")
    if seq_len is None:
        raise CannotPredict("sequence length not stated")
    if row.layout.seq is None:
        notes.add(f"sequence length not stated: {seq_len}, the longest of the source's data")
    method = {"pretrain": "full", "adapter": "lora"}.get(row.method, row.method)
    quantized = layout.quant is not None and layout.quant != "none"
    if quantized and str(layout.quant) not in (*sources.QUANTS, sources.GPTQ):
        raise CannotPredict(f"quantisation {layout.quant} is not modelled")
    if quantized and method == "lora":
        method = "qlora"
    if method == "qlora" and not quantized:
        notes.add("quantisation not stated: nf4")
    double = sources.QUANTS.get(str(layout.quant), True)
    base: BaseFormat = "gptq" if str(layout.quant) == sources.GPTQ else "nf4"
    precision = _precision(row, facts, notes)
    filled = filled_of(row)
    return TrainingJob(
        method=method,  # type: ignore[arg-type]  # one of full, lora, qlora
        narrow_weights=precision in ("fp8", "mxfp8") and bool(filled.get("narrow_weights")),
        narrow_gradients=bool(filled.get("narrow_gradients")),
        narrow_moments=bool(filled.get("narrow_moments")),
        lora=_lora(row, model, facts, notes) if method != "full" else None,
        quantization=Quantization(base=base, double=double, storage="bf16") if method == "qlora" else None,
        precision=precision,  # type: ignore[arg-type]  # one of the table's
        optimizer=_optimizer(row, notes),
        seq_len=seq_len,
    )


def _lora(row: WordRow, model: ModelSpec, facts: RowRuntime | None, notes: Notes) -> Lora:
    stated = row.lora
    if row.method == "adapter":
        return Lora(kind=_adapter_kind(row, model), upcast_adapters=False)
    if stated is None or stated.rank is None:
        raise CannotPredict("rank of the adapters not stated")
    words = (stated.targets or "").lower()
    targets = sources.TARGETS.get(words)
    if targets is None and re.fullmatch(r"[a-z_]+_proj(,[a-z_]+_proj)*", words):
        targets = words
    if targets is None:
        raise CannotPredict(
            f"adapted modules are not modelled: {stated.targets}" if words else "adapted modules not stated"
        )
    if words.endswith("?"):
        notes.add(f"adapted modules not stated: {targets}")
    upcast = facts.upcasts_adapters if facts is not None else True
    names, legal = tuple(targets.split(",")), lora_targets(model)
    if set(names) == {"q_proj", "v_proj"} and not set(names) <= set(legal):
        names = default_lora(model).targets  # one matrix holds both: about as many elements at the same rank
        notes.add(f"adapters on q and v: on {', '.join(names)}")
    if unknown := sorted(set(names) - set(legal)):
        raise CannotPredict(f"adapted modules that {model.name} does not have: {', '.join(unknown)}")
    return Lora(
        rank=stated.rank,
        alpha=stated.alpha or 2 * stated.rank,
        targets=names,
        upcast_adapters=upcast,
        dropout=facts.dropout if facts is not None else 0.0,
        modules_to_save=sources.SAVED.get(words, ()),
    )


def _adapter_kind(row: WordRow, model: ModelSpec) -> str:
    """LitGPT's tables name both versions "Adapter": version 2 trains more than prompts and gates."""
    known = re.search(r"trainable params ([0-9]+)", row.notes or "")
    if known is None:
        raise CannotPredict("which LLaMA-Adapter is not stated, nor how much it trains")
    prompts = parameters(model, Lora(kind="llama-adapter"), trainable=True)
    return "llama-adapter" if int(known[1]) <= prompts else "llama-adapter-v2"


def _precision(row: WordRow, facts: RowRuntime | None, notes: Notes) -> str:
    stated = filled_of(row).get("precision", row.layout.precision)
    if stated is None:
        notes.add("precision not stated: bf16")
        return "bf16"
    if facts is not None and stated in facts.uncast:
        return "pure-bf16"
    if (known := sources.PRECISIONS.get(stated.lower())) is None:
        raise CannotPredict(f"precision {stated} is not modelled")
    return known


def _optimizer(row: WordRow, notes: Notes) -> Optimizer:
    stated = row.layout.optimizer
    more: dict[str, Any] = {}
    for pattern, fields in quirk_of(row).optimizer:
        more |= fields if re.search(pattern, said_of(row)) else {}
    if stated is None:
        notes.add("optimizer not stated: adamw")
        return Optimizer(**more)
    words = stated.lower()
    name = sources.OPTIMIZERS.get(words, words if words in get_args(OptimizerName) else None)
    if name is None:
        raise CannotPredict(f"optimizer {stated} is not modelled")
    return Optimizer(name=name, **more)  # type: ignore[arg-type]  # one of the table's

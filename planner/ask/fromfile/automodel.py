"""NeMo Automodel's YAML: model, step scheduler, group sizes of its FSDP2, adapters, loss and packing.

Keys and defaults: Automodel 36044ad (nemo_automodel/recipes/llm/train_ft.py, components/distributed/config.py and
mesh.py, components/_peft/lora.py). Its FSDP2 is estimated as Accelerate's, or as torchtitan's beside other groups. Not
here: keys that set no option (keys/automodel.toml).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import hub, split, trainer
from planner.ask.fromfile.sheet import OFF, Means, Sheet
from planner.spec.options import ALL_LINEAR

NAME = "NeMo Automodel"
KEYS = "automodel"
RECIPES = ("TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction")
SIZES = {
    "distributed.tp_size": "tp",
    "distributed.cp_size": "cp",
    "distributed.pp_size": "pp",
    "distributed.ep_size": "ep",
}
PLAIN = {
    "step_scheduler.local_batch_size": Means("micro_batch_size", "whole", 1),
    "step_scheduler.global_batch_size": Means("global_batch_size", "whole", 32),
    "step_scheduler.max_steps": Means("steps", "whole"),
    "clip_grad_norm.max_norm": Means("max_grad_norm", "real", 1.0),
    "rng.seed": Means("seed", "whole"),
    "optimizer.weight_decay": Means("weight_decay", "real"),
    "optimizer.lr": Means("lr", "real"),
}
NAMES = (
    "model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config.name_or_path",
    "model.config",
)  # fmt: skip
LENGTHS = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length", "dataset.max_length")
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
"""Classes of torch.optim, in lower case."""
SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved", "gpipe": "gpipe", "zbvzerobubble": "zb-v"}
LOSSES = {"MaskedCrossEntropy": "whole", "FusedLinearCrossEntropy": "fused"}
PROJECTIONS = "*_proj"
"""The pattern that names every linear module of a layer."""
LOOPED = ("interleaved", "zb-v")
"""Schedules in which a rank holds several chunks."""
OFF_WORDS = ("none", "null", "")
REPLICAS, SHARDED = "ddp", "fsdp2"
"""Values of distributed.strategy, which are called as what they start; older files name a class that begins so."""


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is Automodel's."""
    model, recipe = data.get("model"), data.get("recipe")
    named = isinstance(model, dict) and str(model.get("_target_")).startswith("nemo_automodel.")
    return "step_scheduler" in data or named or str(recipe).endswith(RECIPES)


def read(sheet: Sheet) -> None:
    """The whole file."""
    _job(sheet)
    name = next((key for key in NAMES if isinstance(sheet.data.get(key), str)), None)
    if name is not None:
        sheet.means("model", sheet.text(name), name)
        for key in NAMES:
            sheet.ignore(key, f"{name} stands")
    sheet.plain(PLAIN)
    _length(sheet)
    _groups(sheet)
    _method(sheet)
    _precision(sheet)
    _optimizer(sheet)
    _loss(sheet)
    _recompute(sheet)


def _last(sheet: Sheet, key: str) -> str:
    """The class that a `_target_` names, without its modules."""
    return str(sheet.data.get(key) or "").rpartition(".")[2].rpartition(":")[2]


def _job(sheet: Sheet) -> None:
    key = next((one for one in ("recipe", "recipe._target_") if sheet.has(one)), "recipe")
    if sheet.has(key) and (recipe := _last(sheet, key)) not in RECIPES:
        why = f"the job {recipe} is not plain training of a language model"
        sheet.decides(key, why, f"Use {RECIPES[0]} to plan fine-tuning")
    sheet.ignore(key, "training on the next token")


def _length(sheet: Sheet) -> None:
    """Packed rows are full; the data say how long others are, unless a key bounds them."""
    found = [key for key in LENGTHS if (sheet.whole(key) or 0) > 0]
    if found:
        sheet.means("seq_len", sheet.whole(found[0]), found[0])
        if found[0] == LENGTHS[0]:
            sheet.means("packing", "packed", found[0])
    else:
        at = "dataset._target_" if sheet.has("dataset._target_") else "step_scheduler.local_batch_size"
        why = "no key bounds how long its sequences are"
        sheet.decides(at, why, "Add --seq-len, the longest of the data's", "seq_len")
    for key in LENGTHS:
        sheet.ignore(key, OFF if key not in found else f"{found[0]} stands")


def _groups(sheet: Sheet) -> None:
    """Group sizes, and the engine that is nearest to Automodel's own."""
    kind = str(sheet.data.get("distributed.strategy") or _last(sheet, "distributed._target_") or SHARDED).lower()
    said = [key for key in ("distributed.strategy", "distributed._target_") if sheet.has(key)]
    if kind.startswith(REPLICAS):
        sheet.means("strategy", "ddp", *said)
        sheet.means("engine", ("ddp",), *said)
        return
    if not kind.startswith(SHARDED):
        why = "Megatron's own FSDP is not planned"
        sheet.decides(said[0], why, "Use strategy fsdp2, or add --runtime accelerate-fsdp2", "runtime")
        said = []
    sizes = {option: _size(sheet, key) or 1 for key, option in SIZES.items()}
    for key, option in SIZES.items():
        if sizes[option] > 1:
            sheet.means(option, sizes[option], key)
        sheet.ignore(key, OFF)
    data, copies = (_size(sheet, f"distributed.{name}") for name in ("dp_size", "dp_replicate_size"))
    keys = tuple(key for key in ("distributed.dp_size", "distributed.dp_replicate_size", *SIZES) if sheet.has(key))
    note = "" if copies else f"{NAME}'s default: sharded over all ranks"
    sheet.means("dp_replicate", copies or 1, "distributed.dp_replicate_size", note=note)
    if data is not None:
        ranks = data * math.prod(sizes[axis] for axis in ("tp", "cp", "pp"))
        sheet.means("gpus", ranks, *keys, note="the product of the sizes")
    for name in ("dp_size", "dp_replicate_size"):
        sheet.ignore(f"distributed.{name}", "the ranks that are left (--gpus says how many there are)")
    if others := _others(sheet):
        note = f"{NAME}'s FSDP2 beside {' and '.join(others)} is estimated as torchtitan's"
        sheet.means("engine", ("torchtitan",), *said, note=note)
        late = "distributed.defer_fsdp_grad_sync"
        if sheet.flag(late) is False:
            sheet.unmodelled(late, "gradients summed and sharded after each micro-batch", "less")
        sheet.ignore(late, "as is estimated")
    else:
        sheet.means("engine", ("fsdp2",), *said, note=f"{NAME}'s FSDP2 is estimated as Accelerate's")
        _sums(sheet)
        split.settle(sheet)
    sheet.means("zero_stage", 3, note="weights, gradients and optimizer are sharded")
    _sharded(sheet, sizes)


def _size(sheet: Sheet, key: str) -> int | None:
    """A group's size, of which a word stands for what is left."""
    value = sheet.data.get(key)
    return None if isinstance(value, str) and value.lower() in OFF_WORDS else sheet.whole(key)


def _others(sheet: Sheet) -> list[str]:
    """Groups that Accelerate's FSDP2 and Transformers' tensor parallelism have not."""
    return [axis for axis in ("cp", "pp", "ep") if sheet.says(axis)]


def _sums(sheet: Sheet) -> None:
    key = "distributed.defer_fsdp_grad_sync"
    late = sheet.flag(key) is not False
    sheet.means("sync_each_micro_batch", not late, key, note="" if sheet.has(key) else f"{NAME}'s default for {key}")


def _sharded(sheet: Sheet, sizes: Mapping[str, int]) -> None:
    key, parts, whole = (f"distributed.{name}" for name in ("reshard_after_forward", "pipeline", "sequence_parallel"))
    reshard = sheet.flag(key)
    note = "" if sheet.has(key) else f"{NAME}'s default, but for the last layer" if sizes["pp"] == 1 else ""
    sheet.means("reshard_after_forward", sizes["pp"] == 1 if reshard is None else reshard, key, note=note)
    alone = not _others(sheet)
    if sizes["tp"] > 1 and alone and sheet.flag(whole):
        sheet.unmodelled(whole, "tokens split over tensor ranks", "less")
    elif sizes["tp"] > 1 and not alone and not sheet.flag(whole):
        sheet.means("sequence_parallel", True, whole, note="not modelled: tokens are not split", memory="more")
    sheet.ignore(whole, OFF)
    if sizes["cp"] > 1:
        sheet.means("cp_method", "allgather", note="torch's context parallelism")
    if sizes["pp"] == 1:
        sheet.ignore_section(parts, "there is no pipeline")
        return
    schedule = sheet.choice(f"{parts}.pp_schedule", SCHEDULES) or "1f1b"
    sheet.means("pp_schedule", schedule, f"{parts}.pp_schedule")
    local, cut = sheet.says("micro_batch_size"), sheet.whole(f"{parts}.pp_microbatch_size") or 1
    sheet.means("micro_batch_size", cut, "step_scheduler.local_batch_size", f"{parts}.pp_microbatch_size",
                note=f"a pipeline cuts the {local} sequences of a rank")  # fmt: skip
    if schedule in LOOPED:
        _chunks(sheet, f"{parts}.layers_per_stage", f"{parts}.round_virtual_stages_to_pp_multiple", sizes["pp"])


def _chunks(sheet: Sheet, key: str, rounding: str, pp: int) -> None:
    """Chunks of layers on each rank, two unless their layers are said (distributed/pipelining/functional.py)."""
    each = sheet.whole(key)
    if each is None:
        sheet.means("virtual_stages", 2, note=f"{NAME}'s default for layers_per_stage")
        return
    if (model := hub.sizes(sheet.says("model") or "", sheet.path)) is None:
        sheet.decides(key, "chunks a rank follow from the model's layers", "Add --virtual-stages", "virtual_stages")
        return
    stages = -(-model.layers // max(each, 1))
    ranks, rest = divmod(stages, pp)
    up = str(sheet.data.get(rounding)).lower() == "up"
    sheet.means("virtual_stages", max(ranks + (up and rest > 0), 1), key, rounding, note=f"{model.layers} layers")


def _method(sheet: Sheet) -> None:
    adapters = sheet.under("peft")
    if not adapters:
        trainer.adapters(sheet, "full", note="there are no adapters")
        sheet.ignore("peft", OFF)
        return
    four, eight = "quantization.load_in_4bit", "quantization.load_in_8bit"
    own, thin = "peft._target_", "peft.use_memory_efficient_lora"
    if sheet.flag(eight):
        trainer.eight_bit(sheet, own, eight)
    elif sheet.flag(four):
        trainer.adapters(sheet, "qlora", own, four)
        sheet.switch("quantization.bnb_4bit_use_double_quant", "double_quant")
    elif sheet.flag(thin) is False:
        trainer.adapters(sheet, "lora", own)
    else:
        note = f"not modelled: {NAME}'s adapters keep less (use_memory_efficient_lora, on unless it is said)"
        sheet.means("method", "lora", own, thin, note=note, memory="less")
    for key in (four, eight):
        sheet.ignore(key, OFF)
    sheet.ignore(thin, "as is estimated")
    sheet.plain({"peft.dim": Means("lora_rank", "whole", 8), "peft.alpha": Means("lora_alpha", "whole", 32)})
    if sheet.real("peft.dropout"):
        sheet.means("lora_dropout", sheet.real("peft.dropout"), "peft.dropout")
    sheet.ignore("peft.dropout", OFF)
    every, named = "peft.match_all_linear", "peft.target_modules"
    value = sheet.data.get(named)
    names = [str(one) for one in (value if isinstance(value, list) else [value] if value else [])]
    if PROJECTIONS in names:
        sheet.means("lora_targets", ALL_LINEAR, every, named)
    elif sheet.flag(every) or not names or "*" in names:
        note = "not modelled: the head's adapter"
        sheet.means("lora_targets", ALL_LINEAR, every, named, note=note, memory="more")
    else:
        sheet.means("lora_targets", ",".join(one.lstrip("*").lstrip(".") for one in names), named)
    sheet.ignore(every, OFF)
    sheet.means("lora_upcast", False, "peft.lora_dtype", note="adapters in the base's format")
    trainer.magnitudes(sheet, "peft.use_dora")


def _precision(sheet: Sheet) -> None:
    """Weights are trained in the format that they are loaded in: the checkpoint's, unless torch_dtype says it."""
    key = "model.torch_dtype"
    kind = str(sheet.data.get(key) or "auto").lower().removeprefix("torch.")
    if kind not in ("auto", "bf16", "bfloat16", "float32", "fp32"):
        raise sheet.wrong(key, "is not planned", "Known: auto, bfloat16, float32")
    note = "as most models are saved" if kind == "auto" else ""
    narrow = kind not in ("float32", "fp32")
    if sheet.says("method") == "full" and narrow:
        sheet.means("precision", "pure-bf16", key, note=note or "weights are trained as they are loaded")
    else:
        sheet.means("precision", "bf16", key, note=note)


def _optimizer(sheet: Sheet) -> None:
    key, lists, one = "optimizer._target_", "optimizer.foreach", "optimizer.fused"
    path, name = str(sheet.data.get(key) or "torch.optim.AdamW"), _last(sheet, key) or "AdamW"
    if not path.startswith("torch.optim.") or name.lower() not in OPTIMIZERS:
        sheet.decides(key, f"optimizer {name} is not planned for", *trainer.CHOOSE_OPTIMIZER)
        return
    sheet.means("optimizer", OPTIMIZERS[name.lower()], key)
    step = "fused" if sheet.flag(one) else "for-loop" if sheet.flag(lists) is False else "foreach"
    sheet.means("optimizer_implementation", step, lists, one, note="" if step != "foreach" else "torch's default")


def _loss(sheet: Sheet) -> None:
    key = "loss_fn._target_"
    name = _last(sheet, key) or "MaskedCrossEntropy"
    known = LOSSES.get(name)
    if not trainer.whole_head(sheet) or _others(sheet):
        if known != "whole":
            sheet.unmodelled(key, f"{name} keeps less than whole logits", "less")
    elif known is None:
        sheet.means("loss", "whole", key, note=f"not modelled: {name} keeps less than whole logits", memory="less")
    else:
        sheet.means("loss", known, key)
    sheet.ignore(key, "whole logits, as is estimated")


def _recompute(sheet: Sheet) -> None:
    key = "distributed.activation_checkpointing"
    kind = str(sheet.data.get(key) or "none").lower()
    if kind == "selective":
        note = "not modelled: some products run again; all is kept in the estimate, so memory is less"
        sheet.means("recompute", "none", key, note=note, memory="less")
        return
    on = kind == "full" or (kind != "none" and sheet.flag(key))
    sheet.means("recompute", "full" if on else "none", key, note="" if sheet.has(key) else f"{NAME}'s default")

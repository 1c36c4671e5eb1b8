"""What Hugging Face Trainer's arguments mean, which Axolotl and LLaMA-Factory both hand on: optimizers, keys, and how
they hand on to FSDP or DeepSpeed.

Source: transformers 5 (training_args.py). Not here: the two formats' own keys, FSDP's (fsdp.py) or DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile import deepspeed, files, fsdp
from planner.ask.fromfile.classes import classes
from planner.ask.fromfile.sheet import OFF, Means, Sheet
from planner.spec.engines import ENGINES
from planner.spec.layout import LIGER
from planner.spec.options import ALL_LINEAR

PLAIN = {
    "per_device_train_batch_size": Means("micro_batch_size", "whole", 8),
    "gradient_accumulation_steps": Means("grad_accum", "whole", 1),
    "learning_rate": Means("lr", "real"),
    "weight_decay": Means("weight_decay", "real"),
    "max_grad_norm": Means("max_grad_norm", "real"),
    "seed": Means("seed", "whole"),
}
"""Trainer's own keys that are one option each, with its defaults."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw-8bit"),
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), "adamw-8bit-torchao"),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit"), "adamw-4bit-torchao"),
    **dict.fromkeys(("adamw_torch_fp8", "ao_adamw_fp8"), "adamw-fp8-torchao"),
    "sgd": "sgd",
    "adafactor": "adafactor",
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion_pytorch"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion-8bit"),
    "muon": "muon",
}

SMALLER = (
    "came_pytorch", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw", "adalomo", "lomo",
    "rmsprop", "adagrad", "q_galore_adamw8bit", "schedule_free_adamw", "stable_adamw",
)  # fmt: skip
"""Optimizers whose states are at most AdamW's of the weights' format."""

TRAINER_BLOCK = 256
"""Elements that share a scale of a torchao state, whatever torchao's own number is (_get_torchao_optimizer)."""

CHOOSE_OPTIMIZER = ("Add --optimizer adamw, or another that is planned", "optimizer")
"""The way out where a file's optimizer is not, and the option that it is."""

IMPLEMENTATIONS = {
    "adamw_torch": "foreach",
    "adamw_torch_fused": "fused",
    "adamw_hf": "for-loop",
    "adamw_apex_fused": "fused",
    "paged_adamw_32bit": "fused",
}
"""How an AdamW of that name steps on GPUs (trainer_optimizer.py): torch takes lists unless told fused, the one that was
Transformers' own went weight by weight, and Apex's and bitsandbytes' are one kernel."""


def optimizer(sheet: Sheet, key: str) -> None:
    """The optimizer's name in Trainer's words; both formats take AdamW without one."""
    if not sheet.has(key):
        sheet.means("optimizer", "adamw", note=f"{sheet.name}'s default for {key}")
        return
    name = str(sheet.text(key)).lower()
    if name not in OPTIMIZERS:
        if name not in SMALLER:
            sheet.decides(key, f"optimizer {name} is not planned for", *CHOOSE_OPTIMIZER)
            return
        sheet.means("optimizer", "adamw", key, note=f"not modelled: {name} keeps less", memory="less")
        return
    sheet.means("optimizer", OPTIMIZERS[name], key)
    if name.startswith("paged"):
        sheet.means("paged_states", True, key)
    if name == "adamw_torch_4bit":
        sheet.means("state_block", TRAINER_BLOCK, key)
    if name in IMPLEMENTATIONS:
        sheet.means("optimizer_implementation", IMPLEMENTATIONS[name], key)


ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash2", "flash_attention_3": "flash3",
    "flash_attention_4": "flash4", "flex_attention": "flex",
}  # fmt: skip
"""Transformers' names (5.23.0, modeling_utils.py, AttentionInterface)."""


def attention(sheet: Sheet, code: str, key: str) -> None:
    """An implementation of attention; where ranks split the model, the engine's own is estimated."""
    if any(sheet.says(axis) not in (None, 1) for axis in ("tp", "cp", "pp", "ep")):
        sheet.ignore(key, "an engine that splits the model computes attention in its own way")
    else:
        sheet.means("attention", code, key)


def whole_head(sheet: Sheet) -> bool:
    """Whether each rank has the whole head, as far as the file has said until now."""
    return all(sheet.says(axis) in (None, 1) for axis in ("tp", "pp"))


def liger(sheet: Sheet, key: str) -> None:
    """Liger-Kernel as the Trainer applies it: norms, rotary positions, the MLP and the loss (transformers 5.23.0,
    integrations/liger.py, with Liger's own defaults)."""
    if sheet.flag(key):
        sheet.means("liger", ",".join(LIGER), key)
        if whole_head(sheet):
            sheet.means("loss", "fused", key)
    sheet.ignore(key, OFF)


def weighted_loss(sheet: Sheet, key: str) -> None:
    """A loss that weighs that of each token, on whole logits whatever else is asked; a few figures a token beside."""
    if whole_head(sheet):
        sheet.means("loss", "whole", key, note="each token's loss has a weight, a few bytes a token beside the logits")
    else:
        sheet.unmodelled(key, "another loss where ranks split the head", "more")


def copying_loss(sheet: Sheet, key: str, *, beside: bool) -> None:
    """A weighted loss whose forward copies the fp32 logits once, as much as backward makes again; more than is
    estimated where others are there at the same time (`beside`)."""
    weighted_loss(sheet, key)
    if beside and whole_head(sheet):
        note = "not modelled: its copy of the logits, beside those of 16 bits or shifted ones"
        sheet.means("loss", "whole", key, note=note, memory="more")


def gradient_buckets(sheet: Sheet) -> None:
    """DDP's bucket, in megabytes of 2^20."""
    if sheet.has("ddp_bucket_cap_mb"):
        megabytes = sheet.whole("ddp_bucket_cap_mb") or 0
        sheet.means("ddp_bucket_bytes", megabytes * 2**20, "ddp_bucket_cap_mb")


def adapters(sheet: Sheet, method: str, *keys: str, note: str = "") -> None:
    """The method; adapters' own keys mean nothing without them."""
    sheet.means("method", method, *keys, note=note)
    if method == "full":
        for key in list(sheet.data):
            if key.startswith(("lora_", "peft_")):
                sheet.ignore(key, "there are no adapters")


def part_trained(sheet: Sheet, key: str) -> None:
    """Some layers trained and the others frozen: whole training is a bound."""
    adapters(sheet, "full", key)
    note = "not modelled: some layers are frozen; all are estimated as trained"
    sheet.means("method", "full", key, note=note, memory="less")


REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"
"""Trainer's key of how a layer that runs again is called."""


def eight_bit(sheet: Sheet, *keys: str) -> None:
    """Adapters on a base of LLM.int8, as bitsandbytes has it."""
    adapters(sheet, "qlora", *keys, note="adapters on a base of 8 bits")
    sheet.means("quantization", "int8", *keys, note="columns beyond 6 are not counted: 0.1 % by the paper")


def inputs_kept(sheet: Sheet, *, reentrant: bool) -> None:
    """Last of all: an 8-bit base under layers that run again keeps inputs unless their calls are reentrant
    (bitsandbytes 0.50.2, autograd/_functions.py, MatMul8bitLt: attributes of ctx, which no hook sees)."""
    said = sheet.flag(REENTRANT)
    if (
        sheet.says("quantization") != "int8"
        or sheet.says("recompute") != "full"
        or (reentrant if said is None else said)
    ):
        return
    keys = next(line.keys for line in sheet.lines if line.option == "quantization")
    why = "not modelled: an 8-bit base keeps its inputs, since layers run again without reentrant calls"
    sheet.means("quantization", "int8", *keys, note=why, memory="more")


def targets(sheet: Sheet, key: str, absent_all: bool) -> None:
    """Adapted modules: a list, names with commas, or all linear modules."""
    names = _names(sheet.data.get(key))
    if names in ("all", "all-linear", "all_linear"):
        sheet.means("lora_targets", ALL_LINEAR, key)
    elif names is not None:
        sheet.means("lora_targets", names, key)
    elif absent_all:
        sheet.means("lora_targets", ALL_LINEAR, note=f"{sheet.name}'s default for {key}")


def dropout(sheet: Sheet) -> None:
    """The share of adapters' inputs that is zeroed."""
    if sheet.real("lora_dropout"):
        sheet.means("lora_dropout", sheet.real("lora_dropout"), "lora_dropout")
    sheet.ignore("lora_dropout", OFF)


def magnitudes(sheet: Sheet, key: str) -> None:
    """peft's use_dora, where the engine that the file asks for has it; last, when method and engine are known."""
    engines = sheet.says("engine") or ()
    if not sheet.flag(key):
        sheet.ignore(key, OFF)
    elif sheet.says("method") == "lora" and any(ENGINES[name].dora for name in engines):
        sheet.means("dora", True, key)
    else:
        sheet.unmodelled(
            key, "magnitudes are modelled of whole copies in 16 bits; plain adapters are estimated", "more"
        )


def saved_modules(sheet: Sheet, key: str) -> None:
    """Modules trained whole beside the adapters: a list, or names with commas."""
    if (names := _names(sheet.data.get(key))) is not None:
        sheet.means("modules_to_save", names, key)


def _names(value: Any) -> str | None:
    """A list, or names with commas, as names with commas; None where there are none."""
    if value is None or value == []:
        return None
    return ",".join(str(name).strip() for name in (value if isinstance(value, list) else str(value).split(",")))


def split(sheet: Sheet, *said: str, alone: bool = False) -> None:
    """DeepSpeed, FSDP or neither. `said` are the format's keys that ask for FSDP; `alone`: its section does so too."""
    words = sheet.data.get("fsdp") or []
    if not isinstance(words, str | list):
        raise sheet.wrong("fsdp", "must be a list of words", "Known: full_shard, auto_wrap, offload")
    words = words.split() if isinstance(words, str) else [str(word) for word in words]
    if sheet.on("deepspeed"):
        deepspeed_section(sheet, "deepspeed")
    elif words or alone:
        there = [key for key in said if key in sheet.data]
        version = sheet.whole("fsdp_version") if "fsdp_version" in there else None
        fsdp.read(sheet, "fsdp_config", *there, version=version, words=tuple(words))
    elif sheet.says("engine") is None:  # torchrun and Accelerate then wrap the model in DDP
        note = "neither FSDP nor DeepSpeed is asked for"
        sheet.means("strategy", "ddp", note=note)
        sheet.means("engine", ("ddp",), note=note)


def deepspeed_section(sheet: Sheet, key: str) -> None:
    """A path to DeepSpeed's JSON, or the table itself; values beside the trainer's own must agree with them."""
    name = sheet.data.get(key)
    if isinstance(name, str):
        path = files.referenced(name, sheet.path)
        sheet.ignore(key, f"read as {path}")
        deepspeed_table(sheet, key, files.load(path), str(path))
    else:
        tables = sheet.tables.get(key)
        deepspeed_table(sheet, key, tables if isinstance(tables, dict) else {})


def deepspeed_table(sheet: Sheet, key: str, table: dict[str, Any], path: str = "") -> None:
    """DeepSpeed's keys under that one, from a file of that path."""
    inner = Sheet(deepspeed.NAME, path or f"{sheet.path}: {key}", table)
    if path and not deepspeed.detect(inner.tables):
        raise sheet.wrong(key, "is not a DeepSpeed configuration", "Name DeepSpeed's JSON file")
    own = {name: sheet.says(name) for name in ("micro_batch_size", "grad_accum", "max_grad_norm", "lr", "weight_decay")}
    deepspeed.agree(inner, {name: value for name, value in own.items() if value is not None})
    deepspeed.read(inner, trainer=True)
    sheet.include(inner.close(classes(deepspeed.KEYS)), key)


def replicated(sheet: Sheet) -> bool:
    """Whether every rank holds a whole copy."""
    return any(ENGINES[name].copies == "replicas" for name in sheet.says("engine") or ())

"""DeepSpeed's JSON: ZeRO stage, buckets, offload, precision, batches; "auto" as Hugging Face Trainer fills it in.

Keys and defaults: deepspeed 0.19 (runtime/config.py, runtime/zero/config.py); auto: transformers 5
(integrations/deepspeed.py). Not here: what DeepSpeed does with them (planner/engines/deepspeed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.ask.fromfile import split
from planner.ask.fromfile.sheet import Means, Sheet
from planner.basics.errors import PlannerError

NAME = "DeepSpeed"
KEYS = "deepspeed"
AUTO = "auto"
ZERO = "zero_optimization"
DEFAULT_BUCKET_ELEMENTS = 500_000_000
HOST = ("cpu", "nvme")

AS_ESTIMATED = {
    "contiguous_gradients": "gradients copied together in one buffer",
    "reduce_scatter": "gradients reduced to their owner alone",
    "allgather_partitions": "weights gathered, not broadcast one by one",
}
"""Switches of ZeRO that are on unless said otherwise, and that the engine is modelled with."""

OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "cpuadam", "fusedadam", "torchadam", "deepspeedcpuadam"), "adamw"),
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
}

FUSED = ("adam", "adamw", "fusedadam")
"""Of which DeepSpeed makes its FusedAdam on GPUs, unless told torch_adam (runtime/engine.py, _configure_basic_optimizer
of 0.19.8)."""

PLAIN = {
    "train_batch_size": Means("global_batch_size", "whole"),
    "train_micro_batch_size_per_gpu": Means("micro_batch_size", "whole"),
    "gradient_accumulation_steps": Means("grad_accum", "whole"),
    "gradient_clipping": Means("max_grad_norm", "real"),
    "optimizer.params.lr": Means("lr", "real"),
    "optimizer.params.weight_decay": Means("weight_decay", "real"),
    f"{ZERO}.stage3_max_live_parameters": Means("zero3_max_live_elements", "whole"),
    f"{ZERO}.stage3_max_reuse_distance": Means("zero3_max_reuse_elements", "whole"),
}


class OfHidden(NamedTuple):
    """A bucket that Trainer sizes to the model's hidden width once the model is known."""

    text: str
    factor: float
    power: int

    def elements(self, hidden: int) -> int:
        """The size for a model."""
        return int(self.factor * hidden**self.power)


HIDDEN = {
    f"{ZERO}.reduce_bucket_size": OfHidden("hidden x hidden", 1, 2),
    f"{ZERO}.stage3_prefetch_bucket_size": OfHidden("0.9 x hidden x hidden", 0.9, 2),
    f"{ZERO}.stage3_param_persistence_threshold": OfHidden("10 x hidden", 10, 1),
}
FILLED = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": None,
    "optimizer.params.eps": None,
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": None,
}
"""What Trainer or Accelerate fills in when it is "auto": the option, or None when it follows from others."""


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is DeepSpeed's."""
    return any(key in data for key in (ZERO, "train_micro_batch_size_per_gpu", "train_batch_size"))


def read(sheet: Sheet, *, trainer: bool = False) -> None:
    """The whole file. What is auto comes from the file that names this one (`trainer`), or from the command line."""
    _autos(sheet, trainer)
    # Stage 3's limits are plain only where stage 3 reads them.
    live = [key for key in PLAIN if "stage3_" not in key or sheet.data.get(f"{ZERO}.stage") == 3]
    sheet.plain({key: PLAIN[key] for key in live if sheet.data.get(key) != AUTO})
    _precision(sheet)
    _zero(sheet)
    _optimizer(sheet)
    _groups(sheet)
    _batches(sheet)
    for key in sheet.under("activation_checkpointing"):
        sheet.ignore(key, "takes effect only in models that call deepspeed.checkpointing (--recompute says)")


def agree(sheet: Sheet, trainer: Mapping[str, Any]) -> None:
    """A file that Trainer reads: a value beside Trainer's own must be equal, or Trainer refuses to start."""
    for key, option in FILLED.items():
        ours = sheet.data.get(key)
        if option in (None, "precision") or ours in (None, AUTO) or option not in trainer:
            continue
        if float(ours) != float(trainer[option]):
            raise sheet.wrong(key, f"is not the trainer's {option} {trainer[option]}", f'Set it to "{AUTO}"')


def _autos(sheet: Sheet, trainer: bool) -> None:
    for key, value in sheet.data.items():
        if value != AUTO or key in HIDDEN:
            continue
        option = FILLED.get(key)
        if key in FILLED and option is not None:
            named = "the file's own" if trainer else f"--{option.replace('_', '-')} or its default"
            sheet.ignore(key, f"auto: Trainer's argument decides, here {named}")
        elif key in FILLED or key.startswith("scheduler."):
            sheet.ignore(key, "auto: follows from Trainer's other arguments")
        else:
            raise sheet.wrong(key, "is a key that Trainer does not fill in", "Give it a value")


def _precision(sheet: Sheet) -> None:
    bf16_key = "bf16.enabled" if "bf16.enabled" in sheet.data else "bfloat16.enabled"
    if AUTO in (sheet.data.get("fp16.enabled"), sheet.data.get(bf16_key)):
        return
    half, bf16 = sheet.flag("fp16.enabled"), sheet.flag(bf16_key)
    if half and bf16:
        raise sheet.wrong("fp16.enabled", "cannot be together with bf16", "Enable one of the two")
    pure = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
    if bf16 and all(sheet.flag(key) for key in pure):
        sheet.means("precision", "pure-bf16", bf16_key, "fp16.enabled", *pure)
        return
    for key in pure:
        if sheet.flag(key):
            sheet.unmodelled(key, "only both together are (pure-bf16)", "less")
    if half is None and bf16 is None:
        sheet.means("precision", "fp32", note="DeepSpeed's default: neither fp16 nor bf16 is enabled")
    else:
        sheet.means("precision", "bf16" if bf16 else "fp16" if half else "fp32", bf16_key, "fp16.enabled")


def _zero(sheet: Sheet) -> None:
    stage_key = f"{ZERO}.stage"
    stage = sheet.data.get(stage_key)
    stage = int(stage) if isinstance(stage, bool) else sheet.whole(stage_key) or 0
    if stage not in (0, 1, 2, 3):
        raise sheet.wrong(stage_key, "must be 0, 1, 2 or 3")
    if stage == 0:
        note = "stage 0 shards nothing: DDP is estimated, which sends the same"
        sheet.means("strategy", "ddp", stage_key, note=note)
        sheet.means("engine", ("ddp",), stage_key)
        sheet.ignore_section(ZERO, "stage 0 does not use it")
        return
    sheet.means("strategy", f"zero{stage}", stage_key)
    sheet.means("engine", ("deepspeed",), stage_key)
    sheet.means("zero_stage", stage, stage_key)
    for name, what in AS_ESTIMATED.items():
        if sheet.flag(f"{ZERO}.{name}") is False:
            sheet.unmodelled(f"{ZERO}.{name}", f"off; {what} is estimated", "more")
        else:
            sheet.ignore(f"{ZERO}.{name}", f"on, as is estimated: {what}")
    _buckets(sheet, stage)
    overlap = sheet.flag(f"{ZERO}.overlap_comm")
    if overlap is None:
        sheet.means("overlap_comm", stage == 3, note="DeepSpeed's default for overlap_comm: on in stage 3 alone")
    else:
        sheet.means("overlap_comm", overlap, f"{ZERO}.overlap_comm")
    for section, old, option in (
        ("offload_optimizer", "cpu_offload", "offload_optimizer"),
        ("offload_param", "cpu_offload_param", "offload_params"),
    ):
        _offload(sheet, f"{ZERO}.{section}", f"{ZERO}.{old}", option)
    sheet.degree(f"{ZERO}.zero_hpz_partition_size", "zero_secondary_shard")


def _buckets(sheet: Sheet, stage: int) -> None:
    sizes = [("reduce_bucket_size", "reduce_bucket_elements", True)]
    sizes += [("allgather_bucket_size", "allgather_bucket_elements", stage < 3)]
    if stage == 3:
        sizes += [("stage3_prefetch_bucket_size", "zero3_prefetch_elements", False)]
        sizes += [("stage3_param_persistence_threshold", "zero3_persistence_elements", False)]
    for name, option, has_default in sizes:
        key = f"{ZERO}.{name}"
        if sheet.data.get(key) == AUTO:
            sheet.means(option, HIDDEN[key], key, note="auto: as Trainer sizes it to the model")
        elif sheet.has(key):
            sheet.means(option, sheet.whole(key), key)
        elif has_default:
            sheet.means(option, DEFAULT_BUCKET_ELEMENTS, note=f"DeepSpeed's default for {name}, whatever the model")
    for key in sheet.under(ZERO):
        if stage < 3 and key.startswith(f"{ZERO}.stage3_"):
            sheet.ignore(key, f"stage {stage} does not use it")


def _offload(sheet: Sheet, section: str, old: str, option: str) -> None:
    device = f"{section}.device"
    where = str(sheet.data.get(device) or "none").lower()
    if where not in (*HOST, "none"):
        raise sheet.wrong(device, "must be cpu, nvme or none")
    if where in HOST or sheet.flag(old):
        note = "nvme: estimated as host memory" if where == "nvme" else ""
        sheet.means(option, True, device if where in HOST else old, note=note)
    for key in (section, device, old):
        sheet.ignore(key, "off")


def _optimizer(sheet: Sheet) -> None:
    key = "optimizer.type"
    name = sheet.text(key)
    if name is None:
        return
    if name.lower() in OPTIMIZERS:
        sheet.means("optimizer", OPTIMIZERS[name.lower()], key)
        if name.lower() in FUSED:
            lists = "optimizer.params.torch_adam"
            step = "foreach" if sheet.flag(lists) else "fused"
            sheet.means("optimizer_implementation", step, lists if sheet.flag(lists) else key)
    else:
        fix = "Add --optimizer adamw, or another that is planned"
        sheet.decides(key, f"optimizer {name} is not planned for", fix, "optimizer")


def _groups(sheet: Sheet) -> None:
    sheet.degree("tensor_parallel.autotp_size", "tp")
    if sheet.degree("sequence_parallel_size", "cp"):
        sheet.means("cp_method", "ulysses", "sequence_parallel_size", note="DeepSpeed's sequence parallelism")
    split.settle(sheet)


def _batches(sheet: Sheet) -> None:
    """The three batch sizes give the number of data-parallel ranks."""
    whole, micro, accum = (sheet.says(name) for name in ("global_batch_size", "micro_batch_size", "grad_accum"))
    if not (whole and micro and accum) or sheet.says("tp") or sheet.says("cp"):
        return
    if whole % (micro * accum):
        rule = f"is not a multiple of micro-batch {micro} x accumulation {accum}"
        raise PlannerError(f"{sheet.path}: train_batch_size", whole, rule, "DeepSpeed refuses it too: change one")
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sheet.means("gpus", whole // (micro * accum), *keys, note="train_batch_size over micro-batch and accumulation")

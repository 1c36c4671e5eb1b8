"""FSDP keys as Accelerate has them; Axolotl and LLaMA-Factory pass on the same ones, with or without `fsdp_`.

Version 1 (FullyShardedDataParallel) is estimated as FSDP2, which does the same with per-parameter shards.
Not here: group sizes, or anything but FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from planner.ask.fromfile.sheet import Memory, Sheet
from planner.spec.engines import ENGINES
from planner.spec.layout import STRATEGIES as NAMED

VERSION_1 = "FSDP 1 is estimated as FSDP2: its flat parameters pad differently"

# Accelerate takes the word or torch's number for it (ShardingStrategy). (whole copies?, hybrid?, reshard?)
STRATEGIES = {
    **dict.fromkeys(("1", "full_shard"), ("fsdp", True)),
    **dict.fromkeys(("2", "shard_grad_op"), ("fsdp", False)),
    **dict.fromkeys(("3", "no_shard"), ("ddp", False)),
    **dict.fromkeys(("4", "hybrid_shard"), ("hsdp", True)),
    **dict.fromkeys(("5", "hybrid_shard_zero2"), ("hsdp", False)),
}


def read(sheet: Sheet, section: str, *said: str, version: int | None = None, words: tuple[str, ...] = ()) -> None:
    """A section of FSDP keys; `said` are the keys outside that ask for FSDP, `words` what they say (full_shard)."""
    keys = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in sheet.under(section)}

    def key_of(name: str) -> str:
        return keys.get(name, f"{section}.fsdp_{name}")

    version_key = key_of("version")
    version = sheet.whole(version_key) or version or 1
    if version not in (1, 2):
        raise sheet.wrong(version_key, "must be 1 or 2")
    note = VERSION_1 if version == 1 else ""
    strategy, reshard = "fsdp", True
    source: tuple[str, ...] = ()
    named = next((word for word in words if word in STRATEGIES), None)
    if named is not None:
        strategy, reshard = STRATEGIES[named]
    if sheet.has(key_of("sharding_strategy")):
        if version == 1:
            strategy, reshard = sheet.choice(key_of("sharding_strategy"), STRATEGIES)
            source = (key_of("sharding_strategy"),)
        else:
            sheet.ignore(key_of("sharding_strategy"), "FSDP2 does not read it: fsdp_reshard_after_forward decides")
    reshard_key = key_of("reshard_after_forward")
    if sheet.has(reshard_key):
        word = str(sheet.data[reshard_key]).lower()
        if word in STRATEGIES:
            strategy, reshard = STRATEGIES[word]
        else:
            reshard = sheet.flag(reshard_key) is not False
        source = (*source, reshard_key)
    sheet.means("strategy", strategy, *said, *source, version_key, note=note)
    engine = next(one.engine for one in NAMED if one.name == strategy)
    sheet.means("engine", (engine,), *said, version_key, note=note)
    if not ENGINES[engine].whole_copies:
        sheet.means("zero_stage", 3, *said, note="weights, gradients and optimizer are sharded")
        sheet.means("reshard_after_forward", reshard, *source, note="" if source else "the default")
    _offload(sheet, key_of("offload_params"), words, said)
    script = "off here; the training script may still recompute (--recompute says)"
    sheet.switch(key_of("activation_checkpointing"), "recompute", "full", off=script)
    sheet.switch(key_of("activation_checkpointing_offload"), "offload_activations")
    wrap = key_of("auto_wrap_policy")
    if sheet.has(wrap) and str(sheet.data[wrap]).upper() == "TRANSFORMER_BASED_WRAP":
        sheet.ignore(wrap, "layers are wrapped one by one, as is estimated")
    elif sheet.has(wrap):
        sheet.unmodelled(wrap, "layers are wrapped one by one in the estimate", "more")
    sheet.ignore(key_of("min_num_params"), "layers are wrapped one by one, whatever their size")
    _prefetch(sheet, key_of)


def _prefetch(sheet: Sheet, key_of: Callable[[str], str]) -> None:
    """How far FSDP 1 gathers ahead: as Accelerate sets it unless told otherwise, which is FSDP2's way, or not."""
    for name, usual, memory in (
        ("backward_prefetch", ("backward_pre", "1"), "less"),
        ("forward_prefetch", ("false",), "more"),
        ("limit_all_gathers", ("true",), "more"),
    ):
        if str(sheet.data.get(key_of(name))).lower() in usual:
            sheet.ignore(key_of(name), "as is estimated")
        elif sheet.has(key_of(name)):
            sheet.unmodelled(key_of(name), "FSDP2's own prefetch is estimated", cast(Memory, memory))


def _offload(sheet: Sheet, key: str, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    if "offload" in words or sheet.flag(key):
        keys = (key,) if sheet.flag(key) else said
        sheet.means("offload_params", True, *keys)
        sheet.means("offload_optimizer", True, *keys, note="FSDP keeps the optimizer where the weights rest")
    else:
        sheet.ignore(key, "off")

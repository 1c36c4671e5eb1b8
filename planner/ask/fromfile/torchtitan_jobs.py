"""torchtitan's job configurations since February 2026: functions by name with overrides of a command line, and the JSON
that `debug.save_config_file` writes. Their keys become those that torchtitan.py reads, their model its sizes.

Source: torchtitan b5bcd76 (config/manager.py, trainer.py, models/common/config_utils.py). Values of registered
functions are data (keys/registered/torchtitan.toml); no function is run. Not here: what keys mean to an estimate
(torchtitan.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from planner.ask.fromfile.sheet import Sheet
from planner.basics.errors import PlannerError, did_you_mean
from planner.spec import ModelSpec, presets
from planner.spec.model import Mla, Moe
from planner.spec.model_rules import check_model

MODEL = "model_spec"
LAYERS = f"{MODEL}.model.layers"
FLAVOR = f"{MODEL}.flavor"
CONVERTERS = f"{MODEL}.converters"
FURTHER = f"{MODEL}.model.mtp_layers"
FAMILIES = {"llama3": "llama", "qwen3": "qwen3", "deepseek_v3": "deepseek_v3"}
"""torchtitan's models whose dumps are read for their sizes, and the family of Transformers that is built alike."""


def is_job(data: Mapping[str, Any]) -> bool:
    """Whether a table is a dump, or the name of a registered configuration with overrides."""
    spec = data.get(MODEL)
    return (isinstance(spec, Mapping) and "flavor" in spec) or {"module", "config"} <= data.keys()


@lru_cache(maxsize=1)
def registered() -> dict[str, Any]:
    """The data of registered configurations."""
    return tomllib.loads(files(__package__).joinpath("keys/registered/torchtitan.toml").read_text("utf-8"))


def expand(sheet: Sheet) -> None:
    """A name becomes the keys of its configuration, under those of the command line."""
    if "module" not in sheet.data:
        return
    data = registered()
    module, name = str(sheet.data["module"]).removeprefix("torchtitan.models."), str(sheet.data.get("config"))
    dump = "Give the JSON that --debug.save_config_file writes"
    if module not in data["configurations"]:
        known = ", ".join(data["configurations"])
        raise sheet.wrong("module", f"is not one of the modules known here, {known}", dump)
    if name not in data["configurations"][module]:
        raise sheet.wrong("config", f"is not a configuration of {module} known here", dump)
    plain = data["defaults"] | {f"{MODEL}.name": module} | data["configurations"][module][name]
    for key, value in sheet.data.items():
        if isinstance(plain.get(key), list) and isinstance(value, str):
            sheet.data[key] = value.split(",")
    sheet.data = plain | sheet.data
    sheet.ignore("module", f"read as of torchtitan {data['commit'][:7]}")
    sheet.ignore("config", f"its values are those of torchtitan {data['commit'][:7]}")


def model(sheet: Sheet) -> ModelSpec:
    """The model, by the dump's sizes or the flavor's."""
    name, flavor = sheet.text(f"{MODEL}.name"), sheet.text(FLAVOR)
    if LAYERS in sheet.data:
        spec = _sizes(sheet, str(name), str(flavor))
        keys = [key for key in sheet.under(f"{MODEL}.model") if key != FURTHER]
        sheet.means("model", spec, *keys, f"{MODEL}.name", FLAVOR, note="by the dump's sizes")
        if sheet.on(FURTHER):
            sheet.unmodelled(FURTHER, "layers that predict further tokens", "more")
        sheet.ignore(FURTHER, "off")
        return spec
    data = registered()
    known = data["flavors"].get(name, {}) | data["sizes"].get(name, {})
    if flavor not in known:
        raise sheet.wrong(FLAVOR, f"is not a model of {name} known here", did_you_mean(str(flavor), known))
    found = known[flavor]
    if isinstance(found, str):
        sheet.means("model", found, f"{MODEL}.name", FLAVOR)
        return presets.model(found)
    spec = msgspec.convert({"name": f"{name}-{flavor}"} | found, ModelSpec)
    sheet.means("model", spec, f"{MODEL}.name", FLAVOR)
    return spec


def _sizes(sheet: Sheet, name: str, flavor: str) -> ModelSpec:
    """A decoder's sizes from a dump; one that is built otherwise is refused (PlannerError)."""
    layers, top = sheet.data[LAYERS], f"{MODEL}.model"
    try:
        family = FAMILIES[name]
        first, last = layers[0], layers[-1]
        attention, moe = last["attention"], last["moe"]
        dense = sum(1 for layer in layers if layer["moe"] is None)
        ffn = first["feed_forward"]["w1"]["out_features"] if first["feed_forward"] else 0
        facts: dict[str, Any] = {"heads": attention["n_heads"]}
        if name == "deepseek_v3":
            widths = {key: attention[key] for key in Mla.__struct_fields__}
            facts |= {"mla": Mla(**widths | {"q_lora_rank": attention["q_lora_rank"] or None})}
            facts |= {"kv_heads": attention["n_heads"], "head_dim": facts["mla"].qk_head_dim}
            family = family if moe["router"]["score_func"] == "sigmoid" else "deepseek_v2"
        else:
            head = attention["head_dim"] or attention["qkv_linear"]["head_dim"]
            facts |= {"kv_heads": attention["n_kv_heads"] or attention["n_heads"], "head_dim": head}
            facts |= {"qk_norm": attention["qk_norm"] is not None}
        if moe is not None:
            router, experts = moe["router"], moe["routed_experts"]["inner_experts"]
            shared = moe.get("shared_experts")
            facts["moe"] = Moe(
                experts=moe["num_experts"],
                top_k=router["top_k"],
                expert_ffn=experts["hidden_dim"],
                shared_experts=shared["w1"]["out_features"] // experts["hidden_dim"] if shared else 0,
                dense_layers=dense,
                normalised=router["route_norm"],
                scale=float(router["route_scale"]),
                groups=router["num_expert_groups"] or 1,
                top_groups=router["num_limited_groups"] or 1,
            )
            ffn, family = ffn or experts["hidden_dim"], "qwen3_moe" if family == "qwen3" else family
        found = {
            "name": f"{name}-{flavor}",
            "family": family,
            "layers": len(layers),
            "hidden": sheet.data[f"{top}.dim"],
            "vocab": sheet.data[f"{top}.vocab_size"],
            "ffn": ffn,
            "tied": bool(sheet.data.get(f"{top}.enable_weight_tying")),
            "max_seq_len": sheet.whole("training.max_context_length") or 4096,
            **facts,
        }
        spec = msgspec.convert(msgspec.to_builtins(found), ModelSpec)
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        rule = f"is not built as torchtitan's own {', '.join(FAMILIES)}"
        raise PlannerError(f"{sheet.path}: {top}", name, rule, "Say which it is: --model NAME") from error
    check_model(spec, f"{sheet.path}: {top}")
    return spec


def modules(sheet: Sheet) -> None:
    """What modules do beside their sizes: attention, converted products, adapters, how experts' tokens travel."""
    where = LAYERS if LAYERS in sheet.data else CONVERTERS
    found = _of_dump(sheet) if LAYERS in sheet.data else {}
    attention = found.get("attn_backend") or str(sheet.data.get(f"{MODEL}.attn_backend"))
    if attention.startswith("flex"):
        sheet.means("attention", "flex", f"{MODEL}.attn_backend", LAYERS)
    sheet.ignore(f"{MODEL}.attn_backend", "keeps what flash attention keeps, as is estimated")
    converters = sheet.data.get(CONVERTERS) or found.get("converters") or ()
    sheet.ignore(CONVERTERS, "off")
    if "lora" in converters:
        note = "not modelled: adapters; training every weight is estimated"
        sheet.means("method", "full", where, note=note, memory="less")
    if found.get("moe_comm_backend"):
        note = "not modelled: buffers in which experts' tokens travel"
        sheet.means("zero_stage", 3, LAYERS, note=note, memory="more")
    replaced = "override.imports"
    if isinstance(sheet.data.get(replaced), list) and all("fused_swiglu" in str(one) for one in sheet.data[replaced]):
        if sheet.data[replaced]:
            sheet.unmodelled(replaced, "a fused SwiGLU keeps less", "less")
        sheet.ignore(replaced, "off")


def _of_dump(sheet: Sheet) -> dict[str, Any]:
    """What the arguments of model_registry were, as far as the layers show."""
    last = Sheet(sheet.name, sheet.path, sheet.data[LAYERS][-1]).data
    return {
        "attn_backend": "flex" if "attention.inner_attention.block_size" in last else "varlen",
        "converters": ["lora"] if "attention.wo.rank" in last else [],
        "moe_comm_backend": "moe.routed_experts.token_dispatcher.num_max_tokens_per_rank" in last,
    }


def stage_layers(sheet: Sheet, layers: int, stages: int) -> None:
    """Layers of every stage in the model's order: embedding and head count as so many layers of theirs
    (distributed/pipeline_parallel.py, _generate_llm_fqn_per_model_part)."""
    keys = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    before, after = (1 if (value := sheet.whole(key)) is None else value for key in keys)
    each, rest = divmod(layers + before + after, stages)
    if each < 1:
        raise sheet.wrong("parallelism.pipeline_parallel_degree", f"makes {stages} stages of {layers} layers")
    counts = [each + (place < rest) for place in range(stages)]
    counts[0] -= before
    counts[-1] -= after
    if min(counts) < 1 or min(before, after) < 0 or max(before, after) > each:
        raise sheet.wrong("parallelism.pipeline_parallel_degree", f"makes {stages} stages of {layers} layers")
    sheet.means("stage_layers", ",".join(map(str, counts)), *keys)

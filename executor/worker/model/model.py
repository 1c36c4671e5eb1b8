"""The model and its optimizer, before any framework touches them: without data, and where its numbers come from.

Not here: the numbers (values.py), adapters (adapters.py), 4-bit weights (quantized.py), wrapping and sharding
(engines/), or putting numbers where they stay (loading.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from executor.worker.model import compiled, loading, losses, recompute
from executor.worker.model.adapters import add_adapters, is_adapter, is_magnitude, ordinary_name, with_copies
from executor.worker.model.layers import (
    auto_class,
    config_of,
    decoder_config,
    freeze_unused,
    of_layers,
    without_padding,
)
from executor.worker.model.quantized import pack_layers
from executor.worker.model.seeds import seed_all
from executor.worker.model.values import Recorder, WeightValues, drawn, stored, taken
from planner.engines.common import implementation
from planner.inventory.compute import liger_parts
from planner.inventory.ends import pieces_of
from planner.inventory.optimizers import BITSANDBYTES_8BIT
from planner.parallelism.case import Case
from planner.spec import ModelSpec, Optimizer, TrainingJob
from planner.spec.huggingface import config_dict
from planner.spec.plan import Plan

IMPLEMENTATIONS = {"loop": "eager", "grouped": "grouped_mm"}
"""Transformers 5's names of what a plan says of experts (integrations/moe.py); without either it takes grouped_mm where
torch has it."""
ATTENTION = {"flash2": "flash_attention_2", "flash3": "flash_attention_3"}
"""Its names of a plan's attention, where they differ."""
LIGER_ARGUMENTS = {"norm": ("rms_norm",), "rotary": ("rope",), "mlp": ("swiglu", "geglu")}
"""What Liger-Kernel calls each part (0.8.5, transformers/monkey_patch.py)."""


def replace_by_liger(model: Any, parts: Collection[str]) -> None:
    """Have parts of a model computed by Liger-Kernel's functions, and the loss by none of them."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    chosen = {argument: part in parts for part, names in LIGER_ARGUMENTS.items() for argument in names}
    _apply_liger_kernel_to_instance(model, **chosen, cross_entropy=False, fused_linear_cross_entropy=False)


@dataclass(frozen=True)
class Unfilled:
    """A model without data, in the format its weights are held in, and the numbers that it is to have."""

    model: Any
    values: WeightValues

    def filled(self, device: torch.device) -> Any:
        """The model with all its weights on one device."""
        return loading.fill(self.model, self.values, device)


def unfilled_model(plan: Plan) -> Unfilled:
    """The Transformers model with adapters if the method has them; nothing but its buffers takes memory.

    Every rank and every layout gets the same numbers. A checkpoint that lacks a weight is refused (PlannerError).
    """
    job, dtype, config = plan.job, weight_dtype(plan.job), model_config(plan)
    seed_all(job.recipe.seed)
    recorder = Recorder()
    attention = plan.layout.attention
    chosen = {} if attention is None else {"attn_implementation": ATTENTION.get(attention, attention)}
    with _WithoutData(), recorder:
        model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False, **chosen)
    if plan.layout.liger:
        replace_by_liger(model, liger_parts(plan.layout.liger, plan.model))
    if plan.layout.experts is not None:
        model.set_experts_implementation(IMPLEMENTATIONS[plan.layout.experts])
    model.config.use_cache = False
    if plan.model.moe is not None:
        decoder_config(model.config).output_router_logits = False  # a checkpoint may ask for the auxiliary loss
    recorder.fill_buffers(model, job.recipe.seed)
    own = taken(model)
    base = stored(job.recipe.checkpoint, model) if job.recipe.checkpoint else []
    names = {} if base else {id(weight): name for name, weight in model.named_parameters() if name not in own}
    recorder.calls = [] if base else recorder.calls + recorder.constants(model.parameters())
    if plan.model.described is not None:
        freeze_unused(model, plan.model.described, towers=not job.trains_towers)
    if job.base_quantization is not None:
        pack_layers(model, job.base_quantization, dtype)
    if job.adapters is not None:
        with _WithoutData(), recorder:
            add_adapters(model, plan, dtype)
        adapters = [one for one in model.named_parameters() if is_adapter(one[0]) and not is_magnitude(one[0])]
        names |= {id(weight): ordinary_name(name) for name, weight in adapters}
    # peft draws adapters in fp32 and gives them the base's format, whatever they are held in afterwards.
    values: WeightValues = chain(base or own.items(), drawn(recorder.calls, names, job.recipe.seed, adapters=dtype))
    if job.adapters is not None and (job.adapters.modules_to_save or job.adapters.dora):
        values = with_copies(values, model)
    recompute.enable(model, plan)
    compiled.enable(model, plan.layout)
    losses.lend_loss(model)
    losses.install(model, plan.layout.loss, pieces_of(Case.of(plan).parts, plan.model))
    return Unfilled(model.train(), values)


class _WithoutData(TorchFunctionMode):
    """While entered, what modules make for their weights is on "meta".

    Other tensors are real, so buffers are what they will be. And unlike under torch.device("meta") Transformers still
    calls what initialises weights (it asks where `torch.tensor([])` is), so a Recorder sees it.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.ones, torch.zeros) and kwargs.get("device") is None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def weight_dtype(job: TrainingJob) -> torch.dtype:
    """Format of the weights at rest. Mixed precision trains fp32 weights, but a frozen base is never updated: bf16."""
    if job.precision == "fp32" or (job.precision == "bf16" and job.method == "full"):
        return torch.float32
    return torch.bfloat16


def model_config(plan: Plan) -> Any:
    """The model's Transformers configuration: its checkpoint's own, or the one of the plan's sizes."""
    from transformers import AutoConfig

    if plan.job.recipe.checkpoint:
        return AutoConfig.from_pretrained(plan.job.recipe.checkpoint, local_files_only=True, trust_remote_code=False)
    if plan.model.described is not None:
        config = config_of(plan.model.described.config)
        if not plan.model.described.padded:
            without_padding(config)
        return of_layers(config, range(plan.model.layers + plan.model.described.idle_layers))
    return transformers_config(plan.model, plan.job.seq_len)


def transformers_config(spec: ModelSpec, seq_len: int) -> Any:
    """The Transformers configuration of a spec."""
    from transformers import AutoConfig

    facts = config_dict(spec) | {
        "use_cache": False,
        "pad_token_id": None,
        # Ids of the built-in byte tokenizer; they only matter to someone who generates from the saved weights.
        "bos_token_id": min(256, spec.vocab - 1),
        "eos_token_id": min(257, spec.vocab - 1),
    }
    if spec.positions == "rope":  # learned positions are as many as the model has
        facts["max_position_embeddings"] = max(spec.max_seq_len, seq_len)
    return AutoConfig.for_model(**facts)


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """torch's AdamW or SGD, or bitsandbytes' of 8 bits, over every trainable weight; torch's step as the plan is
    predicted (planner.engines.common).

    Weight decay does not spare norms, so all engines shard one list; only where tensors of several kinds are trained it
    is several.
    """
    chosen, step = plan.job.optimizer, implementation(Case.of(plan))
    how: dict[str, bool] = {"fused": step == "fused", "foreach": step == "foreach"}
    groups = one_kind_each(parameter for parameter in model.parameters() if parameter.requires_grad)
    if chosen.name in BITSANDBYTES_8BIT:
        coded: torch.optim.Optimizer = _of_8_bits(groups, chosen)
        return coded
    if chosen.name == "sgd":
        return torch.optim.SGD(groups, lr=chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay, **how)
    return torch.optim.AdamW(
        groups,
        lr=chosen.lr,
        betas=(chosen.beta1, chosen.beta2),
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        **how,
    )


def _of_8_bits(groups: list[dict[str, Any]], chosen: Optimizer) -> Any:
    import bitsandbytes

    numbers: dict[str, Any] = {"betas": (chosen.beta1, chosen.beta2), "weight_decay": chosen.weight_decay}
    if chosen.name == "lion-8bit":
        return bitsandbytes.optim.Lion8bit(groups, lr=chosen.lr, **numbers)
    return bitsandbytes.optim.AdamW8bit(groups, lr=chosen.lr, eps=chosen.eps, **numbers)


def one_kind_each(weights: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups, one a mesh and one of plain tensors: a fused or list update of several kinds raises ("got mixed
    torch.Tensor and DTensor", or on meshes that differ). Number formats torch separates by itself."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for weight in weights:
        groups.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    return [{"params": alike} for alike in groups.values()]

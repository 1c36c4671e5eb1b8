"""The model and its optimizer, before any framework touches them: on CPU, from one seed or a local checkpoint.

Not here: adapters (adapters.py), 4-bit weights (quantized.py), wrapping and sharding (engines/).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from executor.worker import recompute
from executor.worker.adapters import add_adapters
from executor.worker.quantized import quantize_layers
from executor.worker.seeds import seed_weights
from planner.errors import PlannerError
from planner.huggingface import config_dict
from planner.plan import Plan
from planner.spec import ModelSpec, TrainingJob


def build_model(plan: Plan) -> nn.Module:
    """The Transformers model on CPU, in the format its weights are held in, with adapters if the method has them.

    Every rank and every layout gets the same weights: FSDP2 broadcasts none.
    """
    from transformers import AutoModelForCausalLM

    job = plan.job
    seed_weights(job.recipe.seed)
    dtype = weight_dtype(job)
    if job.recipe.checkpoint:
        model = _loaded(job.recipe.checkpoint, dtype)
    else:
        model = AutoModelForCausalLM.from_config(model_config(plan), dtype=dtype)
    model.config.use_cache = False
    if plan.model.moe is not None:
        model.config.output_router_logits = False  # a checkpoint may ask for the auxiliary loss
    if job.base_quantization is not None:
        device = torch.device("cpu" if plan.cluster.gpu.kind == "cpu" else "cuda")
        quantize_layers(model, job.base_quantization, dtype, device)
    if job.adapters is not None:
        add_adapters(model, job, dtype)
    recompute.enable(model, plan)
    trained: nn.Module = model.train()
    return trained


def _loaded(checkpoint: str, dtype: torch.dtype) -> Any:
    """A checkpoint whose sizes have been compared with the plan's (executor.checkpoint); no weight of it may lack."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):  # Transformers would make them up and warn
        raise PlannerError(
            "recipe.checkpoint",
            checkpoint,
            f"lacks {len(missing)} of the model's weights, {missing[0]} among them",
            "Give a folder that holds the whole model",
        )
    return model


def weight_dtype(job: TrainingJob) -> torch.dtype:
    """Format of the weights at rest. Mixed precision trains fp32 weights, but a frozen base is never updated: bf16."""
    if job.precision == "fp32" or (job.precision == "bf16" and job.method == "full"):
        return torch.float32
    return torch.bfloat16


def model_config(plan: Plan) -> Any:
    """The model's Transformers configuration: its checkpoint's own, or the one of the plan's sizes."""
    from transformers import AutoConfig

    if plan.job.recipe.checkpoint:
        return AutoConfig.from_pretrained(plan.job.recipe.checkpoint, local_files_only=True)
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


def build_optimizer(model: nn.Module, job: TrainingJob, *, on_host: bool = False) -> torch.optim.Optimizer:
    """One group with every trainable weight: weight decay does not spare norms, so all engines shard one list.

    `on_host`: the optimizer is offloaded, and each update is torch's fused kernel, see
    docs/decisions/0015-fused-step-on-the-host.md.
    """
    chosen = job.optimizer
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = True if on_host else None
    if chosen.name == "sgd":
        return torch.optim.SGD(
            weights, lr=chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay, fused=fused
        )
    return torch.optim.AdamW(
        weights,
        lr=chosen.lr,
        betas=(chosen.beta1, chosen.beta2),
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=fused,
    )

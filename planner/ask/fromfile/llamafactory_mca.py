"""LLaMA-Factory over Megatron-Core, by mcore_adapter: the keys of groups, recomputation and optimizer that it takes
beside LLaMA-Factory's own.

Keys and defaults: ROLL 8eb27cc (mcore_adapter/src/mcore_adapter/training_args.py), which LLaMA-Factory ff6d4d1 starts
where USE_MCA is set. Not here: LLaMA-Factory's own keys (llamafactory.py), or what Megatron's mean (megatron.py).
"""

from __future__ import annotations

from planner.ask.fromfile import hub, megatron
from planner.ask.fromfile.sheet import Sheet

ASKING = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
)  # fmt: skip
"""Groups whose sizes no other trainer of LLaMA-Factory reads, but Megatron-Bridge."""
OF_BRIDGE = ("mixed_precision", "megatron_pretrained_checkpoint", "extra_config", "export_hf_on_finish")
"""Keys by which Megatron-Bridge is asked for, whose defaults differ."""
FLAGS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "recompute_granularity",
    "recompute_method", "recompute_modules", "recompute_num_layers", "use_distributed_optimizer",
    "overlap_grad_reduce", "accumulate_allreduce_grads_in_fp32", "moe_token_dispatcher_type", "fp8_recipe",
)  # fmt: skip
RENAMED = {"virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank", "fp8": "fp8-format"}


def asked(sheet: Sheet) -> bool:
    """Whether the file is for mcore_adapter."""
    return any(sheet.has(key) for key in ASKING) and not any(sheet.has(key) for key in OF_BRIDGE)


def read(sheet: Sheet) -> None:
    """Its keys, after the model and the batch; every weight is trained."""
    names = {key: key.replace("_", "-") for key in FLAGS} | RENAMED
    sheet.rename({key: name for key, name in names.items() if key in sheet.data})
    sheet.plain(megatron.GROUPS)
    model = hub.sizes(sheet.says("model") or "", sheet.path)
    megatron.layout(sheet, model.layers if model is not None else 0, model is not None and model.moe is not None)
    sheet.means("optimizer", "adamw", note="mcore_adapter's default")
    key = "finetuning_type"
    sheet.means("method", "full", key)
    if str(sheet.data.get(key) or "lora") != "full":
        fix = "Use finetuning_type full, or add --runtime"
        sheet.decides(
            key if sheet.has(key) else "do_train", "adapters are not planned of Megatron-Core", fix, "runtime"
        )

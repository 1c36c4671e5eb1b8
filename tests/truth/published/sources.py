"""What the words of published rows mean here: runtimes, models, GPUs, networks, formats. Facts, each with its source.

One place for every source's quirks, so that a mapping is read, not guessed. A fact that is itself a guess says so and
is counted as an assumption of each row that needs it. Not here: the mapping (cases.py).
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from planner.spec import StepImplementation, presets
from tests.truth.published.conditions import Conditions


class RowRuntime(msgspec.Struct, frozen=True):
    """Whose code ran, as the planner models it.

    `presets` are runtime presets by what is sharded ("single", "ddp", "zero1", ..., "zero3"), "*" for all others; `own`
    says that the preset is that very software, otherwise it is the nearest and `guess` says what differs. `kernels` is
    a preset and `parts` are changes to it, `compiled` more of them where torch.compile was on. `switches` are fields of
    the layout that this software fixes, `staged` more by what is sharded. `uncast` are its words for pure 16-bit
    training. `steps` is how its AdamW stepped when its rows were measured, where they do not say.
    """

    presets: dict[str, str]
    own: bool = False
    kernels: str | None = None
    parts: dict[str, Any] = {}
    compiled: dict[str, Any] = {}
    switches: dict[str, Any] = {}
    staged: dict[str, dict[str, Any]] = {}
    guess: str = ""
    uncast: tuple[str, ...] = ()
    upcasts_adapters: bool = False
    dropout: float = 0.0
    steps: StepImplementation = "foreach"
    source: str = ""


COMPILED = {"norm": "fused", "rotary": "fused", "mlp": "fused"}
"""What torch.compile makes of element-wise chains: one kernel that keeps its inputs."""

TITAN = msgspec.structs.asdict(presets.runtime("torchtitan-compiled").parts)
"""What it makes of torchtitan's layers and loss: that runtime's own kernels."""

RUNTIMES: dict[str, RowRuntime] = {
    "nanotron": RowRuntime({"*": "nanotron"}, own=True),
    "megatron": RowRuntime({"*": "megatron-core"}, own=True),
    "torchtitan": RowRuntime({"*": "torchtitan"}, own=True, compiled=TITAN),
    "megatron-deepspeed": RowRuntime(
        {"*": "deepspeed-pipeline"},
        kernels="megatron",
        switches={"reduce_bucket_elements": 500_000_000},
        steps="fused",
        guess="DeepSpeed's pipeline and optimizers of 2022 as those of 0.19",
        source="bigscience-workshop/Megatron-DeepSpeed: Megatron-LM's modules of 2021, apex's FusedAdam "
        "(megatron/optimizer/__init__.py); ZeRO-1, pipeline by DeepSpeed; train/tr11-176B-ml/README.md: its file "
        "has no reduce_bucket_size, whose default is 5e8 (deepspeed 0.6, runtime/zero/constants.py); "
        "deepspeed 0.7, runtime/bf16_optimizer.py: fp32 gradients whole, beside 16-bit ones until the next backward",
    ),
    "llm-foundry": RowRuntime(
        {"*": "pytorch-fsdp1"},
        parts={"norm": "fused", "loss": "native", "attention": "flash2"},
        switches={"sync_each_micro_batch": True},
        steps="for-loop",
        guess="flash-attn's fused loss as PyTorch's in 16 bits, mixed_precision DEFAULT's fp32 reductions in 16 bits",
        source="llm-foundry, models/mpt/modeling_mpt.py: low-precision layernorm, plain MLP, fused_crossentropy; "
        "setup.py: flash-attn 2; yamls/pretrain/mpt-7b.yaml: attn_impl flash, decoupled_adamw, a for loop (Composer, "
        "optim/decoupled_weight_decay.py); "
        "Composer, distributed/dist_strategy.py, ddp_sync_context: FSDP reduces every micro-batch",
    ),
    "fms-fsdp": RowRuntime(
        {"*": "pytorch-fsdp1"},
        compiled=COMPILED,
        guess="torch.compile as fused norm, rotary and MLP",
        source="foundation-model-stack/fms-fsdp 5a296af, main_training_llama.py: FSDP by block, AdamW in lists",
    ),
    "internevo": RowRuntime(
        {"*": "internevo", "zero3": "accelerate-fsdp2"},
        kernels="internevo",
        guess="ZeRO-3 of InternEvo as FSDP2",
        source="InternLM/InternEvo c628a8c, doc/en/train_performance.md",
    ),
    "litgpt": RowRuntime(
        {"single": "litgpt-single", "ddp": "accelerate-ddp", "zero3": "litgpt-fsdp"},
        kernels="litgpt",
        uncast=("bf16-true",),
        dropout=0.05,
        guess="Lightning Fabric as Accelerate",
        source="Lightning-AI/litgpt, tutorials/resource-tables.md: --precision bf16-true",
    ),
    "torchtune": RowRuntime(
        {"single": "torchtune-single", "ddp": "accelerate-ddp", "fsdp2": "torchtune-fsdp2"},
        parts={"loss": "eager-fp32"},
        compiled=COMPILED,
        uncast=("bf16",),
        steps="fused",
        guess="torchtune's modules as Transformers', torch.compile as fused norm, rotary and MLP",
        source="pytorch/torchtune, recipes: dtype bf16 means weights, gradients and states in bf16",
    ),
    "hf-peft": RowRuntime(
        {"single": "accelerate-single", "ddp": "accelerate-ddp", "zero2": "deepspeed-zero", "zero3": "deepspeed-zero"},
        own=True,
        upcasts_adapters=True,
    ),
}
"""By the rows' `runtime`; a name that is not here may be a runtime preset's own."""


LARGEST = ((r"micro.?batch", "micro_batch"), (r"seq|length|context|tokens", "seq_len"))
"""What a row's `boundary` says is the largest that ran."""


class Host(msgspec.Struct, frozen=True):
    """How the hosts of a source's runs came along: what they took (`conditions`), in pipelines on more than
    `from_gpus`, and with waits for every send on `waiting_gpus` alone; and so how far they were ahead of their devices.

    A host that needed longer for a layer than the device is `pp` - `lag` forwards ahead, and in groups of more than
    `most_ranks` not at all.
    """

    conditions: Conditions
    from_gpus: int
    lag: int
    most_ranks: int
    waiting_gpus: int


class Quirk(msgspec.Struct, frozen=True):
    """What holds for every row of one source beside its words.

    `runtime` replaces the rows' runtime; `network` is theirs where a row names none; `memory` says which figure an
    unnamed memory kind is held against; `note` is an assumption of every row. `seq_len` are tokens by model name where
    rows state none, or another number than their table's code ran. `layout` fills what rows leave open, as a guess
    (`precision` is what a section ran, whatever rows say; `ends_count`: embedding and head are a layer of a stage where
    that divides; `chunks`: layers of each chunk, of every cut its code names; `narrow_weights`: with 8-bit recipes;
    `narrow_gradients` and `narrow_moments`: as in TrainingJob; `recompute_modules`, `token_dispatcher` where experts
    are split, and `tp_comm_overlap` where tokens are: as in Layout; `expandable_segments`: as in Runtime), `columns`
    replace columns of the row that its source states wrongly, `parts` are kernels, `memory_stage` the logged stage,
    `optimizer` fields of it and `refuse` reasons, of rows whose title, notes, model, GPU and precision have the
    pattern, in that order; a `stage` of the layout counts whatever the row says. Rows stepped with a fused AdamW whose
    sharding has the pattern `fused`. A wall time is that of `samples` sequences. `largest` is what the next step of was
    out of memory, by pattern. `host` is known where memory was read while the host was ahead,
    `conditions` are those of rows that have the pattern.
    """

    runtime: RowRuntime | None = None
    layout: tuple[tuple[str, dict[str, Any]], ...] = ()
    columns: tuple[tuple[str, dict[str, int]], ...] = ()
    seq_len: tuple[tuple[str, int], ...] = ()
    network: str | None = None
    memory: str | None = None
    memory_stage: tuple[tuple[str, Literal["fullest", "first"]], ...] = ()
    note: str = ""
    parts: tuple[tuple[str, dict[str, Any]], ...] = ()
    refuse: tuple[tuple[str, str], ...] = ()
    fused: str = ""
    samples: int | None = None
    largest: tuple[tuple[str, str], ...] = ()
    optimizer: tuple[tuple[str, dict[str, Any]], ...] = ()
    host: Host | None = None
    conditions: tuple[tuple[str, Conditions], ...] = ()


FUSED_STEP = r"\+optimizer in backward|\+activation offload|\+8-bit AdamW"
"""torchtune's rows since the optimizer steps inside backward (README.md: each row has what those before it have)."""

SET_BY_BRIDGE: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"(?i) deepseek", {"narrow_moments": True, "recompute_modules": ("mla_up_proj",)}),
    (r"(?i) deepseek.* GB300-\S+ BF16|25\.11.* deepseek.* GB300-", {"recompute_modules": ("moe_act",)}),
    (r"26\.04.* deepseek-v3 GB200-\S+ (?!BF16)", {"recompute_modules": ("mlp",)}),
    (r"(?i) deepseek.* H100-", {"recompute_modules": ("mla_up_proj", "mlp")}),
    (r" gpt-oss-120b (GB200|B200|H100)-", {"recompute_modules": ("layernorm", "moe_act")}),
    (r" llama-3\.1-405b GB200-\S+ (MX)?FP8|26\.04.* llama-3\.1-405b GB300-\S+ (MX)?FP8", {"expandable_segments": True}),
    (r"25\.09 NeMo", {"precision": "fp8"}),
    (r"(?i) llama-3(\.1)?-(70b|405b) |25\.09 NeMo.* qwen3", {"tp_comm_overlap": True}),
    (r" llama-3\S* \S+ NVFP4", {"tp_comm_overlap": False}),
    (r"26\.0.* deepseek-v3 H100-|26\.04.* deepseek-v3 GB200-", {"expandable_segments": True}),
    (r"25\.09 NeMo.* DeepSeekV3 .*H100-|26\.02 NeMo.* qwen3-30b-a3b H100-", {"token_dispatcher": "deepep"}),
    (
        r"(?i)(25\.11|26\.\S+) NeMo.* (deepseek|qwen3).* GB[23]00-|26\.\S+ NeMo.* deepseek-v3 B[23]00-|"
        r"26\.\S+ NeMo.* qwen3-30b-a3b B300-|26\.(02\.01|04\S*) NeMo.* qwen3-30b-a3b (B200|H100)-|"
        r"26\.04\.01 NeMo.* (qwen3-235b-a22b|gpt-oss-120b) B300-|26\.04 NeMo.* gpt-oss-120b (GB200|B300|B200)-",
        {"token_dispatcher": "hybridep"},
    ),
)
"""What Megatron-Bridge's recipes set, the last that fits; where nothing fits, they recompute nothing.

By model, GPU and precision in scripts/performance of its tags v0.1.0rc4 (container 25.09, run_script.py), v0.2.0
(25.11), v0.3.0 (26.02), v0.3.1 (26.02.01), v0.4.0 (26.04) and v0.4.2 (26.04.01):
configs/*/*workload_base_configs.py, recompute_modules; perf_plugins.py, PYTORCH_CUDA_ALLOC_CONF. DeepSeek's moments are
in recipes/deepseek/deepseek_v3.py of every tag (exp_avg_dtype). tp_comm_overlap: src/megatron/bridge/recipes/llama and
qwen, and scripts/performance/configs/llama*/llama3*_llm_pretrain.py (off in NVFP4) and qwen*/qwen3_llm_pretrain.py (off
on H100 since 25.11; elsewhere tp is 1). token_dispatcher: moe_flex_dispatcher_backend where set_workload_base_configs
or the recipe heeds it (apply_flex_dispatcher_backend; of 25.09 enable_deepep). docs/performance-summary.md of 25.09:
the first figure is of scales by tensor, as its note on those in brackets implies."""

WRONG_IN_BRIDGE: tuple[tuple[str, dict[str, int]], ...] = (
    (r"25\.11 NeMo.* gpt-oss-120b B200-", {"ep": 64}),
    (r"25\.11 NeMo.* gpt-oss-120b H100-", {"micro_batch": 1, "grad_accum": 32}),
    (r"25\.11 NeMo.* qwen3-30b-a3b H100-", {"micro_batch": 1, "grad_accum": 64, "vp": 12}),
    (r"25\.11 NeMo.* qwen3-30b-a3b GB300-", {"micro_batch": 8, "grad_accum": 8}),
    (r"25\.11 NeMo.* qwen3-235b-a22b B200-", {"vp": 4}),
)
"""Columns of mixtures in the table of 25.11 that are not those of the recipe whose GPUs and global batch the row has
(v0.2.0, scripts/performance/configs/*/workload_base_configs.py, the same in v0.2.1 and v0.2.2). gpt-oss on H100 has the
GA of B200's line, which with its own MBS makes another GBS than stated; Qwen3 30B on H100 has MBS, VP and GA of
25.09's line."""

BESIDE_IN_BRIDGE = (
    r"25\.09 NeMo.* DeepSeekV3 .*H100-|(25\.11|26\.\S+) NeMo.* qwen3-235b-a22b H100-|"
    r"(25\.11|26\.02) NeMo.* qwen3-30b-a3b H100-|25\.11 NeMo.* qwen3-235b-a22b B200-|"
    r"26\.02(\.01)? NeMo.* qwen3-235b-a22b B300-|26\.04(\.01)? NeMo.* gpt-oss-120b GB200-"
)
"""Rows whose recipes set moe_a2a_overlap (v0.1.0rc4: scripts/performance/run_script.py; later: workload_base_configs.py
of the tags above). That of qwen3-235b-a22b on B300 has it in v0.3.0, with the
virtual stages that both rows state."""

ON_JEAN_ZAY = Conditions(blocking=True, parted_sends=True, unaligned_share=12.21 / 19.5)
"""Of BLOOM's runs before training (bigscience, train/tr11-176B-ml/chronicles-prequel.md @9e64ede).

"dealing with JZ hanging on the large model": with CUDA_LAUNCH_BLOCKING=1, since 200B on 320 GPUs hung without it; all
rows with a step time ran on 320 GPUs or more. DeepSpeed 2151c787a (February 2022), runtime/pipe/engine.py: a stage's
result and its gradient are sent in parts wherever there are tensor ranks. In CUDA 11 products in bf16 whose rows are no
multiple of 16 bytes run at 12.21 TFLOP/s, others of that size at 132.71 (pytorch/pytorch#83272), of an A100's 19.5 in
fp32: heads of 150 (hidden 14400) and 108 (13824 over 128 heads). That the runs were in bf16, if with sums in 16 bits,
is read from the script of the 320-GPU runs, "200B-n40-bf16-mono.slurm": fp16 has 53.89 TFLOP/s there."""

GRAPHED_IN_BRIDGE = (
    r"25\.09 NeMo.* Qwen3_30B_a3B \(tokendrop\) (GB|B)200-|25\.09 NeMo.* Qwen3_235B\S* \(tokendrop\) GB200-"
)
"""Rows whose recipes set cuda_graphs (v0.1.0rc4: scripts/performance/configs/qwen3/*.yaml), which graphs each layer
whole (Megatron-Core 0.14, core/transformer/transformer_layer.py: cuda_graph_scope "full")."""

QUIRKS: dict[str, Quirk] = {
    "huggingface nanotron ultrascale-playbook (copy in vinjn/nanotron-ultrascale-playbook)": Quirk(
        network="EFA",
        memory="reserved",
        # nanotron 67c5ebb6 (branch nouamane/bench2): world rank 0 alone logs, which is on the first stage.
        memory_stage=(("", "first"),),
        # Times of the same runs: with a pipeline a layer never took less than 8.5, 12.8, 21, 46 and 110 ms at tp 2 to
        # 32, whatever its work. 105 of the 107 pipelines on 512 GPUs are as slow as pipeline_parallel/p2p.py of that
        # commit, which sleeps until each send is done. Lag and most ranks are read off the memory of 1B and of 3B runs
        # alike; why a slow host is ahead at all in a pipeline is not known.
        # What a call, a bucket and a poll took was read off these same runs of 1B and 3B. Two tensors go forward and
        # one gradient back, each with two loops of messages ahead (p2p.py).
        host=Host(
            conditions=Conditions(
                call_s=0.21e-3, crossing=1.4, bucket_share=0.25, poll_s=0.081, forward_polls=4, backward_polls=2
            ),
            from_gpus=8,
            lag=2,
            most_ranks=16,
            waiting_gpus=512,
        ),
        note="memory kind not stated: compared with reserved",
    ),
    "AnswerDotAI/fsdp_qlora": Quirk(
        runtime=RowRuntime(
            {"single": "accelerate-single", "ddp": "fsdp-qlora", "zero3": "fsdp-qlora"},
            parts={"loss": "shifted-fp32"},
            uncast=("bf16",),
            dropout=0.1,
            own=True,
            source="AnswerDotAI/fsdp_qlora 05ed9f2, train.py: bf16 throughout, lora_dropout 0.1; shifted logits",
        ),
        layout=(("", {"grad_accum": 1}),),
        note="accumulation not stated: 1",
        samples=1024,  # benchmarks_03_2024.md: --dataset dummy --dataset_samples 1024, one epoch
        largest=((r"reported not to fit", "seq_len"),),
    ),
    "QwenLM/Qwen": Quirk(
        runtime=RowRuntime(
            {"single": "accelerate-single", "zero2": "deepspeed-zero", "zero3": "deepspeed-zero"},
            parts={"norm": "fused", "rotary": "fused", "projections": "joint"},
            own=True,
            upcasts_adapters=True,
            dropout=0.05,
            steps="foreach-2.0",
            staged={
                "zero2": {
                    "reduce_bucket_elements": 200_000_000,
                    "allgather_bucket_elements": 200_000_000,
                    "overlap_comm": True,
                }
            },
            source="QwenLM/Qwen, finetune.py (LoraArguments), finetune/ds_config_zero2.json and README.md (torch 2.0); "
            "docker/Dockerfile: flash-attn and its norm; modeling_qwen.py takes both and its rotary, one c_attn",
        ),
        memory="device",
        note="memory kind not stated: as the card shows it",
        # finetune/ds_config_zero2.json and ds_config_zero3.json: optimizer AdamW, which DeepSpeed makes its FusedAdam
        # (runtime/engine.py, _configure_basic_optimizer); finetune.py alone leaves torch 2.0 its lists.
        fused="zero",
        # finetune/finetune_qlora_single_gpu.sh: fp16 under ds_config_zero2.json on one device too, so that nothing is
        # cast to fp32: DeepSpeed halves the model, and Accelerate converts no outputs of it.
        # finetune/finetune_ds.sh, the only script for whole models, has ds_config_zero3.json, on one device too.
        layout=(("gptq", {"stage": "zero2"}), (" full$", {"stage": "zero3"})),
        parts=(("gptq", {"loss": "native"}),),
    ),
    "PKU-DAIR/Hetu-Galvatron": Quirk(
        runtime=RowRuntime({"zero3": "galvatron"}, own=True),
        # galvatron/models/gpt/scripts/memory_profile_scripts_all.sh: default_dp_type=zero3 and chunks=1 everywhere.
        layout=(("", {"grad_accum": 1, "sharding": "zero3"}),),
        # The keys say 2048, but the table's own activations are those of 4096 tokens a rank: a checkpointed layer keeps
        # 32 MiB = 2 bytes x 4096 x 4096, and of the same key memory_profiling_bf16_llama2-7b_seqlen2048_all.json has
        # half.
        seq_len=((r"llama-2-7b truncated", 4096),),
        parts=((r"key \d+_(?!1_)\d+_\d+(?!\S*vtp)", {"vocab_parallel": False}),),
        memory_stage=((r"rank 0;", "first"),),
        note="4096 tokens a sequence, not the key's 2048; accumulation not stated: 1",
    ),
    "pytorch/torchtune": Quirk(
        # torchtune/datasets/_alpaca.py of the tutorials' time (cd779783f, April 2024): pairs are cut at 512 tokens.
        layout=(("", {"recompute": "full", "grad_accum": 1, "seq_len": 512}),),
        # CEWithChunkedOutputLoss: logits in 16 bits, in pieces that are upcast one at a time.
        parts=(
            (
                r"models table|[Cc]hunked CE|activation checkpointing|" + FUSED_STEP + r"|QLoRA \(same\)",
                {"loss": "chunked"},
            ),
        ),
        refuse=((r"unpacked alpaca", "sequences shorter than the stated most, by how much is not stated"),),
        optimizer=((FUSED_STEP, {"in_backward": True}), ("low-memory", {"in_backward": True, "paged": True})),
    ),
    "Lightning-AI/litgpt": Quirk(
        # finetune/lora.py of 2023: a Block is checkpointed under FSDP, nothing on one device.
        layout=(
            ("on 1 GPU", {"recompute": "none", "global_batch": 128}),
            ("on Multiple GPUs", {"recompute": "full", "global_batch": 128}),
        ),
        # tutorials/resource-tables.md: the longest example of Alpaca in each model's tokens; batches are padded to it.
        seq_len=(("phi-1.5", 1044), ("stablelm-alpha-3b", 1034), ("llama-2-.*", 1304), ("falcon-40b", 1079)),
        note="length of the longest example, to which a batch is padded",
    ),
    "MooreThreads/SimuMax": Quirk(
        note="cross-entropy was fused: predicted with Megatron's",
        # Its own operators on its B200 (tests/truth/kernels/training_ops.csv, products in bf16) take 1.35 times as long
        # in the median as those of the kernel tables, in each of three layouts. Its results "do not depend on overlap
        # timing behavior", the launcher overlaps neither gradients nor parameters (docs/b200/b200_real_repro_guide.md
        # and simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh @4dcaae5).
        conditions=(("B200-", Conditions(product_times=1.35, sent_alone=True)),),
    ),
    "bigscience-workshop/bigscience": Quirk(
        # train/tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers": from there on a BF16 optimizer just written,
        # which sums gradients in fp32 where runs before summed in 16 bits (also those of the section "bf16"); and
        # --pp-partition-method type:transformer|embedding, so that 2 + layers divide by the stages.
        layout=(("", {"precision": "fp16"}), ("Rebalancing layers", {"precision": "bf16", "ends_count": True})),
        conditions=((r"chronicles-prequel", ON_JEAN_ZAY),),
        note="precision by section: sums of gradients in 16 bits, from Rebalancing layers on in fp32",
    ),
    "NVIDIA-NeMo/Megatron-Bridge": Quirk(
        # Commit 067f987df: recipes/llama/h100/llama3.py (405B) and recipes/qwen/h100/qwen3_moe.py (235B) set
        # account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split; the cuts of 61 layers are
        # those of recipes/deepseek/h100/deepseek_v3.py and recipes/kimi/h100/kimi_k2.py, _get_..._pipeline_layout, and
        # perf_recipes/deepseek/h100/deepseek_v3.py ("Et|(tt|)*30mL"). training/mixed_precision.py: fp8_param_gather
        # with current scaling and MXFP8. Every performance recipe since v0.1.0rc4 sets grad_reduce_in_fp32=False and
        # cross_entropy_fusion_impl="te".
        layout=(
            (
                "",
                {
                    "ends_count": True,
                    "narrow_weights": True,
                    "chunks": (
                        (16, 16, 16, 13),
                        (*[8] * 7, 5),
                        (*[4] * 15, 1),
                        (1, *[2] * 30, 0),
                    ),
                    "narrow_gradients": True,
                },
            ),
            *SET_BY_BRIDGE,
        ),
        columns=WRONG_IN_BRIDGE,
        parts=(("", {"loss": "in-place"}),),
        conditions=(
            (BESIDE_IN_BRIDGE, Conditions(exchanges_beside=True)),
            (GRAPHED_IN_BRIDGE, Conditions(layers_graphed=True)),
        ),
        note="layers by chunk, recomputation and formats as in the recipes of the container's time",
    ),
    # 9dec370, train.py: the loss is left to run eagerly (e8977b007), until components/loss.py compiles it.
    "pytorch/torchtitan": Quirk(
        # scaled_dot_product_attention prefers cuDNN on Hopper in torch 2.13 (sdp_utils.cpp,
        # check_prefer_cudnn_attention) and FlashAttention-2 before. When that changed is not known to the month: of
        # NVIDIA's build of May 2025, which the H200 ran, it is a guess.
        parts=(
            (r"h100_202412", {"loss": "eager-fp32", "attention": "flash2"}),
            (r"h200_2025-06", {"attention": "flash2"}),
        ),
    ),
    "mosaicml/llm-foundry": Quirk(note="mfu counts whole, not causal, attention: tokens/s is compared"),
}
"""By the rows' `source.repo_or_paper`."""

NO_QUIRK = Quirk()

OLD_MEGATRON = ("arXiv 2205.05198", "cases_april2021", "calculon/llm/validation.py")
"""Tables measured with Megatron's own modules of 2021 and 2022: no flash attention (kernels preset megatron)."""


class Family(msgspec.Struct, frozen=True):
    """Which preset's kind of block a model has; sizes come from the row. `changes` are facts that differ.

    `itself`: a row without sizes means the preset itself.
    """

    pattern: str
    preset: str
    changes: dict[str, Any] = {}
    source: str = ""
    itself: bool = False


FAMILIES: tuple[Family, ...] = (
    Family(r"nanotron-llama-.*", "llama-2-7b", source="nanotron's Llama; the table states its sizes"),
    Family(r"llama-?[123].*|llama-34b.*|internlm-20b|yi-.*", "llama-2-7b", source="Llama's blocks"),
    Family(
        r"internlm-7b", "llama-2-7b", {"qkv_bias": True, "output_bias": True}, "InternLM 1: Llama with attention biases"
    ),
    Family(r"mistral-7b", "mistral-7b", source="Mistral 7B"),
    Family(r"qwen-.*", "llama-2-7b", {"qkv_bias": True}, "Qwen 1: Llama's blocks with biases of q, k and v"),
    Family(
        r"mpt-.*",
        "gpt2",
        {"dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu"},
        "llm-foundry's MPT: learned positions and biases, by its parameter counts; nn.GELU, no dropout (resid_pdrop 0)",
    ),
    Family(
        r"bloom-tuning-.*",
        "bloom-176b",
        {"dropout": 0.1, "attention_dropout": 0.1},
        "BLOOM's tuning runs: its blocks (ALiBi, norm after the embedding); bigscience, train/tr11-176B-ml/README.md: "
        "Megatron-LM's dropouts are inherited",
    ),
    Family(r"bloomz-7b1", "bloom-7b1", source="BLOOMZ is BLOOM fine-tuned", itself=True),
    Family(r"gpt-oss-.*", "gpt-oss-120b", source="gpt-oss"),
    Family(r"gpt-[0-9.]+b.*|megatron-.*|mt-nlg-.*", "megatron-22b", source="GPT with learned positions"),
    Family(r"qwen3_30b_a3b.*", "qwen3-30b-a3b", source="Qwen3's mixture of experts", itself=True),
    Family(r"qwen3_235b_a22b.*", "qwen3-235b-a22b", source="Qwen3's mixture of experts", itself=True),
    Family(r"deepseekv3.*", "deepseek-v3", source="DeepSeek-V3, without prediction heads", itself=True),
    Family(r"phi-1\.5", "phi-2", {"activation": "gelu_pytorch_tanh"}, "Phi: parallel blocks, biases; LitGPT's F.gelu"),
    Family(r"stablelm-alpha-.*", "pythia-6.9b", {"rotary_fraction": 0.25}, "StableLM-alpha: GPT-NeoX's blocks"),
    Family(r"falcon-40b", "falcon-40b", source="Falcon 40B"),
)
"""By the whole of a model's name in lower case, first match; a name that is a preset's own comes before."""

NOT_DECODERS = {
    r"t0-.*|mt0-.*": "encoder-decoders are not modelled",
    r"nemotron.*": "hybrids of Mamba and attention are not modelled",
    r"kimi.*": "no preset has its blocks, and its recipes step with Muon",
}

GPUS: tuple[tuple[str, str], ...] = (
    (r"H100-80GB.*", "h100-sxm-80gb"),
    (r"H100-96GB.*", "h100-sxm-96gb"),
    (r"H200-141GB.*", "h200-141gb"),
    (r"A100-80GB.*", "a100-sxm-80gb"),
    (r"A800-80GB.*", "a100-sxm-80gb"),
    (r"A100-40GB.*", "a100-sxm-40gb"),
    (r"V100-32GB.*", "v100-32gb"),
    (r"V100-16GB.*", "v100-16gb"),
    (r"GB200-192GB", "gb200-186gb"),
    (r"GB300-288GB", "gb300-279gb"),
    (r"B200-(SXM-)?180GB", "b200-180gb"),
    (r"B300-288GB", "b300-270gb"),
    (r"RTX3090-24GB.*", "rtx-3090-24gb"),
    (r"RTX4090-24GB", "rtx-4090-24gb"),
    (r"A6000-48GB", "rtx-a6000-48gb"),
    (r"A6000-Ada-48GB", "rtx-6000-ada-48gb"),
    (r"A5000-24GB", "rtx-a5000-24gb"),
)
"""GPU names of the rows, whole, and the preset meant. Sold sizes stay in the preset's name."""


UNSTATED_LANES = (
    # benchmarks_03_2024.md: the two cards stand on an old motherboard with slow PCI lanes, whose rate it does not say.
    (r"RTX3090-24GB \(280W cap\)", "lanes slower than usual by a rate that is not stated: no time of sharded weights"),
)
"""GPU names of the rows whose machine is known to be slower between its GPUs than such machines are."""


class Network(msgspec.Struct, frozen=True):
    """What joins the nodes: a cluster preset, or so many network cards of so many Gbit/s a node."""

    pattern: str
    cluster: str | None = None
    nics: int = 0
    gbit: float = 0.0
    guess: str = ""
    source: str = ""


NETWORKS: tuple[Network, ...] = (
    Network(
        r"EFA.*",
        "aws-p5",
        guess="EFA as on p5.48xlarge",
        source="the cluster of the sweep is on EFA; not stated in the plot",
    ),
    Network(r"8x HDR200 IB.*|HDR IB.*", "dgx-a100", source="Selene: DGX A100, eight HDR adapters"),
    Network(r"InfiniBand NDR.*", "dgx-h100", guess="NDR InfiniBand as on DGX H100", source="not stated in the table"),
    Network(r"RoCE 400Gb/s per GPU", nics=8, gbit=400, source="Llama 3 paper: one 400 Gbit/s port a GPU"),
    Network(r"4x100Gb RoCE", nics=4, gbit=100, source="InternEvo, doc/en/train_performance.md"),
    Network(r"4x Omni-Path.*", nics=4, gbit=100, source="Jean Zay, A100 partition: four 100 Gbit/s Omni-Path a node"),
    Network(r"Omni-Path.*", nics=4, gbit=100, guess="four Omni-Path ports a node", source="Jean Zay, V100 partition"),
    Network(r"([0-9]+)Gbps", guess="the stated Gbit/s is a node's", source="fms-fsdp, README.md"),
    Network(
        r".*1600 Gbps node-node.*",
        nics=8,
        gbit=200,
        source="llm-foundry, benchmarking/README.md: 1600 Gbps node to node",
    ),
)
"""By the rows' `inter_link`, else by their table's title."""

RACKS = {("NVL72", "gb200-186gb"): "gb200-nvl72", ("NVL72", "gb300-279gb"): "gb300-nvl72"}
"""The cluster that a link's first word and a GPU mean: NVLink joins the trays of a rack."""

PRECISIONS = {
    "bf16": "bf16",
    "amp_bf16": "bf16",
    "bf16-true": "bf16",
    "bf16 params, fp32 grad accumulation + fp32 master": "bf16",
    "bf16 params, fp32 grad accumulation": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "pure-bf16": "pure-bf16",
    "fp8": "fp8",
    "fp8-cs": "fp8",
    "fp8-cs (fp8-mx)": "fp8",  # one row, two figures: the first is kept
    "fp8-mx": "mxfp8",
    "fp8-sc": "fp8-blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "fp8 hybrid": "fp8",
    "int4 gptq base + fp16": "fp16",
}
"""By the rows' `precision` in lower case."""

OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "adam (distributed)": "adamw",
    "normal adam": "adamw",
    "normal": "adamw",
    "adamw(bf16 states)": "adamw",
    "adamw8bit": "adamw-8bit",
    "8-bit adam (bnb)": "adamw-8bit",
    "paged/8-bit, optimizer-in-backward": "adamw-8bit",
}

RECOMPUTE = {"none": "none", "full": "full", "attention": "attention", "sac:matmul": "sac:matmul"}

ALL_LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
TARGETS = {
    "q,v": "q_proj,v_proj",
    "q,v?": "q_proj,v_proj",
    "all linear": ALL_LINEAR,
    "q,k,v,up,down,gate (script default)": "q_proj,k_proj,v_proj,gate_proj,up_proj,down_proj",
    "q,v,output + mlp (8b config default)": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
    "c_attn,c_proj,w1,w2": ALL_LINEAR,
    "c_attn,c_proj,w1,w2 + full embedding and output layers": ALL_LINEAR,
}
"""Adapted modules, in Transformers' names for a Llama."""

SAVED = {"c_attn,c_proj,w1,w2 + full embedding and output layers": ("embed_tokens", "lm_head")}
"""Modules trained whole beside the adapters (Qwen's finetune.py, modules_to_save: wte and lm_head)."""

OFFLOADS: dict[str, dict[str, bool]] = {
    "cpu params": {"offload_params": True, "offload_optimizer": True},
    "cpu params+activations": {"offload_params": True, "offload_optimizer": True, "offload_activations": True},
    "activations": {"offload_activations": True},
    "cpu (params/optimizer, fused optimizer)": {"offload_params": True, "offload_optimizer": True},
}

GPTQ = "int4 (gptq)"
QUANTS = {"nf4 (bnb)": True, "nf4": True, "bnb.nf4": False, "bnb.nf4-dq": True}
"""4-bit NormalFloat, and whether the scales are quantised too. torchtune's NF4 (torchao) always does that;
fsdp_qlora takes Linear4bit's default, compress_statistics=True (bitsandbytes 0.43, nn/modules.py)."""

MEMORY_KINDS = {"allocated": "allocated", "reserved": "reserved", "nvidia-smi": "device", "device": "device"}


def looked_up(table: tuple[Any, ...], text: str | None) -> Any:
    """The first entry whose pattern is the whole text, whatever its case; None without one."""
    if text is None:
        return None
    for one in table:
        pattern = one[0] if isinstance(one, tuple) else one.pattern
        if re.fullmatch(pattern, text.strip(), re.IGNORECASE):
            return one
    return None

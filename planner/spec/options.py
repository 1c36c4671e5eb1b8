"""Everything that may be said of a question, one record each: model, cluster, job and layout.

The command line, the explorer's fields, `--from`, the executor's matrix, the checks of values and the order in which a
contradiction is looked for read these. Not here: how a value is checked (planner/options.py, planner/quantities.py), or
what a layout has to obey (planner/rules.py).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from planner.spec.job import Implementation, Method, OptimizerName, Packing, Precision, Storage
from planner.spec.layout import RECOMPUTE, STRATEGIES, CpMethod, PpSchedule

Kind = Literal[
    "flag", "switch", "choice", "whole", "length", "real", "share", "memory", "wholes", "names", "name", "file",
    "folder", "folders",
]  # fmt: skip
"""What is typed: nothing (flag), yes or no (switch), one of some words, a number, an amount, a list, or a name."""

LARGEST_COUNT = 1_000_000
"""GPUs, and ranks of a group."""
LARGEST_BATCH = 2**24
LARGEST_SEQ = 2**30
LARGEST_BUCKET = 10**12

GROUPS = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
SIZES = ("gpus", "nodes", "gpus_per_node")
SPLIT = ("strategy", "runtime")
"""Whoever says one of these says how the model is split, whatever a file says."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option, whose name on a command line has hyphens."""

    name: str
    kind: Kind = "whole"
    about: str = ""
    """Its help, without the default."""
    default: str = ""
    """What leaving it out means, as people read it."""
    low: float = 1
    high: float = LARGEST_COUNT
    choices: tuple[str, ...] = ()
    also: str = ""
    """Another name of it on a command line."""
    part: str = ""
    """The value it is a field of: recipe, optimizer, job, layout, ...; empty where options.py reads it by name."""
    field: str = ""
    """The field's name there, where it is another than the option's."""
    fixes: bool = False
    """Whether it leaves one layout to look at."""
    axis: str = ""
    """The group sizes without which it means nothing."""
    engine: str = ""
    """The engine, and those whose names begin with its, that alone read it."""
    trust: int = 0
    """When no layout is left, values are taken on trust in this order, and the first that leaves none is blamed; 0 is
    never blamed."""
    replaced_by: tuple[str, ...] = ()
    """Options of a command line, beside itself, that replace a file's value of it."""
    presets: tuple[str, ...] = ()
    """Kinds of presets it may name."""

    @property
    def flag(self) -> str:
        """Its name on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """A sentence or two."""
        return " ".join(filter(None, (self.about, self.default and f"Default: {self.default}.")))


def _size(name: str, high: int) -> Option:
    return Option(name=name, about=f"Model size: {name.replace('_', ' ')}.", part="model", high=high)


def _group(name: str, about: str = "", trust: int = 3, replaced_by: tuple[str, ...] = ()) -> Option:
    about = f"{about or f'Size of the {name} group'}; fixes the layout."
    return Option(name=name, about=about, part="layout", fixes=True, trust=trust, replaced_by=replaced_by)


def _choice(name: str, choices: tuple[str, ...], about: str = "", part: str = "layout", **more: Any) -> Option:
    return Option(name=name, kind="choice", about=about, choices=choices, part=part, **more)


def _switch(name: str, about: str, part: str = "layout", **more: Any) -> Option:
    return Option(name=name, kind="switch", about=about, part=part, **more)


def _bucket(name: str, engine: str, about: str, default: str = "", low: int = 1) -> Option:
    return Option(
        name=name, about=about, default=default, part="layout", engine=engine, low=low, high=LARGEST_BUCKET,
        replaced_by=SPLIT,
    )  # fmt: skip


TABLE = (
    # The model.
    Option(name="model", kind="name", about="Preset or alias, a Hugging Face config.json, or its folder.",
           replaced_by=("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied"), presets=("models",)),
    _size("layers", 10_000),
    _size("hidden", 2**20),
    _size("heads", 2**16),
    _size("kv_heads", 2**16),
    _size("ffn", 2**24),
    _size("vocab", 2**24),
    Option(name="tied", kind="flag", about="The head is the embedding."),
    # The cluster.
    Option(name="cluster", kind="name", about="Cluster preset or its file, or a GPU's name.", default="dgx-h100",
           presets=("clusters", "gpus")),
    Option(name="gpu", kind="name", about="GPU preset, in nodes as its preset has them.", presets=("gpus",)),
    Option(name="gpus", about="GPUs in all.", part="cluster", replaced_by=SIZES),
    Option(name="nodes", about="Nodes.", part="cluster", replaced_by=SIZES),
    Option(name="gpus_per_node", about="GPUs a node.", part="cluster", replaced_by=SIZES),
    Option(name="host_memory", kind="memory", about="Memory of a node's host, such as 256GiB: for offload.",
           low=0, high=2.0**60),
    # The job.
    _choice("method", get_args(Method), "Weights that are trained.", "job", default="all three"),
    Option(name="lora_rank", about="Rank of the adapters.", part="lora", field="rank", high=65_536,
           replaced_by=("method",)),
    Option(name="lora_alpha", about="Scale of the adapters.", default="twice the rank", part="lora", field="alpha",
           high=2**20, replaced_by=("method",)),
    Option(name="lora_targets", kind="names", about="Adapted modules, separated by commas.", default="q_proj,v_proj",
           replaced_by=("method",)),
    _switch("lora_upcast", "Adapters in fp32 (peft's default).", "lora", field="upcast_adapters",
            replaced_by=("method",)),
    _switch("double_quant", "QLoRA: quantise the scales too (default).", "quantization", field="double"),
    _choice("quant_storage", get_args(Storage), "QLoRA: what codes are packed in.", "quantization", field="storage"),
    _choice("precision", get_args(Precision), "Number format.", "job", default="bf16 (mixed)"),
    _choice("optimizer", get_args(OptimizerName), part="optimizer", field="name", default="adamw"),
    _choice("optimizer_implementation", get_args(Implementation), "How torch's AdamW or SGD steps.", "optimizer",
            default="the runtime's own", field="implementation",
            replaced_by=("runtime", "optimizer", "offload_optimizer")),
    Option(name="lr", kind="real", about="Peak learning rate.", part="optimizer", low=0, high=1e3),
    Option(name="weight_decay", kind="real", about="Weight decay.", part="optimizer", low=0, high=1e3),
    Option(name="momentum", kind="real", about="Momentum of sgd.", part="optimizer", low=0, high=1),
    Option(name="seq_len", kind="length", about="Tokens a sequence; 16k is 16384.", default="2048", high=LARGEST_SEQ),
    _choice("packing", get_args(Packing), "A document a sequence, or end to end.", "job"),
    Option(name="mean_seq_len", kind="length", about="Mean tokens of a document.", default="they fill the sequence",
           high=LARGEST_SEQ),
    Option(name="global_batch_size", about="Sequences an optimizer step.", part="job", high=LARGEST_BATCH, trust=6,
           replaced_by=("micro_batch_size", "grad_accum")),
    # The layout.
    Option(name="micro_batch_size", about="Sequences a rank takes at once.", part="layout", high=LARGEST_BATCH,
           trust=6),
    Option(name="grad_accum", about="Micro-batches a step.", also="--gradient-accumulation", part="layout",
           high=LARGEST_BATCH, trust=6, replaced_by=("global_batch_size",)),
    _group("dp_replicate", "Copies of the sharded model", trust=4, replaced_by=SPLIT),
    _group("dp_shard", "Ranks that states are sharded over", trust=4, replaced_by=SPLIT),
    _group("tp"),
    _group("pp"),
    _group("cp"),
    _group("ep"),
    Option(name="zero_stage", about="0 nothing sharded, 1 optimizer, 2 gradients too, 3 weights too.", part="layout",
           low=0, high=3, trust=2, replaced_by=SPLIT),
    _switch("sequence_parallel", "Tensor ranks split the tokens.", axis="tp", trust=5),
    _choice("cp_method", get_args(CpMethod), "How context ranks attend.", axis="cp", trust=5),
    _choice("pp_schedule", get_args(PpSchedule), "Order of the pipeline's passes.", default="1f1b", axis="pp", trust=5),
    Option(name="virtual_stages", about="Chunks of layers on each pipeline rank.", part="layout", high=1024, axis="pp",
           trust=5),
    Option(name="stage_layers", kind="wholes", about="Layers of each pipeline stage: 8,8,9,7.", part="layout",
           axis="pp"),
    _switch("offload_optimizer", "Optimizer states in host memory."),
    _switch("offload_params", "Weights' shards in host memory."),
    _switch("offload_activations", "Activations in host memory."),
    Option(name="zero_secondary_shard", part="layout",
           about="ZeRO++: ranks of the group that keeps a second copy of the weights."),
    _choice("recompute", RECOMPUTE, "What is run again in backward.", default="none", trust=2),
    _switch("reshard_after_forward", "Free after forward.", trust=2, replaced_by=SPLIT),
    _switch("sync_each_micro_batch", "Reduce each micro-batch.", trust=2),
    _bucket("ddp_bucket_bytes", "ddp", "DDP: bytes of a gradient bucket."),
    _bucket("reduce_bucket_elements", "deepspeed", "DeepSpeed: elements of a gradient bucket.", "by the model"),
    _bucket("allgather_bucket_elements", "deepspeed", "DeepSpeed: elements gathered at once after a step."),
    _bucket("zero3_prefetch_elements", "deepspeed", "DeepSpeed stage 3: elements fetched ahead.", low=0),
    _bucket("zero3_persistence_elements", "deepspeed",
            "DeepSpeed stage 3: weights up to this size are never sharded.", low=0),
    _bucket("zero3_max_live_elements", "deepspeed", "DeepSpeed stage 3: elements gathered at a time, at most.", low=0),
    _bucket("zero3_max_reuse_elements", "deepspeed",
            "DeepSpeed stage 3: weights used again within this are kept.", low=0),
    _switch("overlap_comm", "DeepSpeed: reduce beside backward.", engine="deepspeed", replaced_by=SPLIT),
    Option(name="runtime", kind="name", about="Runtime preset, or an engine: whose code runs.", trust=1,
           presets=("runtimes",)),
    _choice("strategy", tuple(strategy.name for strategy in STRATEGIES), "This strategy alone.", "question", trust=1,
            replaced_by=(*GROUPS, "runtime", "zero_stage")),
    # The answer.
    Option(name="headroom", kind="share", about="Share of device memory to keep free, such as 5%.", default="10%",
           part="question", low=0, high=0.9),
    Option(name="calibration", kind="name", about="Calibration preset, or its file.", presets=("calibrations",)),
    Option(name="presets", kind="folders", about="Folder of your own presets. Repeatable."),
    # The run.
    Option(name="steps", about="Optimizer steps of the run.", part="recipe", high=10**9),
    Option(name="warmup_steps", about="Steps until the peak learning rate.", part="recipe", low=0, high=10**9),
    Option(name="min_lr_ratio", kind="share", about="Floor of the cosine over its peak.", part="recipe", low=0, high=1),
    Option(name="max_grad_norm", kind="real", about="Gradient clipping; 0 turns it off.", part="recipe", low=0,
           high=1e6),
    Option(name="seed", about="Seed of weights and data order.", part="recipe", low=0, high=2**32 - 1),
    Option(name="data", kind="file", about="Text, .jsonl or .bin file to train on (docs/finetuning.md).",
           part="recipe"),
    Option(name="validation_data", kind="file", about="File to evaluate on.", part="recipe"),
    Option(name="eval_every", about="Steps between evaluations; 0 never.", part="recipe", low=0, high=10**9),
    _switch("group_by_length", "Batches of similar lengths (default).", "recipe"),
    Option(name="tokenizer", kind="folder", about="Tokenizer folder.", part="recipe"),
    Option(name="checkpoint", kind="folder", about="Local model folder to start from.", part="recipe"),
)  # fmt: skip

OPTIONS = {option.name: option for option in TABLE}
"""In the order of the help."""

ENGINE_SWITCHES = {option.name: option.engine for option in TABLE if option.engine}
"""Fields of a layout that one engine, and those built on it, alone read."""

OF_AXIS = {option.name: option.axis for option in TABLE if option.axis}
"""Fields of a layout that only matter where an axis is split."""


def of_part(part: str) -> tuple[Option, ...]:
    """The options that are fields of one value."""
    return tuple(option for option in TABLE if option.part == part)

"""Everything that may be said of a question, one record each: model, cluster, job and layout.

The command line, the explorer's fields, `--from`, the executor's matrix, the checks of values and the order in which a
contradiction is looked for read these. Not here: how a value is checked (planner/ask/options.py,
planner/basics/quantities.py), or what a layout has to obey (planner/parallelism/rules.py).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from planner.spec.job import (
    BaseFormat,
    CodeStorage,
    Implementation,
    Method,
    OptimizerName,
    Packing,
    Precision,
    TowerUse,
)
from planner.spec.layout import (
    LIGER,
    RECOMPUTE,
    RECOMPUTE_MODULES,
    STRATEGIES,
    AttentionName,
    Compile,
    CountedEnds,
    CpMethod,
    Experts,
    Loss,
    PpSchedule,
    TokenDispatcher,
)

OptionKind = Literal[
    "flag", "switch", "choice", "whole", "length", "real", "share", "memory", "wholes", "names", "name", "file",
    "folder", "folders",
]  # fmt: skip
"""What is typed: nothing (flag), yes or no (switch), one of some words, a number, an amount, a list, or a name."""

LARGEST_COUNT = 1_000_000
"""GPUs, and ranks of a group."""
LARGEST_BATCH = 2**24
LARGEST_SEQ = 2**30
DEFAULT_SEQ_STEP = 128
"""Tokens: sequences are cut into tiles and over ranks; an odd length is of no use."""
LARGEST_BUCKET = 10**12

GROUPS = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
SIZES = ("gpus", "nodes", "gpus_per_node")
SPLIT = ("strategy", "runtime")
"""Whoever says one of these says how the model is split, whatever a file says."""


ALL_LINEAR = "all-linear"
"""What `lora_targets` may say in the place of names: every linear module of the family's layers."""


class Option(msgspec.Struct, frozen=True):
    """One option, whose name on a command line has hyphens."""

    name: str
    kind: OptionKind
    about: str = ""  # its help, without the default
    part: str = ""  # the value it is a field of: recipe, job, layout, ...; empty where options.py reads it by name
    low: float = 1
    high: float = LARGEST_COUNT
    choices: tuple[str, ...] = ()
    among: tuple[str, ...] = ()  # what each of its names must be one of; empty: a rule says
    default: str = ""  # leaving it out, as people read it
    field: str = ""  # the field's name, where it is another than the option's
    also: str = ""  # another name on a command line
    fixes: bool = False  # whether it leaves one layout to look at
    axis: str = ""  # the group size without which it means nothing
    engine: str = ""  # the engine that alone reads it, with those whose names begin with its
    # When no layout is left, values are trusted in this order, and the first that leaves none is blamed; 0: never.
    trust: int = 0
    replaced_by: tuple[str, ...] = ()  # options of a command line, beside itself, that replace a file's value of it
    presets: tuple[str, ...] = ()  # kinds of presets it may name
    often: bool = False  # whether the first page of a help shows it
    section: str = ""  # of a help (planner/basics/help_page.py)

    @property
    def flag(self) -> str:
        """Its name on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """A sentence or two."""
        return " ".join(filter(None, (self.about, self.default and f"Default: {self.default}.")))


def _size(name: str, high: int) -> Option:
    return Option(name, "whole", f"Model size: {name.replace('_', ' ')}.", "model", 1, high)


def _group(
    name: str, about: str = "", trust: int = 3, replaced_by: tuple[str, ...] = (), *, often: bool = False
) -> Option:
    about = f"{about or f'Size of the {name} group'}; fixes the layout."
    return Option(name, "whole", about, "layout", fixes=True, trust=trust, replaced_by=replaced_by, often=often)


def _bucket(name: str, engine: str, about: str, low: int = 1, default: str = "") -> Option:
    numbers = (low, LARGEST_BUCKET)
    return Option(name, "whole", about, "layout", *numbers, default=default, engine=engine, replaced_by=SPLIT)


def _of(section: str, *options: Option) -> tuple[Option, ...]:
    """Options of a section of a help."""
    return tuple(msgspec.structs.replace(option, section=section) for option in options)


_MODEL_AND_CLUSTER = _of(
    "question",
    # The model.
    Option("model", "name", "Preset or alias, or a Hugging Face config.json. Its folder works, too.",
           replaced_by=("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied"), presets=("models",),
           often=True),
    _size("layers", 10_000),
    _size("hidden", 2**20),
    _size("heads", 2**16),
    _size("kv_heads", 2**16),
    _size("ffn", 2**24),
    _size("vocab", 2**24),
    Option("tied", "flag", "The head is the embedding."),
    # The cluster.
    Option("cluster", "name", "Cluster preset or its file, or a GPU's name.", default="dgx-h100",
           presets=("clusters", "gpus"), often=True),
    Option("gpu", "name", "GPU preset, in nodes as its preset has them.", presets=("gpus",)),
    Option("gpus", "whole", "GPUs in all.", "cluster", replaced_by=SIZES, often=True),
    Option("nodes", "whole", "Nodes.", "cluster", replaced_by=SIZES),
    Option("gpus_per_node", "whole", "GPUs a node.", "cluster", replaced_by=SIZES),
    Option("inter_gbps", "real", "Gbit/s of a network card, in one direction.", "network", 0.1, 1e6,
           default="the cluster's"),
    Option("intra_gbps", "real", "Gbit/s of a GPU's links inside its node, in one direction.", "network", 0.1, 1e6,
           default="the cluster's"),
    Option("nics", "whole", "Network cards of a node.", "network", 1, 1024, default="the cluster's"),
    Option("host_memory", "memory", "Memory of a node's host, such as 256GiB: for offload.", low=0, high=2.0**60),
)  # fmt: skip
_METHOD = _of(
    "question",
    Option("method", "choice", "Weights that are trained.", "job", choices=get_args(Method), default="all three",
           often=True),
    Option("lora_rank", "whole", "Rank of the adapters.", "lora", 1, 65_536, field="rank", replaced_by=("method",)),
    Option("lora_alpha", "whole", "Scale of the adapters.", "lora", 1, 2**20, default="twice the rank", field="alpha",
           replaced_by=("method",)),
    Option("lora_targets", "names", "Adapted modules, separated by commas, or all-linear.", default="q_proj,v_proj",
           replaced_by=("method",)),
    Option("lora_upcast", "switch", "Adapters in fp32 (peft's default).", "lora", field="upcast_adapters",
           replaced_by=("method",)),
    Option("lora_dropout", "real", "Share of an adapter's input that is zeroed.", "lora", 0, 0.99, field="dropout",
           replaced_by=("method",)),
    Option("dora", "switch", "A trained magnitude for each row of an adapted matrix.", "lora", replaced_by=("method",)),
    Option("modules_to_save", "names", "Modules beside layers trained whole, by commas.", replaced_by=("method",)),
)  # fmt: skip
_FORMATS_AND_OPTIMIZER = _of(
    "numbers",
    Option("quantization", "choice", "The frozen base's format; int8 is LLM.int8.", "quantization",
           choices=get_args(BaseFormat), field="base", replaced_by=("method",)),
    Option("double_quant", "switch", "QLoRA: quantise the scales too (default).", "quantization", field="double"),
    Option("quant_storage", "choice", "QLoRA: what codes are packed in.", "quantization", choices=get_args(CodeStorage),
           field="storage"),
    Option("quantize_experts", "switch", "QLoRA: experts in 4 bits too, unpacked by each forward.", "quantization",
           field="experts"),
    Option("precision", "choice", "Number format.", "job", choices=get_args(Precision), default="bf16 (mixed)",
           often=True),
    Option("narrow_weights", "switch", "8-bit recipes: layers' weights in 8 bits alone (fp8_param_gather).", "job"),
    Option("narrow_gradients", "switch", "Megatron-Core: gradients in 16 bits (grad_reduce_in_fp32=False).", "job"),
    Option("narrow_moments", "switch", "Megatron-Core: Adam's averages in 16 bits (exp_avg_dtype).", "job"),
    Option("optimizer", "choice", "", "optimizer", choices=get_args(OptimizerName), default="adamw", field="name"),
    Option("optimizer_implementation", "choice", "How torch's AdamW or SGD steps.", "optimizer",
           choices=get_args(Implementation), default="the runtime's own", field="implementation",
           replaced_by=("runtime", "optimizer", "offload_optimizer")),
    Option("step_in_backward", "switch", "Step each weight as its gradient is made.", "optimizer", field="in_backward"),
    Option("paged_states", "switch", "Optimizer states in managed memory (bitsandbytes).", "optimizer", field="paged",
           replaced_by=("optimizer",)),
    Option("state_block", "whole", "torchao: elements that share a scale of its states.", "optimizer", 2, 2**20,
           default="128 of 4 bits, else 256", replaced_by=("optimizer",)),
    Option("lr", "real", "Peak learning rate.", "optimizer", 0, 1e3, default="by method and checkpoint"),
    Option("beta2", "real", "Decay of Adam's second average.", "optimizer", 0, 1, default="by method and checkpoint"),
    Option("weight_decay", "real", "Weight decay.", "optimizer", 0, 1e3, default="by method and checkpoint"),
    Option("momentum", "real", "Momentum of sgd.", "optimizer", 0, 1),
)  # fmt: skip
_BATCH = _of(
    "question",
    Option("seq_len", "length", "Tokens a sequence; 16k is 16384.", high=LARGEST_SEQ, default="2048", often=True),
    Option("packing", "choice", "A document a sequence, or end to end.", "job", choices=get_args(Packing)),
    Option("mean_seq_len", "length", "Mean tokens of a document.", high=LARGEST_SEQ, default="they fill the sequence"),
    Option("image_tokens", "whole",
           "Tokens of each sequence that are images', as the language model sees them; patches of the tower follow.",
           "job", 1, LARGEST_SEQ, default="text alone", field="images"),
    Option("towers", "choice", "Towers that see the images, with their projectors.", "job",
           choices=get_args(TowerUse), default="frozen"),
    Option("global_batch_size", "whole", "Sequences an optimizer step.", "job", 1, LARGEST_BATCH, trust=6,
           replaced_by=("micro_batch_size", "grad_accum"), often=True),
)  # fmt: skip
_LAYOUT = _of(
    "layout",
    Option("micro_batch_size", "whole", "Sequences a rank takes at once.", "layout", 1, LARGEST_BATCH, trust=6,
           often=True),
    Option("grad_accum", "whole", "Micro-batches a step.", "layout", 1, LARGEST_BATCH, also="--gradient-accumulation",
           trust=6, replaced_by=("global_batch_size",)),
    _group("dp_replicate", "Copies of the sharded model", 4, SPLIT),
    _group("dp_shard", "Ranks that states are sharded over", 4, SPLIT),
    _group("tp", often=True),
    _group("pp"),
    _group("cp"),
    _group("ep"),
    Option("zero_stage", "whole", "0 nothing sharded, 1 optimizer, 2 gradients too, 3 weights too.", "layout", 0, 3,
           trust=2, replaced_by=SPLIT),
    Option("sequence_parallel", "switch", "Tensor ranks split the tokens.", "layout", axis="tp", trust=5),
    Option("cp_method", "choice", "How context ranks attend.", "layout", choices=get_args(CpMethod), axis="cp",
           trust=5),
    Option("pp_schedule", "choice", "Order of the pipeline's passes.", "layout", choices=get_args(PpSchedule),
           default="1f1b", axis="pp", trust=5),
    Option("virtual_stages", "whole", "Chunks of layers on each pipeline rank.", "layout", 1, 1024, axis="pp", trust=5),
    Option("stage_layers", "wholes", "Layers of each pipeline stage, or chunk: 8,8,9,7.", "layout", 0, axis="pp"),
    Option("counted_ends", "choice", "Ends that count as a layer of their stage.", "layout",
           choices=get_args(CountedEnds), default="none", axis="pp"),
    Option("offload_optimizer", "switch", "Optimizer states in host memory.", "layout"),
    Option("offload_params", "switch", "Weights' shards in host memory.", "layout"),
    Option("offload_activations", "switch", "Activations in host memory.", "layout"),
    Option("zero_secondary_shard", "whole", "ZeRO++: ranks of the group that keeps a second copy of the weights.",
           "layout"),
    Option("recompute", "choice", "What is run again in backward.", "layout", choices=RECOMPUTE, default="none",
           trust=2),
    Option("recompute_modules", "names", "Parts that Megatron-Core runs again: " + ", ".join(RECOMPUTE_MODULES) + ".",
           "layout"),
    Option("reshard_after_forward", "switch", "Free after forward.", "layout", trust=2, replaced_by=SPLIT),
    Option("sync_each_micro_batch", "switch", "Reduce each micro-batch.", "layout", trust=2),
    _bucket("ddp_bucket_bytes", "ddp", "DDP: bytes of a gradient bucket."),
    _bucket("reduce_bucket_elements", "deepspeed", "DeepSpeed: elements of a gradient bucket.", 1, "by the model"),
    _bucket("allgather_bucket_elements", "deepspeed", "DeepSpeed: elements gathered at once after a step."),
    _bucket("zero3_prefetch_elements", "deepspeed", "DeepSpeed stage 3: elements fetched ahead.", 0),
    _bucket("zero3_persistence_elements", "deepspeed",
            "DeepSpeed stage 3: weights up to this size are never sharded.", 0),
    _bucket("zero3_max_live_elements", "deepspeed", "DeepSpeed stage 3: elements gathered at a time, at most.", 0),
    _bucket("zero3_max_reuse_elements", "deepspeed", "DeepSpeed stage 3: weights used again within this are kept.", 0),
    Option("overlap_comm", "switch", "DeepSpeed: reduce beside backward.", "layout", engine="deepspeed",
           replaced_by=SPLIT),
    Option("tp_comm_overlap", "switch", "Megatron-Core: collectives of tensor ranks beside products.", "layout",
           axis="tp"),
    Option("token_dispatcher", "choice", "Megatron-Core: what sends tokens to experts.", "layout",
           choices=get_args(TokenDispatcher), default="alltoall", axis="ep"),
    Option("loss", "choice", "How head and loss are computed.", "layout", choices=get_args(Loss),
           default="the runtime's own", replaced_by=("runtime",)),
    Option("attention", "choice", "Which code computes attention.", "layout", choices=get_args(AttentionName),
           default="the runtime's own", replaced_by=("runtime",)),
    Option("liger", "names", "Parts that Liger-Kernel replaces: " + ", ".join(LIGER) + "; its loss is --loss fused.",
           "layout", among=LIGER, replaced_by=("runtime",)),
    Option("compile", "choice", "What runs under torch.compile: each layer by itself, or the model with its loss.",
           "layout", choices=get_args(Compile), default="the runtime's own", replaced_by=("runtime",)),
    Option("experts", "choice", "How a mixture's experts are run.", "layout", choices=get_args(Experts),
           default="the runtime's own", replaced_by=("runtime",)),
    Option("runtime", "name", "Runtime preset, or an engine: whose code runs.", trust=1, presets=("runtimes",)),
    Option("strategy", "choice", "This strategy alone.", "question", trust=1,
           choices=tuple(strategy.name for strategy in STRATEGIES), replaced_by=(*GROUPS, "runtime", "zero_stage")),
)  # fmt: skip
_FIGURES = _of(
    "numbers",
    Option("headroom", "share", "Share of device memory to keep free, such as 5%.", "question", 0, 0.9,
           default="what holds the rest with a probability of 80%"),
    Option("calibration", "name", "Calibration preset, or its file.", presets=("calibrations",)),
    Option("presets", "folders", "Folder of your own presets. Repeatable."),
)  # fmt: skip
_RUN = _of(
    "run",
    Option("steps", "whole", "Optimizer steps of the run.", "recipe", 1, 10**9, default="20"),
    Option("epochs", "real", "Passes over --data, in place of --steps.", "recipe", 1e-6, 1e6),
    Option("warmup_steps", "whole", "Steps until the peak learning rate.", "recipe", 0, 10**9),
    Option("min_lr_ratio", "share", "Floor of the cosine over its peak.", "recipe", 0, 1),
    Option("max_grad_norm", "real", "Gradient clipping; 0 turns it off.", "recipe", 0, 1e6),
    Option("seed", "whole", "Seed of weights and data order.", "recipe", 0, 2**32 - 1),
    Option("data", "file", "File or folder to train on (docs/finetuning.md).", "recipe"),
    Option("validation_data", "file", "File to evaluate on.", "recipe"),
    Option("eval_every", "whole", "Steps between evaluations; 0 never.", "recipe", 0, 10**9),
    Option("group_by_length", "switch", "Batches of similar lengths (default).", "recipe"),
    Option("tokenizer", "folder", "Tokenizer folder, or bytes: an id a byte.", "recipe",
           default="the checkpoint's, else bytes"),
    Option("checkpoint", "folder", "Local model folder to start from.", "recipe"),
    Option("random_weights", "flag", "Adapters, or chats, on random weights are meant.", "recipe"),
    Option("demo_data", "flag", "A launch without --data is meant.", "recipe"),
)  # fmt: skip
TABLE = (*_MODEL_AND_CLUSTER, *_METHOD, *_FORMATS_AND_OPTIMIZER, *_BATCH, *_LAYOUT, *_FIGURES, *_RUN)

OPTIONS = {option.name: option for option in TABLE}
"""In the order of the help."""

ENGINE_SWITCHES = {option.name: option.engine for option in TABLE if option.engine}
"""Fields of a layout that one engine, and those built on it, alone read."""

OF_AXIS = {option.name: option.axis for option in TABLE if option.axis}
"""Fields of a layout that only matter where an axis is split."""


def reads(engine: str, name: str) -> bool:
    """Whether an engine reads a field of the layout: one that no engine has for itself, or its own family's switch."""
    return engine.startswith(ENGINE_SWITCHES.get(name, ""))


def words_of(name: str, value: Any) -> list[str]:
    """An option as words of a command line: names with commas, folders one by one."""
    option = OPTIONS[name]
    if option.kind in ("flag", "switch"):
        no = [f"--no-{option.flag[2:]}"] if option.kind == "switch" else []
        return [option.flag] if value in (True, "true") else no
    if option.kind == "folders":
        return [word for one in value for word in (option.flag, str(one))]
    return [option.flag, ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)]


def of_part(part: str) -> tuple[Option, ...]:
    """The options that are fields of one value."""
    return tuple(option for option in TABLE if option.part == part)

"""The engines there are: one record each, which every other part of the planner and the executor reads.

Other packages bring more by the entry point group `meshwright.engines`, each a `PackagedEngine`. Light on purpose: no
engine's code is imported for it, and entry points are read for names that are not in the table, or where all engines
are asked for. Not here: what an engine computes, holds and sends (planner/engines/), or how it is started
(executor/backends/).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import msgspec

from planner.basics.errors import PlannerError, did_you_mean, refusing

Copies = Literal["none", "replicas", "shards", "any"]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine splits, shards and usually does: the space of its layouts, and its defaults."""

    name: str
    runtime: str  # the preset of presets/runtimes meant when only the engine is known
    framework: str | None = None  # the package, and the backend of that name, that launches it; None: planned only
    zero_stages: tuple[int, ...]  # ZeRO stages that a search tries
    usual: int | None = None  # the stage meant when only the engine is known; None: the last of them
    splits: tuple[str, ...] = ()  # axes beside data parallelism
    # Engines of the same framework that split more: what a file for this one means where it has group sizes.
    beside: tuple[str, ...] = ()
    copies: Copies = "any"  # data-parallel ranks: none, all replicas, all shards, or any product of the two
    compiled_runtime: str = ""  # the preset of presets/runtimes that runs the same under torch.compile
    recompute: tuple[str, ...] = ("none", "full")  # recomputation that a search tries
    reshard: tuple[bool, ...] = (True,)  # reshard_after_forward
    sync: tuple[bool, ...] = (False,)  # sync_each_micro_batch
    schedules: tuple[tuple[str, int], ...] = ()  # pipeline schedules, with chunks a rank
    # Looked at only when named: the bound on their time is loose, and thousands of them would be played out.
    asked_schedules: tuple[tuple[str, int], ...] = ()
    pipeline_reshards: bool = True  # whether a pipeline can let weights go between micro-batches
    cp_methods: tuple[str, ...] = ("ring",)  # how sequences are shared; the first is meant when none is named
    gathers_narrow: bool = False  # tensor ranks convert what they gather to 8 bits before (torchao's float8)
    torch_ring: bool = False  # context ranks attend by torch's own ring (parallelism/context.py)
    sequence_parallel: bool = False  # splits the residual stream over tensor ranks unless told not to
    adapters: bool = False  # trains LoRA's adapters
    offloads: tuple[str, ...] = ()  # fields of a layout by which states wait in host memory
    dora: bool = False  # trains magnitudes beside adapters (peft's use_dora)
    chooses_attention: bool = False  # computes attention as a layout says (Layout.attention)
    chooses_loss: bool = False  # computes head and loss as a layout says (Layout.loss)
    compiles: bool = False  # runs Transformers' layers under torch.compile where a layout says so (Layout.compile)
    saves_modules: bool = False  # trains whole copies of modules beside adapters (peft's modules_to_save)
    steps_in_backward: bool = False  # steps a weight as soon as its gradient is made
    bases: tuple[str, ...] = ("nf4",)  # formats of a frozen base
    shards_packed_experts: bool = False  # shards experts that are one parameter in 4 bits
    secondary_shards: bool = False  # keeps a second copy of gathered weights at stage 3 (ZeRO++'s hpZ)
    fuses_accumulation: bool = False  # products add weight gradients to their buffer themselves
    starts_each_expert: bool = False  # each of a rank's experts is a product of its own, not one grouped kernel
    # Experts run one after the other unless a layout says otherwise: others' runs on the first FSDP had Transformers up
    # to 4, of which no kernels preset says it.
    loops_experts: bool = False
    # Of a layer's products that sac:matmul keeps, it makes every second again (inventory/units.py).
    skips_second_products: bool = False
    flat_states: bool = False  # its optimizer steps one flat buffer and not weight by weight
    recipes: bool = False  # multiplies by Transformer Engine's recipes of 8 and 4 bits (inventory/narrow.py)
    superseded: bool = False  # predicted where it is named, proposed to nobody
    splits_by_model: bool = False  # tensor ranks split what the model's class in Transformers says (base_model_tp_plan)
    apart: str = ""  # the axis of which a block of columns holds one value: the engine's bounds in columns need it

    @property
    def usual_stage(self) -> int:
        """The ZeRO stage meant when only the engine is known."""
        return self.zero_stages[-1] if self.usual is None else self.usual

    @property
    def whole_copies(self) -> bool:
        """Whether every rank holds the whole model's states."""
        return self.copies in ("none", "replicas")


OFFLOADS = ("offload_optimizer", "offload_params", "offload_activations")
"""Fields of a layout by which something waits in host memory."""

_FSDP2 = EngineFacts(
    name="fsdp2",
    runtime="accelerate-fsdp2",
    framework="accelerate",
    zero_stages=(3,),
    beside=("transformers-tp",),
    chooses_attention=True,
    chooses_loss=True,
    compiles=True,
    reshard=(True, False),
    sync=(False, True),
    adapters=True,
    saves_modules=True,
    offloads=OFFLOADS,
    shards_packed_experts=True,  # as Axolotl patches it, which leaves uint8 codes uncast
)

_RECORDS = (
    EngineFacts(
        name="single",
        chooses_attention=True,
        chooses_loss=True,
        compiles=True,
        runtime="accelerate-single",
        framework="accelerate",
        zero_stages=(0,),
        copies="none",
        adapters=True,
        offloads=("offload_activations",),
        dora=True,
        saves_modules=True,
        steps_in_backward=True,
        bases=("nf4", "gptq", "int8"),
    ),
    EngineFacts(
        name="ddp",
        chooses_attention=True,
        chooses_loss=True,
        compiles=True,
        runtime="accelerate-ddp",
        framework="accelerate",
        zero_stages=(0,),
        copies="replicas",
        adapters=True,
        offloads=("offload_activations",),
        dora=True,
        saves_modules=True,
        bases=("nf4", "int8"),
    ),
    _FSDP2,
    msgspec.structs.replace(
        _FSDP2,
        name="fsdp1",
        runtime="pytorch-fsdp1",
        framework=None,
        beside=(),
        superseded=True,
        compiles=False,
        saves_modules=False,
        shards_packed_experts=False,
        loops_experts=True,
    ),
    EngineFacts(
        name="deepspeed",
        chooses_attention=True,
        chooses_loss=True,
        compiles=True,
        runtime="deepspeed-zero",
        framework="deepspeed",
        flat_states=True,
        zero_stages=(1, 2, 3),
        beside=("deepspeed-autotp", "deepspeed-ulysses"),
        copies="shards",
        adapters=True,
        saves_modules=True,
        offloads=OFFLOADS,
        bases=("nf4", "gptq", "int8"),
        secondary_shards=True,
    ),
    EngineFacts(
        name="deepspeed-autotp",
        runtime="deepspeed-autotp",
        framework="deepspeed",
        flat_states=True,
        zero_stages=(0, 1, 2, 3),
        usual=1,
        splits=("tp",),
        copies="shards",
        apart="tp",  # how many buckets a backward fills depends on the split weights, one by one
    ),
    EngineFacts(
        name="deepspeed-pipeline",
        chooses_loss=True,
        runtime="deepspeed-pipeline",
        framework="deepspeed",
        flat_states=True,
        zero_stages=(0, 1),
        splits=("tp", "pp"),
        copies="shards",
        schedules=(("1f1b", 1),),
        adapters=True,
    ),
    EngineFacts(
        name="deepspeed-ulysses",
        chooses_loss=True,
        runtime="deepspeed-ulysses",
        framework="deepspeed",
        flat_states=True,
        zero_stages=(1, 2, 3),
        splits=("cp",),
        copies="shards",
        cp_methods=("ulysses",),
        offloads=("offload_optimizer", "offload_params"),
    ),
    EngineFacts(
        name="transformers-tp",
        runtime="transformers-tp",
        framework="transformers",
        splits_by_model=True,
        zero_stages=(3,),
        splits=("tp", "ep"),
        reshard=(True, False),
        sync=(False, True),
    ),
    EngineFacts(
        name="torchtitan",
        runtime="torchtitan",
        compiled_runtime="torchtitan-compiled",
        chooses_attention=True,
        zero_stages=(3,),
        splits=("tp", "cp", "pp", "ep"),
        recompute=("none", "sac:matmul", "full"),
        skips_second_products=True,
        reshard=(True, False),
        schedules=(("1f1b", 1), ("interleaved", 2)),
        asked_schedules=(("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)),
        pipeline_reshards=False,  # its own default keeps what a pipeline gathers
        cp_methods=("ring", "allgather"),
        gathers_narrow=True,
        torch_ring=True,
        sequence_parallel=True,
    ),
    EngineFacts(
        name="megatron",
        runtime="megatron-core",
        fuses_accumulation=True,
        starts_each_expert=True,
        zero_stages=(1,),
        splits=("tp", "cp", "pp", "ep"),
        copies="shards",
        recompute=("none", "attention", "full"),
        recipes=True,
        schedules=(("1f1b", 1), ("interleaved", 2), ("interleaved", 4)),
        cp_methods=("ring", "ulysses"),
        sequence_parallel=True,
    ),
    EngineFacts(
        name="nanotron",
        runtime="nanotron",
        zero_stages=(0, 1),
        # Experts are folded into the ranks of data and tensor parallelism: nanotron's parallel/context.py,
        # _init_process_group_with_moe (main branch, commit 009b8f7).
        splits=("tp", "pp", "ep"),
        copies="shards",
        schedules=(("1f1b", 1), ("gpipe", 1)),
        sequence_parallel=True,
    ),
)

ENGINES = {facts.name: facts for facts in _RECORDS}
"""Every known engine's facts by its name: a shipped one's is its module's in planner/engines, with dashes."""


class PackagedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that another package brings: what its entry point names."""

    facts: EngineFacts
    code: str  # where its Engine (planner/engines/base.py) is: "package.module:NAME"
    presets: str  # its folder, laid out like presets/, with the runtime that `facts` names and kernels of its own


PACKAGED: dict[str, PackagedEngine] = {}
"""Engines of other packages that are known, by name."""
ENTRY_POINTS = "meshwright.engines"


def add_engine(engine: PackagedEngine) -> None:
    """Make an engine of another package known; no other has its name."""
    ENGINES[engine.facts.name] = engine.facts
    PACKAGED[engine.facts.name] = engine


@cache
def find_packaged() -> None:
    """Make all engines known that installed packages bring (PlannerError where one cannot be loaded)."""
    from importlib.metadata import entry_points  # reading them costs more than a whole estimate

    for point in entry_points(group=ENTRY_POINTS):
        if point.name in ENGINES:
            continue
        fix = f"Mend or remove the package {point.dist.name if point.dist else point.module}"
        with refusing(Exception, f"engine {point.name}", point.value, "cannot be loaded", fix):
            engine = point.load()
        if not isinstance(engine, PackagedEngine) or engine.facts.name != point.name:
            raise PlannerError(f"engine {point.name}", point.value, "must be a PackagedEngine of that name", fix)
        add_engine(engine)


def is_engine(name: str) -> bool:
    """Whether there is an engine of that name, in the table or in an installed package."""
    if name not in ENGINES:
        find_packaged()
    return name in ENGINES


NOT_SHIPPED = dict.fromkeys(("galvatron", "internevo", "litgpt-fsdp", "litgpt-single"), "tests.truth.engines")
"""Engines and runtimes that earlier versions had, with the package of the source tree that has them now."""


def unknown_engine(field: str, name: str) -> PlannerError:
    """The refusal of a name that is not an engine's."""
    if name in NOT_SHIPPED:
        fix = f"The source tree has it in the package {NOT_SHIPPED[name]}"
        return PlannerError(field, name, "is not shipped: published rows alone are predicted with it", fix)
    return PlannerError(field, name, "is not an engine known here", did_you_mean(name, ENGINES))


def engines_with(holds: Callable[[EngineFacts], bool]) -> tuple[str, ...]:
    """Engines whose facts hold something."""
    return tuple(sorted(facts.name for facts in ENGINES.values() if holds(facts)))


def proposed_with(holds: Callable[[EngineFacts], bool]) -> tuple[str, ...]:
    """Engines whose facts hold something, but for superseded ones."""
    return engines_with(lambda facts: holds(facts) and not facts.superseded)


def offloading(field: str) -> tuple[str, ...]:
    """Engines that can keep what a field of the layout names in host memory, but for superseded ones."""
    return proposed_with(lambda facts: field in facts.offloads)


def choosing(field: str) -> tuple[str, ...]:
    """Engines that compute "loss" or "attention" as a layout says, but for superseded ones."""
    return proposed_with(lambda facts: getattr(facts, f"chooses_{field}"))

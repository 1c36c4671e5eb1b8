"""A model that its own code described: the weights and operations of each of its units, as data.

`executor import` records it (executor/worker/imported/); the inventory plays it (inventory/played.py). Not here:
families whose blocks are written by hand (inventory/block.py and its neighbours), or sizes that rules ask (model.py).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

SCHEMA = "model/1"

ByteCount = float | tuple[float, ...]
"""A size as a number of bytes a token, or as the terms of inventory.tensors.Size, of which six more are divided by the
number of tensor ranks; of sequences with images, which are on no tensor ranks, one more is bytes a position of images.
Zeros at the end are left out."""

FORMATS_RECORDED = ("mixed", "pure", "fp32", "adapted")
DEVICES_RECORDED = ("cuda", "cpu")
VARIANTS = tuple(f"{numbers}-{device}" for device in DEVICES_RECORDED for numbers in FORMATS_RECORDED)
"""Programs that each unit has: number formats ("mixed" has fp32 weights under autocast, "adapted" 16-bit ones under
autocast, "pure" all in 16 bits) on a GPU and on a CPU."""
APART = "-apart"
"""Ends the variant of a program of one of several ranks that each hold some of its experts whole; "mixed" has weights
that FSDP2 gathers in 16 bits, and experts that cast what they are given to that. Sizes are those of an even router; a
few numbers for each of a rank's experts are as many as the fewest ranks have."""


def numbers_of(precision: str, *, autocast: bool, adapters: bool) -> str:
    """Which of FORMATS_RECORDED a job computes in: under `autocast` one by what it casts, fp32 weights or those of 16
    bits under adapters, and else the one that the weights are in."""
    if precision in ("fp32", "pure-bf16"):
        return precision.removesuffix("-bf16")
    return "pure" if not autocast else "adapted" if adapters else "mixed"


TOWER = "tower"
"""The unit of the towers' weights."""
BETWEEN = "between"
"""The unit without weights of what is done between two layers, such as to add images' features."""
IMAGES = "+images"
"""Ends the name of a unit as it is where sequences have images; its weights are those of the unit without."""

WEIGHT = "weight"
"""What a step is called that only reads a weight of which others read parts."""
INPUT = -1
"""The storage that a unit is given; storage -2 - k is the k-th of those that all layers share."""


class Make(msgspec.Struct, frozen=True, array_like=True, tag="new"):
    """Backward allocates a storage, numbered on within the operation."""

    size: ByteCount


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """Backward lets go of a storage that it made."""

    storage: int


class Give(msgspec.Struct, frozen=True, array_like=True, tag="grad"):
    """The gradient of an input is a storage that backward made, or (-1) the incoming gradient's."""

    edge: int
    storage: int


class WeightGradient(msgspec.Struct, frozen=True, array_like=True, tag="weight"):
    """Backward makes the gradient of a weight."""

    name: str


BackwardStep = Make | Free | Give | WeightGradient


class AutogradStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What autograd remembers of an operation: the places in the graph that it reads (None: no gradient goes there; a
    weight by its name), the storages it keeps, and what its backward does. The first `own` of these are the operation's
    (0: all are), the others autograd's, which gives each gradient its input's format and shape."""

    reads: tuple[int | str | None, ...]
    keeps: tuple[int, ...] = ()
    back: tuple[BackwardStep, ...] = ()
    own: int = 0


class StandsFor(msgspec.Struct, frozen=True, array_like=True):
    """An operation stands for those of `more` iterations too, of which each keeps what it keeps itself of iterations:
    storages from `reach` on, of which an iteration has `width`. Those in `stays` are there until after the loop."""

    more: int
    reach: int
    width: int
    stays: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation of a unit's forward.

    It makes storages of sizes `new`, numbered on within the unit; its results are `gives`, (storage, size) each, the
    size None where it is the whole storage's: each is a place in the graph, numbered on from 1, where 0 is the unit's
    input. `ends` are storages of which the last variable goes out of scope after it. `weight` and `bias` name the
    weights of a linear module, which the planner computes itself. `frozen` is the node where its weights are frozen.
    `copy` marks autocast's copy of a weight. `depends` names weights of which an input is made by other operations:
    where all of them are frozen, `frozen` holds. `alike` is of a loop that is made longer alone.
    """

    op: str
    new: tuple[ByteCount, ...] = ()
    gives: tuple[tuple[int, ByteCount | None], ...] = ()
    node: AutogradStep | None = None
    frozen: AutogradStep | None = None
    ends: tuple[int, ...] = ()
    weight: str = ""
    bias: str = ""
    copy: bool = False
    depends: tuple[str, ...] = ()
    alike: StandsFor | None = None


class OtherProduct(msgspec.Struct, frozen=True, array_like=True):
    """`rows` a token (with a fixed part) times an n x k matrix, `times` in a unit's forward, beside linear modules:
    one number, or the terms of a polynomial of batch and length where the product is in a loop over positions."""

    rows: ByteCount
    n: int
    k: int
    times: float | tuple[float, ...] = 1.0


class Attend(msgspec.Struct, frozen=True, array_like=True):
    """Fused attention: heads, heads of keys, widths of a query and of a value head, the window (0: none), and whether
    tensor ranks have their own heads."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    window: int = 0
    split: bool = False


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    """A loop over a sequence among the steps of a program, which has its iterations at `length` positions.

    The `steps` from `first` on are one iteration, which covers `positions`; there is one more of it for every
    `positions` beyond `length`. What it reads of the `window` iterations before it, the next one reads of those before
    that (loops.py).
    """

    first: int
    steps: int
    positions: int
    length: int
    window: int = 1


class Summed(msgspec.Struct, frozen=True, array_like=True):
    """Experts whose results tensor ranks sum after the first `steps`: the places in the graph of their input, of the
    weights of each token's experts and of their result (None: without a gradient)."""

    steps: int
    given: int | None
    weights: int | None
    made: int | None


class Program(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One unit's forward in one number format on one kind of device.

    `output` is the place in the graph that it returns. `returned` are storages that a loop over layers has until the
    next one returns, `held` those that wait until the model's forward is over. `given` are those of the embedding's
    `shared` storages that the model calls the layer with, counted from 0: a checkpoint of the layer keeps them (None:
    all). The first steps (`before`) come before the layer is called, so it does not run them again. Places in the
    graph that other units made are read as -1, -2 and on: `outside` names these units and the places there; their
    storages follow those that all layers share. `moved` and `moved_back` are the bytes that operations other than
    products move, `starts` and `starts_back` how many operations there are: one number, or the terms of a polynomial
    of batch and length where some are in the `loop`. Towers run after as many steps as `towers` says (-1: in none).
    """

    steps: tuple[Step, ...]
    output: int
    shared: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    given: tuple[int, ...] | None = None
    before: int = 0
    outside: tuple[tuple[str, int], ...] = ()
    moved: ByteCount = 0.0
    moved_back: ByteCount = 0.0
    starts: int | tuple[float, ...] = 0
    starts_back: int | tuple[float, ...] = 0
    loop: Loop | None = None
    towers: int = -1
    summed: tuple[Summed, ...] = ()


def head_step(program: Program) -> int:
    """The place of the head among the steps of a tail: its last linear module."""
    return max(place for place, step in enumerate(program.steps) if step.weight)


class DescribedWeight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A weight of a unit: its name within it, its shape, and how it is used: by a linear module, by grouped products of
    experts (the first dimension counts them), in another way ("other"), or not at all ("unused"). `split` is the
    dimension that the model's own tensor plan divides; where tensor ranks have the whole results of what is split by
    its outputs, or the whole inputs of what is split by these, it `gathers`."""

    name: str
    shape: tuple[int, ...]
    use: str = "linear"
    split: int | None = None
    gathers: bool = False
    transposed: bool = False


class DescribedUnit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Weights, and programs by variant: those in which the model's own code runs, and of layers with experts those with
    APART after them. `attention` is fused, of `scores` two products make each pair's score and weigh the values.
    `buffers` are bytes of what its modules register beside weights, of which every rank has all."""

    weights: tuple[DescribedWeight, ...]
    programs: dict[str, Program]
    attention: tuple[Attend, ...] = ()
    products: tuple[OtherProduct, ...] = ()
    scores: tuple[Attend, ...] = ()
    buffers: int = 0


Linear = tuple[float, float]
"""So much for each position of images, and a fixed part."""


class TowerGradient(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tower's backward, up to a weight's gradient: the weight, `back` places before that of the part before
    in the unit's order, which begins anew after the first; what is held at its moments beside weights' gradients, of
    which none is below another for every number of images, and as it ends, both counted from the end of the part
    before. `back` is 0 after the last gradient."""

    back: int
    moments: tuple[Linear, ...]
    end: Linear


class TowerTraining(msgspec.Struct, frozen=True, kw_only=True):
    """A tower whose weights are trained: what its forward holds at moments as those of TowerProgram, what is `kept` for
    its backward, what autocast has `cached` until the model's forward is over, and the parts of the backward."""

    moments: tuple[Linear, ...]
    kept: Linear
    cached: Linear
    back: tuple[TowerGradient, ...]


class TowerProgram(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The forward of a model's frozen towers in one number format on one kind of device, in bytes: what is held at
    moments of which none is below another for every number of images, what is `left` to the model, and what operations
    beside products move, which are `starts`. `trained` is how they run where they are trained, `again` the same where
    their layers run again in backward."""

    moments: tuple[Linear, ...]
    left: Linear
    moved: Linear
    starts: int
    trained: TowerTraining | None = None
    again: TowerTraining | None = None


class TowerAttention(msgspec.Struct, frozen=True, array_like=True):
    """Attention of a tower that is not causal: heads, the width of a head, how often it is done, and the patches that
    see each other (0: those of a whole image)."""

    heads: int
    width: int
    times: int
    window: int = 0


class Towers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's towers with their projectors, and its own units as they run where sequences have images.

    A position of text that is an image's is made of `patches`; an image has `per_image` such positions (0: any number),
    for which a model is given `given_bytes`, and `beside_bytes` for every position of text. `products` are those of
    linear modules and all others, with rows a position. What the model's own units do where sequences have images is in
    units of their names with IMAGES after them, where it is not what they do with text alone. `between` is how many
    layers have one of unit BETWEEN after them, the first ones. Lengths are as those of Described.
    """

    patches: int
    per_image: int = 0
    given_bytes: Linear
    beside_bytes: float = 0.0
    programs: dict[str, TowerProgram]
    products: tuple[OtherProduct, ...]
    attention: tuple[TowerAttention, ...]
    between: int = 0
    shortest: int = 1
    longest: int = 0


class Described(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Units by name ("embed", one for each kind of layer, "tail", and "tower" where there are any), how the trainer
    builds the model (`config`, as in a config.json), with which version of Transformers it was recorded, the class of
    a layer, and the kinds of its layers in order: `runs` of (kind, layers). Without `runs` the first `dense_layers` are
    of kind "dense", the others of kind "layer".

    Sizes hold at lengths that are a multiple of `multiple_of`, to which layers that work on chunks of a sequence
    pad others, from `shortest` to `longest` (0: without end). `unused` are weights that take no part in the loss,
    by their names in the model with * for the layer: the trainer freezes them. `towers` are modules that text alone
    leaves out, by name with their classes: those beside the decoder, which see or hear, and its layers that attend to
    what these made. The trainer freezes them too. `seeing` is how towers run, and `blind` why that is not described.
    `shared` are weights beside the token table that several modules hold, and `wide` those that its code makes in fp32
    whatever the format of the others, named as `unused` are. `norm_apart` says whether FSDP2 leaves the
    last norm to the root, since Accelerate looks for it among the children of the model's body alone, `adapts` whether
    programs say what it does with its weights frozen, `recomputes` whether Transformers can recompute its layers,
    `padded` whether it needs its token of padding to be built, `remote_code` whether its classes are of code in its
    folder, and not of Transformers. `unsplit` says
    why no tensor ranks are described: "" where they are, None in descriptions that were made before there were any;
    `undealt` says the same of ranks that experts are dealt to.
    """

    config: dict[str, Any]
    transformers: str
    units: dict[str, DescribedUnit]
    layer_class: str
    dense_layers: int = 0
    runs: tuple[tuple[str, int], ...] = ()
    unused: tuple[str, ...] = ()
    towers: dict[str, str] = {}
    seeing: Towers | None = None
    blind: str = ""
    shared: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    norm_apart: bool = False
    adapts: bool = True
    recomputes: bool = True
    padded: bool = False
    remote_code: bool = False
    multiple_of: int = 1
    shortest: int = 1
    longest: int = 0
    unsplit: str | None = None
    undealt: str | None = None

    def __hash__(self) -> int:
        """By a few names: a configuration is a dict, which has no hash, and equality still compares everything."""
        return hash((self.layer_class, self.transformers, self.multiple_of))

    def runs_of(self, layers: int) -> tuple[tuple[str, int], ...]:
        """The model's `runs`, or those of a description without them, by its number of layers."""
        dense = (("dense", self.dense_layers), ("layer", layers - self.dense_layers))
        return self.runs or tuple(run for run in dense if run[1])

    @cached_property
    def buffers(self) -> tuple[tuple[str, int], ...]:
        """(unit, bytes of its buffers) where there are any."""
        return tuple((name, unit.buffers) for name, unit in self.units.items() if unit.buffers)

    @cached_property
    def idle_layers(self) -> int:
        """How many layers of the decoder are among its `towers`, since text leaves them out."""
        return sum(name.rpartition(".")[2].isdigit() for name in self.towers)

    @property
    def common(self) -> str:
        """One of the `shared` weights that several layers have, or ""."""
        return next((name for name in self.shared if ".*." in name), "")

    @cached_property
    def has_loops(self) -> bool:
        """Whether the number of its operations grows with the length."""
        return any(program.loop is not None for unit in self.units.values() for program in unit.programs.values())


CAST = "_to_copy"
"""torch's operation that makes a tensor in another format."""


def changes_logits(described: Described, loss: str) -> bool:
    """Whether a model makes other tensors of what its head gave before this loss reads them. A loss in one kernel with
    the head computes in fp32 of itself, so a cast is none to it."""
    tails = described.units["tail"].programs.values()
    after = (step for program in tails for step in program.steps[head_step(program) + 1 :])
    return any(step.new and not (loss == "fused" and step.op == CAST) for step in after)

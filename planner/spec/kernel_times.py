"""How long single kernels take on a GPU: few numbers a kind of kernel, each with the measurements it rests on.

A file of presets/kernel_times is one GPU: facts of its chip, and what was fitted to its measured kernels
(`make kernels`). What was not measured on a GPU is that of the `nearest` one, and says so by its `gpu`. Not here: the
formulas that the numbers go into (figures/kernels/), or the fits (calibrate/kernels/).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.quantities import NotNegative, Positive
from planner.spec.presets import checked, read_toml, search_path

FOLDER = "kernel_times"
GROUPS = ("products", "experts", "attention", "memory", "collectives")
ALIKE = {"fp16": "bf16", "pure-bf16": "bf16"}
"""Number formats whose products run at another's rate and in its kernels."""

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ShareOfPeak = Annotated[float, msgspec.Meta(gt=0, le=1.25)]
"""Above 1 where a card's clock is higher than that of its datasheet's rate."""


class FitEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What numbers rest on: how many measurements of `gpu`, median and 90th percentile of |predicted/measured - 1| over
    them as fitted, and who measured. `n` 0: a guess."""

    gpu: str = ""
    n: Annotated[int, msgspec.Meta(ge=0)] = 0
    spread: NotNegative | None = None
    spread_p90: NotNegative | None = None
    source: str


class KernelRates(FitEvidence, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kernel that works tile by tile needs, whatever it computes.

    Of the waves over the multiprocessors `stepped` is the share that must be whole (the rest goes on where others
    end). Each tile takes `tile_s` beside its work, and the kernel `launch_s`. Bytes come at `memory_share` of the
    memory's rate. A FLOP costs `flop_j` joules and a byte from memory `byte_j`: a kernel that would draw more than the
    GPU's power runs slower, the more so the longer it is beside `settle_s`.
    """

    stepped: Share
    tile_s: NotNegative
    launch_s: NotNegative
    memory_share: Share
    flop_j: Positive
    byte_j: Positive
    settle_s: NotNegative


class TileTimes(KernelRates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Matrix products of one number format by their tiles.

    A multiprocessor reaches `share` of its part of the peak on tiles of 32,768 outputs or more, on smaller ones a part
    of that: `share_16k`, `share_8k`, `share_4k`. Filling the loop over k costs as much as `ramp` further elements of
    k. `sharpness` is how sharply arithmetic or memory alone decides (1: they add up).
    """

    format: str
    share: ShareOfPeak
    share_16k: Share
    share_8k: Share
    share_4k: Share
    ramp: NotNegative
    sharpness: Positive


class ProductTimes(TileTimes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Products alone. Splitting k costs `split_s`, and the partial sums. One of 8 bits casts its operand first, at
    `cast_share` of the memory's rate, and `launch_s` is of both kernels."""

    split_s: NotNegative
    cast_share: Share | None = None


class ExpertTimes(TileTimes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Products of many experts in one kernel, with what goes on around them.

    Tiles of 2,048 outputs reach `share_2k`. Tokens are sorted and added up at `routing_share` of the memory's rate, and
    each of the layer's experts costs `expert_s`.
    The first kernel of the library's list (`first_tile` of the chip), where it runs untuned, reaches `share_first`.
    """

    share_2k: Share
    routing_share: Share
    expert_s: NotNegative
    share_first: Share | None = None


class AttentionTimes(KernelRates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Causal attention whose scores stay on the chip: the share of the peak by head size, and the keys more that a
    block takes (`ramp`). Backward is 2.5 times the FLOP at `backward_share` of forward's rate (None: not measured)."""

    share_64: Share
    share_128: Share
    share_192: Share
    share_256: Share
    ramp: NotNegative
    backward_share: Positive | None = None


class AttentionCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many times as long as the attention above another implementation takes, forward and backward, with heads of
    up to `head_dim` elements over sequences of up to `tokens` (0: of any length); `code` is its name in a layout."""

    code: str
    head_dim: Annotated[int, msgspec.Meta(gt=0)]
    forward: Positive
    backward: Positive
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    source: str


class MemoryTimes(FitEvidence, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels that only move bytes, at a share of the memory's rate: `kind` is `plain`, `permute` or
    `cross_entropy`."""

    kind: str
    share: Share
    launch_s: NotNegative


class CollectiveTimes(FitEvidence, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One collective inside a domain: NCCL's protocols LL, LL128 and Simple as a line each, of which the fastest holds.

    A step takes a fixed time and bytes come at a share of a GPU's link: `ll_s` and `ll_share`, and so on. The
    steps' number counts to the power `step_growth`, the shares change with (ranks / 4) to the power `width_growth`.
    Simple fills its pipeline piece by piece (`pieces`: 1 is the best cut).
    """

    op: str
    launch_s: NotNegative
    ll_s: NotNegative
    ll_share: Positive
    ll128_s: NotNegative
    ll128_share: Positive
    simple_s: NotNegative
    simple_share: Positive
    pieces: NotNegative
    width_growth: float
    step_growth: Positive


class KernelTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of presets/kernel_times: a chip's facts, what was fitted on it, and the nearest GPUs for the rest.

    `generation` is the architecture, of which other chips' `attention_codes` hold here too. `first_tile` is the first
    of the library's grouped kernels for the chip, by rows and columns of a tile, which runs where none was tuned. Files
    of others are looked for in the folders `found_in`, when something is not known here.
    """

    gpu: str
    generation: str = ""
    multiprocessors: Annotated[int, msgspec.Meta(gt=0)]
    l2_bytes: Positive
    first_tile: tuple[int, int] | None = None
    nearest: tuple[str, ...] = ()
    products: tuple[ProductTimes, ...] = ()
    experts: tuple[ExpertTimes, ...] = ()
    attention: tuple[AttentionTimes, ...] = ()
    attention_codes: tuple[AttentionCode, ...] = ()
    memory: tuple[MemoryTimes, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()
    sources: dict[str, str] = {}
    found_in: tuple[str, ...] = ()

    @property
    def chain(self) -> Iterator[KernelTimes]:
        """This GPU's, then those of the nearest ones, and of those nearest to these, each once: read as far as somebody
        asks (PlannerError where a GPU that one calls near has none)."""
        yield self
        near, known = [(self, name) for name in self.nearest], {self.gpu}
        for one, name in near:  # grows
            if name in known:
                continue
            known.add(name)
            if (found := _read(name, self.found_in)) is None:
                advice = did_you_mean(name, _names(self.found_in))
                raise PlannerError(f"{FOLDER}/{one.gpu}.toml: nearest", name, "has no file of kernel times", advice)
            near += [(found, further) for further in found.nearest]
            yield found

    def product(self, number_format: str) -> ProductTimes | None:
        """Products in a number format; None where no such GPU was measured."""
        wanted = ALIKE.get(number_format, number_format)
        return _first(one for level in self.chain for one in level.products if one.format == wanted)

    def expert(self, number_format: str) -> ExpertTimes | None:
        """Experts' grouped products in a number format."""
        wanted = ALIKE.get(number_format, number_format)
        return _first(one for level in self.chain for one in level.experts if one.format == wanted)

    def attend(self, backward: bool = False) -> AttentionTimes | None:
        """Attention, backward with the first `backward_share` that is known."""
        found = _first(one for level in self.chain for one in level.attention)
        if found is None or not backward or found.backward_share is not None:
            return found
        known = _first(one for level in self.chain for one in level.attention if one.backward_share is not None)
        return known and msgspec.structs.replace(found, backward_share=known.backward_share)

    def attention_code(self, code: str, head_dim: float, tokens: float) -> AttentionCode | None:
        """What an implementation of attention takes on chips of this generation over sequences of `tokens`; None where
        that is not known."""
        known = [
            one
            for level in self.chain
            if level.generation == self.generation
            for one in level.attention_codes
            if one.code == code and (one.tokens == 0 or one.tokens >= tokens)
        ]
        return min(
            known,
            key=lambda one: (one.head_dim < head_dim, abs(one.head_dim - head_dim), one.tokens or inf),
            default=None,
        )

    def move(self, kind: str) -> MemoryTimes | None:
        """Kernels of that kind that only move bytes."""
        return _first(one for level in self.chain for one in level.memory if one.kind == kind)

    def collective(self, op: str) -> CollectiveTimes | None:
        """One collective inside a domain."""
        return _first(one for level in self.chain for one in level.collectives if one.op == op)


T = TypeVar("T")


def _first(found: Iterator[T]) -> T | None:
    return next(found, None)


@lru_cache(maxsize=64)
def _read(gpu: str, folders: tuple[str, ...]) -> KernelTimes | None:
    """One GPU's own file, from the first folder that has it."""
    if set(gpu) & {"/", "\\", "\0"}:
        return None
    for folder in folders:
        path = Path(folder) / FOLDER / f"{gpu}.toml"
        if not path.is_file():
            continue
        raw = {**read_toml(path), "gpu": gpu, "found_in": folders}
        for group in GROUPS:
            raw[group] = [{"gpu": gpu, **entry} for entry in raw.get(group, [])]
        return checked(raw, KernelTimes, path)
    return None


def folders() -> tuple[str, ...]:
    """Where presets are looked for."""
    return tuple(map(str, search_path(())))


def kernel_times(gpu: str, found_in: tuple[str, ...] | None = None) -> KernelTimes | None:
    """What is known of a GPU preset's kernels; None for one without a file, such as a CPU."""
    return _read(gpu, folders() if found_in is None else found_in)


def _names(folders: tuple[str, ...]) -> set[str]:
    return {path.stem for folder in folders for path in (Path(folder) / FOLDER).glob("*.toml")}

"""A trace of few layers grown to one of many, on steps that are written down here.

Not here: the same of real modules (test_trace.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor.measure import tracekernels
from executor.measure.trace import SavedTensor
from executor.worker.meter.storages import TERMS, StorageChange, TrackedStorage, by_term, fullest_moment
from executor.worker.trace.layers import Phase, calls_of_many, extrapolated, fullest, kept_of, phase_of
from planner.spec import Kernels
from planner.spec.plan import Collective

WEIGHT, KEPT, TEMPORARY, CAST, LOGITS = 1000, 70, 400, 30, 900
"""Bytes of each layer, of the logits in all."""


def storage(term: str, op: str = "aten.mm", path: str = "", phase: str = "forward") -> TrackedStorage:
    """A storage whose bytes count under a term."""
    made = TrackedStorage(0, op, path, phase, (), in_engine=term == "buckets")
    made.state = term if term in ("params", "optimizer") else ""
    made.was_parameter, made.was_grad = term == "gathered", term == "grads"
    made.has_vocab, made.was_kept = term == "logits", term == "activations"
    return made


class Step:
    """What one optimizer step of a model of `layers` layers does to storages, phase by phase."""

    def __init__(self, layers: int, temporary: int = TEMPORARY, cast: int = CAST) -> None:
        self.layers, self.temporary, self.cast = layers, temporary, cast
        self.live: dict[TrackedStorage, int] = {storage("params", path=f"layers.{n}"): WEIGHT for n in range(layers)}
        self.live[storage("params", path="embed_tokens")] = 5 * WEIGHT
        self.changes: list[StorageChange] = []

    def change(self, one: TrackedStorage, delta: int, op: str, path: str) -> TrackedStorage:
        self.live[one] = self.live.get(one, 0) + delta
        self.changes.append(StorageChange(one, delta, op, path))
        return one

    def phases(self) -> Iterator[Phase]:
        for name, work in (("load", self.load), ("forward", self.forward), ("backward", self.backward),
                           ("optimizer", self.optimizer)):  # fmt: skip
            start = {one: size for one, size in self.live.items() if size}
            self.changes = []
            work()
            yield phase_of(name, start, self.changes)

    def load(self) -> None:
        made = self.change(storage("temporaries"), 11 * self.layers, "aten.normal", "")
        self.change(made, -11 * self.layers, "free", "")

    def forward(self) -> None:
        self.kept, casts = [], []
        self.change(storage("activations"), 50, "aten.embedding", "model.embed_tokens")
        for n in range(self.layers):
            path = f"model.layers.{n}"
            casts.append(self.change(storage("gathered"), self.cast, "aten.to", f"{path}.mlp"))
            working = self.change(storage("temporaries"), self.temporary, "aten.mm", f"{path}.mlp")
            self.kept.append(self.change(storage("activations", "aten.mul", f"{path}.mlp.act"), KEPT, "aten.mul", path))
            self.change(working, -self.temporary, "free", path)
        self.logits = self.change(storage("logits", "aten.log_softmax"), LOGITS, "aten.mm", "lm_head")
        for one in casts:
            self.change(one, -self.cast, "free", "")

    def backward(self) -> None:
        self.change(self.logits, -LOGITS, "free", "lm_head")
        for n in reversed(range(self.layers)):
            path = f"model.layers.{n}"
            working = self.change(storage("temporaries"), self.temporary, "aten.mm", f"{path}.mlp")
            self.change(storage("grads"), WEIGHT // 2, "aten.mm", f"{path}.mlp")
            self.change(working, -self.temporary, "free", path)
            self.change(self.kept[n], -KEPT, "free", path)
        self.change(storage("grads"), 9, "aten.embedding", "model.embed_tokens")

    def optimizer(self) -> None:
        self.change(storage("optimizer"), 2 * WEIGHT * self.layers, "aten.zeros", "")
        working = self.change(storage("temporaries"), 3 * self.layers, "aten._foreach_add", "")
        self.change(working, -3 * self.layers, "free", "")


def phases(layers: int, **sizes: int) -> list[Phase]:
    return list(Step(layers, **sizes).phases())


@pytest.mark.parametrize("sizes", [{}, {"temporary": 5000}, {"cast": 0}, {"temporary": 0}, {"cast": 2000}], ids=str)
@pytest.mark.parametrize(("at", "layers"), [((2, 4), 7), ((2, 4), 32), ((2, 3), 9), ((3, 6), 12), ((2, 4), 4)])
def test_few_layers_grow_to_the_fullest_moments_of_many(
    at: tuple[int, int], layers: int, sizes: dict[str, int]
) -> None:
    few, more = (phases(one, **sizes) for one in at)

    grown = extrapolated(few, more, at, layers)

    whole = fullest(phases(layers, **sizes))
    assert [(one.phase, one.op, one.terms) for one in grown] == [(one.phase, one.op, one.terms) for one in whole]
    assert [one.path for one in grown] == [one.path for one in whole]


def test_the_fullest_moment_by_hand() -> None:
    """Seven layers: 12,000 bytes of weights; the last forward moment has all casts, all kept, and the logits."""
    load, forward, backward, optimizer = fullest(phases(7))

    assert (load.op, load.path, load.terms["temporaries"]) == ("aten.normal", "", 77)
    assert (forward.op, forward.path) == ("aten.mm", "lm_head")
    assert forward.terms == dict.fromkeys(TERMS, 0.0) | {
        "params": 12_000, "activations": 50 + 7 * 70, "gathered": 7 * 30, "logits": 900,
    }  # fmt: skip
    assert backward.path == "model.layers.0.mlp"
    assert (backward.terms["grads"], backward.terms["activations"], backward.terms["temporaries"]) == (3500, 120, 400)
    assert optimizer.total == 12_000 + 3509 + 14_000 + 21 + 50


def test_what_a_block_keeps_is_that_of_the_second_and_of_the_loss() -> None:
    start = {
        storage("activations", "aten.mul", "model.layers.0.mlp"): 8,
        storage("activations", "aten.mul", "model.layers.1.mlp.act"): 16,
        storage("activations", "aten.add", "model.layers.1"): 24,
        storage("params", "aten.mm", "model.layers.1.mlp"): 80,
        storage("logits", "aten.log_softmax", "lm_head"): 40,
    }

    assert kept_of(start, tokens=8) == (
        SavedTensor(path="mlp.act", op="aten.mul", bytes_per_token=2.0),
        SavedTensor(path="", op="aten.add", bytes_per_token=3.0),
        SavedTensor(path="loss", op="aten.log_softmax", bytes_per_token=5.0),
    )


def test_the_fullest_moment_has_what_was_there_then_and_counts_it_by_term() -> None:
    first, second = storage("params"), storage("temporaries")
    changes = [
        StorageChange(second, 5, "", ""),
        StorageChange(second, -5, "", ""),
        StorageChange(first, -1, "", ""),
        StorageChange(second, 5, "", ""),
    ]

    moment = fullest_moment({first: 10}, changes)

    assert moment == {first: 10, second: 5}
    assert by_term(moment, "forward") == dict.fromkeys(TERMS, 0.0) | {"params": 10, "temporaries": 5}
    assert fullest_moment({first: 10}, changes[2:3]) == {first: 10}


def collective(op: str, count: float, payload: float) -> Collective:
    return Collective(phase="backward", op=op, group="dp", ranks=2, unit="layer", count=count, payload_bytes=payload)


def test_calls_and_their_bytes_grow_by_the_layers_between_two_traces() -> None:
    few = (collective("all_gather", 5, 70), collective("all_reduce", 1, 8))
    more = (collective("all_gather", 9, 110), collective("all_reduce", 1, 8), collective("reduce_scatter", 4, 16))

    grown = calls_of_many(few, more, (2, 4), 10)

    assert [(call.count, call.payload_bytes) for call in grown] == [(9 + 3 * 4, 110 + 3 * 40), (1, 8), (16, 64)]


def kept(path: str, *operations: str) -> list[SavedTensor]:
    return [SavedTensor(path=path, op=f"aten.{op}", bytes_per_token=1.0) for op in operations]


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        (kept("input_layernorm", "rsqrt", "mul"), {"norm": "eager-fp32"}),
        (kept("ln_1", "native_layer_norm"), {"norm": "native"}),
        (kept("self_attn.q_norm", "rsqrt"), {"norm": "eager-fp32"}),
        (kept("self_attn", "_scaled_dot_product_flash_attention_for_cpu"), {"attention": "flash", "rotary": "eager"}),
        (kept("self_attn", "efficient_attention", "rotary"), {"attention": "flash", "rotary": "fused"}),
        (kept("self_attn", "softmax", "rope"), {"attention": "unfused", "rotary": "fused"}),
        (kept("mlp.act", "silu"), {"mlp": "eager"}),
        (kept("mlp", "swiglu"), {"mlp": "fused"}),
        (kept("experts", "gelu"), {"mlp": "eager"}),
        (kept("loss", "_log_softmax"), {"loss": "eager-fp32"}),
        (kept("loss", "cross_entropy"), {"loss": "fused-linear"}),
        (kept("dropout", "bernoulli"), {}),
    ],
)
def test_kept_tensors_show_the_kernels_of_their_part_and_of_no_other(
    tensors: list[SavedTensor], parts: dict[str, str]
) -> None:
    given = Kernels(norm="x", rotary="x", attention="x", mlp="x", loss="x")  # type: ignore[arg-type]

    found, reasons = tracekernels.parts_of(tensors, given)

    assert {name: getattr(found, name) for name in tracekernels.PARTS if getattr(found, name) != "x"} == parts
    assert reasons == dict.fromkeys(parts, ", ".join(sorted(one.op for one in tensors)))

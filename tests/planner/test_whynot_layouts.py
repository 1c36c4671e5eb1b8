"""The layout that a part of one names: what else follows from it, worked out by hand on 8 GPUs; and how it is judged
by its time, its batch and its size.

Not here: what a whole answer says of it (test_recommend.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.decide.whynot import SAME, _judged, _layout, _slower_or_larger, _value
from planner.spec import Layout

ASKED = question({"model": "llama-3.2-1b", "gpus": "8", "global_batch_size": "64"})
BASE = Layout(engine="fsdp2", dp_shard=8, zero_stage=3, micro_batch_size=2, grad_accum=4)


@pytest.mark.parametrize(
    ("named", "follows"),
    [
        ({}, {}),
        ({"recompute": "full"}, {"recompute": "full"}),
        ({"micro_batch_size": 4}, {"micro_batch_size": 4, "grad_accum": 2}),
        ({"grad_accum": 8}, {"grad_accum": 8, "micro_batch_size": 1}),
        ({"grad_accum": 8, "micro_batch_size": 2}, {"grad_accum": 8}),  # both are named: another batch
        ({"micro_batch_size": 16}, {"micro_batch_size": 16, "grad_accum": 4}),  # 128 sequences in one pass
        ({"tp": 2}, {"tp": 2, "dp_shard": 4, "grad_accum": 8}),
        ({"tp": 8}, {"tp": 8, "dp_shard": 1, "grad_accum": 32}),
        ({"tp": 16}, {"tp": 16, "dp_shard": 1, "grad_accum": 32}),  # more than there are: a rule says so
        ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_replicate": 4, "dp_shard": 4}, {"dp_replicate": 4, "dp_shard": 4, "grad_accum": 2}),
        ({"engine": "ddp"}, {"engine": "ddp", "zero_stage": 0, "dp_replicate": 8, "dp_shard": 1}),
        ({"engine": "deepspeed", "zero_stage": 1}, {"engine": "deepspeed", "zero_stage": 1}),
    ],
    ids=str,
)
def test_what_is_not_named_makes_up_the_gpus_and_the_batch(named: dict[str, Any], follows: dict[str, Any]) -> None:
    assert _layout(ASKED, BASE, named) == replace(BASE, **follows)


def test_without_a_batch_the_passes_stay() -> None:
    free = replace(ASKED, job=replace(ASKED.job, global_batch_size=None))

    assert _layout(free, BASE, {"tp": 2}) == replace(BASE, tp=2, dp_shard=4)


def test_copies_stay_as_they_are_where_they_divide_what_is_left() -> None:
    hybrid = replace(BASE, dp_replicate=2, dp_shard=4)

    assert _layout(ASKED, hybrid, {"tp": 2}) == replace(hybrid, tp=2, dp_shard=2, grad_accum=8)
    assert _layout(ASKED, hybrid, {"tp": 8}) == replace(hybrid, tp=8, dp_replicate=1, dp_shard=1, grad_accum=32)


# -- how it is judged -------------------------------------------------------------------------------------------------


def estimated(step_s: float | None, batch: int = 8, size: float = 1000.0, **more: Any) -> Any:
    """An estimate of a layout that takes so long a step of `batch` sequences, and so many bytes."""
    case = SimpleNamespace(layout=SimpleNamespace(global_batch_size=batch, name=more.pop("name", "other")))
    known = {"fits": True, "launchable": True, "refusal": None, "reasons": ["no time is known", "another"]} | more
    return SimpleNamespace(
        case=case, time=SimpleNamespace(step_s=step_s), throughput=SimpleNamespace(tokens_per_s_per_gpu=100.0),
        memory=SimpleNamespace(device_bytes=size), **known,
    )  # fmt: skip


BEST = estimated(8.0, name="best")


@pytest.mark.parametrize(
    ("one", "kind", "words"),
    [
        (estimated(8.0), "equal", "either will do"),
        (estimated(8.0 * (1 + SAME / 2)), "equal", "either will do"),
        (estimated(8.0 * (1 + SAME * 2)), "slower", "takes 0.00% longer a sequence than the best"),
        (estimated(12.0), "slower", "takes 50.00% longer a sequence than the best: 100 instead of 100 tokens/s"),
        (estimated(15.99), "slower", "takes 99.88% longer"),
        (estimated(16.0), "slower", "takes 2 times as long a sequence as"),
        (estimated(24.0), "slower", "takes 3 times as long a sequence as"),
        (estimated(12.0, batch=16), "batch", "faster, by 25.00% a sequence, with a global batch of 16 instead of 8"),
        (estimated(6.0), "equal", "either will do"),  # of the same batch it would have been found
        (estimated(16.0, batch=16), "equal", "either will do"),
        (estimated(8.0, size=1000.0 * (1 + SAME / 2)), "equal", "either will do"),
        (estimated(8.0, size=2000.0), "larger", "as fast as the best, but needs"),
        (estimated(8.0, size=500.0), "equal", "needs no more memory"),
    ],
)
def test_a_layout_is_slower_of_another_batch_larger_or_as_good(one: Any, kind: str, words: str) -> None:
    found, sentence = _slower_or_larger(one, BEST)
    assert found == kind and words in sentence


def judged(one: Any, recommended: int | None = 0, **limits: Any) -> tuple[str, str]:
    known = {"any_runtime": False, "tie": 0.0, "deadline_s": None, "sequences": lambda question: 800} | limits
    limits = SimpleNamespace(**known)
    found: Any = SimpleNamespace(estimates=[BEST], recommended=recommended, question=None, constraints=limits)
    return _judged(found, one)


def test_memory_comes_before_a_backend_a_backend_before_a_deadline_and_a_deadline_before_time() -> None:
    """800 sequences at 1.5 s each are 1,200 s."""
    slow = estimated(12.0)
    assert judged(estimated(12.0, fits=False, launchable=False)) == ("memory", "no time is known.")
    away = estimated(12.0, launchable=False, refusal="none has it")
    assert judged(away) == ("backend", "cannot be launched: none has it.")
    assert judged(away, any_runtime=True)[0] == "slower"
    assert judged(slow, deadline_s=1199.0)[0] == "deadline" and judged(slow, deadline_s=1200.0)[0] == "slower"
    assert judged(slow, deadline_s=1199.0, sequences=lambda question: None)[0] == "slower"
    assert judged(estimated(None), deadline_s=1.0) == ("slower", "No time is known for it: no time is known.")


def test_the_recommended_layout_itself_is_told_so_where_it_is_recommended() -> None:
    same = estimated(8.0)
    same.case = BEST.case
    assert judged(same)[0] == "best" and judged(same, recommended=None)[0] == "equal"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tp", "4", 4), ("sequence_parallel", "YES", True), ("sequence_parallel", "off", False),
        ("engine", "ddp", "ddp"),
        ("zero_stage", "0", 0), ("zero_stage", "2", 2), ("tp", "1", 1), ("tp", "0", None), ("zero_stage", "-1", None),
        ("sequence_parallel", "2", None), ("tp", "a", None), ("engine", "dpd", None), ("stage_layers", "1", None),
    ],
)  # fmt: skip
def test_a_value_is_read_as_the_layout_has_it(name: str, text: str, value: Any) -> None:
    """Of what a layout has one of there is never none."""
    if value is None:
        with pytest.raises(PlannerError, match="why_not"):
            _value(name, text)
    else:
        assert _value(name, text) == value

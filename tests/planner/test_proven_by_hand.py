"""What a fit must show before it is kept, on both sides of each bound; and latent attention's weights by hand.

Not here: whole fits (test_calibrate.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.basics.errors import PlannerError
from planner.calibrate import fit, holdout, kept, report
from planner.calibrate.allocator import LEAST
from planner.calibrate.compute import ComputeFit, Speeds
from planner.calibrate.kept import CLEARLY, LONGER_TAIL, OF_ONE_MODEL
from planner.inventory.attention import mla_weights
from planner.spec import presets


def residuals(*errors: float | None, what: str = "memory_error") -> list[Any]:
    other = {"memory_error": None, "time_error": None}
    return [
        SimpleNamespace(sample=SimpleNamespace(id=str(place)), **(other | {what: one}))
        for place, one in enumerate(errors)
    ]


def members(count: int, model: str = "a") -> list[Any]:
    return [SimpleNamespace(id=str(place), model=model, gpu="h100", source="s") for place in range(count)]


@pytest.mark.parametrize(("share", "worse"), [(1 - CLEARLY + 1e-6, True), (1 - CLEARLY - 1e-6, False), (2.0, True)])
def test_left_out_errors_must_fall_by_a_twentieth(share: float, worse: bool) -> None:
    before, left = residuals(*[0.2] * 9), residuals(*[0.2 * share] * 9)
    found = kept._worse("allocator", members(9), before, left)
    assert (found is not None) is worse
    if found:
        assert found == f"{0.2 * share:.1%} off in the median against 20.0% before"


@pytest.mark.parametrize(("tail", "worse"), [(LONGER_TAIL * 0.2 + 1e-6, True), (LONGER_TAIL * 0.2 - 1e-6, False)])
def test_a_better_median_may_cost_a_quarter_more_of_the_ninth_decile(tail: float, worse: bool) -> None:
    before, left = residuals(*[0.2] * 10), residuals(*[0.01] * 8, tail, tail)
    found = kept._worse("allocator", members(10), before, left)
    assert (found is not None) is worse
    if found:
        assert found == "a tenth is 25% off or more against 20% before"


def test_only_a_group_s_own_errors_of_its_own_kind_count() -> None:
    before, left = residuals(0.2, 0.2, 9.0), residuals(0.1, 0.1, 9.9)
    assert kept._worse("allocator", members(2), before, left) is None
    assert kept._worse("allocator", members(3), before[:2], []) is None
    assert kept._worse("allocator", [], before, left) is None
    times = residuals(0.1, None, 0.3, what="time_error")
    assert kept.errors_in(times, {"0", "1", "2"}, "time_error") == [0.1, 0.3]
    assert kept.errors_in(times, {"1", "2"}, "time_error") == [0.3]
    assert kept._worse("speed", members(3), times, times) is not None


@pytest.mark.parametrize(
    ("count", "models", "has", "words"),
    [
        (LEAST - 1, 2, False, f"{LEAST - 1} measurements of {LEAST} needed"),
        (OF_ONE_MODEL - 1, 1, True, f"{OF_ONE_MODEL - 1} measurements, all of one model, of {OF_ONE_MODEL} needed"),
        (OF_ONE_MODEL, 1, True, None),
        (OF_ONE_MODEL - 1, 2, True, None),
    ],
)
def test_few_measurements_and_few_of_one_model_keep_the_default(
    count: int, models: int, has: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, some = ("allocator", "ddp"), members(count)
    for place in range(models):
        some[place].model = f"model {place}"
    for one in some[models:]:
        one.model = "model 0"
    monkeypatch.setattr(fit, "groups_of", lambda samples: {group: some})
    monkeypatch.setattr(fit, "has_group", lambda made, asked: has and asked[1] != "shared")
    better, worse = residuals(*[0.01] * count), residuals(*[0.2] * count)

    def unproven(before: Any, left: Any, gone: frozenset[Any] = frozenset()) -> dict[Any, str]:
        return kept.unproven(some, before, left, left, None, gone)  # type: ignore[arg-type]

    found = unproven(worse, better)
    assert found == ({} if words is None else {group: f"allocator of ddp: {words}, keeps its default"})
    assert unproven(worse, better, frozenset([group])) == {}
    if words is None:
        assert "where its model was left out, keeps its default" in unproven(better, worse)[group]


def test_what_a_host_takes_is_of_every_runtime_with_the_same_modules() -> None:
    def fitted(operation_s: float, pace: float = 1.1, waited: bool = False) -> ComputeFit:
        return ComputeFit(speeds=Speeds(0.5, 0.5, operation_s, 1.0, pace), n=9, spread=0.1, waited=waited)

    shipped = {name: presets.runtime(name).kernels for name in presets.names("runtimes")}
    fits: list[Any] = [
        ("accelerate-single", fitted(28e-6), []),
        ("deepspeed-zero", fitted(20e-6), []),
        ("accelerate-ddp", fitted(5e-6, waited=True), []),
        ("accelerate-fsdp2", fitted(1e-6, pace=0.0), []),  # of a device without kernels, such as a CPU
        ("not-shipped", fitted(1e-6), []),
        ("nanotron", fitted(80e-6), []),
    ]
    found = {one.runtime: one for one in fit._of_same_modules(fits, shipped)}

    assert set(found) == {name for name, kernels in shipped.items() if kernels in ("hf", "nanotron")}
    assert {found[name].operation_s for name in ("accelerate-ddp", "accelerate-fsdp2", "deepspeed-ulysses")} == {24e-6}
    assert (found["accelerate-ddp"].gpu, found["accelerate-ddp"].pace, found["nanotron"].operation_s) == (
        fit.ANYWHERE, None, 80e-6,
    )  # fmt: skip
    assert found["accelerate-ddp"].source == "of accelerate-single, deepspeed-zero, which runs the same modules (hf)"


def test_what_runtimes_share_is_judged_first_and_by_source(monkeypatch: pytest.MonkeyPatch) -> None:
    some = members(9)
    monkeypatch.setattr(fit, "groups_of", lambda samples: {("allocator", "ddp"): some})
    monkeypatch.setattr(fit, "has_group", lambda made, asked: True)
    small, large = residuals(*[0.01] * 9), residuals(*[0.2] * 9)
    found = kept.unproven(some, small, small, large, None, frozenset())  # type: ignore[arg-type]
    assert list(found) == [("allocator", "shared")] and "where their source was left out" in str(found)
    assert "runtimes without measurements" in str(found)
    assert kept._named(("speed", "ddp", "h100")) == "speed of ddp on h100"


def test_a_speed_of_several_sources_is_kept_only_where_a_left_out_one_is_predicted_no_worse() -> None:
    some = members(9)
    for place, one in enumerate(some):
        one.source = f"source {place % 2}"
    small, large = (residuals(*[error] * 9, what="time_error") for error in (0.1, 0.2))

    assert kept._harmed(some, small, large) == "20.0% off in the median against 10.0% before"
    assert kept._harmed(some, small, small) is None and kept._harmed(some, large, small) is None
    for one in some:
        one.source = "the only source"
    assert kept._harmed(some, small, large) is None


def test_a_folder_is_a_run_json_a_probe_and_jsonl_are_rows(tmp_path: Path) -> None:
    paths = [tmp_path, tmp_path / "a.json", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    assert report.sorted_out(paths) == ([tmp_path / "b.jsonl", tmp_path / "c.jsonl"], [tmp_path], [tmp_path / "a.json"])
    with pytest.raises(PlannerError, match="neither rows"):
        report.sorted_out([tmp_path / "d.toml"])


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_latent_attention_s_weights_by_hand(name: str) -> None:
    """Down to the latents whole, up from them by head."""
    model = presets.model(name)
    mla = model.mla
    assert mla is not None
    head, heads, hidden = mla.qk_nope_head_dim + mla.qk_rope_head_dim, model.heads, model.hidden
    found = mla_weights(model, mla)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "kv_norm": (mla.kv_lora_rank,),
        "kv_b": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "output": (hidden, heads * mla.v_head_dim),
    }
    if mla.q_lora_rank is None:
        shapes["q"] = (heads * head, hidden)
    else:
        shapes |= {
            "q_a": (mla.q_lora_rank, hidden), "q_norm": (mla.q_lora_rank,), "q_b": (heads * head, mla.q_lora_rank)
        }  # fmt: skip
    assert {role: weight.shape for role, weight in found.items()} == shapes
    split = {role: weight.split for role, weight in found.items() if weight.split is not None}
    assert split == {role: 0 for role in ("q", "q_b", "kv_b") if role in shapes} | {"output": 1}
    assert all(weight.pieces == (heads if role in split else None) for role, weight in found.items())


# -- the speed that all runtimes share -----------------------------------------------------------------------------


def steps(*pairs: tuple[str, str], count: int = LEAST) -> list[Any]:
    """So many timed samples of each pair of a runtime and a device."""
    return [
        SimpleNamespace(id=f"{runtime} {gpu} {place}", runtime=runtime, gpu=gpu, device_kind="cuda", step_s=1.0)
        for runtime, gpu in pairs
        for place in range(count)
    ]


def off(samples: list[Any], errors: dict[str, float]) -> list[Any]:
    """Residuals with one error for each runtime."""
    return [SimpleNamespace(sample=one, time_error=errors[one.runtime], memory_error=None) for one in samples]


def test_a_shared_speed_is_kept_where_most_pairs_and_their_mean_are_better() -> None:
    some = steps(("a", "h100"), ("b", "h100"), ("c", "a100"))
    guesses = off(some, {"a": 0.2, "b": 0.2, "c": 0.2})

    def dropped(**errors: float) -> bool:
        return list(kept.shared_in_vain(some, guesses, off(some, errors))) == [kept.EVERYWHERE]

    assert not dropped(a=0.1, b=0.1, c=0.2 + 0.05)
    assert dropped(a=0.1, b=0.1, c=0.2 + 0.2)  # the mean is no better
    assert dropped(a=0.01, b=0.21, c=0.21)  # one of three
    (reason,) = kept.shared_in_vain(some, guesses, off(some, {"a": 0.3, "b": 0.3, "c": 0.3})).values()
    assert "better on 0 of 3" in reason and "keeps its default" in reason


def test_pairs_of_few_measurements_and_equal_predictions_tell_nothing_of_a_shared_speed() -> None:
    few = steps(("a", "h100"), count=LEAST - 1)
    assert kept.shared_in_vain(few, off(few, {"a": 0.1}), off(few, {"a": 0.9})) == {}
    many = steps(("a", "h100"))
    assert kept.shared_in_vain(many, off(many, {"a": 0.1}), off(many, {"a": 0.1})) == {}


def test_a_carried_speed_is_kept_where_it_is_better_on_more_devices_than_worse() -> None:
    some = steps(("a", "h100"), ("a", "b200"), ("a", "a100"))
    group = ("host", "a", "cuda")

    def at(**errors: float) -> list[Any]:
        return [SimpleNamespace(sample=one, time_error=errors[one.gpu], memory_error=None) for one in some]

    def reasons(**errors: float) -> list[str]:
        return list(kept.carried_in_vain(some, at(h100=0.2, b200=0.2, a100=0.2), at(**errors), {group}).values())

    assert reasons(h100=0.1, b200=0.1, a100=0.2) == []
    assert reasons(h100=0.1, b200=0.1, a100=0.201) == []  # so little is the same
    assert reasons(h100=0.185, b200=0.185, a100=0.9) != []  # worse over all
    assert reasons(h100=0.199, b200=0.199, a100=0.199) != []  # so little may be luck
    (reason,) = reasons(h100=0.01, b200=0.21, a100=0.2)
    assert reason.startswith("host of a on devices") and "better on 1 and worse on 1 of 3" in reason


def test_the_unseen_are_predicted_without_their_runtime_and_without_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = steps(("a", "h100"), ("b", "h100"), ("a", "a100"), ("c", "v100"), count=1)
    monkeypatch.setattr(holdout, "residuals", lambda inside, seen, timer: [(one.id, seen) for one in inside])
    found = dict(holdout.unseen(some, lambda others: {one.id for one in others}, None))  # type: ignore[arg-type]
    assert found == {
        "a h100 0": {"c v100 0"},
        "b h100 0": {"a a100 0", "c v100 0"},
        "a a100 0": {"b h100 0", "c v100 0"},
        "c v100 0": {"a h100 0", "b h100 0", "a a100 0"},
    }


def test_a_runtime_counts_once_in_what_all_share_however_many_devices_it_was_fitted_on() -> None:
    def fits(*paces: float) -> list[ComputeFit]:
        return [ComputeFit(speeds=Speeds(0.7, 0.4, 1e-5, 1.0, pace), n=10, spread=0.1) for pace in paces]

    compute, overlap = fit._shared("cuda", [fits(1.0, 1.1, 1.2), fits(1.3), fits(1.5)], "runtimes")
    assert compute.pace == pytest.approx(1.3) and compute.runtime is None and compute.n == 50
    assert compute.source == "the median over 3 runtimes" and overlap.hidden_share == 1.0

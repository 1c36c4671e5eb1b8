"""`planner recommend`: objectives, constraints, the front, why not a named layout, and what leaves no layout."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from planner.ask import options
from planner.ask.question import Question
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.answers import FREE, Constraints
from planner.decide.candidates import Candidate, thing_of
from planner.decide.capabilities import capabilities
from planner.decide.reasons import reasons_of
from planner.decide.recommendation import among_methods, differences, recommend, thinned
from planner.decide.strategies import answer
from planner.decide.whynot import why_not
from planner.spec import Layout
from planner.studies.objectives import OBJECTIVES, QUANTITIES, reach
from planner.views.verdict import trouble

SIXTY_FOUR = ("recommend", "--model", "7b", "--gpus", "64")
ANY = Constraints(any_runtime=True)


def run(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


def answered(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(*arguments, "--json") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == "recommend/1"
    return found


def asked(**given: str) -> Question:
    return options.question({"model": "7b", "gpus": "64", **given})


# -- what is shown -------------------------------------------------------------------------------------------------


def test_further_layouts_are_shown_by_what_differs(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--top", "4")
    first, *others = found["estimates"]

    assert first["differs"] == {}
    for other in others:
        assert other["differs"]
        assert first["layout"] | other["differs"] == other["layout"]
    layouts = [msgspec.convert(one["layout"], Layout) for one in found["estimates"]]
    assert len(set(map(thing_of, layouts))) == 4
    assert run(*SIXTY_FOUR, "--top", "4") == 0
    text = capsys.readouterr().out
    assert "then what differs" in text and "dp_replicate=2, dp_shard=32" in text


def test_counts_say_what_was_looked_at_and_why_not(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR)

    assert found["considered"] >= found["evaluated"] + found["pruned"] > 0
    assert found["rejected"]["does not fit in memory with headroom"] > 0
    assert run(*SIXTY_FOUR) == 0
    text = capsys.readouterr().out
    assert f"{found['considered']:,} layouts: " in text and f", {found['evaluated']:,} evaluated one by one" in text
    assert "need too much memory" in text and "--verbose" in text and "Turned away" not in text
    assert run(*SIXTY_FOUR, "--verbose") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{count:,} {name}" in text for name, count in found["rejected"].items())


@pytest.mark.slow
def test_the_front_trades_time_for_memory(capsys: pytest.CaptureFixture[str]):
    points = answered(capsys, *SIXTY_FOUR, "--pareto", "5")["pareto"]

    assert 2 <= len(points) <= 5
    for before, after in pairwise(points):
        assert before["seconds_per_sequence"] < after["seconds_per_sequence"]
        assert before["device_bytes"] > after["device_bytes"]
    assert run(*SIXTY_FOUR, "--pareto", "5") == 0
    assert "PARETO FRONT" in capsys.readouterr().out


def test_a_front_is_thinned_to_its_ends_and_equal_steps_of_memory():
    layout = Layout(engine="ddp")
    whole = tuple(Candidate(layout, 1.0 + place / 100, 2.0**-place, 1.0) for place in range(9))

    assert thinned(whole, 9) == whole
    assert [one.device_bytes for one in thinned(whole, 3)] == [1.0, 2.0**-4, 2.0**-8]
    assert thinned(whole, 1) == whole[:1] and thinned(whole, 0) == ()


# -- constraints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["accelerate", "deepspeed", "transformers"])
def test_a_backend_limits_what_is_recommended(backend: str, capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--backend", backend)

    assert {one["backend"] for one in found["estimates"]} == {backend}


@pytest.mark.slow
def test_any_runtime_recommends_what_is_for_later_and_says_so(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--any-runtime")
    best = found["estimates"][found["recommended"]]
    launched = answered(capsys, *SIXTY_FOUR)

    assert not best["launchable"] and found["considered"] > 10 * launched["considered"]
    assert best["throughput"]["tokens_per_s"] > launched["estimates"][0]["throughput"]["tokens_per_s"]
    assert run(*SIXTY_FOUR, "--any-runtime") == 0
    assert "(plan only: nothing here launches it)" in capsys.readouterr().out


def test_fixed_dimensions_constrain_the_space(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--any-runtime", "--tp", "4", "--pp", "2", "--top", "10")

    assert found["considered"] > 1000
    assert {(one["layout"]["tp"], one["layout"]["pp"]) for one in found["estimates"]} == {(4, 2)}


def test_a_strategy_alone_is_kept_to(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--strategy", "zero2")

    assert {one["strategy"] for one in found["estimates"]} == {"zero2"}


def test_a_deadline_that_can_be_kept_says_how_long_the_run_is(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--deadline", "300d", "--tokens", "2T")
    best = found["estimates"][found["recommended"]]

    assert found["deadline"]["run_s"] == pytest.approx(2e12 / best["throughput"]["tokens_per_s"], rel=1e-6)
    assert not found["deadline"]["missed"]


def test_a_missed_deadline_ends_with_3_and_the_best_possible(capsys: pytest.CaptureFixture[str]):
    found = answered(capsys, *SIXTY_FOUR, "--deadline", "3d", "--samples", "1B", "--seq-len", "2048", code=3)

    assert found["recommended"] is None and found["deadline"]["missed"]
    assert found["estimates"][0]["fits"] and found["rejected"]["misses the deadline"] > 0
    days = found["deadline"]["run_s"] / 86400
    assert days > 3
    assert run(*SIXTY_FOUR, "--deadline", "3d", "--samples", "1B", "--seq-len", "2048") == 3
    out, err = capsys.readouterr()
    told = f"deadline of 3.0 days is missed: the fastest takes {days:.1f} days"
    assert told in out and told in err


def test_nothing_fits_ends_with_3_and_the_nearest(capsys: pytest.CaptureFixture[str]):
    asked = ("recommend", "--model", "70b", "--gpus", "2", "--no-offload-optimizer")
    nearest = "zero3, dp_shard=2, recompute=full, loss chunked with 540.05 GiB on the card"
    assert run(*asked, "--method", "full") == 3
    assert f"nothing fits; nearest to it is {nearest}" in capsys.readouterr().err


def test_nothing_fits_is_not_said_where_a_method_that_was_not_ruled_out_does(capsys: pytest.CaptureFixture[str]):
    """On 4 x 4090 `estimate` starred LoRA and `recommend` said that nothing fits."""
    asked = ("--model", "70b", "--gpus", "2", "--no-offload-optimizer")
    assert run("recommend", *asked) == run("estimate", *asked) == 0
    err = capsys.readouterr().err
    assert "ranked is lora" in err and "needs --checkpoint DIR" in err and "nothing fits" not in err
    given = {"model": "70b", "gpus": "2", "offload_optimizer": False}
    found, shown = among_methods(options.question(given), 1).best, answer(options.question(given)).best
    assert found is not None and shown is not None and shown.case == found.case and found.case.job.method == "lora"


def test_a_whole_layout_is_held_against_the_constraints(capsys: pytest.CaptureFixture[str]):
    whole = (*SIXTY_FOUR, "--dp-shard", "64", "--micro-batch-size", "4")

    assert answered(capsys, *whole)["considered"] == 1
    assert answered(capsys, *whole, "--pareto", "3")["pareto"][0]["layout"]["dp_shard"] == 64
    assert answered(capsys, *whole, "--deadline", "3d", "--tokens", "2T", code=3)["deadline"]["missed"]
    with pytest.raises(PlannerError, match=r"runtime accelerate-fsdp2\)\. Use accelerate"):
        recommend(asked(dp_shard="64", runtime="accelerate-fsdp2"), 1, Constraints(backend="deepspeed"))


@pytest.mark.parametrize(
    "given, engine",
    [
        ({"pp": "2", "dp_shard": "32"}, "deepspeed-pipeline"),
        ({"pp": "2", "tp": "2", "dp_shard": "16", "zero_stage": "1"}, "deepspeed-pipeline"),
        ({"model": "mixtral-8x7b", "ep": "2", "dp_shard": "64"}, "transformers-tp"),
        ({"model": "gpt2", "pp": "2", "dp_shard": "32"}, "deepspeed-pipeline"),  # torchtitan cannot: tied
        ({"tp": "2", "dp_shard": "32"}, "transformers-tp"),
    ],
)
def test_sizes_alone_are_recommended_under_an_engine_that_can_be_launched(given: dict[str, str], engine: str):
    found = recommend(asked(method="full", **given), 1)

    assert found.estimates[0].case.layout.engine == engine
    assert found.estimates[0].launchable


def test_an_engine_of_the_nearest_that_runs_can_be_typed_as_a_runtime():
    found = recommend(asked(runtime="deepspeed", dp_shard="64"), 1)

    assert found.estimates[0].case.runtime.name == "deepspeed-zero"


def test_sizes_that_nothing_launches_are_told_by_the_rule_of_an_engine_with_a_backend(
    capsys: pytest.CaptureFixture[str],
):
    sizes = ("--method", "full", "--pp", "2", "--dp-shard", "32")

    assert run("recommend", "--model", "gemma-2-2b", "--gpus", "64", *sizes) == 3
    err = capsys.readouterr().err
    assert "not gemma2" in err and "nearest that runs: engine=" in err and "torchtitan" not in err


def test_a_backend_narrows_the_engine_that_sizes_mean():
    sizes = {"tp": "2", "dp_shard": "32", "method": "full"}

    found = recommend(asked(**sizes), 1, Constraints(backend="deepspeed"))
    assert found.estimates[0].case.layout.engine == "deepspeed-autotp"
    with pytest.raises(PlannerError, match="Use transformers"):
        recommend(asked(**sizes), 1, Constraints(backend="accelerate"))


# -- objectives ----------------------------------------------------------------------------------------------------


def reached(objective: str, constraints: Constraints = FREE, **given: str) -> Any:
    whole = {"model": "7b", "gpus": "16", **given}
    question = options.question(whole)
    return reach(objective, question, options.resizable(whole), constraints=constraints, max_gpus=16)


def test_the_largest_micro_batch_of_one_gpu_is_what_is_recommended_there():
    given = {"model": "llama-3.2-1b", "gpus": "1", "strategy": "single", "method": "full"}

    one = reach("largest-micro-batch", options.question(given), options.resizable(given), max_gpus=1)

    best = one.found.estimates[one.found.recommended]
    assert (one.objective, best.fits) == ("largest-micro-batch", True)
    assert best.case.layout.micro_batch_size == one.fitted.value > 1
    larger = options.question(given | {"micro_batch_size": str(one.fitted.value + 1)})
    assert not recommend(larger).estimates[0].fits


@pytest.mark.slow
@pytest.mark.parametrize("objective", QUANTITIES)
def test_an_objective_recommends_for_the_extreme_it_found(objective: str):
    one = reached(objective)
    best = one.found.estimates[one.found.recommended]
    value = {
        "fewest-gpus": best.case.layout.world_size,
        "largest-context": best.case.job.seq_len,
        "largest-micro-batch": best.case.layout.micro_batch_size,
    }[objective]

    assert best.fits and value == one.fitted.value
    assert one.fitted.limit


@pytest.mark.slow
def test_the_fewest_gpus_that_keep_a_deadline_are_more():
    hurried = Constraints(deadline_s=100 * 86400.0, tokens=10**12)
    free, kept = reached("fewest-gpus"), reached("fewest-gpus", hurried)

    assert free.fitted.value < kept.fitted.value
    assert not kept.found.missed


@pytest.mark.slow
def test_every_objective_is_an_option(capsys: pytest.CaptureFixture[str]):
    assert OBJECTIVES[0] == "fastest"
    found = answered(capsys, "recommend", "--model", "7b", "--gpus", "8", "--objective", "fewest-gpus")
    assert found["objective"]["value"] == found["cluster"]["nodes"] * found["cluster"]["gpus_per_node"]
    assert run("recommend", "--model", "405b", "--gpus", "8", "--objective", "fewest-gpus") == 3
    assert "fewest GPUs: nothing fits" in capsys.readouterr().out


# -- groups over nodes, and what no engine does ----------------------------------------------------------------------

ONE_A_NODE = {"gpus_per_node": "1", "offload_optimizer": False, "method": "full"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"model": "70b", "gpus": "64", "cluster": "aws-g5"},
        {"model": "8b", "gpus": "16", "gpu": "rtx-4090-24gb", **ONE_A_NODE},
        {"model": "mixtral-8x7b", "gpus": "128", "global_batch_size": "1024"},
    ],
)
def test_nothing_is_recommended_that_its_own_reasons_call_wrong(given: dict[str, Any]):
    """W8: tp=128 over nodes of 8 was starred, and "Use tp=8 or less" said below it."""
    found = recommend(options.question(given), 3, ANY)
    told = {reason.reason: reason.text for reason in reasons_of(found)}

    assert found.recommended is None or "leaves the" not in told.get("tensor_parallel_inside_the_node", "")
    assert found.rejected["tensor parallel groups leave the node"] > 0


def test_tensor_parallel_groups_over_nodes_are_planned_when_they_are_asked_for():
    given = {"model": "8b", "gpus": "2", "runtime": "transformers-tp", "optimizer": "sgd", **ONE_A_NODE}
    stray, wanted = recommend(options.question(given)), recommend(options.question(given | {"tp": "2"}))

    assert (stray.stray, stray.recommended) == (True, None)
    assert trouble(stray) == (
        "nothing fits whose tensor parallel groups stay inside a node; --tp 2 plans transformers-tp, tp=2."
    )
    assert (wanted.stray, wanted.recommended) == (False, 0)
    assert wanted.estimates[0].case.layout.tp == 2


@pytest.mark.parametrize("model", ["deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_no_engine_that_is_launched_does_8_bit_experts_and_it_is_said_in_one_line(
    model: str, capsys: pytest.CaptureFixture[str]
):
    """W8: 2,530,448 layouts were "precision not supported", and the rest was ranked."""
    for name in ("estimate", "recommend"):
        assert run(name, "--model", model, "--gpus", "64", "--precision", "fp8") == 2
        err = capsys.readouterr().err
        assert "no engine that is launched here multiplies the experts of a" in err and err.count("\n") == 1


def test_megatron_core_is_recommended_for_8_bit_experts_where_any_runtime_may_be(capsys: pytest.CaptureFixture[str]):
    asked = ["--model", "qwen3-30b-a3b", "--gpus", "64", "--precision", "fp8", "--any-runtime", "--json"]
    assert run("recommend", *asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimates"][found["recommended"]]["layout"]["engine"] == "megatron"


# -- why not -------------------------------------------------------------------------------------------------------

WHY = [
    ("dp_shard=64", "best", "It is the recommended layout."),
    ("tp=4", "slower", "longer a sequence than the best"),
    ("pp=4", "slower", "longer a sequence than the best"),
    ("cp=2", "slower", "longer a sequence than the best"),
    ("ep=2", "rule", "ep=2: llama-2-7b is dense: it has no experts to split."),
    ("tp=3", "rule", "tp=3: it does not divide the 32 attention heads of llama-2-7b."),
    ("dp_shard=3", "rule", "dp_shard=3: no layout of 64 GPUs has it. Use dp_shard=2."),
    ("engine=fsdp2,tp=2", "rule", "tp=2: the fsdp2 engine does not split tp."),
    ("engine=deepspeed-ulysses,cp=2", "slower", "longer a sequence than the best"),
    ("engine=megatron,tp=2", "backend", "runtime megatron-core is planned for, not launched"),
    ("ddp_bucket_bytes=1M", "memory", "on a card of 79.11 GiB"),
    ("engine=ddp", "memory", "on a card of 79.11 GiB, largest is"),
    ("micro_batch_size=16", "memory", "largest is activations"),
    ("recompute=full", "slower", "% longer a sequence than the best"),
    ("dp_shard=8", "slower", "tokens/s a GPU"),
    ("reshard_after_forward=off", "larger", "as fast as the best, but needs"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "kind", "words"), WHY)
def test_a_named_layout_is_told_what_excludes_it(text: str, kind: str, words: str):
    answer = why_not(recommend(asked(), 1), text)

    assert (answer.kind, words in answer.sentence) == (kind, True), answer.sentence
    assert answer.layout.world_size == 64 or kind == "rule"


@pytest.mark.parametrize("text", ["tp=8", "pp=4", "cp=2", "engine=deepspeed-ulysses,cp=2", "engine=megatron,tp=2"])
def test_only_what_was_typed_is_blamed(text: str):
    """C3: "the deepspeed engine does not split tp", or cp_method=ring and reshard_after_forward=False: not typed."""
    found = recommend(asked(), 1, ANY)
    answer = why_not(found, text)
    typed = dict(part.split("=") for part in text.split(","))

    assert answer.kind != "rule"
    assert all(str(getattr(answer.layout, name)) == value for name, value in typed.items())


def test_two_layouts_of_one_time_and_size_are_told_apart_by_neither():
    """C3: "as fast as the best, but needs 42.99 GiB instead of 42.99 GiB"."""
    found = recommend(asked(method="full", global_batch_size="64", micro_batch_size="1"), 1)
    layout = found.estimates[0].case.layout
    twin = why_not(found, f"sync_each_micro_batch={not layout.sync_each_micro_batch}".lower())

    assert (twin.kind, twin.sentence) == (
        "equal",
        "It is as fast as the best and needs no more memory: either will do.",
    )


def test_a_layout_faster_by_another_batch_is_another_training():
    one_pass = asked(model="3b", gpus="8", micro_batch_size="1")
    answer = why_not(recommend(one_pass, 1, Constraints(tie=0)), "grad_accum=64")

    assert answer.kind == "batch"
    assert f"with a global batch of {answer.layout.global_batch_size} instead of 8" in answer.sentence


def test_a_layout_twice_as_slow_is_told_in_times():
    """C3: "4365.08% longer"."""
    answer = why_not(recommend(asked(gpus="64", gpus_per_node="1"), 1), "tp=16")

    assert " times as long a sequence than" not in answer.sentence
    assert "times as long a sequence as the best" in answer.sentence


def test_a_backend_and_a_deadline_exclude_too():
    refused = why_not(recommend(asked(), 1), "engine=fsdp2,offload_activations=on,recompute=full")
    assert refused.kind == "backend" and "not launchable" in refused.sentence
    best = recommend(asked(), 1)
    hurried = Constraints(deadline_s=best.estimates[0].time.step_s / 256 * 1.1 * 10**6, samples=10**6)
    late = why_not(recommend(asked(), 1, hurried), "recompute=full")
    assert late.kind == "deadline" and "the deadline is" in late.sentence


def test_what_was_fixed_excludes_first():
    assert why_not(recommend(asked(recompute="full"), 1), "recompute=none").kind == "fixed"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo=3", "not a field of a layout"),
        ("tp", "not name=value"),
        ("tp=x", "tp=x: must be a whole number from 1"),
        ("tp=0", "tp=0: must be a whole number from 1"),
        ("tp=2,tp=4", "named twice"),
        ("engine=megatrn", "Did you mean megatron"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert run(*SIXTY_FOUR, "--why-not", text) == 2
    assert words in capsys.readouterr().err


def test_why_not_is_in_the_json_too(capsys: pytest.CaptureFixture[str]):
    answer = answered(capsys, *SIXTY_FOUR, "--why-not", "recompute=full")["why_not"]

    assert answer["kind"] == "slower" and answer["layout"]["recompute"] == "full"


def test_differences_are_what_makes_one_layout_the_other():
    one, other = Layout(engine="ddp", dp_replicate=8), Layout(engine="fsdp2", dp_shard=8, zero_stage=3)

    assert msgspec.structs.replace(one, **differences(one, other)) == other
    assert differences(one, one) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "method"), [(one.engine, method) for one in capabilities() for method in one.methods]
)
def test_every_method_that_an_engine_is_launched_with_is_in_its_space(engine: str, method: str):
    gpus = "1" if engine == "single" else "16"
    found = recommend(asked(model="llama-3.1-8b", gpus=gpus, runtime=engine, method=method, seq_len="1024"), 1)

    (best,) = found.estimates
    assert best.launchable and (best.case.layout.engine, best.case.job.method) == (engine, method)


def test_adapters_are_recommended_in_a_pipeline_that_is_asked_for_by_its_size():
    found = recommend(asked(model="tiny-llama", cluster="localhost", gpus="2", pp="2", method="lora"), 1)

    (best,) = found.estimates
    assert best.fits and best.launchable and best.case.layout.engine == "deepspeed-pipeline"


# -- bad input -----------------------------------------------------------------------------------------------------

MOE = ("--model", "mixtral-8x7b")
BAD = [
    (["--gpus", "96", "--tp", "6"], "tp=6", "does not divide the 32 attention heads", "tp=4"),
    (["--gpus", "64", "--tp", "6"], "tp=6", "does not divide", "tp=4"),
    (["--gpus", "64", "--pp", "64"], "pp=64", "", "pp=32"),
    (["--gpus", "64", "--pp", "4", "--virtual-stages", "3"], "virtual_stages=3", "", "virtual_stages=2"),
    ([*MOE, "--gpus", "64", "--ep", "16"], "ep=16", "", "ep=8"),
    ([*MOE, "--gpus", "64", "--ep", "8", "--pp", "16"], "ep=8", "= 4, the ranks it spans", "ep=4"),
    (["--gpus", "64", "--cp", "64", "--seq-len", "96"], "cp=64", "", "cp="),
    (["--gpus", "64", "--ep", "4"], "ep=4", "", "ep=1"),
    (["--gpus", "64", "--lora-targets", "q_prj"], "lora_targets=q_prj", "", "q_proj"),
    (["--gpus", "64", "--tp", "4", "--pp", "3"], "pp=3", "with tp=4", "pp=2"),
    (["--gpus", "64", "--strategy", "hsdp", "--zero-stage", "1"], "zero_stage=1", "strategy=hsdp", "zero_stage=3"),
    (["--gpus", "64", "--global-batch-size", "128", "--micro-batch-size", "3"], "micro_batch_size=3", "", "=2"),
    (["--gpus", "64", "--method", "lora", "--runtime", "megatron-core"], "runtime=megatron-core", "method=lora", ""),
    (["--gpus", "64", "--sequence-parallel", "--tp", "1"], "sequence_parallel=True", "tp=1", ""),
]


@pytest.mark.parametrize(("arguments", "field", "rule", "fix"), BAD)
def test_what_leaves_no_layout_is_told_with_the_nearest_legal_value(
    arguments: list[str], field: str, rule: str, fix: str, capsys: pytest.CaptureFixture[str]
):
    model = [] if "--model" in arguments else ["--model", "7b"]

    assert run("recommend", *model, *arguments, "--any-runtime") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"{field}:" in err and rule in err and fix in err, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cp", "4", "--cp-method", "ring"], "Add --any-runtime to look at"),
        (["--backend", "slurm"], "is not installed"),
        (["--strategy", "fsdp", "--backend", "deepspeed"], "Without --backend there is fsdp2"),
        (["--method", "full", "--lora-rank", "8"], "Add --method lora"),
        (["--backend", "deepspeed", "--any-runtime"], "contradicts --backend deepspeed"),
        (["--deadline", "3d"], "Add --tokens 300B or --samples 1M"),
        (["--tokens", "1T"], "Add --deadline"),
        (["--deadline", "3d", "--tokens", "1T", "--samples", "1M"], "contradicts --tokens 1T"),
        (["--deadline", "3d", "--samples", "1M"], "Give --seq-len"),
        (["--deadline", "soon", "--tokens", "1T"], "must be a duration"),
        (["--top", "0"], "from 1 to 100"),
        (["--pareto", "x"], "must be a whole number"),
        (["--objective", "largest-context", "--seq-len", "512"], "is what --objective largest-context looks for"),
        (["--objective", "largest-micro-batch", "--micro-batch-size", "2"], "Leave it out"),
        (["--objective", "smallest"], "is not a value of"),
        (["--model", "gpt2", "--seq-len", "9000"], "gpt2 has learned 1024 positions"),
    ],
)
def test_constraints_that_contradict_or_change_nothing_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*SIXTY_FOUR, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert words in err


def test_the_recommendation_states_its_checkpoint(capsys):
    assert run("recommend", "--model", "1b", "--gpus", "8", "--top", "1") == 0
    assert " (--storage-gb-per-s gives the time).\n" in capsys.readouterr().out
    assert run("recommend", "--model", "1b", "--cluster", "llama-3-24k", "--gpus", "1024", "--top", "1") == 0
    told = r"A checkpoint takes [\d.]+ GiB and [\d.]+ ms to write; the best interval is [\d.]+ s of training\.\n"
    assert re.search(told, capsys.readouterr().out)

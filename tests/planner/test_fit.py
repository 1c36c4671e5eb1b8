"""The edges: what is answered fits, the next value does not, and nothing between was missed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ask import options
from planner.ask.question import Question
from planner.basics import command
from planner.basics.arith import boundary
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.answers import Constraints
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.studies.fit import FitLimit, fit, gpu_sizes
from planner.studies.reply import Resize
from planner.views.fit import fit_text


def run(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


def asked(**given: Any) -> tuple[Question, Resize]:
    def resize(gpus: int | None) -> Question:
        return options.question({**given, "gpus": None if gpus is None else str(gpus)})

    return options.question(given), resize


def fitted(what: str, **given: Any) -> tuple[Question, FitLimit]:
    question, resize = asked(**given)
    return question, fit(question, resize, [what], max_gpus=128).found[0]


def recommended(question: Question) -> bool:
    """Whether a layout fits and launches, with everything on the devices."""
    return recommend(question, 1, Constraints(offload=False)).recommended is not None


def with_job(question: Question, **job: Any) -> Question:
    return msgspec.structs.replace(question, job=msgspec.structs.replace(question.job, **job))


def with_pins(question: Question, **pins: Any) -> Question:
    return msgspec.structs.replace(question, pins=msgspec.structs.replace(question.pins, **pins))


# -- the edge itself -------------------------------------------------------------------------------------------------


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_the_boundary_of_a_monotone_property_is_found(count: int, edge: int):
    assert boundary(count, lambda place: place < edge) == min(count, edge)


@given(st.lists(st.booleans(), max_size=50))
def test_the_boundary_of_any_property_is_where_it_changes(holds: list[bool]):
    place = boundary(len(holds), holds.__getitem__)

    assert place == len(holds) or not holds[place]
    assert place == 0 or holds[place - 1]


def test_a_large_range_is_not_walked():
    looked_at: list[int] = []
    boundary(2**24, lambda place: looked_at.append(place) or place < 1000)

    assert len(looked_at) < 25
    assert max(looked_at) < 4000  # a huge value is a huge search


# -- quantities ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    gpus=st.sampled_from([2, 4, 8, 16]),
    recompute=st.sampled_from(["none", "full"]),
    seq_len=st.sampled_from([512, 2048, 4096]),
    headroom=st.sampled_from(["0", "0.1", "0.3"]),
)
def test_one_more_sequence_than_the_largest_micro_batch_does_not_fit(
    gpus: int, recompute: str, seq_len: int, headroom: str
):
    """On one given layout, against the plain estimate of it."""
    given_options = {
        "model": "llama-3.2-1b", "gpus": str(gpus), "dp_shard": str(gpus), "zero_stage": "3", "recompute": recompute,
        "seq_len": str(seq_len), "headroom": headroom,
    }  # fmt: skip
    question, found = fitted("micro-batch", **given_options)

    assert found.value is not None
    assert answer(with_pins(question, micro_batch_size=found.value)).estimates[0].fits
    assert found.beyond == found.value + 1
    assert not answer(with_pins(question, micro_batch_size=found.value + 1)).estimates[0].fits


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_longest_sequence_fits_and_the_next_does_not(recompute: str):
    question, found = fitted("seq-len", model="llama-3.1-405b", gpus="512", micro_batch_size="1", recompute=recompute)

    assert found.value is not None
    assert found.beyond == found.value + 128
    assert recommended(with_job(question, seq_len=found.value))
    assert not recommended(with_job(question, seq_len=found.beyond))


def test_the_models_own_length_is_the_end():
    question, found = fitted("seq-len", model="8b", gpus="32")

    assert (found.value, found.beyond) == (question.model.max_seq_len, None)
    assert "made for at most 8192" in found.limit


@pytest.mark.slow
@pytest.mark.parametrize("model", ["8b", "70b"])
def test_the_fewest_gpus_are_the_first_of_all_sizes_that_fit(model: str):
    _, resize = asked(model=model)
    sizes = gpu_sizes(8, 128)
    first = next(size for size in sizes if recommended(resize(size)))

    found = fit(resize(None), resize, ["gpus"], max_gpus=128).found[0]

    assert found.value == first
    assert found.beyond == sizes[sizes.index(first) - 1]


@pytest.mark.slow
def test_sizes_that_a_global_batch_forbids_are_passed_over():
    _, found = fitted("gpus", model="70b", global_batch_size="96")

    assert found.value is not None
    assert 96 % found.value == 0


def test_parts_of_a_node_come_before_whole_nodes():
    assert gpu_sizes(8, 32) == [1, 2, 4, 8, 16, 24, 32]
    assert gpu_sizes(8, 4) == [1, 2, 4]
    assert gpu_sizes(1, 3) == [1, 2, 3]


def test_with_a_global_batch_the_micro_batch_divides_it():
    question, found = fitted("micro-batch", model="8b", gpus="16", global_batch_size="480")

    assert found.value is not None
    assert (480 // found.best.case.layout.data_parallel) % found.value == 0
    larger = [size for size in range(found.value + 1, 481) if 480 % size == 0]
    assert not any(recommended(with_pins(question, micro_batch_size=size)) for size in larger)


@pytest.mark.slow
def test_the_largest_batch_in_one_pass_does_not_accumulate():
    question, found = fitted("global-batch", model="8b", gpus="16")

    assert found.best is not None
    assert found.best.case.layout.grad_accum == 1
    assert found.best.case.layout.global_batch_size == found.value
    more = with_pins(with_job(question, global_batch_size=found.beyond), grad_accum=1)
    assert not recommended(more)


@pytest.mark.slow
def test_when_nothing_fits_the_reason_is_told():
    _, found = fitted("seq-len", model="70b", gpus="2", offload_optimizer=False)

    assert (found.value, found.best) == (None, None)
    assert "on a card of" in found.limit


def test_what_is_given_is_not_searched():
    question, resize = asked(model="8b", gpus="16", micro_batch_size="2")

    found = fit(question, resize, ["micro-batch", "global-batch"])

    assert list(found.fixed) == ["micro-batch"]
    assert [one.quantity for one in found.found] == ["global-batch"]


def test_a_device_of_unknown_memory_has_no_edge():
    question, resize = asked(model="8b", gpus="16")
    bare = msgspec.structs.replace(question.cluster.gpu, memory_bytes=None)
    question = msgspec.structs.replace(question, cluster=msgspec.structs.replace(question.cluster, gpu=bare))

    with pytest.raises(PlannerError, match="no known memory"):
        fit(question, resize)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_answers_all_four(capsys: pytest.CaptureFixture[str]):
    assert run("fit", "--model", "8b", "--gpus", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "fit/1"
    assert [one["quantity"] for one in found["answers"]] == ["gpus", "seq-len", "micro-batch", "global-batch"]
    assert all(one["best"]["layout"]["engine"] for one in found["answers"])
    assert all(one["limit"] for one in found["answers"])


@pytest.mark.slow
def test_text_says_what_stops_each(capsys: pytest.CaptureFixture[str]):
    assert run("fit", "--model", "8b", "--gpus", "8", "--what", "gpus,micro-batch") == 0
    out = capsys.readouterr().out
    assert "fewest GPUs" in out
    assert "largest micro-batch: at " in out
    assert "longest" not in out


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_told_the_size_that_is_not(capsys: pytest.CaptureFixture[str]):
    assert run("fit", "--model", "70b", "--gpus", "8", "--what", "gpus,seq-len", "--no-offload-optimizer") == 3
    out = capsys.readouterr().out
    size = out.partition("--gpus ")[2].split()[0]
    assert run("fit", "--model", "70b", "--gpus", size, "--what", "seq-len") == 0


@pytest.mark.slow
def test_exit_code_3_when_something_asked_does_not_fit(capsys: pytest.CaptureFixture[str]):
    on_devices = ("--model", "70b", "--no-offload-optimizer")
    assert run("fit", *on_devices, "--gpus", "2", "--what", "seq-len") == 3
    assert capsys.readouterr().err == "error: nothing fits for seq-len.\n"
    assert run("fit", *on_devices, "--what", "gpus", "--max-gpus", "4") == 3
    assert "--max-gpus" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--what", "gpu"], "what=gpu: is not a quantity that can be fitted. Did you mean gpus?"),
        (["--max-gpus", "0"], "max_gpus"),
        (["--seq-step", "x"], "seq_step"),
        (["--model", "gpt2", "--seq-len", "99999"], "seq_len"),
        (["--gpus", "9"], "gpus"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], field: str):
    assert run("fit", "--model", "8b", *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {field}")
    assert err.count("\n") == 1


# -- what is not memory's fault, and the way out through the hosts ----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "at_least"),
    [("pythia-1b", "8", 350), ("opt-125m", "2", 100), ("bloom-560m", "3", 30), ("phi-2", "4", 140)],
)
def test_families_that_only_data_parallelism_launches_have_a_largest_batch(model: str, gpus: str, at_least: int):
    """W7: "nothing", where 350 sequences of pythia-1b fit: a batch of 1 has only layouts that nothing launches."""
    question, found = fitted("global-batch", model=model, gpus=gpus, method="full")

    assert found.value is not None and found.value >= at_least
    assert recommended(with_pins(with_job(question, global_batch_size=found.value), grad_accum=1))
    assert found.beyond is not None
    assert not recommended(with_pins(with_job(question, global_batch_size=found.beyond), grad_accum=1))


def test_a_given_micro_batch_leaves_one_largest_batch():
    _, found = fitted("global-batch", model="8b", gpus="8", micro_batch_size="1")

    assert (found.value, found.limit) == (8, "the micro-batch is given: 1")


@pytest.mark.slow
def test_a_model_that_nothing_launches_is_no_question_of_memory(capsys: pytest.CaptureFixture[str]):
    assert run("fit", "--model", "deepseek-v2-lite", "--gpus", "8", "--what", "gpus,seq-len") == 3
    out, err = capsys.readouterr()

    assert out.count("cannot be launched") == 2
    assert err == "error: there is no layout to look at for gpus, seq-len.\n"


@pytest.mark.slow
def test_states_wait_in_host_memory_for_what_has_no_value_without():
    """W5: 8b on four cards of 24 GB."""
    question, resize = asked(model="llama-3-8b", cluster="pcie-4x4090", seq_len="4096", method="full")
    found = fit(question, resize, ["gpus", "micro-batch"], max_gpus=16)
    gpus, micro = found.found

    assert (gpus.value, gpus.offloaded) == (8, False)
    assert micro.offloaded and micro.best is not None and micro.best.case.layout.offload_params
    assert "Nothing fits without offload: states wait in host memory, 149.58 GiB of 256 GiB of each node." in (
        fit_text(found)
    )


def test_a_question_beyond_the_model_s_own_length_finds_the_longest_beyond_it():
    """It ended at the 4,096 that the model was made for, in an answer about 16,384."""
    given = {"model": "llama-2-7b", "method": "lora", "gpu": "a100-80gb", "gpus": "1"}
    question, found = fitted("seq-len", seq_len="16k", seq_step="4096", **given)
    assert found.value >= 16384 > question.model.max_seq_len
    assert recommended(with_job(question, seq_len=found.value))
    assert not recommended(with_job(question, seq_len=found.beyond))
    within = fitted("seq-len", seq_len="2048", **given)[1]
    assert within.value == 4096 and within.limit.endswith("a longer --seq-len looks beyond")

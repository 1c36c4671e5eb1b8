"""What a plan leaves out by mistake is refused where it matters, in every pair of method, weights, data and command.

Not here: what the planner counts (tests/planner/test_data_lengths.py), or training (tests/cluster).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forms import FORMS, written

from executor.cli import executor
from executor.preflight.meant import meant
from planner.ask.options import question
from planner.ask.question import check_meant
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.decide.planning import plan_of
from planner.decide.strategies import answer
from planner.spec.inputs import named, resolved
from planner.spec.lengths import course, in_steps
from planner.spec.plan import Plan, decode_plan, encode_plan, hash_of

PAIRS = [(f"p{number}", f"a{number}") for number in range(7)]
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "a.tiktoken")


def asked(**given: Any) -> Any:
    words = {"model": "tiny-llama", "cluster": "localhost", "gpus": "2", "seq_len": "64", "mean_seq_len": "20"} | given
    return question({name: value for name, value in words.items() if value is not None})


def planned(**given: Any) -> Plan:
    found = answer(asked(strategy="ddp", **given))
    return plan_of(found.estimates[0])


def folder(path: Path, *names: str) -> str:
    path.mkdir()
    for name in ("config.json", *names):
        (path / name).write_text("{}")
    return str(path)


# -- whose tokenizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_checkpoints_tokenizer_is_the_default_in_the_question_the_plan_and_its_digests(name, tmp_path) -> None:
    data = str(written(tmp_path, "lines", PAIRS))
    given = {"checkpoint": folder(tmp_path / "c", name), "data": data}
    made = resolved(planned(**given))
    assert made.job.recipe.tokenizer == given["checkpoint"]
    assert {one.field for one in made.inputs} == {"data", "tokenizer", "checkpoint"}
    assert "tokenizer: the checkpoint's" in answer(asked(**given)).notes[-1]
    other = folder(tmp_path / "other", name)
    assert asked(tokenizer=other, **given).job.recipe.tokenizer == other


def test_a_checkpoint_without_one_is_refused_but_for_bytes_and_ids(tmp_path: Path) -> None:
    given = {"checkpoint": folder(tmp_path / "c")}
    for data in (None, str(written(tmp_path, "lines", PAIRS))):
        with pytest.raises(PlannerError, match="holds no tokenizer"):
            asked(data=data, **given)
        made = planned(data=data, tokenizer="bytes", **given)
        assert made.job.recipe.own_tokenizer is None and "tokenizer" not in named(made)
        assert meant(made) is made
    (ids := tmp_path / "d.bin").write_bytes(b"\0" * 4000)
    assert asked(data=str(ids), mean_seq_len=None, **given).job.recipe.tokenizer is None
    absent = str(tmp_path / "elsewhere")
    assert asked(checkpoint=absent).job.recipe.tokenizer == absent


def test_a_plan_of_before_keeps_its_meaning_and_bytes_beside_a_checkpoint_are_not_launched(tmp_path: Path) -> None:
    made = planned(data=str(written(tmp_path, "lines", PAIRS)), checkpoint=folder(tmp_path / "c"), tokenizer="bytes")
    old = msgspec.json.decode(encode_plan(made))
    for field in ("epochs", "examples", "rows", "demo_data", "random_weights", "tokenizer"):
        old["job"]["recipe"].pop(field)
    old["content_hash"] = hash_of(old)
    read = decode_plan(json.dumps(old).encode())
    assert read.job.recipe.own_tokenizer is None and read.job.recipe.rows is None
    with pytest.raises(PlannerError, match=r"bytes as tokens are wrong.*Make the plan again"):
        meant(read)


# -- weights and data --------------------------------------------------------------------------------------------------

METHODS, DATA = ("full", "lora", "qlora"), (None, *FORMS)


@pytest.mark.parametrize(("method", "form"), [*itertools.product(METHODS, DATA)])
def test_fine_tuning_needs_a_checkpoint_to_be_recommended_and_launched_or_that_it_is_meant(
    method, form, tmp_path
) -> None:
    data = None if form is None else str(written(tmp_path, form, PAIRS))
    job = asked(method=method, data=data).job
    chats = form not in (None, "alpaca", "texts")
    if data is not None and (method != "full" or chats):
        with pytest.raises(PlannerError, match="checkpoint: is missing"):
            check_meant(job)
        check_meant(asked(method=method, data=data, random_weights=True).job)
        check_meant(asked(method=method, data=data, checkpoint=folder(tmp_path / "c", "tokenizer.json")).job)
    else:
        check_meant(job)


@pytest.mark.parametrize(("method", "gpu"), [*itertools.product(("full", "lora"), ("localhost", "dgx-h100"))])
@pytest.mark.parametrize(("data", "exported"), [*itertools.product((False, True), (False, True))])
def test_each_launch_is_refused_for_what_it_lacks_alone(method, gpu, data, exported) -> None:
    made = planned(method=method, cluster=gpu)
    lacks = {"random_weights"} if method == "lora" else set()
    lacks |= {"demo_data"} if not data and (exported or gpu != "localhost") else set()
    for said in (set(), {"random_weights"}, {"demo_data"}, {"random_weights", "demo_data"}):
        how = dict.fromkeys(said, True) | {"data": data, "exported": exported}
        if lacks <= said:
            kept = meant(made, **how)
            assert all(getattr(kept.job.recipe, name) for name in said)
            assert decode_plan(encode_plan(kept)) == kept
            assert meant(kept, data=data, exported=exported) == kept  # a plan is told once
        else:
            with pytest.raises(PlannerError) as caught:
                meant(made, **how)
            assert caught.value.exit_code == 3
            assert any(f"--{name.replace('_', '-')}" in caught.value.fix for name in lacks - said)


@pytest.mark.parametrize("words", [("run", "plan.json", "--yes"), ("run", "plan.json", "--dry-run", "-o", "out"),
                                   *(("export-launch", "plan.json", "-o", "out", "--to", to)
                                     for to in ("slurm", "kubernetes", "skypilot"))])  # fmt: skip
def test_every_command_that_launches_asks(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_bytes(encode_plan(planned(method="lora", cluster="dgx-h100")))
    for added, missing in (((), "--random-weights"), (("--random-weights",), "--demo-data")):
        assert command.exit_code(executor, [*words, *added]) == 3
        error = capsys.readouterr().err
        assert missing in error and error.count("\n") == 1
        assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


# -- how long, and how it steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", ["0.5", "1", "3", "2.4"])
@pytest.mark.parametrize("batch", [1, 2, 4, 64])
def test_epochs_are_the_fewest_steps_that_show_every_row_so_often(epochs: str, batch: int, tmp_path: Path) -> None:
    data = str(written(tmp_path, "lines", PAIRS))
    job = asked(data=data).job
    recipe = msgspec.structs.replace(job.recipe, epochs=float(epochs), rows=len(PAIRS), examples=len(PAIRS))
    made = planned(data=data, micro_batch_size=str(batch))

    size = made.layout.global_batch_size
    steps = in_steps(recipe, size).steps
    assert steps * size >= float(epochs) * len(PAIRS) > (steps - 1) * size
    assert in_steps(recipe, size).warmup_steps <= steps


def test_epochs_and_steps_are_one_of_two_and_epochs_need_data_that_are_here(tmp_path: Path) -> None:
    data = str(written(tmp_path, "lines", PAIRS))
    made = planned(data=data, epochs="3", mean_seq_len=None, global_batch_size="2")
    assert (made.job.recipe.steps, made.job.recipe.examples) == (11, 7)
    assert course(made.job.recipe, 2) == "11 steps = 3.14 epochs of 7 examples"
    for given in ({"steps": "3", "data": data}, {}, {"data": "absent.jsonl"}):
        with pytest.raises(PlannerError) as caught:
            asked(epochs="2", **given)
        assert caught.value.field == "epochs"


RATES = {
    ("full", False): (3e-4, 0.95, 0.1),
    ("full", True): (2e-5, 0.999, 0.0),
    ("lora", False): (2e-4, 0.999, 0.0),
    ("lora", True): (2e-4, 0.999, 0.0),
    ("qlora", True): (2e-4, 0.999, 0.0),
}


@pytest.mark.parametrize(("method", "begun"), RATES)
@pytest.mark.parametrize("given", [{}, {"lr": "3e-4"}, {"weight_decay": "0.1"}, {"beta2": "0.95", "lr": "1"}])
def test_rates_follow_method_and_checkpoint_but_for_those_that_were_given(method, begun, given, tmp_path) -> None:
    checkpoint = folder(tmp_path / "c", "tokenizer.json") if begun else None
    found = asked(method=method, checkpoint=checkpoint, **given).job.optimizer
    expected = dict(zip(("lr", "beta2", "weight_decay"), RATES[method, begun], strict=True))
    assert {name: getattr(found, name) for name in expected} == expected | {n: float(v) for n, v in given.items()}
    # Where every method is shown, each has its own.
    shown = answer(asked(checkpoint=checkpoint, **given)).estimates
    for one in shown:
        if one.case.job.method == method:
            assert one.case.job.optimizer == found

"""A plan for another tool: the files and commands of its run, what is refused, the inputs that it is given, and which
of its checkpoints is whole.

Not here: a run (tests/cluster/test_tool.py), or the files' words (tests/planner/test_tofile.py).
"""

from __future__ import annotations

import json
from importlib import metadata
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from kept import record
from test_cli import assert_refused, run, write
from test_rundir import make_plan

from executor.backends.tool_backend import ENGINES, ToolBackend
from executor.backends.tools import TOOLS
from executor.folder import joining, rundir, toolpoints
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.hosts import node
from executor.preflight import preflight
from executor.run import attempts, prepare, resume, slurm_run
from executor.run.launch import worker_arguments
from executor.worker import toolinputs
from executor.worker.data.data import open_rows, order_of
from executor.worker.data.rows import IGNORED
from executor.worker.data.tokenizer import ByteTokenizer
from planner.ask.fromfile import FORMATS
from planner.basics.errors import PlannerError
from planner.spec import Layout, Recipe
from planner.spec.plan import Plan
from tests.planner.written_plans import plans

SEED, FEW, MANY = 2026, 12, 60
TINY = Layout(engine="ddp", dp_replicate=2)


def planned(layout: Layout = TINY, precision: str = "fp32", **recipe: object) -> Plan:
    plan = make_plan(layout)
    made = Recipe(**{"steps": 3} | recipe)  # type: ignore[arg-type]
    return msgspec.structs.replace(
        plan, job=msgspec.structs.replace(plan.job, precision=precision, seq_len=16, recipe=made)
    )


# What is refused.


def test_a_command_line_that_no_tool_can_follow_is_refused_in_a_line(tmp_path: Path) -> None:
    file = write(tmp_path / "plan.json", planned())
    for words, code, said in (
        (("--with", "trk"), 2, "Did you mean trl?"),
        (("--with", "trl", "--script", "mine.py"), 2, "do not go with --with"),
        (("--with", "trl", "--checkpoint-every", "10m"), 2, "Give --checkpoint-every 20"),
        (("--with", "llamafactory"), 3, "precision=fp32: cannot be said in a file of LLaMA-Factory"),
    ):
        assert_refused(run("run", file, *words, "--dry-run", cwd=tmp_path), code, said)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("word", sorted(TOOLS))
def test_a_tool_that_is_missing_or_of_another_release_is_refused_with_its_command(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = TOOLS[word]
    if find_spec(tool.package) is None:
        with pytest.raises(PlannerError, match=f"--with={word}: is not installed here. Run pip install ") as refused:
            preflight.check_tool(word)
        assert refused.value.exit_code == 3 and tool.install in refused.value.sentence
    monkeypatch.setattr(metadata, "version", lambda _: "1.140.0")
    if tool.releases:
        with pytest.raises(PlannerError, match=r"is 1\.140\.0 here, and the file is written for 1\.14"):
            preflight.check_tool(word)
    else:
        assert preflight.check_tool(word) == "1.140.0"


def drawn(count: int) -> list[tuple[str, Plan]]:
    return [(word, plan) for word, plan in product(sorted(TOOLS), islice(plans(SEED), count))]


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_drawn_plan_is_said_whole_or_refused_by_its_field(count: int) -> None:
    names, said = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}, 0
    for word, plan in drawn(count):
        try:
            made = prepare.decided(plan, prepare.RunOptions(Path("run"), plan.cluster.nodes, tool=word), lambda _: None)
        except PlannerError as refused:
            assert refused.exit_code == 3 and len(refused.sentence) <= 300, refused.sentence
            assert refused.field.startswith("plan"), refused.sentence
            continue
        said += 1
        assert made.plan.layout.engine in ENGINES
        first = yaml.safe_load(next(iter(made.files.values())))
        assert first["max_steps"] == plan.job.recipe.steps and first["output_dir"] == "output"
        assert TOOLS[word].keys.items() <= first.items()
        reader = next(one for one in FORMATS if names[word] == one.NAME)
        assert reader.detect(first), first
    assert said


def test_a_plan_with_a_field_that_no_key_says_would_train_otherwise(tmp_path: Path) -> None:
    plan = planned(msgspec.structs.replace(TINY, recompute="selective"))
    with pytest.raises(PlannerError, match="recompute=selective: cannot be said in a file of TRL") as refused:
        ToolBackend("trl").files(plan)
    assert refused.value.exit_code == 3


# The files and commands.


def test_checkpoints_and_a_resume_stand_in_the_file_and_on_the_command_line(tmp_path: Path) -> None:
    plan, schedule = planned(), CheckpointSchedule(every="5", keep_last=3)
    backend = prepare.backend_of(plan, "trl", schedule)
    recipe = yaml.safe_load(backend.files(plan)["config/recipe.yaml"])
    assert (recipe["save_strategy"], recipe["save_steps"], recipe["save_total_limit"]) == ("steps", 5, 3)
    assert yaml.safe_load(ToolBackend("trl").files(plan)["config/recipe.yaml"])["save_strategy"] == "no"
    sharded = planned(Layout(engine="fsdp2", dp_shard=2, zero_stage=3))
    last = yaml.safe_load(ToolBackend("trl").files(sharded)["config/recipe.yaml"])
    assert last["save_steps"] == plan.job.recipe.steps  # or its weights would be nowhere
    options = prepare.RunOptions(tmp_path, 1, tool="trl", resume=tmp_path / "output" / "checkpoint-5")
    assert worker_arguments(options) == (
        "-m",
        "executor.worker.tool",
        str(tmp_path),
        "trl",
        "--resume",
        "output/checkpoint-5",
    )


@pytest.mark.parametrize(("every", "keep_every"), [("90s", None), ("signal", None), ("5", 10)])
def test_a_schedule_that_the_trainer_has_no_key_for_is_refused(every: str, keep_every: int | None) -> None:
    with pytest.raises(PlannerError, match="after a number of steps"):
        prepare.backend_of(planned(), "trl", CheckpointSchedule(every=every, keep_every=keep_every))


# What it is given.


def test_the_rows_are_the_trainers_in_its_order_and_their_labels_its_targets(tmp_path: Path) -> None:
    chance = Random(SEED)
    chats = tmp_path / "chats.jsonl"
    lines = [{"prompt": "p" * chance.randint(1, 9), "response": "r" * chance.randint(1, 12)} for _ in range(20)]
    chats.write_text("\n".join(map(json.dumps, lines)) + "\n")
    for data in (None, str(chats)):
        plan = planned(data=data)
        (target := tmp_path / str(data is None)).mkdir()
        toolinputs.make_rows(plan, target)
        found = pq.read_table(target / "data" / "train.parquet").to_pylist()
        rows = open_rows(plan, data)
        order, batch = order_of(plan, rows), plan.layout.global_batch_size
        whole = [index for step in range(plan.job.recipe.steps) for index in order.batch(step)]
        assert len(found) == plan.job.recipe.steps * batch == len(whole)
        for one, index in zip(found, whole, strict=True):
            inputs, targets = (part[0, : rows.lengths[index]].tolist() for part in rows.batch([index])[:2])
            ids, labels = one["input_ids"], one["labels"]
            assert ids[: len(inputs)] == inputs and len(ids) <= plan.job.seq_len
            assert labels[0] == IGNORED and labels[1:] == targets[: len(ids) - 1]  # Transformers' models shift by one
            assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
        counts = np.fromfile(target / "lengths.int64", np.int64).reshape(-1, 2)
        assert counts.tolist() == [
            [len(one["input_ids"]), sum(label != IGNORED for label in one["labels"][1:])] for one in found
        ]


def test_the_built_in_tokenizer_is_the_same_in_transformers_format(tmp_path: Path) -> None:
    toolinputs.byte_tokenizer().save_pretrained(tmp_path)
    from executor.worker.data.tokenizer import own_tokenizer

    theirs, chance = own_tokenizer(str(tmp_path)), Random(SEED)
    for _ in range(50):
        text = "".join(chr(chance.choice((chance.randint(32, 126), chance.randint(160, 0x2FFF)))) for _ in range(20))
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert [theirs.bos_token_id, *ids, theirs.eos_token_id] == ByteTokenizer().stream(text)
        assert theirs.decode(ids) == text


def test_a_model_is_made_of_the_plans_sizes_and_seed_or_is_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    toolinputs.make_model(planned(), tmp_path / "one")
    toolinputs.make_model(planned(), tmp_path / "two")
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    toolinputs.make_model(planned(checkpoint=str(tmp_path / "one")), tmp_path / "three")
    assert (tmp_path / "three" / "model.safetensors").resolve() == (tmp_path / "one" / "model.safetensors").resolve()
    assert (tmp_path / "one" / "tokenizer.json").is_file()  # that of the checkpoint itself stays


# Which checkpoint is whole.


def made(folder: Path, step: int, world: int) -> Path:
    place = folder / f"checkpoint-{step}"
    (place / "global").mkdir(parents=True)
    (place / toolpoints.STATE).write_text(json.dumps({"global_step": step, "epoch": 0.5}))
    for rank in range(world):
        torch.save({"cpu": torch.get_rng_state()}, place / f"rng_state_{rank}.pth")
        torch.save({"state": torch.ones(9)}, place / "global" / f"rank_{rank}_optim_states.pt")
    return place


def test_the_newest_whole_checkpoint_is_found_whatever_is_wrong_with_newer_ones(tmp_path: Path) -> None:
    chance, world = Random(SEED), 2
    harms = {
        "missing or damaged": lambda one: (one / toolpoints.STATE).unlink(),
        "is missing or damaged": lambda one: (one / toolpoints.STATE).write_text('{"global_'),
        "is of step 7": lambda one: (one / toolpoints.STATE).write_text('{"global_step": 7}'),
        "states of 1 ranks": lambda one: (one / "rng_state_1.pth").unlink(),
        "was not written to its end": lambda one: cut(
            one / chance.choice(["rng_state_0.pth", "global/rank_1_optim_states.pt"])
        ),
    }

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])

    assert toolpoints.newest(tmp_path / "none", world) == (None, 0, [])
    whole = made(tmp_path, 5, world)
    for number, (why, harm) in enumerate(chance.sample(sorted(harms.items()), len(harms))):
        harm(made(tmp_path, 10 + number, world))
        found, step, skipped = toolpoints.newest(tmp_path, world)
        assert (found, step) == (whole, 5)
        assert skipped[0][0] == f"checkpoint-{10 + number}" and why in skipped[0][1]


def test_a_run_folder_of_a_tool_resumes_from_the_tools_checkpoint(tmp_path: Path) -> None:
    plan = planned()
    rundir.create(tmp_path, plan, {})
    rundir.write_json(tmp_path / attempts.ASKED, attempts.RunRequest(tool="trl"))
    assert attempts.newest(tmp_path) == attempts.ResumePoint(None, 0)
    place = made(tmp_path / "output", 5, plan.layout.world_size)
    assert attempts.newest(tmp_path) == attempts.ResumePoint(place, 5)


def test_a_tools_run_resumes_in_its_own_layout_alone_and_is_not_exported(tmp_path: Path) -> None:
    plan = planned()
    rundir.create(tmp_path, plan, {})
    rundir.write_json(tmp_path / attempts.ASKED, attempts.RunRequest(tool="trl"))
    rundir.write_json(tmp_path / "mesh" / "rank-0.json", {"script": "trl", "world_size": 2})
    made(tmp_path / "output", 5, plan.layout.world_size)
    options, place = resume.going(tmp_path, resume.planned(tmp_path, None), lambda _: None)
    assert (options.tool, options.resume, place.step) == ("trl", tmp_path / "output" / "checkpoint-5", 5)
    with pytest.raises(PlannerError, match="is another layout than that of the checkpoints of trl"):
        resume.planned(tmp_path, planned(Layout(engine="fsdp2", dp_shard=2, zero_stage=3)))
    rundir.keep_record(tmp_path, record("completed", 0))
    assert_refused(run("export", tmp_path, tmp_path / "model", cwd=tmp_path), 2, "trl trained it")


@pytest.mark.parametrize("tool", ["", "trl"])
def test_a_host_that_does_not_see_the_folder_keeps_no_checkpoints_of_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    class Link:
        stops: list[int] = []  # noqa: RUF012  # as the connection has it
        told: list[dict[str, object]] = []  # noqa: RUF012

        def say(self, message: dict[str, object], _: bytes = b"") -> None:
            self.told.append(message)

    joining_file = msgspec.json.encode(
        joining.Joining(run_id="r", plan_hash="p", version="1", code="c", port=1, tool=tool)
    ).decode()
    monkeypatch.setattr(node.join, "prepared", lambda *_: pytest.fail("it got that far", pytrace=False))
    asked = {
        "kind": "node", "node": 0, "host": "red", "run_id": "r", "folder": str(tmp_path / "elsewhere"),
        "files": {joining.JOIN: joining_file}, "master": "a:1", "place": str(tmp_path / "runs"), "kept": "r",
    }  # fmt: skip
    with pytest.raises(PlannerError if tool else pytest.fail.Exception, match="share" if tool else "that far"):
        node.answer(asked, Link())  # type: ignore[arg-type]


def test_a_job_that_slurm_starts_again_is_trained_by_the_same_tool(tmp_path: Path) -> None:
    assert slurm_run.again_words(planned(), prepare.RunOptions(tmp_path, 1, tool="trl")) == ("--with=trl",)

"""What one training run writes and refuses, on real processes: mesh, validation, weights, data errors; and the same run
under the project's own launcher.

Not here: that split runs equal one process (test_equivalence.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import TINY, Finished, make_plan, run_warm
from cases import SplitRun
from msgspec.structs import replace

from executor.folder.rundir import read_measured, read_run_plan
from executor.run import launch
from planner.spec import Layout, Optimizer, Recipe, TrainingJob

ONE = Layout(engine="single", micro_batch_size=4)
TWO = Layout(engine="ddp", dp_replicate=2, micro_batch_size=2)
HSDP = Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3)


def job(**recipe: object) -> TrainingJob:
    return TrainingJob(
        precision="fp32", seq_len=32, optimizer=Optimizer(lr=1e-3), recipe=Recipe(**{"steps": 2, **recipe})
    )


def test_each_rank_records_the_groups_it_is_really_in(tmp_path: Path) -> None:
    finished = run_warm(make_plan(HSDP, job(), nodes=2, per_node=2), tmp_path, "--no-meter")

    assert finished.exit_codes == (0, 0), finished.output[-3000:]
    third = finished.json("mesh/rank-3.json")
    assert third["groups"] == {"dp_replicate": [1, 3], "dp_shard": [2, 3]}
    assert third["coordinates"] == {"dp_replicate": 1, "dp_shard": 1}
    assert (third["node"], third["local_rank"], third["world_size"]) == (1, 1, 4)


@pytest.mark.parametrize(("layout", "model"), [(ONE, "LlamaForCausalLM"), (TWO, "DistributedDataParallel")])
def test_one_device_trains_the_model_itself_and_two_a_replica_each(tmp_path: Path, layout: Layout, model: str) -> None:
    finished = run_warm(make_plan(layout, job(), nodes=1, per_node=layout.world_size), tmp_path, "--no-meter")

    assert finished.exit_codes == (0,), finished.output[-3000:]
    assert finished.json("mesh/rank-0.json")["model"] == model


@pytest.mark.smoke
def test_the_launchers_ranks_train_what_forked_ones_do(tmp_path: Path, split_run: SplitRun) -> None:
    forked = split_run("fsdp2-accum1")
    options = launch.RunOptions(run_dir=tmp_path / "run", nodes=2, hosts="loopback")
    done = launch.execute(launch.prepare(read_run_plan(forked.folder), options, print), print)

    assert done.status == "completed", done.message
    assert {one.rank for one in done.measured} == {0, 1, 2, 3}
    launched = Finished(tmp_path / "run", (0, 0), "")
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert launched.column(name).tolist() == forked.column(name).tolist()
    by_rank = {one.rank: one for one in done.measured}
    for one in read_measured(forked.folder):
        assert by_rank[one.rank].memory == one.memory
        assert by_rank[one.rank].collectives == one.collectives


def test_groups_other_than_the_plans_stop_the_run(tmp_path: Path) -> None:
    wrong = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}

    finished = run_warm(make_plan(HSDP, job(), nodes=1, per_node=4), tmp_path, "--no-meter", environment=wrong)

    assert finished.exit_codes != (0,)
    failed = [finished.json(str(path.relative_to(tmp_path))) for path in (tmp_path / "failed").glob("rank-*.json")]
    assert failed
    assert {record["exit_code"] for record in failed} == {4}
    assert "the plan puts it in" in finished.output
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_world_of_another_size_stops_the_run(tmp_path: Path) -> None:
    plan = make_plan(replace(TWO, dp_replicate=4), job(), nodes=1, per_node=4)

    finished = run_warm(plan, tmp_path, "--no-meter", per_node=2)

    assert finished.exit_codes != (0,)
    assert "2 ranks" in finished.output
    assert "the plan has 4" in finished.output
    assert not (tmp_path / "metrics.jsonl").exists()


def test_validation_counts_every_token_once_however_it_is_split(tmp_path: Path) -> None:
    # 9 windows: the last batch of two ranks is padded, and the padding must not count.
    text = tmp_path / "held-out.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 7)
    recipe = {"validation_data": str(text), "eval_every": 1}

    one = run_warm(make_plan(ONE, job(**recipe), nodes=1, per_node=1), tmp_path / "one", "--no-meter")
    two = run_warm(make_plan(TWO, job(**recipe), nodes=1, per_node=2), tmp_path / "two", "--no-meter")
    whole, split = one.json("result.json"), two.json("result.json")

    assert [entry["tokens"] for entry in whole["validation"]] == [9 * 32, 9 * 32]
    assert [entry["tokens"] for entry in split["validation"]] == [9 * 32, 9 * 32]
    expected = [entry["loss"] for entry in whole["validation"]]
    assert [entry["loss"] for entry in split["validation"]] == pytest.approx(expected, rel=1e-5)
    for run, result in ((one, whole), (two, split)):  # as they come, for a run that does not reach its end
        assert [list(line)[:2] for line in run.lines] == [["step", "loss"], ["step", "validation_loss"]] * 2
        logged = [(line["step"], line["validation_loss"]) for line in run.lines if "validation_loss" in line]
        assert logged == [(entry["step"], entry["loss"]) for entry in result["validation"]]
        assert all(2**20 < step["memory_bytes"] < 2**50 for step in run.metrics)


def test_saved_weights_load_as_an_ordinary_transformers_model(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from executor.worker.model.model import transformers_config

    layout = Layout(engine="deepspeed", dp_shard=2, zero_stage=3, micro_batch_size=2)
    finished = run_warm(make_plan(layout, job(), nodes=1, per_node=2), tmp_path, "--no-meter", "--save-weights")

    assert finished.exit_codes == (0,), finished.output[-3000:]
    model = LlamaForCausalLM(transformers_config(TINY, 32))
    missing, unexpected = model.load_state_dict(finished.weights, strict=False)
    assert (missing, unexpected) == ([], [])


def test_token_ids_beyond_the_vocabulary_are_refused_with_exit_code_2(tmp_path: Path) -> None:
    data = tmp_path / "tokens.bin"
    data.write_bytes((600).to_bytes(2, "little") * 400)

    finished = run_warm(make_plan(ONE, job(data=str(data)), nodes=1, per_node=1), tmp_path, "--no-meter")

    failed = finished.json("failed/rank-0.json")
    assert failed["exit_code"] == 2
    assert "token id 600" in failed["message"]

"""The run folder: names, refusals before anything is made, and reading damaged or half-written folders."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from executor.folder import rundir
from planner.basics.errors import PlannerError
from planner.spec import Cluster, Gpu, Layout, Link, Lora, ModelSpec, Runtime, TrainingJob
from planner.spec.plan import Plan

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)


def make_plan(layout: Layout, *, name: str = "tiny-llama", job: TrainingJob | None = None) -> Plan:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    cluster = Cluster(
        name="c", gpu=Gpu(name="cpu", kind="cpu"), nodes=1, gpus_per_node=2, intra_link=link, inter_link=link
    )
    model = ModelSpec(name=name, layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=300)
    runtime = Runtime(name="r", engine=layout.engine, kernels="transformers")
    return Plan(model=model, cluster=cluster, job=job or TrainingJob(), layout=layout, runtime=runtime).sealed()


@pytest.mark.parametrize(
    ("layout", "job", "expected"),
    [
        (Layout(engine="ddp", dp_replicate=2), None, "tiny-llama-ddp-20260301T123005Z"),
        (Layout(engine="fsdp2", dp_shard=2, zero_stage=3), None, "tiny-llama-fsdp2-20260301T123005Z"),
        (Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3), None, "tiny-llama-hsdp-20260301T123005Z"),
        (Layout(engine="deepspeed", dp_shard=2, zero_stage=1), None, "tiny-llama-zero1-20260301T123005Z"),
        (Layout(engine="ddp"), TrainingJob(method="lora", lora=Lora()), "tiny-llama-lora-ddp-20260301T123005Z"),
    ],
)
def test_a_run_is_named_after_model_strategy_and_time(layout, job, expected):
    assert rundir.default_folder(make_plan(layout, job=job), NOW) == Path("runs") / expected


@pytest.mark.parametrize("name", ["../../etc/evil", "a/b", "..", "x; rm -rf ~"])
def test_a_model_name_cannot_lead_out_of_the_runs_folder(name):
    folder = rundir.default_folder(make_plan(Layout(engine="ddp"), name=name), NOW)

    assert folder.parent == Path("runs")
    assert set(folder.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_a_new_folder_is_fine_and_nothing_is_made_by_asking(tmp_path):
    rundir.check_new(tmp_path / "deep" / "down")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_a_file_and_a_path_through_a_file_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, rule in (
        (tmp_path, "exists"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", "not a folder"),
    ):
        with pytest.raises(PlannerError, match=rule) as caught:
            rundir.check_new(folder)
        assert caught.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_parent_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PlannerError, match="not writable"):
        rundir.check_new(tmp_path / "run")


def test_a_created_folder_reads_back_as_the_same_plan_and_files(tmp_path):
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    rundir.create(tmp_path / "run", plan, {"config/a.yaml": "x: 1\n"})

    assert rundir.read_run_plan(tmp_path / "run") == plan
    assert (tmp_path / "run" / "config" / "a.yaml").read_text() == "x: 1\n"
    assert rundir.read_record(tmp_path / "run") is None


def test_a_backend_cannot_write_outside_the_run_folder(tmp_path):
    with pytest.raises(PlannerError, match="outside the run folder"):
        rundir.create(tmp_path / "run", make_plan(Layout(engine="ddp")), {"../escaped": "x"})
    assert not (tmp_path / "escaped").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(PlannerError, match="not a run folder"):
        rundir.read_run_plan(tmp_path)


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"schema": "run/1", "plan_')
    with pytest.raises(PlannerError, match=r"run\.json.*cannot be read"):
        rundir.read_record(tmp_path)


def test_losses_of_a_run_that_died_while_writing_are_the_whole_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"loss":6.5}\n{"step":1,"loss":6.25}\n{"step":2,"lo')
    assert rundir.read_losses(tmp_path) == (6.5, 6.25)
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"loss":null}\n{"step":1,"loss":6.25}\n')  # NaN, in a fake world
    assert rundir.read_losses(tmp_path) == (6.25,)


def test_the_room_that_is_kept_holds_the_record_of_a_thousand_ranks_steps(tmp_path):
    rundir.keep_room(tmp_path)

    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_size == 262_144

"""What must hold before a run's weights are exported, and what an export says it wrote.

The process that writes is the test's. Not here: weights (test_export.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from test_rundir import make_plan

from executor.folder import rundir
from executor.preflight import preflight
from executor.run import export as exports
from executor.run.export import ModelOptions
from planner.basics.errors import PlannerError
from planner.spec import Layout, Lora, Recipe, TrainingJob
from planner.spec.plan import encode_plan
from planner.spec.record import RunRecord

DDP = Layout(engine="ddp", dp_replicate=2)
LORA = TrainingJob(method="lora", precision="fp32", lora=Lora(rank=4, alpha=12, targets=("q_proj", "down_proj")))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As much of a run folder as is looked at before anything is written."""
    folder = tmp_path / "run"
    (folder / rundir.WEIGHTS).mkdir(parents=True)
    (folder / rundir.PLAN).write_bytes(encode_plan(make_plan(DDP)))
    (folder / rundir.WEIGHTS / "config.json").write_text("{}")
    return folder


def refusal(run: Path, target: Path, **options: Any) -> str:
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(PlannerError) as caught:
        exports.export(run, target, ModelOptions(**options))
    assert sorted(run.parent.rglob("*")) == before
    return caught.value.sentence


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (None, 0, "it still runs, or its supervisor was killed"),
        ("training failed", 5, r"it ended before they were saved (training failed)"),
        ("completed", 0, "without --no-save-weights"),
    ],
)
def test_a_run_without_weights_says_why_it_has_none(
    run: Path, tmp_path: Path, status: str | None, code: int, words: str
) -> None:
    shutil.rmtree(run / rundir.WEIGHTS)
    if status:
        record = RunRecord(
            plan_hash="", status=status, exit_code=code, started="", seconds=1, backend="", launcher="", world_size=1,
            nodes=1,
        )  # fmt: skip
        rundir.write_json(run / rundir.RECORD, record)

    assert words in refusal(run, tmp_path / "model")


def test_others_files_are_never_replaced(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")

    assert "is not empty" in refusal(run, other)
    assert "--force replaces models only" in refusal(run, other, force=True)
    assert "is a file" in refusal(run, other / "thesis.tex")
    assert "holds the run's own files" in refusal(run, run, force=True)
    assert "holds the run's own files" in refusal(run, tmp_path, force=True)
    assert "holds the run's own files" in refusal(run, run / rundir.WEIGHTS, force=True)


def test_options_that_say_nothing_of_the_run_are_refused(run: Path, tmp_path: Path) -> None:
    assert "without adapters" in refusal(run, tmp_path / "model", merge=True)
    start = tmp_path / "start"
    made = make_plan(DDP, job=replace(LORA, recipe=Recipe(checkpoint=str(start))))
    (run / rundir.PLAN).write_bytes(encode_plan(made))
    assert "has no weights" in refusal(run, tmp_path / "model")
    (run / rundir.ADAPTER).mkdir()
    (run / rundir.ADAPTER / "adapter_config.json").write_text("{}")
    assert "exported as they were trained" in refusal(run, tmp_path / "model", dtype="bf16")
    assert "is not a model folder" in refusal(run, tmp_path / "model", merge=True)  # its base is gone


def test_no_room_on_the_disk_is_said_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))

    assert "its disk has 1000 B free" in refusal(run, tmp_path / "model")


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The packages that were asked for."""
    asked: list[list[str]] = []
    monkeypatch.setattr(preflight, "check_packages", lambda names: asked.append(names))
    return asked


def writer(monkeypatch: pytest.MonkeyPatch, why: str = "") -> list[Any]:
    """Stands for the process that writes: its words; it makes two files of weights, or fails."""
    calls: list[Any] = []

    def answer_of(module: str, *words: str, env: dict[str, str]) -> tuple[dict[str, Any], str]:
        calls.append((module, words, env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_OFFLINE"]))
        folder = Path(words[1])
        folder.mkdir(parents=True)
        for name, size in (("a.safetensors", 10), ("b.safetensors", 300), ("config.json", 7)):
            (folder / name).write_bytes(bytes(size))
        return {"kind": "model", "parameters": 155, "dtype": "bf16"}, why

    monkeypatch.setattr(exports, "answer_of", answer_of)
    return calls


def test_an_export_says_what_it_wrote_and_its_files_come_whole(run, tmp_path, packages, monkeypatch) -> None:
    calls, target = writer(monkeypatch), tmp_path / "deep" / "model"
    done = exports.export(run, target, ModelOptions(shard_gb=0.5, dtype="bf16"))
    partial = target.with_name("model.partial")
    words = (str(run), str(partial), "--shard-bytes", "500000000", "--dtype", "bf16")
    assert calls == [("weights.export", words, "", "1")]
    assert (done.weight_bytes, done.files, done.tokenizer) == (
        310, ("a.safetensors", "b.safetensors", "config.json"), False)  # fmt: skip
    assert (done.kind, done.parameters, done.run_dir, done.model_dir) == ("model", 155, str(run), str(target))
    assert packages == [["torch", "transformers", "safetensors"]] and not partial.exists()

    (target / "tokenizer.json").write_text("{}")
    assert exports.export(run, target, ModelOptions(force=True)).files == done.files  # the old folder gave way
    assert calls[1][1][2:] == ("--shard-bytes", "5000000000")
    assert sorted(path.name for path in target.parent.iterdir()) == ["model"]


def test_a_merge_needs_the_adapters_package_and_counts_the_whole_model(run, tmp_path, packages, monkeypatch) -> None:
    needs: list[float] = []
    monkeypatch.setattr(preflight, "check_disk", lambda path, need, field, fix: needs.append(need))
    (run / rundir.ADAPTER).mkdir()
    (run / rundir.ADAPTER / "adapter_config.json").write_text("{}")
    calls = writer(monkeypatch)
    exports.export(run, tmp_path / "whole", ModelOptions(dtype="fp16"))
    (run / rundir.PLAN).write_bytes(encode_plan(make_plan(DDP, job=LORA)))
    exports.export(run, tmp_path / "adapters", ModelOptions())
    exports.export(run, tmp_path / "merged", ModelOptions(merge=True))
    # Embeddings and head 300 x 16 each; q, k, v, o 4 x 16 x 16; gate, up, down 3 x 16 x 32; three norms of 16.
    model = 2 * 300 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16
    adapters = 4 * (16 + 16) + 4 * (32 + 16)
    assert needs == [2 * model, 4 * adapters, 4 * model]
    assert packages[1:] == [["torch", "transformers", "safetensors"], ["torch", "transformers", "safetensors", "peft"]]
    assert [words[-1] == "--merge" for _, words, _, _ in calls] == [False, False, True]


def test_a_process_that_fails_leaves_nothing(run, tmp_path, packages, monkeypatch) -> None:
    writer(monkeypatch, why="no model_type")
    assert "its process failed: no model_type" in refusal(run, tmp_path / "model")


def test_an_empty_folder_and_a_model_with_force_give_way(run: Path, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    exports.check_target(run, empty, force=False)
    exports.check_target(run, run / "exported", force=False)  # within the run folder, beside its own
    (model := tmp_path / "model").mkdir()
    (model / "adapter_config.json").write_text("{}")
    exports.check_target(run, model, force=True)
    (model / "notes.txt").write_text("mine")
    exports.check_target(run, model, force=True)
    with pytest.raises(PlannerError, match="is not empty"):
        exports.check_target(run, model, force=False)
    for own in (run / rundir.WEIGHTS / "inside", run / rundir.ADAPTER):
        with pytest.raises(PlannerError, match="the run's own files"):
            exports.check_target(run, own, force=True)

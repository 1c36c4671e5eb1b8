"""An engine that another package brings by the entry point group `meshwright.engines`: the package is installed in a
folder of its own and a fresh process is asked.

Not here: an engine that is added to the project itself (test_engine_patch.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.spec import Layout, Lora, TrainingJob, presets
from planner.spec.plan import Plan, encode_plan

PROJECT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = """\
[meshwright.engines]
toy = toy_engine:TOY

[meshwright.backends]
toy = toy_engine:ToyBackend
"""
ASKED = ("--model", "1b", "--gpus", "2")

ASK = f"""
import json, sys
from scripts.fuzz import captured
from planner.cli.explorer import find_explorer
from planner.spec.engines import PACKAGED
from tui import inputs

asked = {ASKED!r}
shipped = captured(["estimate", *asked])[0]
print(json.dumps({{
    "shipped": (shipped, "importlib.metadata" in sys.modules, list(PACKAGED)),
    "runtime": captured(["estimate", *asked, "--runtime", "toy", "--json"])[1],
    "written": captured(["recommend", *asked, "--runtime", "toy", "-o", "plan.json"])[0],
    "any": captured(["recommend", *asked, "--any-runtime", "--zero-stage", "0", "--top", "40", "--json"])[1],
    "split": captured(["recommend", *asked, "--runtime", "toy", "--tp", "2"])[2],
    "backends": captured(["backends", "--json"])[1],
    "explore": captured(["explore", *asked, "--runtime", "toy", "--json"])[1],
    "suggested": [one.shown for one in inputs.suggestions(inputs.MORE, "--runtime toy")],
    "unknown": captured(["estimate", *asked, "--runtime", "toys"])[2],
}}))
"""


def installed(folder: Path, entry_points: str) -> Path:
    """A folder with the package in it as an installer leaves it."""
    shutil.copytree(PROJECT / "tests/patches/toy_engine", folder / "toy_engine")
    record = folder / "toy_engine-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(entry_points)
    return folder


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    there = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{PROJECT}", "COLUMNS": "110"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=there, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = installed(tmp_path_factory.mktemp("installed"), ENTRY_POINTS)
    done = run(folder, ASK)
    assert done.returncode == 0, done.stderr
    read = run(folder, "from scripts.fuzz import captured\nprint(captured(['groups', 'plan.json'])[1])")
    return json.loads(done.stdout) | {"groups": read.stdout}


def test_a_plain_estimate_reads_no_entry_point(answers):
    assert answers["shipped"] == [0, False, []]


def test_its_runtime_predicts_with_the_kernels_that_it_brings(answers):
    (one,) = json.loads(answers["runtime"])["estimates"]

    assert (one["layout"]["engine"], one["layout"]["dp_replicate"]) == ("toy", 2)
    assert one["runtime"] == "toy" and one["time"]["step_s"] > 0


def test_a_plan_of_it_is_written_and_read_back(answers):
    assert answers["written"] == 0 and "dp_replicate" in answers["groups"]


def test_a_search_over_all_runtimes_looks_at_it(answers):
    assert "toy" in {one["layout"]["engine"] for one in json.loads(answers["any"])["estimates"]}


def test_it_refuses_what_its_record_does_not_split(answers):
    assert answers["split"].startswith("error: tp=2: no layout of 2 GPUs has it")


def test_it_is_listed_with_the_backend_that_it_brings(answers):
    (toy,) = (one for one in json.loads(answers["backends"])["engines"] if one["engine"] == "toy")

    assert (toy["backend"], toy["splits"], toy["methods"]) == ("toy", ["data"], ["full", "lora", "qlora"])


def test_the_explorer_answers_with_it_and_suggests_its_runtime(answers):
    assert '"toy"' in answers["explore"]
    assert "toy" in answers["suggested"]


def test_a_name_near_its_own_is_pointed_at_it(answers):
    assert answers["unknown"].startswith("error: runtime=toys: is not among the runtimes known here. Did you mean toy")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("toy_engine:GONE", "cannot be loaded (module 'toy_engine' has no attribute 'GONE')"),
        ("toy_engine:ToyBackend", "must be a PackagedEngine of that name"),
    ],
)
def test_an_entry_point_that_names_no_engine_is_refused_in_one_line(tmp_path, place, why):
    folder = installed(tmp_path, f"[meshwright.engines]\ntoy = {place}\n")

    done = run(folder, "from scripts.fuzz import captured\nprint(captured(['backends'])[2])")

    assert done.stdout.strip() == f"error: engine toy={place}: {why}. Mend or remove the package toy-engine."


def test_an_engine_that_is_no_longer_shipped_is_refused_with_its_package_by_name_in_a_plan_and_in_a_row(tmp_path):
    plan = {"schema": "plan/1", "layout": {"engine": "galvatron"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"schema": "row/2", "id": "a", "plan": plan}) + "\n")
    asked = [["estimate", *ASKED, "--runtime", name] for name in ("internevo", "litgpt-single", "litgpt-fsdp")]
    asked += [["groups", "plan.json"], ["replay", "rows.jsonl"]]

    done = run(tmp_path, f"from scripts.fuzz import captured\nfor one in {asked}: print(captured(one)[2].strip())")

    rule = "is not shipped: published rows alone are predicted with it"
    fix = "The source tree has it in the package tests.truth.engines."
    fields = [f"runtime={name}" for name in ("internevo", "litgpt-single", "litgpt-fsdp")]
    fields += ["plan.json: layout.engine=galvatron", "rows.jsonl:1: plan: layout.engine=galvatron"]
    assert done.stdout.splitlines() == [f"error: {field}: {rule}. {fix}" for field in fields]


@pytest.mark.parametrize(
    ("projections", "kind", "field"),
    [("joint", "lora", "runtime.parts.projections=joint"), ("own", "llama-adapter", "job.lora.kind=llama-adapter")],
)
def test_a_plan_with_model_code_that_is_no_longer_shipped_is_read_and_refused_where_it_is_predicted(
    tmp_path, projections, kind, field
):
    """As earlier versions wrote it with the runtime litgpt-single."""
    runtime = presets.runtime("accelerate-single")
    runtime = msgspec.structs.replace(runtime, parts=msgspec.structs.replace(runtime.parts, projections=projections))
    job = TrainingJob(seq_len=64, method="lora", lora=Lora(kind=kind))
    cluster = presets.cluster("localhost", 1)
    plan = Plan(
        model=presets.model("tiny-llama"), cluster=cluster, job=job, layout=Layout(engine="single"), runtime=runtime
    )
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    asked = [["groups", "plan.json"], ["timeline", "plan.json"]]

    done = run(tmp_path, f"from scripts.fuzz import captured\nfor one in {asked}: print(captured(one)[2].strip())")

    fix = "Install the package that brings it, or make the plan again with another runtime and method."
    assert done.stdout == f"\nerror: {field}: is not known here. {fix}\n"

"""The `executor` command: help, refusals in one line with their code, and a dry run that leaves no trace."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from test_rundir import make_plan

from executor import cli
from planner import command
from planner.errors import PlannerError
from planner.plan import PhaseMemory, Prediction, encode_plan
from planner.spec import Gpu, Layout, Recipe

PROJECT = Path(__file__).parents[2]


def run(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "executor.cli", *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        command_line,
        cwd=cwd,
        env=env,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    data = tmp_path / "data.txt"
    data.write_text("some words to train on " * 200)
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    job = msgspec.structs.replace(plan.job, precision="fp32", seq_len=16, recipe=Recipe(steps=2, data=str(data)))
    return write(tmp_path / "plan.json", msgspec.structs.replace(plan, job=job))


def write(path: Path, plan: object) -> Path:
    path.write_bytes(encode_plan(plan))  # type: ignore[arg-type]
    return path


def assert_refused(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and words in lines[0], done.stderr


def test_help_opens_with_three_examples_and_imports_nothing_heavy(tmp_path):
    code = "import sys; from executor import cli; from planner import command\n"
    code += "command.exit_code(cli.executor, ['--help'])\n"
    code += "print(sorted({'torch', 'rich', 'numpy', 'accelerate'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, text=True, capture_output=True, check=True)

    lines = done.stdout.splitlines()
    assert lines[0] == "Examples:"
    assert [line.split()[0] for line in lines[1:4]] == ["executor"] * 3
    assert lines[-1] == "[]"


def test_the_examples_are_commands_that_exist():
    for line in cli.EXAMPLES.strip().splitlines()[1:]:
        words = shlex.split(line.partition("#")[0])
        found = cli.executor.get_command(click.Context(cli.executor), words[1])
        assert found is not None
        known = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_a_dry_run_shows_files_commands_and_environment_and_leaves_no_trace(plan_file, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    done = run("run", plan_file, "--dry-run", "--nodes", 2, "--hosts", "loopback", "--json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["schema"] == "dry-run/1" and "config/accelerate.yaml" in shown["files"]
    assert [one["node"] for one in shown["commands"]] == [0, 1]
    for one in shown["commands"]:
        argv = one["argv"]
        assert argv[argv.index("--nproc-per-node") + 1] == "1"
        assert argv[-4:] == ["-m", "executor.worker.train", shown["run_dir"], "--save-weights"]
        assert one["env"]["ACCELERATE_MIXED_PRECISION"] == "no"
    assert sorted(tmp_path.rglob("*")) == before


def test_refusals_are_one_line_with_the_codes_of_the_contract_and_make_nothing(plan_file, tmp_path):
    plan = msgspec.json.decode(plan_file.read_bytes())
    (tmp_path / "cut.json").write_bytes(plan_file.read_bytes()[:100])
    plan["layout"]["micro_batch_size"] = 7
    (tmp_path / "edited.json").write_text(json.dumps(plan))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    before = sorted(tmp_path.rglob("*"))

    assert_refused(run("run", "absent.json", cwd=tmp_path), 2, "cannot be read")
    assert_refused(run("run", "cut.json", cwd=tmp_path), 2, "not complete JSON")
    assert_refused(run("run", "edited.json", cwd=tmp_path), 2, "edited")
    assert_refused(run("run", plan_file, "--nodes", 3, cwd=tmp_path), 2, "Try 1, 2")
    assert_refused(run("run", plan_file, "--run-dir", "full", cwd=tmp_path), 2, "exists")
    assert_refused(run("run", plan_file, "--data", "absent.txt", cwd=tmp_path), 2, "does not exist")
    assert_refused(run("run", plan_file, "--steps", 0, cwd=tmp_path), 2, "--steps")
    assert_refused(run("run", plan_file, "extra", cwd=tmp_path), 2, "--script")
    assert_refused(run("run", plan_file, "--check", "--tolerance", "speed=1", cwd=tmp_path), 2, "--tolerance")
    assert_refused(run("report", "full", cwd=tmp_path), 2, "not a run folder")
    assert_refused(run("frobnicate", cwd=tmp_path), 2, "No such command")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_for_other_hardware_or_more_memory_or_no_backend_is_code_3(plan_file, tmp_path):
    plan = msgspec.json.decode(plan_file.read_bytes(), type=type(make_plan(Layout(engine="ddp"))))
    cuda = msgspec.structs.replace(
        plan, cluster=msgspec.structs.replace(plan.cluster, gpu=Gpu(name="h100", kind="cuda"))
    )
    huge = msgspec.structs.replace(
        plan, prediction=Prediction(memory=(PhaseMemory(phase="forward", terms={"params": 2.0**50}),))
    )
    other = msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, backend="acelerate"))
    none = msgspec.structs.replace(
        plan,
        layout=msgspec.structs.replace(plan.layout, engine="torchtitan"),
        runtime=msgspec.structs.replace(plan.runtime, name="torchtitan", backend=None),
    )
    assert_refused(run("run", write(tmp_path / "none.json", none), cwd=tmp_path), 3, "names no backend")
    split = msgspec.structs.replace(plan, layout=Layout(engine="ddp", tp=2))

    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert_refused(run("run", write(tmp_path / "cuda.json", cuda), cwd=tmp_path, **hidden), 3, "no CUDA device")
    assert_refused(run("run", write(tmp_path / "huge.json", huge), cwd=tmp_path), 3, "free")
    assert_refused(run("run", write(tmp_path / "other.json", other), cwd=tmp_path), 3, "Did you mean accelerate?")
    assert_refused(run("run", write(tmp_path / "split.json", split), cwd=tmp_path), 3, "tp=2")


def test_a_persons_own_script_runs_under_the_plans_launch_with_its_own_arguments(plan_file, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(sys.argv[1:], dist.get_world_size(), os.environ['ACCELERATE_MIXED_PRECISION'], flush=True)\n"
        "sys.exit(3 if sys.argv[-1] == 'fail' else 0)\n"
    )
    done = run("run", plan_file, "--run-dir", "r", "--script", script, "--", "--lr", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "['--lr', 'a b'] 2 no" in done.stderr and "prediction n/a" in done.stderr and done.stdout == ""

    failed = run("run", plan_file, "--run-dir", "f", "--json", "--script", script, "--", "fail", cwd=tmp_path)
    assert failed.returncode == 5
    record = json.loads(failed.stdout)
    assert (record["schema"], record["status"], record["exit_code"]) == ("run/1", "training failed", 5)
    assert "exit code 3" in record["message"]


def test_a_run_of_the_real_trainer_reports_itself_and_its_folder_reports_again(plan_file, tmp_path):
    done = run("run", plan_file, "--run-dir", "r", "--steps", 3, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert len(record["losses"]) == 3 and {one["rank"] for one in record["measured"]} == {0, 1}

    again = run("report", "r", "--json", cwd=tmp_path)
    assert again.returncode == 0
    assert json.loads(again.stdout)["schema"] == "report/1"
    assert json.loads(again.stdout)["memory"] == record["report"]["memory"]

    checked = run("report", "r", "--check", cwd=tmp_path)  # this plan predicts nothing, so nothing can be confirmed
    assert checked.returncode == 6 and "none was predicted" in checked.stderr.splitlines()[-1]
    assert "\x1b[" not in checked.stdout
    assert run("status", "r", cwd=tmp_path).stdout == "completed\n"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            PlannerError("tp", 6, "does not divide\nthe heads", "Try 2", exit_code=3),
            3,
            "error: tp=6: does not divide the heads. Try 2.\n",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted.\n"),
        (click.UsageError("no such thing"), 2, "error: no such thing. See fails --help.\n"),
        (
            ZeroDivisionError("x"),
            1,
            "error: internal error: ZeroDivisionError: x. Set MESHWRIGHT_DEBUG=1 for the traceback.\n",
        ),
    ],
)
def test_every_error_ends_as_one_line_and_its_code(raised, code, said, capsys):
    @click.command()
    def fails() -> None:
        raise raised

    assert command.exit_code(fails, [], name="fails") == code
    assert capsys.readouterr().err.lstrip("\n") == said  # after a Ctrl-C, click first ends the line with the ^C


def test_the_traceback_is_there_for_those_who_ask(monkeypatch, capsys):
    @click.command()
    def fails() -> None:
        raise ZeroDivisionError("x")

    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    assert command.exit_code(fails, []) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_error():
    code = "import click; from planner import command\n"
    code += "@click.command()\ndef talk():\n  for _ in range(99999): click.echo('x' * 99)\ncommand.main(talk, [])"
    pipe = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert pipe.stdout is not None and pipe.stderr is not None
    pipe.stdout.read(10)
    pipe.stdout.close()
    assert pipe.wait(timeout=60) == 0
    assert pipe.stderr.read() == b""

"""The `executor` command: help, refusals in one line with their code, and a dry run that leaves no trace."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import msgspec
import pytest
from test_rundir import make_plan

from executor import cli
from executor.run import launch
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.spec import Gpu, Layout, Recipe, inputs
from planner.spec.plan import PhaseMemory, Plan, Prediction, encode_plan, read_plan

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


@pytest.mark.slow
def test_the_whole_help_has_every_example_and_imports_nothing_heavy(tmp_path):
    code = "import sys; from executor import cli; from planner.basics import command\n"
    code += "command.exit_code(cli.executor, ['--help-all'])\n"
    code += "print(sorted({'torch', 'rich', 'numpy', 'accelerate'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, text=True, capture_output=True, check=True)

    lines = done.stdout.splitlines()
    examples = lines[lines.index("Examples:") + 1 :][: len(cli.EXAMPLES.strip().splitlines())]
    assert {line.split()[0] for line in examples} == {"executor"}
    assert lines[-1] == "[]"


def test_the_examples_are_commands_that_exist():
    for line in cli.EXAMPLES.strip().splitlines()[1:]:
        words = shlex.split(line.partition("#")[0])
        found = cli.executor.get_command(click.Context(cli.executor), words[1])
        assert found is not None
        known = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.slow
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


@pytest.fixture
def far_plan(plan_file: Path, tmp_path: Path) -> Path:
    """The same plan for two nodes of eight H100, which this machine is not."""
    plan = msgspec.json.decode(plan_file.read_bytes(), type=Plan)
    cluster = msgspec.structs.replace(plan.cluster, gpu=Gpu(name="h100", kind="cuda"), nodes=2, gpus_per_node=8)
    layout = msgspec.structs.replace(plan.layout, dp_replicate=16)
    memory = (PhaseMemory(phase="forward", terms={"params": 2.0**50}),)
    far = msgspec.structs.replace(plan, cluster=cluster, layout=layout, prediction=Prediction(memory=memory))
    return write(tmp_path / "far.json", far)


@pytest.mark.slow
def test_a_dry_run_of_a_plan_for_other_machines_shows_and_writes_everything_but_secrets(far_plan, tmp_path):
    given = ["--env", "HF_TOKEN", "--env", "FOO=a-hidden $(touch canary)", "--env", "WANDB_API_KEY=w-hidden"]
    given += ["--steps", "7", "--data", "absent.txt"]
    hidden = {"HF_TOKEN": "hf-hidden", "CUDA_VISIBLE_DEVICES": ""}
    done = run("run", far_plan, "--dry-run", "--json", "-o", "out", *given, cwd=tmp_path, **hidden)

    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["elsewhere"] and "num_machines: 2" in shown["files"]["config/accelerate.yaml"]
    for node, one in enumerate(shown["commands"]):
        pairs = dict(zip(one["argv"], one["argv"][1:], strict=False))
        assert (pairs["--nnodes"], pairs["--node-rank"], pairs["--nproc-per-node"]) == ("2", str(node), "8")
        assert (pairs["--master-addr"], pairs["--local-addr"]) == ("node-0", f"node-{node}")
        assert one["env"]["ACCELERATE_MIXED_PRECISION"] == "no"
        assert not {"GLOO_SOCKET_IFNAME", "PYTHONPATH", "OMP_NUM_THREADS"} & set(one["env"])  # of this machine
    assert "no CUDA device" in shown["unchecked"]["devices"] and "absent.txt" in shown["unchecked"]["data"]

    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path / "out").as_posix() for path in written}
    names_of_a_run = {"plan.json", "asked.json", "launch.json", "join.json", "config/accelerate.yaml"}
    assert names == names_of_a_run | {"node-0.sh", "node-1.sh", ".lock"}
    joining = json.loads((tmp_path / "out" / "join.json").read_text())
    assert joining["environment"] == {"HF_TOKEN": None, "FOO": None, "WANDB_API_KEY": None}
    assert joining["code"].startswith("sha256:") and (tmp_path / "out" / "join.json").stat().st_mode & 0o77 == 0
    assert "-hidden" not in done.stdout + done.stderr
    assert not [path for path in written if b"-hidden" in path.read_bytes()]
    plan = read_plan(tmp_path / "out" / "plan.json")
    assert plan.job.recipe.steps == 7 and plan.content_hash in done.stdout


@pytest.mark.slow
def test_the_scripts_of_a_dry_run_join_their_folder_wherever_it_lies_and_pass_words_on_as_they_are(far_plan, tmp_path):
    done = run("run", far_plan, "--dry-run", "-o", "out", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and "executor join" in done.stdout, done.stderr
    moved = tmp_path / "a b'$(touch canary)"
    (tmp_path / "out").rename(moved)
    (tmp_path / "executor").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "executor").chmod(0o755)
    shell = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", moved / "node-1.sh", "--master", "x $(touch canary)"]
    ran = subprocess.run(command, cwd=tmp_path, env=shell, text=True, capture_output=True, check=True).stdout
    assert ran.splitlines() == ["join", str(moved), "--node-rank", "1", "--master", "x $(touch canary)"]
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_where_a_dry_run_writes_must_be_new_and_a_run_writes_to_its_own_folder(far_plan, tmp_path):
    (tmp_path / "out").mkdir()
    assert_refused(run("run", far_plan, "--dry-run", "-o", "out", cwd=tmp_path), 2, "--output=out: exists")
    assert_refused(run("run", far_plan, "-o", "other", cwd=tmp_path), 2, "--output is for --dry-run")


@pytest.mark.slow
def test_a_dry_run_shows_the_plans_own_variables_where_the_framework_is_missing(far_plan, tmp_path):
    (tmp_path / "site").mkdir()  # a laptop: its interpreter finds the planner, and no framework
    hide = "import importlib.util as util\nfind, gone = util.find_spec, ('torch', 'accelerate', 'transformers')\n"
    hide += "util.find_spec = lambda name, *rest: None if name in gone else find(name, *rest)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join([str(tmp_path / "site"), str(PROJECT)])
    before = sorted(tmp_path.rglob("*"))
    alone = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run("run", far_plan, "--dry-run", cwd=tmp_path, **alone)

    assert done.returncode == 0, done.stderr
    shown, _, unchecked = done.stdout.partition("# different on this machine, or not checked here:")
    assert "# node 1 (node-1)\nexecutor join /" in shown and "--node-rank 1 --master HOST\n" in shown
    assert "# ACCELERATE_DYNAMO_BACKEND=NO \\\n# ACCELERATE_MIXED_PRECISION=no \\\n" in shown
    assert "#   software: " in unchecked and "not installed" in unchecked and "#   configuration: " in unchecked
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_changed_file_is_refused_by_name_and_taken_as_it_is_when_it_is_named(plan_file, tmp_path, monkeypatch):
    plan = inputs.resolved(read_plan(plan_file))
    options = launch.RunOptions(run_dir=tmp_path / "run", nodes=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert launch.prepare(plan, options, print).plan.inputs == plan.inputs

    (tmp_path / "data.txt").write_text("other words to train on " * 200)
    with pytest.raises(PlannerError, match=r"recipe.data=.* is not what the plan was made with.* --data") as caught:
        launch.prepare(plan, options, print)
    assert caught.value.exit_code == 3
    taken = launch.prepare(plan, replace(options, data=tmp_path / "data.txt"), print).plan
    assert taken.inputs[0].digest != plan.inputs[0].digest and taken.inputs[0].path == str(tmp_path / "data.txt")


@pytest.mark.slow
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


@pytest.mark.slow
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


SCRIPT = """
import os, sys
assert "torch" not in sys.modules and sys.argv[0].endswith("own/mine.py")  # nothing comes before the script
import beside
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
print(sys.argv[1:], dist.get_world_size(), os.environ["ACCELERATE_MIXED_PRECISION"], beside.HERE, flush=True)
print(os.environ.get("FOO"), os.environ.get("HF_TOKEN"), os.environ.get("BAR"), flush=True)
if sys.argv[-1] == "fail":
    sys.exit(3)
model(torch.ones(1, 4)).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""


@pytest.mark.slow
def test_a_persons_own_script_runs_under_the_plans_launch_with_its_own_arguments(plan_file, tmp_path):
    (tmp_path / "own").mkdir()
    script = tmp_path / "own" / "mine.py"
    script.write_text(SCRIPT)
    (tmp_path / "own" / "beside.py").write_text("HERE = 'found'\n")
    given = ["--env", "FOO=a $b 'c'", "--env", "HF_TOKEN", "--script", script]
    secret = {"HF_TOKEN": "hf-hidden", "BAR": "not passed on"}
    done = run("run", plan_file, "--run-dir", "r", *given, "--", "--lr", "a b", cwd=tmp_path, **secret)
    assert done.returncode == 0, done.stderr
    assert "['--lr', 'a b'] 2 no found" in done.stderr and "prediction n/a" in done.stderr and done.stdout == ""
    assert "a $b 'c' hf-hidden None" in done.stderr  # printed by the script itself
    kept = [path for path in (tmp_path / "r").rglob("*") if path.is_file() and b"hf-hidden" in path.read_bytes()]
    assert {path.name for path in kept} == {"stdout.log"}

    failed = run("run", plan_file, "--run-dir", "f", "--json", "--script", script, "--", "fail", cwd=tmp_path)
    assert failed.returncode == 5
    record = json.loads(failed.stdout)
    assert (record["schema"], record["status"], record["exit_code"]) == ("run/1", "training failed", 5)
    assert "exit code 3" in record["message"]


@pytest.mark.long  # its parts are in tests/cluster/test_script.py and test_verdict.py
def test_a_script_that_trains_as_lone_processes_is_a_failed_run(plan_file, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(1, 4)).sum().backward()\noptimizer.step()\nprint('trained', flush=True)\n"
    )
    done = run("run", plan_file, "--run-dir", "r", "--json", "--script", script, cwd=tmp_path)

    assert done.returncode == 4 and "trained" not in done.stderr
    record = json.loads(done.stdout)
    assert (record["status"], record["cause"]) == ("launch failed", "another world")
    assert "trains alone, the plan has 2 ranks" in record["message"]


@pytest.mark.slow
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
    code = "import click; from planner.basics import command\n"
    code += "@click.command()\ndef talk():\n  for _ in range(99999): click.echo('x' * 99)\ncommand.main(talk, [])"
    pipe = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert pipe.stdout is not None and pipe.stderr is not None
    pipe.stdout.read(10)
    pipe.stdout.close()
    assert pipe.wait(timeout=60) == 0
    assert pipe.stderr.read() == b""

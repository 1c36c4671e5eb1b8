"""`executor export-launch`: each file, read back as its own tool reads it, means the plan.

The commands are run, with programs of the test's that write down how they were called. Not here: Slurm's script
(test_slurm.py), or a real Slurm (tests/cluster).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from test_cli import assert_refused, run
from test_rundir import make_plan

from executor.folder import joining, ownscript, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.launchers.kubernetes import MOUNTED, RUNS
from executor.run import attempts, launch_export
from executor.run.launch_export import Exported, ExportOptions
from executor.run.prepare import RunOptions
from planner.basics.errors import PlannerError
from planner.spec import Layout, Recipe, TrainingJob, presets
from planner.spec.plan import Plan, encode_plan

SCHEMAS = Path(__file__).parents[1] / "schemas"
NASTY = "two words $(touch canary) `touch canary` ' \" \\ ;"
RECORD = (
    "#!{python}\nimport json, os, sys\n"
    "open({log!r}, 'a').write(json.dumps([sys.argv[1:], os.environ.get('PYTHONPATH', '')]) + '\\n')\n"
)


def layouts(nodes: int) -> list[Layout]:
    """What is launched, of `nodes` with 8 GPUs each."""
    world = 8 * nodes
    return [
        Layout(engine="ddp", dp_replicate=world),
        Layout(engine="fsdp2", dp_shard=world, zero_stage=3),
        Layout(engine="fsdp2", dp_replicate=nodes, dp_shard=8, zero_stage=3),
        Layout(engine="transformers-tp", dp_shard=nodes, tp=8, zero_stage=3),
        Layout(engine="deepspeed", dp_shard=world, zero_stage=1),
        Layout(engine="deepspeed", dp_shard=world, zero_stage=2),
        Layout(engine="deepspeed", dp_shard=world, zero_stage=3),
        Layout(engine="deepspeed-autotp", dp_shard=4 * nodes, tp=2, zero_stage=1),
        Layout(engine="deepspeed-pipeline", dp_shard=4 * nodes, pp=2, zero_stage=1),
        Layout(engine="deepspeed-pipeline", dp_shard=2 * nodes, pp=2, tp=2, zero_stage=1),
    ]


CASES = [(nodes, place) for nodes in (2, 5) for place in range(10)]


def plan_of(nodes: int, layout: Layout, data: Path | None = None) -> Plan:
    cluster = msgspec.structs.replace(presets.cluster("h100-sxm-80gb"), nodes=nodes, gpus_per_node=8)
    recipe = Recipe(data=str(data)) if data else Recipe()
    plan = make_plan(msgspec.structs.replace(layout, grad_accum=2), job=TrainingJob(recipe=recipe))
    return msgspec.structs.replace(plan, cluster=cluster, model=presets.model("llama-2-7b")).sealed()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("words to train on " * 500)
    return path


def export(
    tmp_path: Path, plan: Plan, to: launch_export.Target, asked: ExportOptions, env: tuple[str, ...] = (), **more: Any
) -> Exported:
    options = RunOptions(run_dir=tmp_path / "out", nodes=plan.cluster.nodes, save_weights=True, env=env, **more)
    return launch_export.export(plan, to, options, asked, lambda _: None)


def called(tmp_path: Path, words: list[str], environment: dict[str, str], *names: str) -> list[Any]:
    """How programs called `names` were called by a command line: words and PYTHONPATH of each."""
    (bin_ := tmp_path / "bin").mkdir(exist_ok=True)
    log = tmp_path / "calls"
    log.unlink(missing_ok=True)
    for name in names:
        (bin_ / name).write_text(RECORD.format(python=sys.executable, log=str(log)))
        (bin_ / name).chmod(0o700)
    path = f"{bin_}:{os.environ['PATH']}"
    done = subprocess.run(words, env={"PATH": path} | environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


def strict(schema: Any) -> Any:
    """A schema of Kubernetes' as its server reads it: what it does not name is an error."""
    if isinstance(schema, dict):
        made = {key: strict(value) for key, value in schema.items()}
        if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        return made
    return [strict(one) for one in schema] if isinstance(schema, list) else schema


def check_means(folder: Path, plan: Plan, nodes_words: list[list[str]], master: str) -> None:
    """Every node joins the run in `folder` as itself, and that run is the plan."""
    wanted, made = joining.read(folder), rundir.read_run_plan(folder)
    assert msgspec.structs.replace(made, inputs=()).sealed() == msgspec.structs.replace(plan, inputs=()).sealed()
    assert wanted.plan_hash == made.content_hash
    spec = rundir.read_launch(folder)
    assert spec is not None and len(spec.commands) == len(nodes_words) == plan.cluster.nodes
    for node, (command, words) in enumerate(zip(spec.commands, nodes_words, strict=True)):
        asked = dict(zip(words[2::2], words[3::2], strict=True))
        assert (
            words[0] == "join" and asked["--node-rank"] == str(node) and asked["--master"] == f"{master}:{wanted.port}"
        )
        agent = dict(zip(command.argv[3::2], command.argv[4::2], strict=False))
        started = {name: agent[f"--{name}"] for name in ("nnodes", "node-rank", "nproc-per-node", "master-port")}
        assert started == {
            "nnodes": str(plan.cluster.nodes),
            "node-rank": str(node),
            "nproc-per-node": str(plan.layout.world_size // plan.cluster.nodes),
            "master-port": str(wanted.port),
        }


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "place"), CASES)
def test_a_jobset_means_the_plan(tmp_path: Path, nodes: int, place: int) -> None:
    plan = plan_of(nodes, layouts(nodes)[place])
    export(
        tmp_path,
        plan,
        "kubernetes",
        ExportOptions(image="team/image:1"),
        ("HF_TOKEN=hf_SeCrEt0ne", f"GREETING={NASTY}"),
    )
    config, jobset = yaml.safe_load_all((tmp_path / "out/jobset.yaml").read_text())
    jsonschema.validate(jobset, strict(json.loads((SCHEMAS / "jobset-v1alpha2.json").read_text())))

    (group,) = jobset["spec"]["replicatedJobs"]
    job, name = group["template"]["spec"], jobset["metadata"]["name"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (nodes, nodes, "Indexed")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    (volume,) = [one for one in pod["volumes"] if one["name"] == "launch"]
    assert volume["configMap"]["name"] == config["metadata"]["name"] == name

    launch = tmp_path / "pod"  # as the kubelet lays out the ConfigMap, and then the START command copies it
    for item in volume["configMap"]["items"]:
        path = launch / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config["data"][item["key"]])
    words = []
    for node in range(nodes):
        environment = {"JOB_COMPLETION_INDEX": str(node)}
        for one in container["env"]:
            if "value" in one:
                environment[one["name"]] = one["value"].replace("$(JOB_COMPLETION_INDEX)", str(node))
        environment["RUN"] = environment["RUN"].replace(RUNS, str(tmp_path / "runs"))
        command = [word.replace(f"{MOUNTED}/.", f"{launch}/.") for word in container["command"]]
        ((given, _),) = called(tmp_path, command, environment, "executor")
        words.append(given)
        copied = Path(given[1])
        assert joining.read(copied) == joining.read(tmp_path / "out/run") and os.access(copied, os.W_OK)
        assert {path.name for path in copied.rglob("*") if path.is_file()} >= {"plan.json", "join.json"}
    check_means(tmp_path / "out/run", plan, words, f"{name}-node-0-0.{name}")
    for secret in ("HF_TOKEN", "GREETING"):
        found = [one["valueFrom"] for one in container["env"] if one["name"] == secret]
        assert found == [{"secretKeyRef": {"name": name, "key": secret}}]
        assert joining.read(tmp_path / "out/run").environment[secret] is None
    assert "hf_SeCrEt0ne" not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert not list(tmp_path.rglob("canary"))


# Each copies the code, a quarter of a second: two of them are quick.
@pytest.mark.parametrize(
    ("nodes", "place"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])]
)
def test_a_task_of_skypilot_means_the_plan(tmp_path: Path, nodes: int, place: int, data: Path) -> None:
    plan = plan_of(nodes, layouts(nodes)[place], data)
    export(tmp_path, plan, "skypilot", ExportOptions(), ("HF_TOKEN=hf_SeCrEt0ne",))
    task = yaml.safe_load((tmp_path / "out/task.yaml").read_text())
    schemas = json.loads((SCHEMAS / "skypilot-0.14.1.json").read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])

    assert (task["num_nodes"], task["resources"]) == (nodes, {"accelerators": "H100:8"})
    mounts = task["file_mounts"]
    assert mounts[str(data)] == str(data)
    words = []
    for node in range(nodes):
        environment = {
            "HOME": "/home/me",
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{one + 1}" for one in range(nodes)),
        }
        ((given, path),) = called(tmp_path, ["bash", "-c", task["run"]], environment, "python")
        assert given[:2] == ["-m", "executor.cli"] and path == "/home/me/meshwright-code"
        assert (given[3] == mounts and False) or given[3] == "/home/me/meshwright-run"
        words.append(given[2:])
    check_means(Path(mounts["~/meshwright-run"]), plan, words, "10.0.0.1")
    assert task["secrets"] == {"HF_TOKEN": None}


@pytest.mark.slow
def test_the_code_that_skypilot_copies_is_the_code_that_made_the_folder(tmp_path: Path, data: Path) -> None:
    export(tmp_path, plan_of(2, layouts(2)[0], data), "skypilot", ExportOptions())
    code = tmp_path / "out/code"
    asked = "from executor.folder import joining; print(joining.code_digest(), joining.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", asked], env={"PYTHONPATH": str(code)}, cwd=tmp_path, capture_output=True, text=True
    )
    digest, file = done.stdout.split()
    assert digest == joining.read(tmp_path / "out/run").code and file.startswith(str(code))
    ((given, _),) = called(
        tmp_path, ["bash", "-c", yaml.safe_load((tmp_path / "out/task.yaml").read_text())["setup"]], {}, "python"
    )
    assert given[:3] == ["-m", "pip", "install"]
    assert {"torch", "accelerate", "deepspeed"} <= {one.partition("==")[0] for one in given if "==" in one}


@pytest.mark.parametrize(("nodes", "place"), CASES)
def test_a_script_for_slurm_means_the_plan(tmp_path: Path, nodes: int, place: int) -> None:
    plan = plan_of(nodes, layouts(nodes)[place])
    made = export(tmp_path, plan, "slurm", ExportOptions(sbatch=("time=1:00:00",)))
    script = (tmp_path / "out/run.sbatch").read_text()
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {f"nodes={nodes}", "ntasks-per-node=1", "gpus-per-node=8", "time=1:00:00"} <= set(lines)
    ((words, _),) = called(tmp_path, ["bash", "-c", script], {}, "srun")
    assert words[0] == f"--nodes={nodes}" and words[-3:] == ["join", str(tmp_path / "out"), "--slurm"]
    node_words = [
        ["join", "", "--node-rank", str(node), "--master", f"x:{joining.read(tmp_path / 'out').port}"]
        for node in range(nodes)
    ]
    check_means(tmp_path / "out", plan, node_words, "x")  # which node and master a task is, it reads itself
    assert made.start == f"sbatch {tmp_path / 'out/run.sbatch'}"


AGAIN: dict[str, Any] = {"checkpoints": CheckpointSchedule(every="10", keep_last=3, keep_every=100), "max_restarts": 4}


def pods(tmp_path: Path, nodes: int, job: str) -> list[list[str]]:
    """How executor is called by the pods of a job, which share a volume, node 0 last."""
    config, jobset = yaml.safe_load_all((tmp_path / "out/jobset.yaml").read_text())
    jsonschema.validate(jobset, strict(json.loads((SCHEMAS / "jobset-v1alpha2.json").read_text())))
    spec = jobset["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 4}
    (container,) = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    of_pod = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    assert of_pod["START"] == "metadata.labels['batch.kubernetes.io/controller-uid']"
    launch = tmp_path / "pod"
    for key, text in config["data"].items():
        (path := launch / key.replace("--", "/")).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    env["RUN"] = env["RUN"].replace(RUNS, str(tmp_path / "runs"))
    command = [word.replace(f"{MOUNTED}/.", f"{launch}/.") for word in container["command"]]
    return [
        called(tmp_path, command, env | {"JOB_COMPLETION_INDEX": str(node), "START": job}, "executor")[0][0]
        for node in reversed(range(nodes))
    ]


@pytest.mark.slow
def test_pods_that_are_started_again_find_the_folder_of_the_first(tmp_path: Path) -> None:
    export(
        tmp_path, plan_of(2, layouts(2)[1]), "kubernetes", ExportOptions(image="a", claims=(f"kept={RUNS}",)), **AGAIN
    )
    (tmp_path / "runs").mkdir()
    first = pods(tmp_path, 2, "uid-1")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == joining.read(folder).run_id and joining.read(folder).checkpoints == AGAIN["checkpoints"]
    assert [words[1:4] for words in first] == [[str(folder), "--node-rank", node] for node in "10"]
    (folder / "mark").touch()
    second = pods(tmp_path, 2, "uid-2")
    assert (folder / "mark").exists()
    assert [words[-2:] for words in first + second] == [["--start", f"uid-{job}"] for job in (1, 1, 2, 2)]


def test_nodes_of_skypilot_that_take_the_place_of_others_find_the_folder_of_the_first(tmp_path: Path) -> None:
    made = export(tmp_path, plan_of(2, layouts(2)[1]), "skypilot", ExportOptions(claims=(f"kept={RUNS}",)), **AGAIN)
    assert made.start == f"sky jobs launch {tmp_path / 'out/task.yaml'}"
    task = yaml.safe_load((tmp_path / "out/task.yaml").read_text())
    schemas = json.loads((SCHEMAS / "skypilot-0.14.1.json").read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    assert task["volumes"] == {RUNS: "kept"} and task["resources"]["job_recovery"] == {"max_restarts_on_errors": 4}

    (tmp_path / "home").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "out/run").rename(tmp_path / "home/meshwright-run")
    script = task["run"].replace(RUNS, str(tmp_path / "runs"))
    words = []
    for node, ip in ((1, 1), (0, 1), (1, 2), (0, 2)):
        environment = {"HOME": str(tmp_path / "home"), "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_TASK_ID": "job-1"}
        environment["SKYPILOT_NODE_IPS"] = f"10.0.{ip}.1\n10.0.{ip}.2"
        ((given, _),) = called(tmp_path, ["bash", "-c", script], environment, "python")
        words.append(given[-2:])
        folders = list((tmp_path / "runs").iterdir())
        assert len(folders) == (len(words) > 1) and given[3].startswith(str(tmp_path / "runs"))
    assert words == [["--start", f"job-1 10.0.{ip}.1 10.0.{ip}.2"] for ip in (1, 1, 2, 2)]
    assert joining.read(folders[0]).checkpoints == AGAIN["checkpoints"]


def test_a_script_for_slurm_takes_the_checkpoints_along(tmp_path: Path) -> None:
    more = AGAIN | {"max_restarts": 0, "stall_s": 90.0}
    export(tmp_path, plan_of(2, layouts(2)[1]), "slurm", ExportOptions(sbatch=("time=1:00:00",)), **more)
    wanted, asked = joining.read(tmp_path / "out"), attempts.read_asked(tmp_path / "out")
    assert wanted.checkpoints == asked.checkpoints == AGAIN["checkpoints"] and wanted.stall_s == 90.0
    assert (asked.launcher, asked.sbatch) == ("slurm", ("time=1:00:00",))
    assert "SLURM_RESTART_COUNT" not in (tmp_path / "out/run.sbatch").read_text()


@pytest.mark.parametrize(
    ("to", "asked", "more", "words"),
    [
        (
            "kubernetes",
            ExportOptions(image="a"),
            AGAIN,
            "--checkpoint-every=10: writes checkpoints that are lost with the nodes",
        ),
        ("skypilot", ExportOptions(claims=("data=/data",)), AGAIN, "that all nodes share: --claim NAME=/runs"),
        (
            "kubernetes",
            ExportOptions(image="a"),
            {"max_restarts": 1},
            "--max-restarts=1: needs a checkpoint to restart from",
        ),
        ("slurm", ExportOptions(), AGAIN, "--max-restarts=4: does not apply to Slurm"),
        (
            "slurm",
            ExportOptions(claims=("kept=/runs",)),
            {},
            "--claim=kept=/runs: applies to --to kubernetes and --to skypilot",
        ),
    ],
)
def test_checkpoints_that_nothing_keeps_and_restarts_without_any_are_refused(
    tmp_path: Path, to: launch_export.Target, asked: ExportOptions, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlannerError) as caught:
        export(tmp_path, plan_of(2, layouts(2)[0]), to, asked, **more)
    assert words in caught.value.sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "asked", "words"),
    [
        ("kubernetes", ExportOptions(), "--image: is not given"),
        ("kubernetes", ExportOptions(image="a b"), "must be the name of an image"),
        ("kubernetes", ExportOptions(image="a", claims=("data",)), "must be NAME=PATH"),
        ("kubernetes", ExportOptions(image="a", claims=("data=rel",)), "must be NAME=PATH"),
        ("kubernetes", ExportOptions(image="a", accelerator="H100"), "--accelerator: is for --to skypilot"),
        ("slurm", ExportOptions(image="a"), "--image: is for --to kubernetes"),
        ("slurm", ExportOptions(sbatch=("nodes=9",)), "is decided by the plan"),
        ("skypilot", ExportOptions(accelerator="H100:8"), "must be a name that sky show-gpus prints"),
    ],
)
def test_what_does_not_belong_is_refused_and_nothing_is_left(
    tmp_path: Path, to: launch_export.Target, asked: ExportOptions, words: str
) -> None:
    with pytest.raises(PlannerError, match=words.replace("(", "\\(")):
        export(tmp_path, plan_of(2, layouts(2)[0]), to, asked)
    assert not (tmp_path / "out").exists()


def test_a_gpu_without_a_name_there_needs_one(tmp_path: Path) -> None:
    plan = plan_of(2, layouts(2)[0])
    other = msgspec.structs.replace(presets.cluster("mi300x-192gb"), nodes=2, gpus_per_node=8)
    plan = msgspec.structs.replace(plan, cluster=other).sealed()
    with pytest.raises(PlannerError, match="has no name of SkyPilot's"):
        export(tmp_path, plan, "skypilot", ExportOptions())
    export(tmp_path, plan, "skypilot", ExportOptions(accelerator="MI300X"))
    assert "MI300X:8" in (tmp_path / "out/task.yaml").read_text()


def test_claims_hold_the_runs_and_the_data(tmp_path: Path, data: Path) -> None:
    asked = ExportOptions(image="a", claims=(f"data={data.parent}", f"kept={RUNS}"))
    made = export(tmp_path, plan_of(2, layouts(2)[0], data), "kubernetes", asked)
    assert len(made.notes) == 1 and "needs executor on its PATH" in made.notes[0]
    _, jobset = yaml.safe_load_all((tmp_path / "out/jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    mounted = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounted == {MOUNTED, "/dev/shm", str(data.parent), RUNS}


@pytest.mark.slow
def test_the_command_prints_how_to_start_it(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(encode_plan(plan_of(2, layouts(2)[1])))
    words = ("export-launch", "plan.json", "--to", "kubernetes", "--image", "a/b:c", "--demo-data", "-o", "out")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == f"kubectl apply -f {tmp_path / 'out/jobset.yaml'}\n", done.stderr
    assert_refused(run(*words, cwd=tmp_path), 2, "out")
    assert_refused(run(*words[:2], "--to", "nomad", "-o", "x", cwd=tmp_path), 2, "nomad")


@pytest.mark.parametrize("to", ["slurm", "kubernetes", "skypilot"])
def test_a_persons_own_script_goes_with_the_folder_and_is_run_with_its_arguments(tmp_path: Path, to: Any) -> None:
    script = tmp_path / "own" / "a $(touch canary) é.py"
    script.parent.mkdir()
    script.write_text("print('mine')\n")
    image = {"kubernetes": ExportOptions(image="team/image:1")}.get(to, ExportOptions())
    words = (str(script), "--lr", NASTY)
    options = RunOptions(tmp_path / "out", 2, script=words)
    launch_export.export(plan_of(2, layouts(2)[0]), to, options, image, lambda text: None)

    folder = tmp_path / "out" / ("" if to == "slurm" else "run")
    wanted = joining.read(folder)
    assert wanted.script == words and not wanted.save_weights
    assert ownscript.program(folder, wanted.script) == words  # it finds what lies beside it
    (copy,) = (folder / ownscript.FOLDER).iterdir()
    script.write_text("print('another since')\n")
    assert ownscript.program(folder, wanted.script) == (str(copy), *words[1:])
    script.unlink()
    assert ownscript.program(folder, wanted.script) == (str(copy), *words[1:])
    assert copy.read_text() == "print('mine')\n" and copy.name.isascii()
    if to == "kubernetes":  # every pod gets it from the ConfigMap
        config = next(yaml.safe_load_all((tmp_path / "out/jobset.yaml").read_text()))
        assert config["data"][f"script--{copy.name}"] == "print('mine')\n"
    assert not list(tmp_path.rglob("canary"))


def test_a_script_is_named_for_export_and_takes_no_options_of_the_trainer(tmp_path: Path, data: Path) -> None:
    (tmp_path / "plan.json").write_bytes(encode_plan(plan_of(2, layouts(2)[0], data)))
    (tmp_path / "own.py").write_text("")
    asked = ["export-launch", "plan.json", "--to", "slurm", "-o", "out", "--script", "own.py"]
    for more in (["--save-weights"], ["--checkpoint-every", "5"], ["--max-restarts", "1"]):
        assert_refused(run(*asked, *more, cwd=tmp_path), 2, "the built-in trainer")
    done = run(*asked, "--json", "--", "--lr", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert joining.read(tmp_path / "out").script == (str(tmp_path / "own.py"), "--lr", "a b")

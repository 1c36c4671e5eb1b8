"""Nodes that join a run by themselves go on with it: a JobSet's command in its second start, and a loop by hand.

Not here: a first start (test_join.py), or what the files for other launchers say (test_launch_export.py).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from agents import make_plan, run_warm
from cases import FULL, SEQUENCES
from hanging import HOOK
from hosts import TestHosts, unusable
from msgspec.structs import replace
from test_join import EXECUTOR, alone, ended, executor, joining, pair, processes  # noqa: F401 (fixtures)

from executor.folder import rundir
from executor.launchers.kubernetes import MOUNTED, RUNS
from planner.spec import Layout, inputs
from planner.spec.plan import encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

STEPS = 15
SECRET = {"DIE": "1 12 1", "EVERY": "10"}
"""What the Secret of the pods holds, and a hand sets on each host."""
LAYOUT = Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=SEQUENCES // 2)


def pod(hosts: TestHosts, node: int, tmp_path: Path, job: str) -> subprocess.Popen[str]:
    """A node's pod: the command of its container, with its environment, on a host, as a part of this job."""
    config, jobset = yaml.safe_load_all((tmp_path / "out/jobset.yaml").read_text())
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "launch"]
    for item in volume["configMap"]["items"]:
        (path := tmp_path / "launch" / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config["data"][item["key"]])
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert {one["name"] for one in container["env"] if "secretKeyRef" in one.get("valueFrom", ())} == set(SECRET)
    given |= SECRET | {"JOB_COMPLETION_INDEX": str(node), "START": job, "OMP_NUM_THREADS": "1"}
    given |= {"RUN": given["RUN"].replace(RUNS, str(tmp_path / "runs"))}
    given |= {"MASTER": f"{hosts.hosts[0].address}:{given['MASTER'].rpartition(':')[2]}"}
    given |= {"PYTHONPATH": str(HOOK), "PATH": f"{EXECUTOR.parent}:{os.environ['PATH']}"}
    words = [word.replace(MOUNTED, str(tmp_path / "launch")) for word in container["command"]]
    command = hosts.hosts[node].words("env", *(f"{name}={value}" for name, value in given.items()), *words)
    return subprocess.Popen(
        command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def by_hand(hosts: TestHosts, folder: Path) -> list[subprocess.Popen[str]]:
    """The nodes, joined once more by a loop, after resume has made the folder ready."""
    refused = ended(joining(hosts, 0, folder))[0]
    assert refused[0] == 2 and "Continue with executor resume RUN, then join again" in refused[1]
    again = executor("resume", folder, *(f"--env={name}={value}" for name, value in SECRET.items()))
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines() == [f"executor join {folder} --node-rank {node} --master HOST" for node in (0, 1)]
    assert f"resuming after step 10 of {STEPS}, from checkpoint step-10" in again.stderr
    given = [shlex.quote(f"--env={name}={value}") for name, value in SECRET.items()]  # ssh's words are a shell's
    return [joining(hosts, node, folder, "--master", "red", *given) for node in (0, 1)]


@pytest.mark.parametrize("hand", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nodes_that_are_started_again_go_on(pair: TestHosts, tmp_path: Path, hand: bool) -> None:  # noqa: F811
    job = replace(FULL, recipe=replace(FULL.recipe, steps=STEPS))
    plan = inputs.resolved(make_plan(LAYOUT, job, nodes=2, per_node=1))
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    (tmp_path / "runs").mkdir()
    words = ("--to", "kubernetes", "--image", "a/b", "--claim", f"kept={RUNS}", "--checkpoint-every", "10")
    words += ("--demo-data", *(f"--env={name}={value}" for name, value in SECRET.items()))
    made = executor("export-launch", tmp_path / "plan.json", "-o", tmp_path / "out", "--no-save-weights", *words)
    assert made.returncode == 0, made.stderr
    first = [pod(pair, node, tmp_path, "uid-1") for node in (0, 1)]
    (one, told), (two, also) = ended(*first)
    assert (one, two) == (5, 5), told + also
    (folder,) = (tmp_path / "runs").iterdir()

    second = by_hand(pair, folder) if hand else [pod(pair, node, tmp_path, "uid-2") for node in (0, 1)]
    (one, told), (two, also) = ended(*second)
    assert (one, two) == (0, 0), told + also
    found = json.loads((folder / "run.json").read_text())
    assert (found["status"], found["launcher"]) == ("completed", "join")
    (past,) = found["attempts"]
    assert (past["failed_rank"], past["steps"], past["resumed_from"]) == (1, 11, 10)
    whole = run_warm(plan, tmp_path / "whole", "--no-meter")
    assert set(whole.exit_codes) == {0}, whole.output
    assert rundir.read_losses(folder) == rundir.read_losses(tmp_path / "whole")
    assert processes(pair) == []

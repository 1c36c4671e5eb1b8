"""Two nodes of a run in one PID namespace, as of two jobs of Slurm on a host: the first to end leaves the other alone.

Each node is `executor join` in a network namespace of its own. Not here: hosts with processes of their own
(test_join.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from test_join import EXECUTOR, a_plan, run_folder
from waiting import PATIENCE_S, until

from executor.launchers import namespaces

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(namespaces.unusable() is not None, reason=str(namespaces.unusable())),
]
SLOW_END = """
import atexit, os, pathlib, time
def wait():
    here = pathlib.Path(os.environ["SLOW_END"])
    (here / "ended").touch()
    while not (here / "go").exists():
        time.sleep(0.05)
if os.environ.get("MESHWRIGHT_NODE") == os.environ["SLOW_NODE"] and "RANK" not in os.environ:
    atexit.register(wait)
"""


@pytest.mark.parametrize("slow", [0, 1])
def test_a_node_that_ends_first_kills_no_slower_one(tmp_path: Path, slow: int) -> None:
    folder = run_folder(tmp_path / "run", a_plan("ddp"))
    (hook := tmp_path / "hook").mkdir()
    (hook / "sitecustomize.py").write_text(SLOW_END)
    env = os.environ | {"PYTHONPATH": str(hook), "OMP_NUM_THREADS": "1"}
    with namespaces.network(2):
        nodes = []
        for node in (0, 1):
            words = ["ip", "netns", "exec", namespaces.namespace(os.getpid(), node), EXECUTOR, "join", folder]
            words += ["--node-rank", node, "--master", namespaces.address(0)]
            words += [f"--env=SLOW_END={tmp_path}", f"--env=SLOW_NODE={slow}"]
            command = [str(word) for word in words]
            own = env | {"SLOW_END": str(tmp_path), "SLOW_NODE": str(slow)}
            nodes.append(subprocess.Popen(command, env=own, text=True, stderr=subprocess.PIPE))
        try:
            _, quick = nodes[1 - slow].communicate(timeout=PATIENCE_S)
            until((tmp_path / "ended").exists, "the slower node's agent to come to its end")
            (tmp_path / "go").touch()
            _, said = nodes[slow].communicate(timeout=PATIENCE_S)
        finally:
            for one in nodes:
                one.kill()
    assert [one.returncode for one in nodes] == [0, 0], quick + said
    assert json.loads((folder / "run.json").read_text())["status"] == "completed"
    assert (folder / "weights" / "model.safetensors").exists()

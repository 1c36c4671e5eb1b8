"""The story of two hosts in docs/launching.md, typed as written: from a file of hosts to one exported model.

The hosts have sshd, addresses and homes of their own, no clone and no shared folder; the packages, which the block's
first lines install from the network, are those of this environment. Not here: how hosts are reached (test_ssh.py).
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from hosts import TestHosts, network, unusable

from tests.test_docs import FENCE, TWO_HOSTS, section

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))

PROJECT = Path(__file__).parents[2]
CODE = [PROJECT / name for name in ("planner", "executor", "presets")]
NAMES = ("node1", "node2")
PACKAGES = next(path for path in site.getsitepackages() if path.startswith(sys.prefix))
INSTALLS = ("source ", "for ", "    ssh ", "done")
PATIENCE_S = 900


def install(hosts: TestHosts) -> None:
    """What the block's loop leaves on each host: ~/meshwright with the packages. Both share this machine's cores, so a
    rank has one thread."""
    for host in hosts.hosts:
        venv.create(host.home / "meshwright", with_pip=False, symlinks=True)
        (packages,) = host.home.glob("meshwright/lib/python*/site-packages")
        (packages / "others.pth").write_text(f"{PACKAGES}\nimport os; os.environ['OMP_NUM_THREADS'] = '1'\n")


def test_two_bare_hosts_train_one_model_by_the_lines_of_the_page(tmp_path: Path) -> None:
    ((_, block),) = FENCE.findall(section(*TWO_HOSTS))
    lines = [line for line in block.splitlines() if not line.startswith(INSTALLS)]
    assert [line.split()[0] for line in lines] == ["printf", "planner", "executor", "executor", "executor"]
    (alone := tmp_path / "alone").mkdir()  # this machine's alone, as on a host that shares no disk

    with network(tmp_path / "net", NAMES, own=[alone, *CODE]) as hosts:
        install(hosts)
        env = os.environ | {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "MESHWRIGHT_SSH": f"ssh -F {hosts.ssh_config}",
        }
        for line in lines:
            done = subprocess.run(
                ["bash", "-c", line], cwd=alone, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=PATIENCE_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"

    losses = [json.loads(line)["loss"] for line in (alone / "runs/two/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 20 and losses[-1] < losses[0]
    assert {path.name for path in (alone / "my-first-model").iterdir()} >= {"config.json", "model.safetensors"}

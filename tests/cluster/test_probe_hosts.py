"""`executor probe --hosts FILE` on two hosts with sshd of their own: a preset that the planner takes, and nothing left.

Not here: the figures (docs/probing.md), or the hosts (hosts.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import network, running_on, unusable
from waiting import PATIENCE_S, until

from planner.spec import presets

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

EXECUTOR = Path(sys.executable).with_name("executor")
WORDS = ("--name", "two", "--quick", "--ranks", "1", "--kind", "cpu", "--json")


def test_links_between_hosts_become_a_cluster_preset(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("red\nblue\n")
    with network(tmp_path / "net", ("red", "blue")) as made:
        before = [host.sent_bytes() for host in made.hosts]
        done = subprocess.run(
            [EXECUTOR, "probe", "--hosts", tmp_path / "hosts", "-o", tmp_path / "out", *WORDS],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {made.ssh_config}", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        crossed = [host.sent_bytes() - past for host, past in zip(made.hosts, before, strict=True)]
        until(lambda: running_on(made.hosts, "executor") == [], "every process on the hosts to end")
    probe = json.loads(done.stdout)
    assert (probe["launcher"], probe["nodes"], probe["ranks_per_node"]) == ("ssh", 2, 1)
    assert {row["nodes"] for row in probe["exchanges"]} == {2}
    assert min(crossed) > 100_000
    cluster = presets.cluster("two", nodes=2, gpus_per_node=1, folders=(tmp_path / "out",))
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 1)
    assert cluster.inter_link.bytes_per_s_per_direction > 0

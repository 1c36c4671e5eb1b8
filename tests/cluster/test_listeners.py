"""Where a run listens: on loopback alone where it is of one machine, else on the addresses that its hosts have for it.

Every engine that is launched, held in its second step, on hosts of which all that listens is seen. Not here: who is
answered (docs/launching.md), or a loop of one's own (test_join.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import make_plan
from cases import SEQUENCES, job
from hanging import HOOK
from hosts import TestHost, TestHosts, network, unusable
from test_ssh import CODE, EXECUTOR, NAMES, ended, nothing_stays, started
from waiting import PATIENCE_S, until

from executor.backends.launched import LAUNCHED
from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(unusable() is not None, reason=str(unusable()))]
SPLITS = {
    "single": {},
    "ddp": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2, "zero_stage": 3},
    "deepspeed": {"dp_shard": 2, "zero_stage": 3},
    "deepspeed-autotp": {"tp": 2, "zero_stage": 1},
    "deepspeed-pipeline": {"pp": 2, "pp_schedule": "1f1b", "zero_stage": 1, "grad_accum": 2},
    "deepspeed-ulysses": {"cp": 2, "cp_method": "ulysses", "zero_stage": 2},
    "transformers-tp": {"tp": 2},
}
HELD = {"HOLD": "0 2 1"}


def a_plan(engine: str, nodes: int = 1) -> Plan:
    split = SPLITS[engine]
    copies = split.get("dp_replicate", 1) * split.get("dp_shard", 1) * split.get("grad_accum", 1)
    layout = Layout(engine=engine, micro_batch_size=SEQUENCES // copies, **split)
    per_node = 1 if engine == "single" else 2 // nodes
    return inputs.resolved(make_plan(layout, job("full"), nodes=nodes, per_node=per_node))


def listeners(host: TestHost) -> set[str]:
    """ADDRESS:PORT of all that listens on a host beside its sshd."""
    return {line.split()[3] for line in host.run("ss", "-Hltn").stdout.splitlines()} - {f"{host.address}:22"}


def test_every_engine_that_is_launched_is_looked_at() -> None:
    assert SPLITS.keys() == LAUNCHED.keys()


def sampled(engine: str) -> object:
    return engine if engine == "deepspeed" else pytest.param(engine, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHost]:
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES[:1]) as hosts:
        yield hosts.hosts[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES[:2], own=CODE) as hosts:
        yield hosts


@pytest.mark.parametrize("engine", [sampled(engine) for engine in SPLITS])
def test_a_run_of_one_machine_listens_on_loopback_alone(one: TestHost, tmp_path: Path, engine: str) -> None:
    (plan := tmp_path / "plan.json").write_bytes(encode_plan(a_plan(engine)))
    words = [str(EXECUTOR), "run", str(plan), "--run-dir", str(tmp_path / "run"), "--no-save-weights"]
    words += [f"--env={name}={value}" for name, value in HELD.items()]
    command = one.words("env", f"PYTHONPATH={HOOK}", "OMP_NUM_THREADS=1", *words)
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: run.poll() is not None or (tmp_path / "run" / "HOLD-2").exists(), "rank 0 to stand still")
    assert run.poll() is None, run.communicate()

    found = listeners(one)
    one.run("pkill", "-INT", "-f", "executor run")
    said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, said
    assert found and all(where.startswith(("127.0.0.1:", "[::1]:")) for where in found), found
    assert listeners(one) == set()


@pytest.mark.long
@pytest.mark.parametrize("engine", [engine for engine in SPLITS if engine != "single"])
def test_a_run_of_two_hosts_listens_on_their_addresses_alone(pair: TestHosts, tmp_path: Path, engine: str) -> None:
    run = started(pair, tmp_path, a_plan(engine, 2), tmp_path / "run", "--no-save-weights", befalls=HELD)
    until(lambda: run.poll() is not None or (tmp_path / "run" / "HOLD-2").exists(), "rank 0 to stand still")
    assert run.poll() is None, run.communicate()

    found = {host.address: listeners(host) for host in pair.hosts}
    run.terminate()
    code, said = ended(run)
    assert code == 143, said
    assert all(where.startswith(f"{address}:") for address, some in found.items() for where in some), found
    assert all(found.values()), found
    nothing_stays(pair)

"""`executor probe` before it measures: what it refuses, what it leaves alone. The rest: tests/cluster/test_probe.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.measure import probe
from planner.basics.errors import PlannerError


def quiet(_: str) -> None:
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        ({"ranks": 0}, "--ranks=0", 2),
        ({"nodes": 0}, "--nodes=0", 2),
        ({"name": "My Machine"}, "Try my-machine", 2),
        ({"kind": "cuda", "ranks": 4000}, "--ranks=4000", 2),
        ({"kind": "cuda", "ranks": 1000}, "need 1000 GPUs", 3),
    ],
)
def test_what_cannot_be_probed_is_refused_before_anything_is_made(tmp_path: Path, options, words: str, code: int):
    with pytest.raises(PlannerError, match=words) as caught:
        probe.prepare(probe.ProbeOptions(folder=tmp_path / "new", **options), quiet)

    assert caught.value.exit_code == code
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("taken", ["probe.json", "calibrations/here.toml"])
def test_an_earlier_probe_is_overwritten_only_when_asked(tmp_path: Path, taken: str):
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("earlier")

    with pytest.raises(PlannerError, match="--force"):
        probe.prepare(probe.ProbeOptions(folder=tmp_path, name="here", kind="cpu"), quiet)
    assert probe.prepare(probe.ProbeOptions(folder=tmp_path, name="here", kind="cpu", force=True), quiet).ranks == 2


@pytest.mark.slow
def test_emulated_nodes_start_as_those_of_a_run_do(tmp_path: Path):
    options = probe.ProbeOptions(folder=tmp_path, name="here", kind="cpu", nodes=2, ranks=3, hosts="loopback")
    spec = probe.launch_spec(probe.prepare(options, quiet), tmp_path, 20000)

    assert [one.node for one in spec.commands] == [0, 1]
    for one in spec.commands:
        assert "executor.worker.agent" in one.argv
        assert one.argv[-3:] == ("-m", "executor.worker.probe.probe", str(tmp_path))
        assert one.argv[one.argv.index("--nproc-per-node") + 1] == "3"

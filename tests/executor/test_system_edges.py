"""What a host's system, its disk and its limits say, a bound tried on each side; and what is shown of many hosts alike.

Not here: real hosts (tests/cluster/test_check.py), or a full disk (tests/cluster/test_faults.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from test_checkpoints import NAMES, PLAN, flip, run, written  # noqa: F401
from test_rundir import make_plan

from executor.folder import checkpoints, rundir
from executor.folder.alive import Said
from executor.hosts.checks import compare, table
from executor.hosts.checks.check import CheckTable
from executor.hosts.checks.host import CheckReply
from executor.hosts.hosts import HostEntry, keep_hosts, kept_hosts
from executor.launchers import namespaces
from executor.launchers.kubernetes import Claim, manifests
from executor.measure import measure
from executor.preflight import limits
from executor.preflight.findings import Finding
from executor.run import attempts
from executor.system import cgroups, sources
from executor.watch import hangs
from executor.worker.world import wire
from planner.basics.errors import PlannerError
from planner.spec import Gpu, Layout, Lora, TrainingJob

TWO = make_plan(Layout(engine="ddp", dp_replicate=2))


def test_kills_are_counted_from_where_a_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 5)
    assert (cgroups.kills_since(3), cgroups.kills_since(5), cgroups.kills_since(0)) == (2, 0, 5)
    assert cgroups.kills_since(None) is None
    monkeypatch.setattr(cgroups, "oom_kills", lambda: None)
    assert cgroups.kills_since(3) is None


def test_the_code_that_hosts_take_in_is_ours_without_what_python_keeps() -> None:
    names = sources.sources().files
    assert {"planner/__init__.py", "executor/hosts/boot.py"} <= names.keys()
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_hosts_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    hosts = (HostEntry("a", slots=2, port=7), HostEntry("b", user="me", line=3))
    keep_hosts(tmp_path, hosts)
    assert kept_hosts(tmp_path) == hosts
    assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0]


@pytest.mark.parametrize(
    ("number", "state"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "whole"), (errno.EACCES, "whole")]
)
def test_a_folder_is_full_where_the_system_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, state: str
) -> None:
    assert rundir.state(tmp_path) == "deleted"
    rundir.create(tmp_path / "run", TWO, {})
    assert rundir.state(tmp_path / "run") == "whole"
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.endswith(".probe")]

    def fail(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(rundir.os, "fsync", fail)
    assert rundir.state(tmp_path / "run") == state


def test_a_host_s_part_of_a_checkpoint_is_this_very_one_undamaged(run: Path) -> None:  # noqa: F811
    folder = written(run, 20)
    found = checkpoints.complete(folder)
    assert checkpoints._is(folder, found, found.files)
    other = replace(found, step=21)
    assert not checkpoints._is(folder, other, found.files) or other.content_hash == found.content_hash
    assert not checkpoints._is(run / "none", found, found.files)
    flip(folder / NAMES[1])
    assert not checkpoints._is(folder, found, found.files)
    assert checkpoints._is(folder, found, {NAMES[0]: found.files[NAMES[0]]})  # the damaged one is another host's


def on(kind: str, layout: Layout = TWO.layout) -> Any:
    plan = make_plan(layout)
    return replace(plan, cluster=replace(plan.cluster, gpu=Gpu(name="x", kind=kind)))  # type: ignore[arg-type]


def test_ranks_of_a_host_share_a_segment_each_under_nccl_and_deepspeed_s_buffers_on_cpus() -> None:
    zero = Layout(engine="deepspeed", dp_shard=2, zero_stage=1)
    assert limits._shared_bytes(on("cuda"), 1) == limits._shared_bytes(on("cpu", zero), 1) == 0
    assert limits._shared_bytes(on("cuda"), 2) == 2 * 9_637_888
    assert limits._shared_bytes(on("cuda"), 3) == 3 * 9_637_888
    # csrc/cpu/comm/shm.cpp: two buffers of 1 MiB and two of 32 MiB of a rank, where all ranks are on one host.
    assert limits._shared_bytes(on("cpu", zero), 2) == 2 * 66 * 2**20
    assert limits._shared_bytes(on("cpu", replace(zero, dp_shard=4)), 2) == 0
    assert limits._shared_bytes(on("cpu"), 2) == 0


def disk(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, free: int) -> Path:
    found = SimpleNamespace(f_blocks=size // 512, f_frsize=512, f_bavail=free // 512)
    monkeypatch.setattr(limits.os, "statvfs", lambda path: found)
    return folder


def test_shared_memory_is_refused_below_the_need_and_doubted_below_the_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = 2 * 9_637_888  # a multiple of 512
    cuda = on("cuda")
    limits.check_shared_memory(cuda, 2, disk(tmp_path, monkeypatch, 2**30, need))
    with pytest.raises(PlannerError, match="2 ranks on one host need"):
        limits.check_shared_memory(cuda, 2, disk(tmp_path, monkeypatch, 2**30, need - 512))
    with pytest.raises(limits.Doubt, match="advises"):
        limits.check_shared_memory(cuda, 2, disk(tmp_path, monkeypatch, 2**30 - 512, need))
    for plan, ranks in ((cuda, 1), (on("cpu"), 2)):
        limits.check_shared_memory(plan, ranks, disk(tmp_path, monkeypatch, 2**20, 0))
    assert limits.check_shared_memory(cuda, 2, tmp_path / "none") == "none on this system"


def test_a_gpu_with_less_free_than_a_rank_takes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free: dict[int, float | None] = {0: 9e9, 1: 8e9, 2: 1e9, 3: None}
    monkeypatch.setattr(limits, "visible_cards", lambda: list(free))
    monkeypatch.setattr(limits.facts, "free_memory", free.__getitem__)
    phase = SimpleNamespace(total=8e9)

    def plan(total: float, kind: str = "cuda") -> Any:
        memory = (phase, SimpleNamespace(total=total))
        return SimpleNamespace(
            cluster=SimpleNamespace(gpu=SimpleNamespace(kind=kind)), prediction=SimpleNamespace(memory=memory)
        )

    assert "free" in limits.check_gpu_memory(plan(7e9), 2)
    with pytest.raises(PlannerError, match="GPU=1") as told:
        limits.check_gpu_memory(plan(8.1e9), 2)
    assert told.value.exit_code == 3
    with pytest.raises(PlannerError, match="GPU=2"):
        limits.check_gpu_memory(plan(1.0), 4)
    free |= {0: None, 1: None}
    assert limits.check_gpu_memory(plan(8.1e9), 2) == limits.check_gpu_memory(plan(8.1e9, "cpu"), 4) == "n/a"


def test_a_finding_is_refused_by_its_field_or_else_its_check() -> None:
    bare = Finding(check="room", status="fail", rule="is full", fix="Free some")
    assert (bare.refusal.field, bare.refusal.value, bare.refusal.exit_code) == ("room", None, 3)
    named = replace(bare, field="--run-dir", measured="1 B")
    assert (named.refusal.field, named.refusal.value) == ("--run-dir", "1 B")


def rows(count: int, *, same: bool, status: Any = "pass", check: str = "GPU") -> tuple[compare.NodeFinding, ...]:
    rule = "" if status == "pass" else "is wrong"
    return tuple(
        compare.row(
            Finding(check=check, status=status, measured="x" if same else f"x{node}", rule=rule), node, f"n{node}"
        )
        for node in range(count)
    )


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (rows(3, same=True), ["GPU  all 3  pass  x"]),
        (rows(4, same=False), [f"{'GPU' if node == 0 else '   '}  n{node}  pass  x{node}" for node in range(4)]),
        (rows(5, same=False), ["GPU  all 5  pass  x0 on n0; others in --json"]),
        (rows(1, same=True), ["GPU  n0  pass  x"]),
    ],
)
def test_hosts_that_found_the_same_share_a_line_and_many_figures_are_one(found: Any, lines: list[str]) -> None:
    names = [one.host for one in found]
    text = table.as_text(CheckTable(found, {"facts": 1.25, "reach": 0.5}), names).splitlines()
    assert text[:-2] == lines
    assert text[-1] == f"{len(names)} of {len(names)} nodes can run the plan (in 1.8 s)"


def test_what_fails_keeps_its_lines_beside_many_that_pass_and_is_counted() -> None:
    found = (*rows(6, same=False), *(replace(one, node=6, host="n6") for one in rows(1, same=True, status="fail")))
    found = (*found, *(replace(one, host="n6") for one in rows(2, same=True, status="warn", check="clock")))
    text = table.as_text(CheckTable(found, {}), [f"n{node}" for node in range(7)]).splitlines()
    assert text[0].startswith("GPU    n0 and 5 more  pass  x0 on n0") and "n6" in text[1] and "FAIL" in text[1]
    assert text[-1] == "1 checks failed on n6, 2 warned (in 0.0 s)"
    na = compare.row(Finding(check="all-reduce", status="skip", measured=table.NOT_ASKED), 0, "n0")
    assert table.as_text(CheckTable((na,), {}), ["n0"]).splitlines()[0] == ""


def test_an_all_reduce_of_one_rank_is_measured_and_not_judged_and_a_silent_host_has_no_row() -> None:
    said = [{"rank": 0, "bytes": 4e9, "seconds": 2.0}]
    one, none = CheckReply(node=0, host="a", reduced=said), CheckReply(node=1, host="b")
    (row,) = compare.rows_of_reduce({0: one, 1: none}, 1, 0.1)
    assert (row.status, row.measured, row.node) == ("pass", "1 ranks, 2 GB/s", 0)
    four = CheckReply(node=0, host="a", reduced=[{"rank": rank, "bytes": 4e9, "seconds": 2.0} for rank in range(4)])
    assert compare.rows_of_reduce({0: four}, 4, None)[0].measured == "4 ranks, 3 GB/s"  # 2 x 3/4 of the bytes


def test_whom_a_node_does_not_reach_is_named_and_others_are_not_tried() -> None:
    blocked = {"rank": 0, "error": "x", "blocked": {"0": [1, 2]}}
    answers = {node: CheckReply(node=node, host=f"n{node}", reduced=[blocked]) for node in (0, 1)}
    first, second = compare.rows_of_reduce(answers, 1, None)
    assert first.status == "fail" and "n1, node 2" in first.rule
    assert (second.status, second.rule) == ("skip", "")


@pytest.mark.parametrize(
    ("ahead_s", "status", "way"),
    [(0.99, "pass", "ahead of"), (-0.99, "pass", "behind"), (1.0, "warn", "ahead of"), (-59.9, "warn", "behind"),
     (60.0, "fail", "ahead of"), (-61.0, "fail", "behind")],
)  # fmt: skip
def test_clocks_are_doubted_from_a_second_and_wrong_from_a_minute(ahead_s: float, status: str, way: str) -> None:
    (row,) = compare.rows_of_clocks(
        {0: CheckReply(node=0, host="a", ahead_s=ahead_s), 1: CheckReply(node=1, host="b", ahead_s=None)}
    )
    assert row.status == status and way in row.measured


def test_a_jobset_has_a_pod_a_node_that_is_not_brought_back_alone() -> None:
    plan = replace(on("cuda"), cluster=replace(on("cuda").cluster, nodes=3, gpus_per_node=8))
    config, jobset = manifests(plan, {"plan.json": "p", "config/a.yaml": "y"}, 29500, "i", (Claim("d", "/d"),))
    name = config["metadata"]["name"]
    assert config["data"] == {"plan.json": "p", "config--a.yaml": "y"}
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (group["replicas"], job["completions"], job["parallelism"], job["backoffLimit"]) == (1, 3, 3, 0)
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}} and container["ports"] == [{"containerPort": 29500}]  # fmt: skip  # noqa: E501
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["MASTER"] == f"{name}-node-0-0.{name}:29500"
    assert environment["RUN"] == f"/runs/{name}/$(JOB_COMPLETION_INDEX)" and "START" not in environment
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/launch", "/dev/shm", "/d", "/runs"]
    assert [one["name"] for one in pod["volumes"]] == ["launch", "shm", "claim-0", "runs"]

    own = (Claim("r", "/runs"), Claim("d", "/d"))
    _, again = manifests(on("cpu"), {}, 1, "i", own, ("TOKEN",), "id", restarts=2)
    pod = again["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [one["name"] for one in pod["volumes"]] == ["launch", "shm", "claim-0", "claim-1"]
    assert again["spec"]["failurePolicy"] == {"maxRestarts": 2} and "resources" not in container
    by_name = {one["name"]: one for one in container["env"]}
    assert by_name["RUN"]["value"] == "/runs/id" and "START" in by_name
    assert by_name["TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "TOKEN"


def test_an_earlier_start_without_a_word_of_its_own_began_at_the_beginning(tmp_path: Path) -> None:
    rundir.create(tmp_path / "run", TWO, {})
    folder = tmp_path / "run" / attempts.ATTEMPTS / "1"
    folder.mkdir(parents=True)
    (folder / rundir.PLAN).write_bytes((tmp_path / "run" / rundir.PLAN).read_bytes())
    (one,) = attempts.read(tmp_path / "run")
    assert (one.resumed_from, one.steps, one.repeated_s, one.down_s, one.status) == (
        0, 0, 0.0, None, "ended without a record")  # fmt: skip
    assert one.exit_code == 1


def test_ranks_that_say_nothing_are_looked_for_every_five_seconds_until_all_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    there: dict[int, str] = {0: "7:1", 5: "9:9"}

    def ranks_of(run_id: str) -> dict[int, str]:
        looks.append(run_id)
        return dict(there)

    monkeypatch.setattr(hangs.processes, "ranks_of", ranks_of)
    watch = hangs.HangWatch(tmp_path, "id", 0, (0, 1), 4)
    assert (watch._processes(0.0), looks) == ({0: "7:1"}, ["id"])
    watch._processes(4.9)
    assert len(looks) == 1
    there[1] = "8:1"
    assert (watch._processes(5.0), len(looks)) == ({0: "7:1", 1: "8:1"}, 2)
    watch._processes(99.0)
    assert len(looks) == 2  # all are found
    speaks = hangs.HangWatch(tmp_path, "id", 0, (0, 1), 4)
    for rank in (0, 1):
        speaks._heard[rank] = hangs._Heard(Said(rank=rank, process=f"{rank}:1", count=1, stage="step"), 0.0)
    assert (speaks._processes(0.0), len(looks)) == ({0: "0:1", 1: "1:1"}, 2)


def test_a_model_is_built_on_a_host_that_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Embeddings and head 300 x 16 each; q, k, v, o 4 x 16 x 16; gate, up, down 3 x 16 x 32; three norms of 16.
    weights = 2 * 300 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16
    adapters = Lora(rank=4, alpha=8, targets=("q_proj",))
    for job, size in (
        (TrainingJob(precision="fp32"), 4 * weights),
        (TrainingJob(precision="bf16"), 4 * weights),
        (TrainingJob(precision="pure-bf16"), 2 * weights),
        (TrainingJob(precision="bf16", method="lora", lora=adapters), 2 * (weights + 4 * 32)),
    ):
        cell: Any = SimpleNamespace(plan=make_plan(Layout(engine="ddp"), job=job))
        for free, holds in ((size / 0.7 + 2, True), (size / 0.7 - 2, False)):
            monkeypatch.setattr(measure, "available_memory", lambda free=free: free)
            assert measure.host_holds(cell) is holds


def test_a_cell_has_a_folder_of_its_name_which_a_cut_run_does_not_keep(tmp_path: Path) -> None:
    cell: Any = SimpleNamespace(id="one")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    with measure._folder(cell, tmp_path / "runs") as folder:
        assert (folder, folder.exists()) == (tmp_path / "runs" / "one", False)
        folder.mkdir()
    assert folder.exists()
    with measure._folder(cell, None) as folder:
        assert (folder.name, folder.parent.exists()) == ("one", True)
    assert not folder.parent.exists()
    with measure._folder(cell, tmp_path / "new" / "runs") as folder:
        assert folder.parent.is_dir()


# -- counts that cannot be read ----------------------------------------------------------------------------------------

DEV = "Inter-| Receive | Transmit\n face |bytes\n eth0: 9 9 9 9 9 9 9 9 {0} {0} 7 7\n lo: 9 9 9 9 9 9 9 9 1 1 7 7\n"
FAULTS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "no file": lambda path: (path.unlink(), path.mkdir()),
    "empty": lambda path: path.write_text(""),
    "words": lambda path: path.write_text(path.read_text().replace("1", "many")),
    "another's": lambda path: path.write_text(path.read_text().replace("eth0", "eth9").replace("1", "x")),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


def _wire(place: Path, spoil: Callable[[], object]) -> object:
    counter = wire.WireCounter()
    counter.begin()
    for step in range(1, 6):
        (place / "dev").write_text(DEV.format(100 * step))
        if step == 5:
            spoil()
        counter.step_ended()
    return counter.result()


def _sent(place: Path, spoil: Callable[[], object]) -> object:
    spoil()
    return namespaces.sent_bytes(2)


def _kills(place: Path, spoil: Callable[[], object]) -> object:
    spoil()
    return cgroups.oom_kills(place)


READERS: dict[str, tuple[Callable[[Path, Callable[[], object]], object], str, object]] = {
    "bytes of a step": (_wire, "dev", None),
    "bytes between nodes": (_sent, f"links/{namespaces.link(os.getpid(), 1)}/statistics/rx_bytes", ()),
    "kills for memory": (_kills, "group/memory.events", None),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_count_of_the_system_that_cannot_be_read_is_not_measured(tmp_path, monkeypatch, reader, fault):
    read, name, absent = READERS[reader]
    monkeypatch.setattr(wire, "COUNTERS", tmp_path / "dev")
    monkeypatch.setattr(namespaces, "LINKS", tmp_path / "links")
    monkeypatch.setenv(wire.VARIABLE, "eth0,lo")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for node in (0, 1):
        place = tmp_path / "links" / namespaces.link(os.getpid(), node) / "statistics"
        place.mkdir(parents=True)
        (place / "rx_bytes").write_text("1111\n")
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "memory.events").write_text("oom 1\noom_kill 1\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"1 1 0:1 / {tmp_path / 'group'} rw - cgroup2 cgroup rw\n")
    (tmp_path / "dev").write_text(DEV.format(100))

    found = read(tmp_path, (lambda: FAULTS[fault](tmp_path / name)) if fault else lambda: None)
    assert (found == absent) == (fault is not None), found

"""Memory control groups of both versions, as Linux lays them out; tests/cluster/test_faults.py has a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.system import cgroups

V2 = "0::/user.slice/job\n"
V1 = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"


def process(folder: Path, groups: str, *mounts: str) -> Path:
    """A stand-in for /proc/self, whose mounts lie below `folder`."""
    own = folder / "self"
    own.mkdir()
    (own / "cgroup").write_text(groups)
    (own / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return own


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2_has_the_least_limit_of_the_group_and_those_above_and_its_own_kills(tmp_path):
    root = tmp_path / "unified"
    own = process(tmp_path, V2, f"41 31 0:38 / {root} rw - cgroup2 cgroup2 rw,nsdelegate")
    write(root / "user.slice/job", memory__max="max\n", memory__events="low 0\noom 2\noom_kill 3\noom_group_kill 0\n")
    write(root / "user.slice", memory__max="1000\n", memory__events="oom_kill 7\n")

    assert (cgroups.limit_bytes(own), cgroups.oom_kills(own)) == (1000.0, 3)


def test_version_1_is_read_where_its_memory_controller_is_mounted(tmp_path):
    root = tmp_path / "memory"
    own = process(
        tmp_path, V1,
        f"32 31 0:29 / {tmp_path / 'cpu'} rw - cgroup cgroup rw,cpu",
        f"35 31 0:32 / {root} rw - cgroup cgroup rw,memory",
    )  # fmt: skip
    write(
        root / "job",
        memory__limit_in_bytes="500\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    )
    write(root, memory__limit_in_bytes="9223372036854771712\n", memory__oom_control="oom_kill 9\n")

    assert (cgroups.limit_bytes(own), cgroups.oom_kills(own)) == (500.0, 1)


def test_a_container_that_sees_its_own_group_as_the_mounts_root_is_read_there(tmp_path):
    root = tmp_path / "unified"
    own = process(tmp_path, "0::/docker/abc\n", f"41 31 0:38 /docker/abc {root} rw - cgroup2 cgroup2 rw")
    write(root, memory__max="2000\n", memory__events="oom_kill 4\n")

    assert (cgroups.limit_bytes(own), cgroups.oom_kills(own)) == (2000.0, 4)


@pytest.mark.parametrize("groups", ["", "0::/../outside\n", V1])
def test_what_nothing_says_is_not_known_and_not_zero(tmp_path, groups):
    own = process(tmp_path, groups, f"41 31 0:38 / {tmp_path / 'unified'} rw - cgroup2 cgroup2 rw")

    assert (cgroups.limit_bytes(own), cgroups.oom_kills(own)) == (None, None)
    assert cgroups.kills_since(None) is None
    assert (cgroups.limit_bytes(tmp_path / "absent"), cgroups.oom_kills(tmp_path / "absent")) == (None, None)

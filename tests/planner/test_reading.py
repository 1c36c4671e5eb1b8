"""Files that are given are bounded in kind, size, line length, nesting and what their aliases repeat."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.basics import reading


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "is not a name of a file", "No such file"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    with socket.socket(socket.AF_UNIX) as held:
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            held.bind(str(path))
        elif kind == "device":
            path.symlink_to("/dev/zero")
        name = f"{path}\0" if kind == "is not a name of a file" else str(path)
        for read in (reading.opened, reading.read_bytes, reading.read_text, lambda one: list(reading.read_lines(one))):
            with pytest.raises(OSError, match=kind):
                read(name)


def test_a_file_of_the_most_bytes_is_read_and_one_of_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "it"
    for size in (0, 9, 10):
        path.write_bytes(b"x" * size)
        assert reading.read_bytes(path, 10) == b"x" * size
    path.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="is larger than"):
        reading.read_bytes(path, 10)
    path.write_bytes(b"a\nbcd\n\nlast")
    assert list(reading.read_lines(path, 4)) == [b"a\n", b"bcd\n", b"\n", b"last"]
    with pytest.raises(OSError, match="longer than 0 KiB: 2"):
        list(reading.read_lines(path, 3))


DEEP = 100_000


@pytest.mark.parametrize(
    "case, given",
    {
        "toml list": (reading.read_toml, b"a=" + b"[" * 5000 + b"]" * 5000),
        "toml table": (reading.read_toml, b"a." * 100 + b"a=1"),
        "toml square": (reading.read_toml, b"a." * DEEP + b"a=1"),
        "toml int": (reading.read_toml, b"a=" + b"9" * 5000),
        "json list": (reading.read_json, b"[" * DEEP + b"]" * DEEP),
        "json just too deep": (reading.read_json, b"[" * 66 + b"]" * 66),
        "json table, infinite": (reading.read_json, b'{"a":' * DEEP + b"Infinity" + b"}" * DEEP),
        "json int": (reading.read_json, b"9" * DEEP),
        "json cut off": (reading.read_json, b"[" * DEEP),
        "yaml flow": (reading.read_yaml, b"[" * DEEP),
        "yaml block": (reading.read_yaml, b"\n".join(b" " * n + b"a:" for n in range(300))),
        "yaml aliases": (reading.read_yaml, b"a0: &a0 [1]\n" + b"".join(
            b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9))),
        "yaml chain": (reading.read_yaml, b"a0: &a0 [1]\n" + b"".join(
            b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 90))),
        "yaml merges": (reading.read_yaml, b"a0: &a0 {k: 1}\n" + b"".join(
            b"a%d: &a%d {<<: [%s]}\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9))),
        "yaml of itself": (reading.read_yaml, b"a: &a [*a]"),
        "yaml twice": (reading.read_yaml, b"b: {a: 1, c: {a: 2}, a: 3}"),
        "yaml of nothing": (reading.read_yaml, b"a: *b"),
        "yaml cut off": (reading.read_yaml, b"a: [1"),
        "yaml bytes": (reading.read_yaml, b"\xff\xfe\x00"),
    }.items(),
)  # fmt: skip
def test_what_is_too_deep_or_repeats_itself_is_a_value_error(
    case: str, given: tuple[Callable[[bytes], object], bytes]
) -> None:
    read, raw = given
    with pytest.raises(ValueError) as said:
        read(raw)
    assert len(str(said.value)) < 300 and "\n" not in str(said.value).strip()


def test_what_people_have_is_read() -> None:
    assert reading.read_json(b"[" * 64 + b"]" * 64)
    assert reading.read_json(b'{"a": [0.0, Infinity], "b": -Infinity, "c": NaN}')["a"] == [0.0, float("inf")]
    assert reading.read_toml(b"a.b.c = [[1, 2], [3]]") == {"a": {"b": {"c": [[1, 2], [3]]}}}
    assert reading.read_yaml(b"a: &x {k: 1}\nb: {<<: *x, l: *x}\nc: [*x, *x]") == {
        "a": {"k": 1}, "b": {"k": 1, "l": {"k": 1}}, "c": [{"k": 1}, {"k": 1}],
    }  # fmt: skip
    assert reading.read_yaml(b"- {a: 1, b: a}\n- {a: [a, a], b: {a: a}}\n") == [
        {"a": 1, "b": "a"},
        {"a": ["a", "a"], "b": {"a": "a"}},
    ]
    assert reading.read_yaml(b"") is None


@pytest.mark.parametrize(
    "name, stays",
    {
        "model.safetensors": True, "sub/model-00001-of-2.safetensors": True, "..model": True, "..": False,
        "../other": False, "a/../../b": False, "/etc/passwd": False, "": False, "a\\..\\..\\b": False, "a\0b": False,
        "a\nb": False,
    }.items(),
)  # fmt: skip
def test_names_that_leave_a_folder_are_told(name: str, stays: bool) -> None:
    assert reading.inside(name) is stays


def test_only_text_is_a_name() -> None:
    other: tuple[object, ...] = (None, 1, [], {})
    assert not any(reading.inside(one) for one in other)

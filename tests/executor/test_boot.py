"""Code that a host has, or takes in: its digest, and that it comes whole; and where hosts are said to meet.

Not here: a real connection (tests/executor/test_ssh_run.py).
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.hosts import boot, remote
from executor.hosts.checks import compare
from executor.hosts.checks.check import _meeting, _place
from executor.preflight.findings import Finding
from executor.system.sources import Sources, sources


def zipped(**files: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return packed.getvalue()


def test_a_digest_is_of_names_and_contents_and_not_of_what_python_keeps(tmp_path: Path) -> None:
    place = tmp_path / "code"
    boot.unpack(zipped(planner__a="1", executor__b="2"), str(place))
    whole = boot.digest(str(place))

    (place / "planner" / "__pycache__").mkdir()
    (place / "planner" / "__pycache__" / "a.pyc").write_text("x")
    assert boot.digest(str(place)) == whole and len(whole) == 16
    (place / "planner" / "a").write_text("3")
    assert boot.digest(str(place)) != whole
    (place / "planner" / "a").write_text("1")
    (place / "planner" / "a").rename(place / "planner" / "c")
    assert boot.digest(str(place)) != whole
    assert boot.digest(str(tmp_path / "none")) is None


def test_packed_sources_have_on_a_host_the_digest_that_they_were_asked_by(tmp_path: Path) -> None:
    own = sources()
    few = Sources(dict(list(own.files.items())[:3]), own.digest)
    boot.unpack(few.packed, str(tmp_path / "few"))

    for name, content in few.files.items():
        assert (tmp_path / "few" / name).read_bytes() == content
    boot.unpack(own.packed, str(tmp_path / "code"))
    assert boot.digest(str(tmp_path / "code")) == own.digest


def test_what_is_unpacked_takes_the_place_of_what_was_there_and_damage_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "code"
    boot.unpack(zipped(old="1"), str(place))
    boot.unpack(zipped(new="2"), str(place))
    assert [path.name for path in place.iterdir()] == ["new"]

    with pytest.raises(zipfile.BadZipFile):
        boot.unpack(b"no zip", str(place))
    assert [path.name for path in tmp_path.iterdir()] == ["code"] and [path.name for path in place.iterdir()] == ["new"]


def test_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert boot.cache() == str(tmp_path / "meshwright" / "code")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert boot.cache() == str(tmp_path / ".cache" / "meshwright" / "code")


LOOKS: dict[int, Any] = {
    0: {"port": 29500, "addresses": {"10.0.0.1": ("eth0", 24)}},
    1: {"port": 29501, "addresses": {"10.0.0.2": ("eth0", 24)}},
}
ALIKE: dict[int, Any] = {0: LOOKS[0], 1: LOOKS[0]}


def test_hosts_meet_at_node_0_s_address_of_a_network_that_they_share_or_where_a_person_says() -> None:
    assert _place(LOOKS, None, []) == ("10.0.0.1", 29500)
    assert _place({0: LOOKS[0]}, None, []) == (None, 29500)
    assert _place(LOOKS, "b.example", []) == ("b.example", 29500)
    assert _place(LOOKS, "b.example:7", []) == ("b.example", 7)
    assert _place({1: LOOKS[1]}, "b.example", []) == (None, 0)
    failed = compare.row(Finding(check="master", status="fail"), 0, "a")
    assert _place(LOOKS, None, [failed]) == (None, 0)


def test_hosts_that_all_have_node_0_s_addresses_fail_there() -> None:
    assert _meeting(LOOKS, ("a", "b")) == []
    assert _meeting({1: LOOKS[1]}, ("a", "b")) == [] and _meeting({0: LOOKS[0]}, ("a",)) == []
    (row,) = _meeting(ALIKE, ("a", "b"))
    assert (row.node, row.host, row.check, row.status) == (0, "a", "master", "fail")


# -- a host's first code, in this process -----------------------------------------------------------------------------


@pytest.fixture
def booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `boot.main` with what a launcher sends: (exit code, what the host says line by line). `remote` gives 7."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/others")
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    monkeypatch.setattr(
        remote, "main", lambda stdin, out, asked: 7 if (stdin.read(), out.closed) == (b"", False) else 8
    )

    def main(*sent: bytes) -> tuple[int, list[Any]]:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"".join(sent))))
        kept = os.dup(1)
        with (tmp_path / "said").open("w+b") as written:
            os.dup2(written.fileno(), 1)
            try:
                code = boot.main()
                os.write(1, b"no message")
            finally:
                os.dup2(kept, 1)
                os.close(kept)
        text = (tmp_path / "said").read_text()
        assert not text.startswith("\n") or "no message" not in text
        return code, [json.loads(one) if one.startswith("{") else one for one in text.splitlines()]

    return main


def asked(code: str) -> bytes:
    return json.dumps({"marker": "here it begins", "code": code}).encode() + b"\n"


def test_what_a_host_prints_is_no_message_and_goes_where_its_errors_do(booted: Any, tmp_path: Path) -> None:
    boot.unpack(packed := zipped(planner__a="1"), str(tmp_path / "other"))
    kept = os.dup(2)
    with (tmp_path / "errors").open("w+b") as errors:
        os.dup2(errors.fileno(), 2)
        try:
            _, said = booted(asked(boot.digest(str(tmp_path / "other"))), b'{"bytes": %d}\n' % len(packed), packed)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert (tmp_path / "errors").read_text() == "no message" and "no message" not in str(said)


def test_a_host_takes_in_code_that_it_lacks_once_and_goes_on_with_it(booted: Any, tmp_path: Path) -> None:
    boot.unpack(packed := zipped(planner__a="1"), str(tmp_path / "other"))
    wanted = boot.digest(str(tmp_path / "other"))
    place = str(tmp_path / "meshwright" / "code" / wanted)

    code, said = booted(asked(wanted), json.dumps({"bytes": len(packed)}).encode() + b"\n", packed)
    assert (code, said[:2]) == (7, ["", "here it begins"])
    assert [(one["kind"], one.get("have"), one.get("place")) for one in said[2:]] == [
        ("code", False, None), ("ready", None, place)]  # fmt: skip
    assert {one["executable"] for one in said[2:]} == {sys.executable}
    assert {one["python"] for one in said[2:]} == {sys.version.split()[0]}
    assert sys.path[0] == place and "" not in sys.path[:2]
    assert os.environ["PYTHONPATH"] == f"{place}:/others"

    code, said = booted(asked(wanted))
    assert (code, [one["kind"] for one in said[2:]], said[2]["have"]) == (7, ["code", "ready"], True)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b'{"bytes": 6}\nno zip', "not a zip"),
        (b'{"bytes": %d}\n%s' % (len(zipped(a="2")), zipped(a="2")), "other bytes arrived"),
        (b"", "not a zip"),
    ],
)
def test_code_that_does_not_come_whole_is_not_run(booted: Any, sent: bytes, why: str) -> None:
    code, said = booted(asked("0123456789abcdef"), sent)
    assert (code, said[-1]["kind"], said[-1]["what"]) == (1, "failed", "code")
    assert why in said[-1]["why"] and said[-1]["place"].endswith("0123456789abcdef")


def test_no_question_an_old_python_and_a_package_that_is_missing_end_it(
    booted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for sent in (b"", b"{}\n"):
        assert booted(sent) == (1, ["no message"])
    boot.unpack(zipped(a="1"), str(tmp_path / "meshwright" / "code" / "there"))
    monkeypatch.setattr(boot, "digest", lambda place: "there")
    monkeypatch.setitem(sys.modules, "executor.hosts.remote", None)
    monkeypatch.delattr("executor.hosts.remote")
    code, said = booted(asked("there"))
    assert (code, said[-1]["kind"], said[-1]["module"]) == (1, "missing", "executor.hosts.remote")
    monkeypatch.setattr(boot, "OLDEST", (99, 0))
    code, said = booted(asked("there"))
    assert (code, [one["kind"] for one in said[2:]]) == (1, ["old"])
    monkeypatch.setattr(boot, "OLDEST", tuple(sys.version_info))
    assert booted(asked("there"))[1][-1]["kind"] == "missing"

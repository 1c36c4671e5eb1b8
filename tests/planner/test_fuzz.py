"""420 of the calls of `make fuzz`, by one seed: nothing is wrong with the end of any."""

from __future__ import annotations

import os
import signal

import click
import pytest

from scripts import apart, fuzz, fuzz_files, fuzz_inputs

SEED, CALLS = 20261122, 400


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")  # an import takes 20 s: tests/executor/test_imported.py has the odd ones
@pytest.mark.parametrize("part", range(4))
def test_no_wrong_input_ends_wrongly(part: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    kinds = fuzz.kinds_of(SEED, CALLS, tuple(fuzz_inputs.KINDS))
    calls = [fuzz.called(SEED, number, kinds[number]) for number in range(part, CALLS, 4)]

    assert {call.kind for call in calls} == set(fuzz_inputs.KINDS)
    wrong = [(call.number, call.kind, call.arguments, call.wrong, call.err[:300]) for call in calls if call.wrong]
    assert not wrong
    assert {0, 2} <= {call.code for call in calls} <= set(fuzz.CODES)
    assert sum(call.code == 0 for call in calls) > CALLS // 40 and sum(call.code == 2 for call in calls) > CALLS // 16


@pytest.mark.parametrize("kind", fuzz_files.KINDS)
def test_no_odd_file_folder_or_stream_ends_wrongly(kind: str):
    calls = [fuzz.called(SEED, number, kind) for number in range(4)]
    assert not [(call.number, call.arguments, call.wrong, call.err[:300]) for call in calls if call.wrong]


@pytest.mark.parametrize("kind", [*fuzz_files.SPECIAL])
def test_each_special_file_is_refused_and_not_waited_for(kind: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz_files.odd(tmp_path / "it.json", kind)
    for name, words in (("planner", ["show", "it.json"]), ("executor", ["run", "it.json", "--dry-run"])):
        end = apart.run(fuzz.GROUPS[name], name, words)
        assert (end.code, end.out, end.err.count("error:"), end.err.count("\n")) == (2, "", 1, 1), end


def test_a_call_that_waits_or_takes_memory_is_told(tmp_path, monkeypatch):
    """What the limits of a call's own process are for: a command that breaks them ends by them."""
    monkeypatch.setattr(apart, "MOST_S", 1)
    os.mkfifo(tmp_path / "pipe")

    def reads(name: str) -> click.Group:
        return click.Group("g", {"read": click.Command("read", callback=(tmp_path / name).read_bytes)})

    assert apart.run(reads("pipe"), "planner", ["read"]).code == -signal.SIGALRM
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(3 * 10**9)
    monkeypatch.setattr(apart, "MOST_S", 60)
    end = apart.run(reads("large"), "planner", ["read"])
    assert end.code == 1 and "internal error: MemoryError" in end.err


def test_the_same_seed_makes_the_same_calls():
    kinds = fuzz.kinds_of(SEED, 12, tuple(fuzz_inputs.KINDS))
    again = [fuzz.called(SEED, number, kind) for number, kind in enumerate(kinds)]
    assert [(call.arguments, call.code, call.err) for call in again] == [
        (call.arguments, call.code, call.err)
        for call in (fuzz.called(SEED, number, kind) for number, kind in enumerate(kinds))
    ]


def test_each_check_can_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("new")

    def told(code: int = 0, out: str = "", err: str = "", *arguments: str) -> str:
        return "; ".join(fuzz._wrong([*arguments], code, out, err, {"kept": b"new"}))

    assert told() == ""
    assert "internal error" in told(1, err="error: internal error: x") and "exit code 1" in told(1)
    assert "0 error lines" in told(2) and "2 error lines" in told(2, err="error: a\nerror: b\n")
    assert "no error line" in told(3) and "exit code 0" in told(0, err="error: a\n")
    assert "a line of 301" in told(2, err="error: " + "x" * 294) and "a line of 400" in told(0, "x" * 400)
    assert "no JSON" in told(0, "text", "", "estimate", "--json")
    assert "answer on stdout" in told(2, "text", "error: a\n")
    assert "takes more" in told(-27)
    (tmp_path / ".out.tmp").write_text("half")
    assert "left ['.out.tmp']" in told() and "and refused" in told(2, err="error: a\n")
    assert "changed" in "; ".join(fuzz._wrong([], 0, "", "", {"kept": b"old"}))
    assert "bytes of memory" in "; ".join(fuzz._wrong([], 0, "", "", {"kept": b"new"}, fuzz.MOST_BYTES + 1))


def test_what_a_call_takes_is_counted_from_what_the_process_had():
    held = bytearray(200_000_000)
    before = fuzz._memory_counted_anew()
    assert fuzz._peak_bytes() - before < len(held) / 4
    held[:] = bytes(len(held))
    assert fuzz._peak_bytes() - before > len(held) / 2

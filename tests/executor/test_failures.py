"""Whom to blame: a rank's own record, its agent's word, and text only where the type of an exception says nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_supervise import rank_log

from executor.folder.rundir import read_errors
from executor.watch.failures import Blame, failures, last_error_line
from executor.worker.world import lastwords
from planner.basics.errors import PlannerError

NOW_NS = 1_800_000_000_000_000_000
NOW = NOW_NS / 1e9
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1410: Connection reset by peer."
)


def first_failure(folder, ranks_per_node):
    return next(iter(failures(folder, ranks_per_node)), None)


def agent_saw(folder: Path, node: int, *failures: tuple[int, int, int, float], **more: object) -> None:
    (folder / "failed").mkdir(exist_ok=True)
    named = [dict(zip(("rank", "local_rank", "exit_code", "time"), one, strict=True)) for one in failures]
    (folder / "failed" / f"node-{node}.json").write_text(json.dumps({"failures": named} | more))


def rank_said(folder: Path, rank: int, kind: str, message: str, after_s: float = 0.0, **more: object) -> None:
    (folder / "failed").mkdir(exist_ok=True)
    record = {"schema": "failed/1", "rank": rank, "exit_code": 1, "kind": kind, "message": message}
    record |= {"time_ns": NOW_NS + int(after_s * 1e9)} | more
    (folder / "failed" / f"rank-{rank}.json").write_text(json.dumps(record))


def blamed(folder: Path, ranks_per_node: int = 1) -> tuple[int, str]:
    failure = first_failure(folder, ranks_per_node)
    assert failure is not None
    return failure.rank, failure.message


# -- a record against a record -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", f"RuntimeError: {GLOO}"),
        ("torch.AcceleratorError", "AcceleratorError: NCCL error: remote process exited or there was a network error"),
        ("torch.distributed.DistBackendError", "DistBackendError: what it says is not read"),
        ("torch.distributed.DistNetworkError", "DistNetworkError: The client socket has timed out"),
        ("ConnectionResetError", "ConnectionResetError: [Errno 104]"),
    ],
)
def test_a_rank_that_lost_its_peer_is_not_blamed_even_when_it_ended_first(tmp_path, kind, message):
    rank_said(tmp_path, 0, kind, message, after_s=-10)
    rank_said(tmp_path, 1, "ValueError", "ValueError: nan in the data")
    agent_saw(tmp_path, 0, (0, 0, 1, NOW - 10))
    agent_saw(tmp_path, 1, (1, 0, 1, NOW))

    assert blamed(tmp_path) == (1, "ValueError: nan in the data")


def test_what_an_exception_of_another_type_says_is_not_read_for_its_cause(tmp_path):
    rank_said(tmp_path, 1, "ValueError", "ValueError: connection closed by peer is not a label")
    rank_said(tmp_path, 0, "ValueError", "ValueError: a consequence, by its time", after_s=0.001)

    assert blamed(tmp_path) == (1, "ValueError: connection closed by peer is not a label")


def test_of_two_records_the_earlier_is_blamed_to_the_nanosecond(tmp_path):
    rank_said(tmp_path, 0, "KeyError", "KeyError: 'a'", after_s=1e-9)
    rank_said(tmp_path, 1, "KeyError", "KeyError: 'b'")
    agent_saw(tmp_path, 0, (0, 0, 1, float(int(NOW))), (1, 1, 1, float(int(NOW))))

    assert blamed(tmp_path, 2) == (1, "KeyError: 'b'")


# -- a signal, or os._exit, against a record -----------------------------------------------------------------------


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, 3])
@pytest.mark.parametrize("innocent", ["RuntimeError", "ValueError"])
def test_a_signal_or_an_exit_without_a_word_outranks_any_exception(tmp_path, code, innocent):
    rank_said(tmp_path, 0, innocent, f"{innocent}: a rank that has noticed", after_s=-2)
    agent_saw(tmp_path, 0, (0, 0, 1, NOW - 2))
    agent_saw(tmp_path, 1, (1, 0, code, NOW))

    assert blamed(tmp_path)[0] == 1


def test_what_an_agent_did_itself_to_its_other_ranks_is_no_cause(tmp_path):
    rank_said(tmp_path, 0, "ValueError", "ValueError: the cause")
    agent_saw(tmp_path, 0, (0, 0, 1, NOW), (1, 1, -signal.SIGTERM, NOW), (2, 2, -signal.SIGKILL, NOW + 30))

    assert blamed(tmp_path, 3) == (0, "ValueError: the cause")


def test_a_rank_that_was_ended_while_it_left_is_known_by_its_own_words(tmp_path):
    rank_said(tmp_path, 1, "ValueError", "ValueError: the cause")
    agent_saw(tmp_path, 0, (0, 0, 1, NOW - 3), (1, 1, -signal.SIGABRT, NOW))
    rank_log(tmp_path, 0, 0, f"RuntimeError: {GLOO}\n")

    assert blamed(tmp_path, 2) == (1, "ValueError: the cause")


def test_a_rank_that_left_without_a_word_and_with_exit_code_0_is_told_so(tmp_path):
    agent_saw(tmp_path, 0, (1, 1, 0, NOW))

    assert blamed(tmp_path, 2) == (1, "exit code 0")


def test_a_watchdog_that_aborts_its_rank_has_only_noticed(tmp_path):
    agent_saw(tmp_path, 0, (0, 0, -signal.SIGABRT, NOW - 5))
    rank_log(tmp_path, 0, 0, "RuntimeError: NCCL watchdog: collective operation timeout\n")
    rank_said(tmp_path, 1, "ValueError", "ValueError: the cause", after_s=-1)
    agent_saw(tmp_path, 1, (1, 0, 1, NOW))

    assert blamed(tmp_path) == (1, "ValueError: the cause")


@pytest.mark.parametrize(
    ("oom_kills", "words"),
    [
        (1, "SIGKILL of the kernel's out-of-memory killer"),
        (0, "SIGKILL, and not by the kernel's out-of-memory killer"),
        (None, "SIGKILL (often the kernel's out-of-memory killer)"),
    ],
)
def test_a_kill_is_the_out_of_memory_killers_where_its_counter_says_so(tmp_path, oom_kills, words):
    agent_saw(tmp_path, 0, (0, 0, -signal.SIGKILL, NOW), oom_kills=oom_kills)

    assert blamed(tmp_path) == (0, f"killed by {words}")


# -- a rank without a record, and none at all ----------------------------------------------------------------------


def test_the_log_is_read_of_a_rank_that_left_no_record(tmp_path):
    log = rank_log(tmp_path, 0, 0, f"RuntimeError: {GLOO}\n")
    os.utime(log, (NOW - 10, NOW - 10))
    rank_log(tmp_path, 1, 0, "Traceback (most recent call last):\nValueError: nan in the data\n")
    agent_saw(tmp_path, 0, (0, 0, 1, NOW - 10))
    agent_saw(tmp_path, 1, (1, 0, 1, NOW))

    failure = first_failure(tmp_path, ranks_per_node=1)

    assert failure is not None
    assert (failure.rank, failure.message, failure.blame) == (1, "ValueError: nan in the data", Blame.OWN_END)


def test_a_ranks_own_words_come_before_its_log_and_carry_its_exit_code(tmp_path):
    rank_log(tmp_path, 0, 1, "some other line\n")
    agent_saw(tmp_path, 0, (1, 1, 3, time.time()))
    (tmp_path / "failed" / "rank-1.json").write_text(  # as commits before had it, without type and time
        '{"schema": "failed/1", "rank": 1, "exit_code": 3, "message": "no data."}'
    )

    failure = first_failure(tmp_path, ranks_per_node=2)

    assert failure is not None and (failure.rank, failure.message, failure.exit_code) == (1, "no data.", 3)
    assert failure.time_ns == (tmp_path / "failed" / "rank-1.json").stat().st_mtime_ns


def test_a_signal_names_itself_and_nothing_known_blames_nobody(tmp_path):
    assert first_failure(tmp_path, ranks_per_node=1) is None
    agent_saw(tmp_path, 0, (0, 0, -15, 5.0), (1, 1, -9, 6.0))

    failure = first_failure(tmp_path, ranks_per_node=2)

    assert failure is not None and failure.rank == 1 and "SIGKILL" in failure.message


def test_the_last_error_line_of_a_log(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_text("[rank1]: Traceback\n[rank1]: torch.cuda.OutOfMemoryError: no room\n[rank1]:   hint\n\n")
    assert last_error_line(log) == "torch.cuda.OutOfMemoryError: no room"
    log.write_text("nothing special\nlast words\n\n")
    assert last_error_line(log) == "last words"
    log.write_text("")
    assert last_error_line(log) is None
    assert last_error_line(tmp_path / "absent.log") is None


# -- what a rank writes --------------------------------------------------------------------------------------------


def recorded(folder: Path, error: BaseException):
    with pytest.raises(type(error)), lastwords.recorded(folder):
        raise error
    return read_errors(folder)[0]


def test_a_record_has_type_time_host_and_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    before = time.time_ns()
    found = recorded(tmp_path, ValueError("first line\nsecond line"))

    assert (found.kind, found.message, found.exit_code) == ("ValueError", "ValueError: first line", 1)
    assert before <= found.time_ns <= time.time_ns() and found.host and not found.refusal


def test_a_refusal_keeps_its_exit_code_and_a_programs_own_code_is_no_refusal(tmp_path):
    refused = recorded(tmp_path, PlannerError("mesh", "1 rank", "the plan has 2", exit_code=4))
    left = recorded(tmp_path, SystemExit(4))

    assert (refused.exit_code, refused.refusal) == (4, True)
    assert (left.exit_code, left.refusal, left.message) == (4, False, "exit code 4")


def test_a_file_that_could_not_be_written_is_a_failed_training_and_tells_the_systems_number(tmp_path):
    def fail() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise PlannerError("output", "metrics.jsonl", "cannot be written (No space left on device)") from None

    with pytest.raises(PlannerError), lastwords.recorded(tmp_path):
        fail()

    (found,) = read_errors(tmp_path).values()
    assert (found.errno, found.exit_code) == (errno.ENOSPC, 5)
    failure = first_failure(tmp_path, 1)
    assert failure is not None and failure.no_space


def test_a_full_disk_is_known_of_a_library_that_has_no_number_of_it(small_file_system):
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with pytest.raises(SafetensorError) as caught:
        save_file({"weight": np.zeros(2**20)}, small_file_system / "model.safetensors")

    assert lastwords.said(caught.value).errno == errno.ENOSPC


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_an_end_without_failure_leaves_no_record(tmp_path):
    for error in (SystemExit(0), SystemExit(None)):
        with pytest.raises(SystemExit), lastwords.recorded(tmp_path):
            raise error

    assert read_errors(tmp_path) == {}

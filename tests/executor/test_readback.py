"""Names that an engine imports and a release lacks, and the answer of a process that reads a file back.

The framework is Python's own json package or the test's. Not here: frameworks (tests/cluster).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from executor.worker import readback


def test_names_that_a_release_lacks_are_found_in_modules_and_among_them(tmp_path: Path) -> None:
    (tmp_path / "json_a.py").write_text(
        "from json import loads, decoder, gone\nfrom json.decoder import JSONDecoder, lost\n"
        "from json.away import x\nfrom os import nothing\nimport json.b\n"
    )
    (tmp_path / "json_b.py").write_text(
        "def f():\n    from json.encoder import JSONEncoder, more\n    from . import a\n"
    )
    (tmp_path / "other.py").write_text("from json import not_read\n")
    assert readback.missing_names("json", tmp_path) == [
        "json.gone", "json.decoder.lost", "json.away.x", "json.encoder.more"]  # fmt: skip
    assert readback.missing_names("nothing", tmp_path) == []


def test_a_framework_that_is_not_here_is_no_name_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "nowhere_a.py").write_text("from nowhere_at_all import x\n")
    (tmp_path / "nowhere_at_all.py").write_text("from nowhere_at_all import x\n")
    with pytest.raises(ModuleNotFoundError):
        readback.missing_names("nowhere_at_all", tmp_path)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A framework whose files say what becomes of them."""

    def values(path: str) -> dict[str, Any]:
        print("a greeting")
        if path == "bad":
            raise ValueError("no such\nkey")
        if path == "absent":
            raise ImportError("not here")
        return {"path": path}

    monkeypatch.setitem(readback.READERS, "own", values)
    monkeypatch.setattr(readback, "missing_names", lambda framework: [])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return values


def test_what_is_read_is_a_line_of_json_and_a_refusal_the_last_of_stderr(
    reader: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert readback.main(["own", "good"]) == 0
    said = capsys.readouterr()
    assert (json.loads(said.out), said.err) == ({"path": "good"}, "a greeting\n")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert readback.main(["own", "bad"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", "ValueError: no such key")
    with pytest.raises(ImportError):
        readback.main(["own", "absent"])
    monkeypatch.setattr(readback, "missing_names", lambda framework: ["a.b", "a.c"])
    capsys.readouterr()
    assert readback.main(["own", "good"]) == 3
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a.b, a.c\n")


@pytest.mark.parametrize(
    ("path", "code", "said", "error"),
    [("good", 0, '{"path": "good"}\n', "a greeting"), ("bad", 1, "", "ValueError"), ("absent", 1, "", "ImportError")],
)
def test_a_fork_answers_with_code_and_both_outputs(reader: Any, path: str, code: int, said: str, error: str) -> None:
    reading, writing = os.pipe()
    readback.answer_from_fork(["own", path], writing)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = json.loads(stream.read())
    assert answer[:2] == [code, said] and error in answer[2]

"""Claims about the page that answers in a browser: its figures are the planner's own, and nothing leaves the tab.

Not here: the dial (planner/test_dial.py), or pages that are saved (planner/test_pages.py).
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from planner.ask import options
from planner.decide.answers import Constraints
from planner.decide.recommendation import recommend
from planner.studies.dial import exact_options
from planner.views.library import checked
from scripts import page
from tests.browser import browser
from web import ask

HERE = Path(__file__).parent
MOST_BYTES = 9_000_000
NASTY = (
    "<script>alert(1)</script>",
    "'; rm -rf /",
    "\x1b[31mred",
    "../../etc/passwd",
    "__import__('os')",
    "llama\u202e",
)
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "vocab_size": 128, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
QUESTIONS: list[dict[str, Any]] = [
    {"do": "ask", "given": page.FIRST},
    *({"do": "turn", "name": name, "up": up, "held": True} for name, up in
      (("tp", False), ("pp", False), ("dp_replicate", True), ("micro_batch_size", True), ("ep", True), ("cp", True))),
    *({"do": "ask", "given": {"model": model, "gpus": gpus, **more}} for model, gpus, more in (
        ("7b", "32", {}), ("8b", "4", {"method": "lora"}), ("mixtral-8x7b", "64", {"seq_len": "4k"}),
        ("deepseek-v3", "1024", {"runtime": "megatron-core", "tp": "8", "pp": "8", "ep": "8", "dp_shard": "16"}),
        ("qwen3-8b", "8", {"cluster": "dgx-a100"}), ("olmo-2-7b", "16", {}), ("gpt2", "1", {}),
        ("7b", "32", {"strategy": "zero3", "recompute": "full"}), ("nothing", "8", {}), ("8b", "many", {}),
        *((nasty, "8", {}) for nasty in NASTY))),
    {"do": "config", "text": json.dumps(CONFIG), "given": {"gpus": "2"}},
    {"do": "config", "text": "{", "given": {"gpus": "2"}},
    {"do": "tour", "stop": 0}, {"do": "tour", "stop": 3}, {"do": "tour", "stop": 9},
]  # fmt: skip
SEARCHES: list[dict[str, str]] = [
    {"model": "8b", "gpus": "8"},
    {"model": "7b", "gpus": "32", "global_batch_size": "256"},
    {"model": "70b", "gpus": "64", "global_batch_size": "64"},
    *({"model": model, "gpus": gpus, "global_batch_size": "64"} for model, gpus in
      (("mixtral-8x7b", "16"), ("gpt2", "4"), ("qwen3-8b", "8"), ("13b", "16"), ("llama-3.2-1b", "2"))),
    {"model": "8b", "gpus": "4", "method": "lora"},
    {"model": "8b", "gpus": "8", "seq_len": "16k", "global_batch_size": "32"},
    {"model": "70b", "gpus": "64", "runtime": "megatron-core", "global_batch_size": "64"},
    {"model": "70b", "gpus": "16", "method": "qlora", "global_batch_size": "32"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None:
        pytest.skip("node is not here")
    if not page.fetched():
        pytest.skip("Pyodide is not here: python scripts/page.py fetch")
    made = tmp_path_factory.mktemp("page")
    page.build(made / "try")
    return made / "try"


def in_node(folder: Path, messages: list[dict[str, Any]], scratch: Path) -> list[Any]:
    (scratch / "messages.json").write_text(json.dumps(messages))
    command = ["node", HERE / "answers.mjs", folder, scratch / "messages.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout)
    return found


def natively(messages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, scratch: Path) -> list[Any]:
    monkeypatch.setattr(ask, "PAGE", ask.Page())
    monkeypatch.chdir(scratch)
    return [json.loads(ask.answer(json.dumps(one))) for one in messages]


def unlike(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two answers differ: numbers by more than 1e-15 of themselves."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in unlike(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            found for place, pair in enumerate(zip(one, other, strict=True)) for found in unlike(*pair, f"{at}.{place}")
        ]
    if isinstance(one, float) and isinstance(other, float):
        return [] if math.isclose(one, other, rel_tol=1e-15) else [f"{at}: {one} {other}"]
    return [] if one == other else [f"{at}: {str(one)[:200]} {str(other)[:200]}"]


def test_answers_in_a_browsers_python_are_the_native_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [*QUESTIONS, {"do": "best", "given": SEARCHES[0]}]
    there = in_node(folder, messages, tmp_path)
    here = natively(messages, monkeypatch, tmp_path)

    for message, one, other in zip(messages, there, here, strict=True):
        assert unlike(one, other) == [], message
    assert sum("facts" in one for one in here) > 15
    assert sum("refused" in one for one in here) >= len(NASTY)


@pytest.mark.long
def test_the_best_layout_is_what_recommend_stars(folder: Path, tmp_path: Path) -> None:
    found = in_node(folder, [{"do": "best", "given": one} for one in SEARCHES], tmp_path)

    for given, one in zip(SEARCHES, found, strict=True):
        limits = Constraints(any_runtime="runtime" in given)
        best = recommend(options.question(checked(given)), 1, limits).best
        assert best is not None
        assert one["given"] == json.loads(json.dumps(exact_options(given, best)))


def test_a_question_with_too_many_layouts_is_a_command_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {"do": "best", "given": {"model": "70b", "gpus": "4096", "runtime": "megatron-core"}}

    found = natively([asked], monkeypatch, tmp_path)[0]

    assert "has more than 10,000 layouts" in found["refused"]
    assert "planner recommend --model 70b --gpus 4096 --runtime megatron-core" in found["refused"]


def test_the_page_is_small_over_the_wire(folder: Path) -> None:
    sent = sum(len(gzip.compress(one.read_bytes())) for one in folder.rglob("*") if one.is_file())
    lines = sum(len((folder / name).read_text().splitlines()) for name in ("page.js", "worker.js"))

    assert sent < MOST_BYTES
    assert lines < 600


@pytest.fixture
def address(folder: Path) -> Any:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


def browsed(address: str, scratch: Path, *scripts: str) -> dict[str, Any]:
    program = browser()
    if program is None:
        pytest.skip("Chromium is not here")
    command = ["node", HERE / "browse.mjs", program, scratch / "profile", page.WEB, address, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SAID = "document.getElementById('said').textContent"
FIGURE = "document.querySelector('[data-key$=device_bytes]').firstChild.textContent"


@pytest.mark.long
def test_a_browser_turns_the_dial_and_an_address_shows_the_same_again(address: str, tmp_path: Path) -> None:
    turn = "document.getElementById('down-tp').click()"
    first = browsed(
        address, tmp_path, FIGURE, turn, FIGURE, "location.href", "document.getElementById('said').textContent"
    )
    before, _, after, there, said = first["found"]
    assert (before, after) == ("35.24 GiB", "54.88 GiB")
    assert said.startswith("tp 8 to 4, dp_shard 2 to 4")
    again = browsed(there, tmp_path / "again", FIGURE)

    assert again["found"] == [after]
    for one in (first, again):
        assert one["console"] == []
        assert [url for url in one["requests"] if not url.startswith(address)] == []


@pytest.mark.long
def test_a_search_is_stopped_and_the_dial_still_turns(address: str, tmp_path: Path) -> None:
    stop = "document.getElementById('best').click(); document.getElementById('stop').click()"
    turn = "document.getElementById('down-tp').click()"

    found = browsed(address, tmp_path, FIGURE, stop, FIGURE, turn, FIGURE)

    assert found["found"] == ["35.24 GiB", None, "35.24 GiB", None, "54.88 GiB"]
    assert found["console"] == []


@pytest.mark.long
@pytest.mark.parametrize("nasty", NASTY)
def test_an_address_runs_nothing(nasty: str, address: str, tmp_path: Path) -> None:
    from urllib.parse import urlencode

    found = browsed(f"{address}#{urlencode({'model': nasty, 'gpus': '8'})}", tmp_path,
                    SAID, "document.scripts.length")  # fmt: skip

    said, scripts = found["found"]
    assert said.startswith("model=")
    assert scripts == 1
    assert found["console"] == []

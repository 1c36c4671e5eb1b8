"""Claims about a saved page, in a real browser with the network off: its figures are those of `--json`, it loads and
runs nothing, it reads the same without scripts, and no text in it becomes markup.

Not here: what a picture shows (test_scenes.py), or which sentences an answer has (test_cli.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import planner as library
from planner.basics.display import Table
from planner.basics.errors import PlannerError
from planner.basics.quoting import for_shell
from planner.cli import planner
from planner.spec.plan import decode_plan, encode_plan
from planner.studies.compare import compare
from planner.views.page import MOST_BYTES, Section, page_of
from planner.views.pages import compare_page
from tests.browser import Opened, browser, opened, widths
from tests.nasty import TEXTS

needs_browser = pytest.mark.skipif(
    browser() is None, reason="no Chromium here: scripts/cluster-packages.sh installs it"
)

MARKUP = (
    "<script>console.log(1)</script>", "\"><img src=x onerror=alert(1)>", "</svg><script>alert(1)</script>",
    "</style><script>alert(1)</script>", "</pre></details><iframe src=//example.com>", "<a href=javascript:alert(1)>m",
    "&lt;b&gt;", "'><svg onload=alert(1)>", "<!-- --!><script>alert(1)</script>", "]]><script>alert(1)</script>",
)  # fmt: skip
COMMANDS = (
    "estimate --model 7b --gpus 32",
    "estimate --model 70b --gpus 4",
    "estimate --model 8b --gpus 8 --method lora --seq-len 8k",
    "estimate --model 405b --gpus 8 --method full",
    "recommend --model 70b --gpus 64 --global-batch-size 512",
    "recommend --model mixtral-8x7b --gpus 64 --top 5",
    "recommend --model 70b --gpus 64 --tp 8 --pp 4 --micro-batch-size 1 --grad-accum 32 --any-runtime",
    "fit --model 7b --gpus 16 --what gpus",
    "sweep --model 7b --gpus 8..64 --global-batch-size 512",
    "cost --model 70b --gpus 512 --tokens 2T --price-per-gpu-hour 2.5",
    "timeline --model 7b --gpus 8 --pp 4 --micro-batch-size 1 --grad-accum 8 --runtime megatron-core",
    "compare first.json second.json",
    "compare first.json '--model 8b --gpus 16 --tokens 10B --price-per-gpu-hour 2' '--model 8b --gpus 32 --tokens 10B'",
)


def asked(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    planner.main(words, standalone_mode=False, prog_name="planner", obj=words)
    return json.loads(capsys.readouterr().out)


def at(answer: Any, path: str) -> Any:
    for name in path.split("."):
        answer = answer[int(name)] if isinstance(answer, list) else answer[name]
    return answer


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_the_figures_of_json_and_loads_and_runs_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if command.startswith("compare"):
        for name, gpus in (("first.json", "16"), ("second.json", "32")):
            asked(f"recommend --model 7b --gpus {gpus} --json -o {name}".split(), capsys)
    path = tmp_path / "page.html"
    answer = asked([*shlex.split(command), "--json", "--save", str(path)], capsys)
    shown = opened(path, tmp_path)
    bare = Opened(path.read_text(), (), frozenset())  # what a reader without scripts has: the file as it was written

    assert path.stat().st_size <= MOST_BYTES
    assert (shown.console, shown.requests) == ((), frozenset())
    assert shown.text == bare.text and "<script" not in shown.html
    assert shown.figures == {key: at(answer, key) for key in shown.figures}
    assert len(shown.figures) >= 5 or answer.get("recommended", 0) is None, "a page without figures"
    assert for_shell(["planner", *shlex.split(command)]) in shown.text
    assert "Content-Security-Policy" in shown.html


@needs_browser
def test_a_table_that_is_wider_than_the_window_scrolls_in_its_own_box(tmp_path: Path) -> None:
    row = tuple("a figure" for _ in range(30))
    wide, word = Table(row, (row,)), "word" * 60
    path = tmp_path / "wide.html"
    path.write_bytes(page_of(word, [word], [Section(word, [wide]), Section("x", [wide], folded=True)], word))
    seen = widths(path, tmp_path, 800)
    assert seen.page <= seen.window == 800 and len(seen.hidden) == 2 and min(seen.hidden) > 500

    path.write_text(path.read_text().replace("overflow-x: auto", "").replace("display: block", ""))
    assert widths(path, tmp_path, 800).page > 800, "the claim above cannot fail"


@needs_browser
def test_what_the_browser_reports_is_seen(tmp_path: Path) -> None:
    """The claims above can fail: a page with a script and an image is noticed."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<!DOCTYPE html><title>x</title><img src='http://example.com/a.png'><script>console.log(1)</script>"
    )
    seen = opened(path, tmp_path)
    assert seen.requests == {"http://example.com/a.png"} and len(seen.console) == 1


@needs_browser
def test_no_text_of_a_stranger_becomes_markup(tmp_path: Path) -> None:
    """Plans whose names are nasty texts, sixteen a page, each shown as the text that it is."""
    found = library.estimate(model="tiny-llama", gpus=2)
    plan = library.plan_of(found.best)
    places = {
        "model": lambda text: {"model": replace(plan.model, name=text)},
        "gpu": lambda text: {"cluster": replace(plan.cluster, gpu=replace(plan.cluster.gpu, name=text))},
    }
    read = []
    for place, changed in places.items():
        for text in (*TEXTS, *MARKUP):
            try:
                read.append((text, decode_plan(encode_plan(replace(plan, **changed(text))), f"{place}.json")))
            except PlannerError:
                continue  # refused where it is read
    assert len(read) > 20
    for number, start in enumerate(range(0, len(read) - 1, 16)):
        some = read[start : start + 16]
        if len(some) < 2:
            continue
        path = tmp_path / f"nasty-{number}.html"
        path.write_bytes(compare_page(compare(some), f"planner compare {some[0][0]}"))
        seen = opened(path, tmp_path)
        assert (seen.console, seen.requests) == ((), frozenset())
        assert not re.search(r"<(script|img|iframe|object|link|base|form|a)\b", seen.html, re.I)
        assert not re.search(r"<[^>]*\son[a-z]+\s*=", seen.html, re.I)


def test_a_page_that_would_be_too_large_leaves_out_the_last_that_may_be_left_out_and_says_so() -> None:
    large = "x" * (MOST_BYTES // 2)
    sections = [
        Section("Kept", ["a figure"]),
        Section("First", source=large, spare=True),
        Section("Second", source=large, spare=True),
    ]
    page = page_of("title", (), sections, "planner estimate").decode()
    assert len(page) <= MOST_BYTES and "<h2>First</h2>" in page and "<h2>Second</h2>" not in page
    assert "Left out, since the page would be too large: Second." in page


def test_two_outputs_are_never_one_file_and_none_is_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlannerError, match=r"save=\./both: is the file of --output, too"):
        asked(["recommend", "--model", "7b", "--gpus", "8", "-o", "both", "--save", "./both", "--json"], capsys)
    asked(["recommend", "--model", "7b", "--gpus", "8", "-o", "plan.json", "--json"], capsys)
    plan = Path("plan.json").read_bytes()
    with pytest.raises(PlannerError, match=r"save=plan\.json: is a file that is read, too"):
        asked(["timeline", "plan.json", "--save", "plan.json", "--force", "--json"], capsys)
    with pytest.raises(PlannerError, match="save=page: is the file of --svg, too"):
        asked(["timeline", "plan.json", "--svg", "page", "--save", "page", "--json"], capsys)
    with pytest.raises(PlannerError, match=r"save=no/page\.html: cannot be written"):
        asked(["estimate", "--model", "7b", "--gpus", "8", "--save", "no/page.html", "--json"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"] and Path("plan.json").read_bytes() == plan


def test_a_page_is_written_where_the_reader_of_stdout_is_gone(tmp_path: Path) -> None:
    path, program = tmp_path / "page.html", "from planner.cli import main; main()"
    ours, theirs = os.pipe()
    os.close(ours)
    words = ["estimate", "--model", "7b", "--gpus", "8", "--save", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], stdout=theirs, stderr=subprocess.PIPE, check=False, timeout=300
    )
    os.close(theirs)
    assert path.read_text().endswith("</html>\n"), done.stderr


def test_a_step_of_a_layout_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["timeline", "--model", "405b", "--gpus", "8", "--dp-shard", "8"]
    planner.main(words, standalone_mode=False, prog_name="planner", obj=words)
    assert "note: this layout does not fit: " in capsys.readouterr().err


def test_a_page_is_written_whole_and_replaces_a_file_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    words = ["estimate", "--model", "7b", "--gpus", "8", "--json", "--save", str(path)]
    with pytest.raises(PlannerError, match="exists already"):
        asked(words, capsys)
    assert path.read_text() == "mine"
    asked([*words, "--force"], capsys)
    assert path.read_text().startswith("<!DOCTYPE html>") and len(list(tmp_path.iterdir())) == 1

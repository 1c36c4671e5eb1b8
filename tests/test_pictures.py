"""Claims about the pictures in docs/: they are what the program draws now, whatever the terminal; they load nothing;
and the charts of docs/accuracy.md have a point for every figure, in its place, as fitted or left out.

Not here: that the charts are current (test_docs.py, with their page), or the drawing of a plan (planner/test_show.py).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner.calibrate.predict import replay
from planner.calibrate.score import memory_points, time_points
from planner.spec.calibration import calibration
from planner.views.svg.canvas import Canvas, lines_of
from scripts import docs, pictures
from scripts.pages import accuracy, scatter
from tests.truth.published.reader import each

PROJECT = Path(__file__).resolve().parents[1]
PICTURES = sorted(PROJECT.glob("docs/**/*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 150_000
ODD = {"PYTHONHASHSEED": "7", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "41", "TZ": "Asia/Tokyo", "LC_ALL": "C",
       "TEXTUAL_THEME": "textual-light"}  # fmt: skip


def loaded(svg: str) -> list[str]:
    """Everything in a picture that a browser would fetch or run, and every address but the namespace's."""
    found = re.findall(r"@import|url\((?!#)[^)]*|https?://[^\"'\s<]*", svg.replace(SVG.strip("{}"), ""))
    for element in ElementTree.fromstring(svg.encode()).iter():
        tag = element.tag.removeprefix(SVG)
        found += [tag] * (tag in ("script", "image", "foreignObject", "use", "a"))
        found += [name for name in element.attrib if name.endswith("href") or name.startswith("on")]
    return found


def picture_id(path: Path) -> str:
    return str(path.relative_to(PROJECT / "docs"))


def test_the_pictures_of_the_readme_are_what_the_program_draws_in_any_terminal(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "pictures.py"), "--check"],
        cwd=tmp_path, env=os.environ | ODD, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nmake docs draws them anew"


@pytest.mark.parametrize("kept", [b"before", None], ids=["another", "none"])
def test_a_picture_that_is_out_of_date_or_missing_is_found_and_drawn_anew(tmp_path, monkeypatch, capsys, kept):
    for name in [name for name in os.environ if name == "NO_COLOR" or "TEXTUAL" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    monkeypatch.setattr(pictures, "DRAWN", {"one.svg": lambda: b"now", "two.svg": lambda: b"same"})
    (tmp_path / "two.svg").write_bytes(b"same")
    if kept is not None:
        (tmp_path / "one.svg").write_bytes(kept)

    monkeypatch.setattr(sys, "argv", ["pictures.py", "--check"])
    assert pictures.main() == 1
    told = capsys.readouterr().out
    assert "one.svg" in told and "two.svg" not in told

    monkeypatch.setattr(sys, "argv", ["pictures.py"])
    assert pictures.main() == 0
    assert (tmp_path / "one.svg").read_bytes() == b"now"


def test_every_picture_is_made_by_a_script_and_shown_in_a_page_with_words_for_those_who_do_not_see_it():
    made = {pictures.FOLDER / name for name in pictures.DRAWN} | set(docs.CHARTS)
    shown = {
        (page.parent / target).resolve(): words
        for page in (PROJECT / "README.md", docs.ACCURACY)
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", page.read_text())
    }

    assert set(PICTURES) == made == set(shown)
    assert all(len(words) > 40 for words in shown.values())
    assert {path.name for path in docs.CHARTS} == set(accuracy.DRAWN)


@pytest.mark.parametrize("path", PICTURES, ids=picture_id)
def test_a_picture_is_well_formed_small_and_loads_nothing(path):
    svg = path.read_text()

    root = ElementTree.fromstring(svg.encode())
    assert root.tag == f"{SVG}svg" and float(root.attrib["width"]) > 0 and float(root.attrib["height"]) > 0
    assert loaded(svg) == []
    assert len(svg.encode()) <= MOST_BYTES


def test_what_a_picture_would_load_is_found():
    inside = (
        "<style>@font-face { src: url(https://a.example/f.woff) } p { fill: url(#here) }</style>"
        "<image href='//b.example/i.png'/><g onclick='x()'/>"
    )
    assert loaded(f'<svg xmlns="{SVG[1:-1]}">{inside}</svg>') == [
        "url(https://a.example/f.woff", "image", "href", "onclick",
    ]  # fmt: skip


def test_the_fonts_and_comments_of_a_screenshot_are_left_out():
    shot = (
        '<svg viewBox="0 0 30 20.5" xmlns="x"><!-- by --><style>@font-face {\n src: url("y") }\n'
        "p { font-family: Fira Code, monospace }</style></svg>"
    )
    kept = pictures.without_fonts(shot)

    assert 'width="30" height="20.5" viewBox="0 0 30 20.5"' in kept
    assert "@font-face" not in kept and "<!--" not in kept and "p { font-family: 'Fira Code', " in kept


def test_a_quantity_is_not_broken_between_lines():
    text = "a step of 2.14 s on 2 x 8 GPUs, and 56.17 GiB on the card of each"
    broken = [lines_of(text, room, 10) for room in range(80, 400, 7)]

    assert {" ".join(lines) for lines in broken} == {text}
    assert [line for lines in broken for line in lines if re.search(r"(\d| x)$", line)] == []


def test_a_picture_in_a_picture_keeps_its_shape_and_is_as_wide_as_told():
    inner = Canvas(200)
    inner.text(1, 2, "a < b")
    outer = Canvas(1000)
    height = outer.place(inner.finished(50), 10, 20, 400)
    found = ElementTree.fromstring(outer.finished(500)).find(f"{SVG}svg")

    assert height == 100 and found is not None
    assert [found.attrib[key] for key in ("x", "y", "width", "height", "viewBox")] == [
        "10", "20", "400", "100", "0 0 200 50",
    ]  # fmt: skip
    assert [element.text for element in found.iter(f"{SVG}text")] == ["a < b"]


# -- the charts of docs/accuracy.md ----------------------------------------------------------------------------------


def test_the_charts_are_checked_with_their_page(monkeypatch, capsys):
    last = docs.CHARTS[-1]
    monkeypatch.setattr(docs, "rewritten", lambda page, before, runs: before + "<!-- more -->" * (page == last))
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check", str(docs.ACCURACY)])

    assert docs.main() == 1
    assert str(last) in capsys.readouterr().out


def groups(svg: bytes) -> list[tuple[str, int]]:
    """Colour and number of each group of points, the two of the headings left out."""
    found = [
        (group.attrib["fill"] if group.attrib["fill"] != "none" else group.attrib["stroke"], len(group))
        for group in ElementTree.fromstring(svg).iter(f"{SVG}g")
    ]
    return [(colour, count) for colour, count in found if count > 1 or colour not in (scatter.FITTED, scatter.OTHERS)]


def test_a_chart_has_a_point_for_every_figure_that_the_tables_count():
    files = [PROJECT / "tests" / "truth" / f"{name}.jsonl" for name in ("torchtune", "own_gpu", "unfitted_peft_docs")]
    replayed = replay(each(files), calibration())
    memory = Counter(one.row.file for _, (one, _, _) in memory_points(replayed))
    time = Counter(one.row.file for one, _, _ in time_points(replayed))

    assert sorted(groups(scatter.memory_picture(replayed))) == sorted(
        [(scatter.FITTED, memory["torchtune"]), *((scatter.OTHERS, memory[name]) for name in memory if "_" in name)]
    )
    assert sorted(groups(scatter.time_picture(replayed))) == sorted(
        [(scatter.FITTED, time["torchtune"]), *((scatter.OTHERS, time[name]) for name in time if "_" in name)]
    )
    assert len(memory) == 3 and min(memory.values()) > 1 and min(time.values()) > 1


def test_what_a_chart_calls_left_out_is_what_the_makefile_leaves_out_of_the_fit():
    told = re.search(r"filter-out ([^,]*),", (PROJECT / "Makefile").read_text())

    assert told is not None
    assert [name.removeprefix("tests/truth/") for name in told[1].split()] == [f"{one}%" for one in scatter.LEFT_OUT]


def source(*points: tuple[float, float], name: str = "some") -> scatter.ChartSource:
    return scatter.ChartSource(name, "told", points)


def test_a_right_prediction_is_on_the_diagonal_and_one_of_twice_on_the_line_above():
    svg = scatter.picture_of("Title", "GiB", [source((10.0, 10.0), (20.0, 20.0), (15.0, 30.0))])
    root = ElementTree.fromstring(svg)
    plot = next(one for one in root.iter(f"{SVG}rect") if one.attrib["fill"] == scatter.PANEL)
    left, top, side = (float(plot.attrib[key]) for key in ("x", "y", "width"))
    group = max(root.iter(f"{SVG}g"), key=len)
    middles = [(float(one.attrib["cx"]) - left, top + side - float(one.attrib["cy"])) for one in group]
    low, high = scatter.edges(((10.0, 10.0), (20.0, 20.0), (15.0, 30.0)))
    twice = side * math.log(2) / math.log(high / low)

    assert [up - across for across, up in middles] == pytest.approx([0, 0, twice], abs=0.15)
    assert middles[1][0] - middles[0][0] == pytest.approx(twice, abs=0.15)
    lines = root.iter(f"{SVG}polyline")
    above = next(line.attrib["points"] for line in lines if line.attrib["stroke"] == scatter.LINE)
    (start_x, start_y), _ = ([float(part) for part in pair.split(",")] for pair in above.split())
    assert (start_x - left, top + side - start_y) == pytest.approx((0, twice), abs=0.15)


@pytest.mark.parametrize(
    "points", [[(1.0, 1.0)], [(0.017, 0.02), (0.26, 0.3)], [(0.8, 80.0)], [(0.17, 480.0), (9.0, 0.4)], [(35.0, 76.0)]]
)
def test_a_plot_holds_its_points_and_has_a_few_round_ticks(points):
    low, high = scatter.edges(points)
    ticks = scatter.ticks(low, high)

    assert all(low < value < high for point in points for value in point)
    assert 2 <= len(ticks) <= 7 and ticks == sorted(ticks)
    assert all(f"{value:g}".strip("0.") in ("1", "2", "5") for value in ticks)


def test_a_source_of_any_name_stays_text():
    svg = scatter.picture_of("Title", "GiB", [source((1.0, 2.0), name="<script>&")])

    assert b"<script" not in svg
    assert "<script>&" in [one.text for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]

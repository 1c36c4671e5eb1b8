"""Claims about keys that come faster than the screen: typed ahead, or pasted by a terminal without brackets."""

from __future__ import annotations

import pytest
from drawn import GIVEN, drive, settled, text_of
from terminal import EXPLORE, Terminal, left_after
from textual import events

from tui import inputs
from tui.app import ExplorerApp

ASKED = ("--model", "7b", "--gpus", "64")
WIDE = (140, 45)


@pytest.mark.parametrize(
    ("keys", "field", "text", "listed"),
    [
        (b"\t\t\t512", "gpus", "512", False),
        (b"/qwen", "model", "qwen", True),
        (b"/3-8b\r", "model", "llama-3-8b", False),
        (b"\x1b[Z\x1b[Z--tp 2", "more", "--tp 2", False),  # shift+tab
        (b"/qwen\x1b", "model", "qwen", False),
    ],
    ids=["tab", "slash", "enter", "shift-tab", "escape"],
)
def test_a_burst_of_keys_goes_where_each_key_is_meant(tmp_path, keys, field, text, listed):
    left = left_after(keys, tmp_path / "left.json", *ASKED, size=WIDE)

    assert left is not None, "the explorer was quit"
    assert (left["texts"][field], left["list"]) == (text, listed), left
    assert {name: one for name, one in left["texts"].items() if name != field} == {
        name: one for name, one in inputs.typed(GIVEN).items() if name != field
    }


def test_keys_typed_before_the_first_frame_wait_for_it(tmp_path):
    left = left_after(b"", tmp_path / "left.json", *ASKED, early=b"/3-8b\r")

    assert left is not None and left["texts"]["model"] == "llama-3-8b"


def test_a_name_typed_right_after_the_key_that_saves_is_the_file_s(tmp_path):
    path = tmp_path / "a.json"

    left_after(f"\x13{path}\r".encode(), tmp_path / "left.json", *ASKED)

    assert path.is_file()


def test_text_pasted_beside_the_fields_is_looked_for_and_quits_nothing():
    app = ExplorerApp(inputs.typed(GIVEN))

    async def body(pilot):
        app.post_message(events.Paste("/qwen quits\n"))
        await settled(pilot)
        return dict(app.main.texts), text_of(app)

    texts, screen = drive(app, body)

    assert texts == {**inputs.typed(GIVEN), "model": "qwen quits"}
    assert "model     qwen quits" in screen


def test_ctrl_c_leaves_the_explorer_without_a_word():
    with Terminal(EXPLORE.format(words=list(ASKED))) as terminal:
        terminal.until(b"yes")
        terminal.type(b"\t\x03")
        assert terminal.ended(10) == 0
        assert b"interrupted" not in terminal.seen and b"Traceback" not in terminal.seen

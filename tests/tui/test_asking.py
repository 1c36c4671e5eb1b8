"""Claims about asking: nothing wrong is shown or saved meanwhile, a long search can be ended, a hub is asked once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from drawn import GIVEN, PATIENCE_S, drive, settled, text_of
from terminal import EXPLORE, Terminal
from textual.widgets import Input

from planner.spec import presets
from planner.spec.huggingface import config_dict
from planner.spec.plan import read_plan
from tui import inputs, state
from tui.app import ExplorerApp


class Standing:
    """The planner, which stands still at the questions about `gpus` until it may go on."""

    def __init__(self, gpus: str) -> None:
        self.gpus, self.stands, self.go = gpus, threading.Event(), threading.Event()

    def __call__(self, asked: state.CheckedQuestion, watch) -> state.Planned:
        if asked.given["gpus"] == self.gpus:
            self.stands.set()
            assert self.go.wait(PATIENCE_S)
        return state.plan(asked, watch)


async def typed(pilot, field: str, text: str) -> None:
    """Another text in the place of a field's."""
    pilot.app.main.query_one(f"#{field}", Input).focus()
    await pilot.press("end", "ctrl+u", *text)


async def until(pilot, there) -> None:
    """Until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end
        await pilot.pause(0.01)


def test_nothing_is_saved_or_copied_while_a_plan_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planner = Standing("128")
    app = ExplorerApp(inputs.typed(GIVEN), planner)

    async def body(pilot):
        await typed(pilot, "gpus", "128")
        await until(pilot, planner.stands.is_set)
        await pilot.press("ctrl+y", "ctrl+s", "enter")
        await pilot.pause()
        early = [one.message for one in app._notifications], app.clipboard, list(Path.cwd().iterdir())
        planner.go.set()
        await settled(pilot)
        await pilot.press("ctrl+s", "enter")
        await pilot.pause()
        return early

    said, copied, files = drive(app, body)

    assert said == ["Still planning. Nothing is copied.", "Still planning. Nothing is saved."]
    assert (copied, files) == ("", [])
    assert read_plan("plan.json").cluster.gpus == 128


def test_nothing_is_saved_while_the_fields_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = ExplorerApp(inputs.typed(GIVEN))

    async def body(pilot):
        await typed(pilot, "gpus", "63")
        await settled(pilot)
        await pilot.press("ctrl+s", "enter")
        await pilot.pause()
        return list(Path.cwd().iterdir())

    assert drive(app, body) == []


def test_a_mistake_is_told_and_a_refusal_goes_while_a_plan_is_made():
    planner = Standing("128")
    app = ExplorerApp(inputs.typed(GIVEN), planner)

    async def body(pilot):
        await typed(pilot, "gpus", "128")
        await until(pilot, planner.stands.is_set)
        await typed(pilot, "gpus", "63")
        await settled(pilot)
        wrong = text_of(app)
        await typed(pilot, "gpus", "16")
        await pilot.pause(0.1)
        mended, waits = text_of(app), not app.main.settled
        planner.go.set()
        await settled(pilot)
        return wrong, mended, waits, app.main.planned.ranked[0].case.cluster.gpus

    wrong, mended, waits, gpus = drive(app, body)

    assert "gpus=63: must be a multiple" in wrong
    assert "gpus=63" not in mended and waits
    assert gpus == 16


def test_escape_ends_a_long_search_with_the_best_so_far_and_says_so():
    app = ExplorerApp(inputs.typed({"model": "7b", "gpus": "8"}))

    async def body(pilot):
        for field, text in (("gpus", "2048"), (inputs.MORE, "--any-runtime"), ("model", "deepseek-v3")):
            app.main.query_one(f"#{field}", Input).value = text
        counts = set()
        while len(counts) < 3:
            watch = app.main.asking.watch
            if watch is not None and watch.total > 10**6:
                counts.add(watch.text)
            await pilot.pause(0.05)
        counting = text_of(app)
        await pilot.press("escape")
        await settled(pilot)
        return counting, text_of(app), app.main.planned.shown

    counting, screen, shown = drive(app, body, (140, 45))

    assert " M layouts  esc ends the search" in counting
    if shown.unseen:  # a layout that fits was found by then
        assert f"The search was ended: these are the best of {shown.considered - shown.unseen:,} of" in screen
        assert "2048" in shown.ranked[0].command
    else:
        assert "Ended: no layout that fits was found" in screen


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_leaving_in_a_long_search_returns_the_shell(key):
    words = [*["--model", "deepseek-v3", "--gpus", "2048", "--any-runtime"]]
    with Terminal(EXPLORE.format(words=words)) as terminal:
        terminal.until(b" M layouts")
        terminal.type(key)
        assert terminal.ended(20) == 0
        assert b"interrupted" not in terminal.seen and b"Traceback" not in terminal.seen


class Hub(BaseHTTPRequestHandler):
    """Knows one model, and counts what it is asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        Hub.asked.append(self.path)
        self.send_response(200 if self.path.startswith("/somebody-else/gpt2/") else 404)
        self.end_headers()
        self.wfile.write(json.dumps(config_dict(presets.model("gpt2"))).encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    Hub.asked.clear()
    yield Hub.asked
    server.shutdown()
    server.server_close()


def test_a_hub_is_asked_on_enter_alone_and_its_answer_is_kept(hub):
    app = ExplorerApp(inputs.typed(GIVEN))

    async def body(pilot):
        counts = []
        await pilot.press("slash")
        for letter in "somebody-else/gpt2":
            await pilot.press(letter)
            await pilot.pause(0.05)
        await settled(pilot)
        counts.append((len(hub), text_of(app)))
        await pilot.press("enter")
        await settled(pilot)
        counts.append((len(hub), text_of(app)))
        await typed(pilot, "gpus", "8")
        await settled(pilot)
        counts.append((len(hub), text_of(app)))
        return counts

    (typing, told), (entered, found), (later, changed) = drive(app, body, (140, 45))

    assert (typing, entered, later) == (0, 1, 1)
    assert "the hub is asked on enter. Press enter." in told
    assert "gpt2 (" in found.splitlines()[0] and "on 8 x 8" in found.splitlines()[0]
    assert "gpt2 (" in changed.splitlines()[0] and "on 1 x 8" in changed.splitlines()[0]


def test_a_model_of_the_hub_that_was_named_when_entering_is_asked_for(hub):
    app = ExplorerApp(inputs.typed({"model": "somebody-else/gpt2", "gpus": "8"}))

    async def body(pilot):
        return app.main.planned.shown.headline

    assert drive(app, body).startswith("gpt2 (")
    assert len(hub) == 1

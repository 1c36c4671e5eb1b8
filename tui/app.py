"""The application: one screen, its styles, one queue for what is typed, and the garbage collector's hours.

Not here: the screen (screens/main.py), or how the command is entered (entry.py).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.message_pump import MessagePump

from tui import inputs
from tui.asking import Search
from tui.screens.main import MainScreen

AT_ONCE = ("ctrl+c", "ctrl+q")
"""Keys that overtake everything typed before them."""
TURNS = 3
"""Passes from the focused widget up to the application after which a key has had its effect: the key and its binding;
what these posted (focus, a changed text); what the widgets above made of that (the list, the screen's texts)."""
PATIENCE_S = 1.0
"""A widget that is removed answers no more: the next key does not wait for it longer than this."""


class ExplorerApp(App[None]):
    """`search` is the function that answers; tests of the drawing give one that reads a recorded answer."""

    CSS_PATH = "app.tcss"
    TITLE = "meshwright"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", "Quit", show=False, priority=True)]

    def __init__(self, texts: Mapping[str, str] | None = None, search: Search | None = None) -> None:
        super().__init__()
        self.main = MainScreen(inputs.typed({}) if texts is None else texts, search)
        self._typed: asyncio.Queue[events.Event] = asyncio.Queue()

    def get_default_screen(self) -> MainScreen:
        """The one screen is the first one."""
        return self.main

    def on_ready(self) -> None:
        """The first frame is painted: now import the planner's cost models and plan."""
        # The command line turned this off, since its commands live for a tenth of a second; this one stays. What was
        # imported lives as long as the process, so only what comes later is looked through.
        gc.freeze()
        gc.enable()
        self.run_worker(self._type())
        self.main.start()

    async def action_quit(self) -> None:
        """Leave, and end the search first: its thread would contend for the interpreter with the screen's farewell."""
        self.main.asking.change()
        await super().action_quit()

    # -- one queue for what is typed -------------------------------------------------------------------------------

    # Textual hands a key to the widget that has the focus when the key arrives. The focus moves later, when the binding
    # of an earlier key has run, so a burst of keys (typed ahead, or pasted by a terminal without bracketed paste) would
    # land where its first key was. Here a key is handed on when all before it have had their effect.

    async def on_event(self, event: events.Event) -> None:
        """Keys and pasted text wait for their turn, in the order in which they came."""
        waits = isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded
        if waits and not (isinstance(event, events.Key) and event.key in AT_ONCE):
            self._typed.put_nowait(event)
        else:
            await super().on_event(event)

    async def _type(self) -> None:
        """Hand on what was typed, one by one."""
        while True:
            await super().on_event(await self._typed.get())
            for _ in range(TURNS):
                for node in (self.focused or self.screen).ancestors_with_self:
                    await self._reached(node)

    async def _reached(self, node: MessagePump) -> None:
        """Until a widget has handled all messages that it has by now."""
        done = asyncio.Event()
        if node.call_later(done.set):
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), PATIENCE_S)

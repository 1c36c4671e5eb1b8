"""The application: one screen, its styles, and the garbage collector's hours.

Not here: the screen (screens/main.py), or how the command is entered (entry.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from textual.app import App

from tui import inputs
from tui.screens.main import MainScreen

if TYPE_CHECKING:  # as in messages.py
    from tui.state import Planned


class ExplorerApp(App[None]):
    """`planner` is the function that answers; tests of the drawing give one that reads a recorded answer."""

    CSS_PATH = "app.tcss"
    TITLE = "meshwright"
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, texts: Mapping[str, str] | None = None, planner: Callable[[inputs.Typed], Planned] | None = None
    ) -> None:
        super().__init__()
        self.main = MainScreen(inputs.typed({}) if texts is None else texts, planner)

    def get_default_screen(self) -> MainScreen:
        """The one screen is the first one."""
        return self.main

    def on_ready(self) -> None:
        """The first frame is painted: now import the planner's cost models and plan."""
        # The command line turned this off, since its commands live for a tenth of a second; this one stays. What was
        # imported lives as long as the process, so only what comes later is looked through.
        gc.freeze()
        gc.enable()
        self.main.start()

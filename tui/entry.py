"""`planner explore`: opens the explorer on this terminal, or prints as JSON what it would show first.

Textual is imported only when something is drawn. Not here: what is shown (state.py) or how (screens/, widgets/).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from planner.basics.errors import PlannerError
from planner.cli.explorer import not_installed
from tui import inputs


def explore(given: Mapping[str, Any], as_json: bool) -> int:
    """Run until the person quits."""
    typed = inputs.typed(given)
    if as_json:
        from tui import state

        sys.stdout.buffer.write(msgspec.json.encode(state.plan(state.ask(typed)).shown) + b"\n")
        return 0
    if find_spec("textual") is None:
        raise not_installed("textual")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise PlannerError("explore", None, "needs a terminal to draw on", "Use planner recommend, or explore --json")
    from tui.app import ExplorerApp

    app = ExplorerApp(typed)
    app.run()
    return app.return_code or 0

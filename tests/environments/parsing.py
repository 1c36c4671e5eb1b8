"""Has a function parse every folder in the folder that a command line names; their tables are in its `parsed.json`.

Run in the environments of tools, without pytest. Not here: what a tool makes of a folder (parse_*.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parse_all(parsed: Callable[[Path], dict[str, Any]]) -> None:
    """Every folder; what is refused has the reason in the place of its table."""
    root, answers = Path(sys.argv[1]).absolute(), {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            answers[folder.name] = parsed(folder)
        except Exception as error:  # whatever it raises is the answer
            answers[folder.name] = {"refused": f"{type(error).__name__}: {error}"}
    (root / "parsed.json").write_text(json.dumps(answers, default=str))

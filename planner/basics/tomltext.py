"""Keys and values as lines of TOML, for the presets that are written here.

Not here: reading TOML (presets.py), or which keys a preset has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping


def pairs(table: Mapping[str, object]) -> list[str]:
    """A line for each key that has a value; floats to six digits."""
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else json.dumps(key)


def _value(value: object) -> str:
    # A JSON string is a TOML string; a float without a point would come back as a whole number, which converts too.
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)

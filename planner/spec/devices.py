"""Which GPU preset the driver's name of a card means.

Not here: what a preset says (presets.py), or the words of published tables (tests/truth/published/machines.py).
"""

from __future__ import annotations

import re

from planner.spec import presets
from planner.spec.presets import Folders

MEMORY_ALLOWANCE = 0.08
"""How far a card's memory may be from its preset's: drivers, ECC and PyTorch count it differently by 3 GB of 80."""
USUAL = {"sxm": 0, "pcie": 1, "nvl": 2}
"""Forms of one GPU, the one meant first where the driver's name does not say."""


def gpu_preset(name: str, memory_bytes: float | None, kind: str = "cuda", folders: Folders = ()) -> str | None:
    """The GPU preset that a driver's name means ("NVIDIA H100 80GB HBM3" is h100-sxm-80gb), or None.

    The family is a word of the name, the memory decides between sizes, and PCIe or NVL is said where it is one.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    form = next((one for one in USUAL if any(word.startswith(one) for word in words)), None)
    found = []
    for preset in presets.names("gpus", folders=folders):
        parts = [part for part in preset.split("-") if not re.fullmatch(r"\d+gb", part)]
        forms = [part for part in parts if part in USUAL]
        if not words.issuperset(part for part in parts if part not in USUAL):
            continue
        known = presets.gpu(preset, folders=folders)
        off = abs(memory_bytes / known.memory_bytes - 1) if known.memory_bytes and memory_bytes else 0.0
        if known.kind != kind or off > MEMORY_ALLOWANCE or (form and forms and forms[0] != form):
            continue
        found.append((USUAL[forms[0]] if forms else 0, -len(parts), off, preset))
    return min(found)[-1] if found else None

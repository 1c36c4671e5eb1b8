"""The code that runs here, as one zip for hosts that have other code or none: planner, executor and presets.

Not here: sending it (ssh.py), or putting it in place (boot.py).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import executor
import planner
from planner.spec.presets import packaged

LEFT_OUT = ("__pycache__", ".pyc")


@dataclass(frozen=True)
class Sources:
    """Every file by its name in the zip, and their digest as `boot.digest` has it."""

    files: Mapping[str, bytes]
    digest: str

    @functools.cached_property
    def packed(self) -> bytes:
        """The zip. The same files make the same bytes; a host that has them never asks for it."""
        import zipfile  # takes long to load

        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return packed.getvalue()


@functools.cache
def sources() -> Sources:
    """The code that every host runs. The same files make the same digest."""
    files: dict[str, bytes] = {}
    for name, folder in (
        ("planner", Path(planner.__file__).parent),
        ("executor", Path(executor.__file__).parent),
        ("planner/presets", packaged()),
    ):
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder).as_posix()
            if path.is_file() and not any(word in inside for word in LEFT_OUT):
                files[f"{name}/{inside}"] = path.read_bytes()
    files = dict(sorted(files.items()))
    sums = [(name, hashlib.sha256(content).hexdigest()) for name, content in files.items()]
    return Sources(files, hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16])

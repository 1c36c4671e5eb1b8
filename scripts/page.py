"""The page that answers in a browser: fetches what it loads, by digest, and puts its folder together.

    python scripts/page.py fetch          # Pyodide and a wheel into web/; needs npm, and a network once
    python scripts/page.py build FOLDER   # every file of the page into a folder that a server shows

Not here: the page itself (web/), or the documentation around it (mkdocs.yml).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

PROJECT = Path(__file__).resolve().parents[1]
WEB = PROJECT / "web"
PYODIDE, WHEELS = WEB / "node_modules/pyodide", WEB / "wheels"
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
OWN = ("index.html", "page.js", "worker.js", "page.css", "ask.py")
PLATFORM = ("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--implementation", "cp",
            "--abi", "cp314")  # fmt: skip
PACKED = {"planner": "planner", "presets": "planner/presets", "executor/backends": "executor/backends"}
"""Folders that answer a question, and where an installation has them; backends say what can be launched."""
FIRST = {"model": "llama-3-70b", "gpus": "64", "cluster": "dgx-h100", "runtime": "megatron-core", "tp": "8", "pp": "4",
         "dp_shard": "2", "zero_stage": "1", "micro_batch_size": "1", "grad_accum": "32"}  # fmt: skip
"""What the page shows before Python is there."""


def fetch() -> None:
    """Bring what the page loads; npm and pip refuse what has another digest than web/ says."""
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=WEB, check=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *PLATFORM]
    subprocess.run([*pip, "--require-hashes", "-r", WEB / "requirements.txt", "-d", WHEELS], check=True)


def fetched() -> bool:
    """Whether everything that the page loads is here."""
    return all((PYODIDE / name).is_file() for name in RUNTIME) and any(WHEELS.glob("*.whl"))


def build(folder: Path) -> None:
    """The page's folder, whole."""
    from web.ask import answer

    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pyodide").mkdir(parents=True)
    for name in RUNTIME:
        shutil.copy(PYODIDE / name, folder / "pyodide" / name)
    for name in OWN:
        shutil.copy(WEB / name, folder / name)
    wheels = sorted(WHEELS.glob("*.whl"))
    for wheel in wheels:
        shutil.copy(wheel, folder / wheel.name)
    pack(folder / "planner.zip")
    names = ["planner.zip", *(wheel.name for wheel in wheels)]
    (folder / "files.json").write_text(json.dumps({"wheels": names}))
    (folder / "first.json").write_text(answer(json.dumps({"do": "ask", "given": FIRST})))


def pack(target: Path) -> None:
    """What answers, as one archive."""
    with ZipFile(target, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for name, place in PACKED.items():
            for one in sorted((PROJECT / name).rglob("*")):
                if one.is_file() and "__pycache__" not in one.parts:
                    archive.write(one, Path(place, one.relative_to(PROJECT / name)))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fetch"]:
            fetch()
        case ["build", target]:
            if not fetched():
                sys.exit("scripts/page.py: what the page loads is not here. Run: python scripts/page.py fetch")
            build(Path(target))
        case _:
            sys.exit(__doc__)

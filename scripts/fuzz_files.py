"""Odd files, folders, streams and names, drawn by chance: what a stranger's folder may hold, and a shell may close.

Each maker writes into the current folder and returns (command group, streams, command line) for apart.py. Commands only
read: nothing is launched. Not here: running them (fuzz.py), or wrong values in good files (fuzz_inputs.py).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

if __package__:
    from scripts import apart
    from scripts.fuzz_inputs import NASTY, ODD, ROOT, change_value
else:  # as a file, by path
    import apart  # type: ignore[import-not-found, no-redef]
    from fuzz_inputs import NASTY, ODD, ROOT, change_value  # type: ignore[import-not-found, no-redef]

from planner.spec import presets
from planner.spec.huggingface import config_dict

Made = tuple[str, str, list[str]]
RUN = ROOT / "tests" / "executor" / "old" / "run"
LARGE_BYTES = 3 * 10**9
"""Of a file with a hole, which takes no disk."""
SPECIAL = ("pipe", "folder", "zero", "full", "socket", "absent", "loop", "dangling", "large", "nested", "nested tables",
           "long line", "not utf-8", "empty", "aliases", "merges", "digits", "brackets", "nul")  # fmt: skip
CLOSED = tuple(one for one in apart.STREAMS if one != "files")


def special(chance: Random) -> Made:
    """A command that is given something else than the file it wants."""
    name = chance.choice(("it.json", "it.toml", "it.yaml", "it.jsonl", "it.csv", "it.txt", "it", "it\udcff.json"))
    odd(Path(name), chance.choice(SPECIAL))
    ask = ["--model", "gpt2", "--gpu", "h100", "--gpus", "2"]
    Path("P/gpus").mkdir(parents=True)
    Path("P/gpus/mine.toml").symlink_to(Path(name).absolute())
    group, words = chance.choice((
        ("planner", ["show", name]), ("planner", ["groups", name]), ("planner", ["compare", name, name]),
        ("planner", ["replay", name]), ("planner", ["calibrate", name]), ("planner", ["timeline", name]),
        ("planner", ["estimate", "--model", name, *ask[2:]]), ("planner", ["estimate", "--from", name, *ask]),
        ("planner", ["estimate", *ask, "--data", name]), ("planner", ["estimate", *ask, "--cluster", name]),
        ("planner", ["estimate", *ask, "--calibration", name]), ("planner", ["recommend", *ask, "-o", name]),
        ("planner", ["presets", "gpus", "mine", "--presets", "P"]), ("planner", ["presets", "gpus", "--presets", name]),
        ("executor", ["run", name, "--dry-run"]), ("executor", ["status", name]), ("executor", ["report", name]),
        ("executor", ["logs", name]), ("executor", ["resume", name]), ("executor", ["export", name, "to"]),
        ("executor", ["export-launch", name, "--launcher", "slurm", "-o", "to"]), ("executor", ["stop", name]),
        ("executor", ["measure", "--matrix", name, "--dry-run"]), ("executor", ["check", name]),
    ))  # fmt: skip
    return group, "files", words


def streams(chance: Random) -> Made:
    """A right command whose streams or folder are gone."""
    ask = ["--model", chance.choice(("gpt2", "mini-llama", "7b")), "--gpu", "h100", "--gpus", chance.choice("1248")]
    group, words = chance.choice((
        ("planner", ["estimate", *ask]), ("planner", ["recommend", *ask]),
        ("planner", ["fit", *ask[:4], "--max-gpus", "2"]),
        ("planner", ["presets", "models"]), ("planner", ["show", str(RUN / "plan.json")]), ("planner", ["--help"]),
        ("planner", ["groups", str(RUN / "plan.json")]), ("planner", ["timeline", str(RUN / "plan.json")]),
        ("executor", ["status", str(RUN)]), ("executor", ["report", str(RUN)]), ("executor", ["--help"]),
    ))  # fmt: skip
    return (
        group,
        chance.choice(CLOSED),
        [*words, *(["--json"] if chance.random() < 0.3 and "--help" not in words else [])],
    )


def hosts(chance: Random) -> Made:
    """A host file of names, ranges and settings by chance."""
    part = ("n", "[1-2]", "[01-04]", "[1-4096]", "[1-999999999]", "[4-1]", "[", "]", "[1,3]", "x", ":", "me@", "-o",
            " ", " slots=2", " slots=9999999999", " port=22", " user=x", " python=/p", ' prelude="a', "* ",
            "[" * 50, "\t", "#", "é", "'", "\\", "9" * 6000)  # fmt: skip
    lines = ["".join(chance.choices(part, k=chance.randint(1, 6))) for _ in range(chance.randint(1, 5))]
    Path("hosts").write_text("\n".join(lines))
    return "executor", "files", ["run", str(RUN / "plan.json"), "--hosts", "hosts", "--dry-run"]


def weights(chance: Random) -> Made:
    """A checkpoint whose configuration, index or head of a file is odd, and a plan of it, which reads its content."""
    folder = Path("weights")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_dict(presets.model("mini-llama"))))
    entry = {"dtype": "F32", "shape": [15], "data_offsets": [0, 60]}
    head: object = {"w": entry}
    if chance.random() < 0.7:
        change_value(chance, head, 1)
    raw = json.dumps(head).encode()
    length = chance.choice((len(raw), len(raw), len(raw), 0, 1, 2**24 + 1, 2**31, 2**63))
    names = ("a.safetensors", "../made.json", "/dev/zero", "", "..", "model.safetensors.index.json", 7, None, [])
    table = {"weight_map": {"w": chance.choice((*names, "a.safetensors", "a.safetensors"))}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table if chance.random() < 0.8 else head))
    with (folder / "a.safetensors").open("wb") as stream:
        stream.write(length.to_bytes(8, "little") + raw + bytes(60))
        if chance.random() < 0.2:
            stream.truncate(LARGE_BYTES)
    if chance.random() < 0.3:
        odd(chance.choice(sorted(folder.iterdir())), chance.choice(SPECIAL))
    ask = ["--cluster", "cpu", "--gpus", "2", "--checkpoint", "weights"]
    model = chance.choice(("weights", "weights/config.json", "mini-llama"))
    return "planner", "files", ["recommend", "--model", model, *ask, "-o", "plan.json"]


def runs(chance: Random) -> Made:
    """A run folder of which a file is something else, or that holds one more."""
    shutil.copytree(RUN, "run")
    for _ in range(chance.randint(1, 2)):
        files = sorted(path for path in Path("run").rglob("*") if path.is_file())
        more = ("hosts.json", "launcher.json", "join.json", "asked.json", "launch.json", "failed/node-0.json", ".lock",
                "failed/rank-0.json", "alive/rank-0", "joined/node-0.json", "attempts/1/run.json",
                "profile/rank-0.json",
                "checkpoints/step-00000002/COMPLETE", "weights/model.safetensors.index.json")  # fmt: skip
        path = chance.choice((*files, Path("run", chance.choice(more))))
        how = chance.random()
        if how < 0.4:
            odd(path, chance.choice(SPECIAL))
            continue
        try:
            whole = json.loads(path.read_bytes() if path.is_file() and path.stat().st_size < 10**6 else b"")
        except (OSError, ValueError, RecursionError):
            whole = {
                "schema": "x/1",
                "hosts": [{"name": chance.choice(NASTY[:40])}],
                "pid": 1,
                "step": chance.choice(ODD),
            }
        change_value(chance, whole, chance.randint(1, 3))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():
            path.write_text(json.dumps(whole if how < 0.9 else chance.choice(ODD)))
    group, words = chance.choice((
        ("executor", ["status", "run"]), ("executor", ["report", "run"]), ("executor", ["logs", "run"]),
        ("executor", ["report", "run", "--check"]), ("executor", ["resume", "run"]), ("executor", ["stop", "run"]),
        ("executor", ["export", "run", "to"]), ("executor", ["status", "run", "--json"]),
        ("planner", ["calibrate", "run"]), ("planner", ["timeline", "--beside", "run"]),
        ("planner", ["show", "run/plan.json"]),
    ))  # fmt: skip
    return group, "files", words


KINDS: dict[str, tuple[Callable[[Random], Made], int]] = {
    "special": (special, 600), "streams": (streams, 200), "hosts": (hosts, 150), "weights": (weights, 150),
    "runs": (runs, 500),
}  # fmt: skip
"""Makers, and of how many calls beside the 9,000 of fuzz_inputs.py each is."""


def odd(path: Path, kind: str) -> None:
    """Put something of this kind where a file is looked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    texts = {
        "nested": b"[" * 10**5 + b"]" * 10**5, "nested tables": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        "long line": b'{"a": "' + b"x" * 2**25 + b'"}', "not utf-8": b'{"a": "\xff\xfe"}\n', "empty": b"",
        "digits": b'{"schema": ' + b"9" * 10**5 + b"}", "brackets": b"a = " + b"[" * 10**5, "nul": b'{"a": "\0"}\0',
        "aliases": b"a0: &a0 [1]\n" + b"".join(
            b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)),
        "merges": b"a0: &a0 {k: 1}\n" + b"".join(
            b"a%d: &a%d {<<: [%s]}\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)),
    }  # fmt: skip
    links = {"zero": "/dev/zero", "full": "/dev/full", "dangling": "nothing-here", "loop": path.name}
    if kind in texts:
        path.write_bytes(texts[kind])
    elif kind in links:
        path.symlink_to(links[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # an address of a socket has 107 bytes
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(path.name.encode("utf-8", "surrogateescape"))
        os.chdir(here)
    elif kind == "large":
        with path.open("wb") as stream:
            stream.truncate(LARGE_BYTES)

"""Every call of the tree that opens or reads a file goes through planner/basics/reading.py, or stands in EXCEPTIONS.

Likewise no load of Transformers may run code of a folder. Not here: the bounds (test_reading.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import executor

ROOT = Path(executor.__file__).parents[1]
READING = "planner/basics/reading.py"
PARTS = ("planner", "executor", "tui")

METHODS = {"read_text", "read_bytes", "readlines", "open"}
UNBOUNDED = {"read", "readline"}
"""Without a size."""
FUNCTIONS = {
    "open", "io.open", "os.open", "os.fdopen", "json.load", "tomllib.load", "tomllib.loads", "yaml.load",
    "yaml.safe_load", "yaml.full_load", "yaml.load_all", "yaml.safe_load_all", "msgspec.yaml.decode", "np.load",
    "np.loadtxt", "np.fromfile", "np.memmap", "torch.load", "safe_open", "load_file", "mmap.mmap",
    "linecache.getlines", "urlopen", "pickle.load", "pickle.loads",
}  # fmt: skip
"""By the names that the tree calls them; ordinary values are decoded by bytes that were read before."""

OWN_RUN = "a file of the run that this process runs, written a moment before by itself or its own ranks"
PACKAGED = "a file of this package, which came with the code that reads it"
KERNEL = "what the kernel says of processes and interfaces, under /proc or /sys"
CHECKED = "safetensors takes no head above 100 MB, and checks every offset in it before it reads a tensor"
CALLER = "comes through the pipe or connection of the process that started this one, which bounds it"

EXCEPTIONS: dict[str, str] = {
    "executor/folder/checkpoints.py:_sync": "opens a file or a folder that was just written, to bring it to the disk",
    "executor/folder/ownership.py:_taken": "opens the lock file, of which nothing is read",
    "executor/hosts/boot.py:digest": PACKAGED,
    "executor/hosts/boot.py:main": CALLER,
    "executor/hosts/checks/host.py:versions": "a file of the torch that is installed here, which is imported anyway",
    "executor/hosts/node.py:Mirror._send": "looks first that it is a file, and reads it in parts of CHUNK_BYTES",
    "executor/hosts/ssh.py:contact": "opens connections and no file",
    "executor/hosts/ssh_run.py:_SshRun._request": OWN_RUN,
    "executor/hosts/ssh_run.py:_SshRun._store": "opens a file to write into it, and reads nothing",
    "executor/hosts/ssh_session.py:Session._open": PACKAGED,
    "executor/launchers/local.py:start": "opens the descriptor of a pipe that it has just made",
    "executor/launchers/skypilot.py:accelerator": PACKAGED,
    "executor/measure/measure.py:_end_whole": "opens a file to cut its last line, which was read within bounds",
    "executor/run/launch.py:start_and_watch": OWN_RUN,
    "executor/run/launch_export.py:_kubernetes": OWN_RUN,
    "executor/system/processes.py:_others": KERNEL,
    "executor/system/processes.py:said": KERNEL,
    "executor/system/sources.py:sources": PACKAGED,
    "planner/basics/output.py:_check_unchanged": "a file that was read within bounds, compared with what it held then",
    "executor/worker/checkpoints/fetching.py:_sent": "reads parts of a size that the checkpoint's manifest says",
    "executor/worker/checkpoints/shards.py:load": CHECKED,
    "executor/worker/checkpoints/shards.py:read_pieces": CHECKED,
    "executor/preflight/files.py:text_of": "the text that is trained on, as large as it is, after its kind is checked",
    "executor/worker/data/data.py:open_rows": "the tokens that are trained on, mapped and not read",
    "executor/worker/data/limited.py:limited": KERNEL,
    "executor/worker/engines/transformers_tp.py:TransformersTpEngine.__init__": OWN_RUN,
    "executor/worker/model/values.py:_files_by_key": CHECKED,
    "executor/worker/model/values.py:_read": CHECKED,
    "executor/worker/probe/check_reduce.py:main": CALLER,
    "executor/worker/probe/probe.py:_time": OWN_RUN,
    "executor/worker/readback.py:accelerate_values": OWN_RUN,
    "executor/worker/readback.py:deepspeed_values": OWN_RUN,
    "executor/worker/readback.py:missing_names": PACKAGED,
    "executor/worker/readback.py:transformers_values": OWN_RUN,
    "executor/worker/weights/export.py:_adapters": CHECKED,
    "executor/worker/weights/weights.py:read": CHECKED,
    "executor/worker/world/limits.py:limit_memory": KERNEL,
    "planner/ask/fromfile/classes.py:classes": PACKAGED,
    "planner/ask/fromfile/hub.py:_same": PACKAGED,
    "planner/ask/fromfile/megatron_bridge.py:defaults": PACKAGED,
    "planner/ask/fromfile/torchtitan_jobs.py:registered": PACKAGED,
    "planner/basics/streams.py:prepare": "opens the null device",
    "planner/cli/__init__.py:show_schema": PACKAGED,
    "planner/spec/hub.py:_fetched": "reads RECORD_BYTES of the answer at most",
    "tui/widgets/fields.py:Fields._changed": "opens a list on the screen, and no file",
    "tui/widgets/fields.py:Fields.move": "opens a list on the screen, and no file",
    "tui/widgets/fields.py:Fields.search": "opens a list on the screen, and no file",
}
"""Functions that read otherwise, and why what they read is bounded or their own."""


@cache
def trees() -> dict[str, ast.Module]:
    """The parsed modules by path."""
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.Call]]:
    """(name of the outermost function or class, call) of every call."""
    for node in ast.iter_child_nodes(tree):
        scope = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.Call):
            yield inside, node
        yield from functions(node, ".".join(filter(None, (inside, scope))))


def reads(call: ast.Call) -> bool:
    """Whether a call may read a file without the bounds of reading.py."""
    name = ast.unparse(call.func)
    whose, _, method = name.rpartition(".")
    if whose == "reading":
        return False
    if name in FUNCTIONS or (whose and (method in METHODS or (method in UNBOUNDED and not call.args))):
        return not writes(call)
    return False


def writes(call: ast.Call) -> bool:
    """Whether it opens for writing alone, as its words show."""
    words = [*call.args, *(one.value for one in call.keywords)]
    modes = [one.value for one in words if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    flags = {one.attr for word in words for one in ast.walk(word) if isinstance(one, ast.Attribute)}
    return any(set(mode) & set("wax") and "+" not in mode and len(mode) <= 3 for mode in modes) or "O_WRONLY" in flags


@cache
def found() -> dict[str, list[int]]:
    """The lines of such calls, by module and function."""
    places: dict[str, list[int]] = {}
    for path, tree in trees().items():
        for name, call in functions(tree):
            if path != READING and reads(call):
                places.setdefault(f"{path}:{name}", []).append(call.lineno)
    return places


def test_what_is_given_is_read_through_the_bounded_reader() -> None:
    new = {place: lines for place, lines in found().items() if place not in EXCEPTIONS}
    assert not new, f"read these by {READING}, or give the reason in EXCEPTIONS: {new}"


def test_each_exception_is_still_there_and_has_a_reason() -> None:
    assert set(EXCEPTIONS) <= set(found())
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    "line, seen",
    {
        "open(path)": True, "open(path, 'rb')": True, "path.open()": True, "Path(x).open('r+b')": True,
        "path.open(encoding='utf-8')": True, "path.read_text()": True, "(a / b).read_bytes()": True,
        "stream.read()": True, "stream.readline()": True, "stream.readlines()": True, "json.load(stream)": True,
        "tomllib.loads(text)": True, "yaml.safe_load(stream)": True, "np.memmap(path)": True, "torch.load(path)": True,
        "safe_open(path, framework='pt')": True, "os.open(path, os.O_RDONLY)": True, "urlopen(request)": True,
        "open(path, 'w')": False, "path.open('wb', buffering=0)": False, "path.open(mode='ab')": False,
        "os.open(path, os.O_WRONLY | os.O_CREAT)": False, "stream.read(10)": False, "stream.readline(most)": False,
        "reading.read_bytes(path)": False, "read_bytes(path)": False, "path.write_text(text)": False,
    }.items(),
)  # fmt: skip
def test_a_read_is_seen_and_a_write_is_none(line: str, seen: bool) -> None:
    assert reads(next(call for _, call in functions(ast.parse(line)))) is seen


LOADS = ("from_pretrained", "from_config")
OWN_CODE = {"GenerationConfig": "numbers alone", "PeftModel": "its class is peft's own, whatever the folder says"}
"""Classes that load no code of a folder's, and take no trust_remote_code."""


def trusting(tree: ast.AST) -> list[int]:
    """Lines of the calls that may run a folder's code without being told not to."""
    lines = []
    for _, call in functions(tree):
        whose, _, method = ast.unparse(call.func).rpartition(".")
        told = [one.value for one in call.keywords if one.arg == "trust_remote_code"]
        if method in LOADS and whose not in OWN_CODE:
            safe = told and isinstance(told[0], ast.Constant) and told[0].value is False
            lines += [] if safe else [call.lineno]
    return lines


def test_nothing_that_is_loaded_may_bring_code_along() -> None:
    found = {path: len(lines) for path, tree in trees().items() if (lines := trusting(tree))}
    assert found == {"executor/worker/imported/describe.py": 2}  # of executor import --trust-remote-code
    methods = [ast.unparse(call.func).rpartition(".")[2] for tree in trees().values() for _, call in functions(tree)]
    assert sum(method in LOADS for method in methods) >= 8


@pytest.mark.parametrize("told", ["", ", trust_remote_code=True", ", trust_remote_code=given", ", **more"])
def test_a_load_that_may_bring_code_along_is_seen(told: str) -> None:
    assert trusting(ast.parse(f"AutoTokenizer.from_pretrained(path{told})")) == [1]
    assert trusting(ast.parse("AutoTokenizer.from_pretrained(path, trust_remote_code=False)")) == []

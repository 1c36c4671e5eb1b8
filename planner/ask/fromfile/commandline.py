"""A command line that trains, as tables of keys: what its launcher is given, and what the script is. Nothing is run.

`accelerate launch`, torchrun, `deepspeed` and `python` start a script; `trl sft`, `llamafactory-cli train` and `axolotl
train` are one. A configuration that an option names is read, and options beside it replace its keys.
Not here: what the keys mean (a module a format).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.ask.fromfile import files
from planner.basics import reading
from planner.basics.errors import PlannerError, refusing

NamedTable = tuple[str, dict[str, Any]]

LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
SCRIPTS = ("trl", "llamafactory-cli", "axolotl", "swift")
"""Programs that train."""
JOB_SCRIPT = "run_train.sh"
"""torchtitan's own start, whose variables say what it starts: NGPU, MODULE and CONFIG (torchtitan b5bcd76)."""
STARTS = (*LAUNCHERS, *SCRIPTS, "python", "python3", JOB_SCRIPT)
SUFFIX = ".sh"
"""Of a file that holds one command line."""
LONGEST = 20_000
"""Characters of a command line."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
SCRIPT = "script"
"""Where the name of one of Megatron-LM's scripts stands, which say what is trained."""
OF_MEGATRON = re.compile(r"pretrain_\w+\.py")
POLICY = re.compile(r"activation[-_]checkpoint:[a-z_-]+")
ON = "true"
"""An option without a value."""
KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""Accelerate's options that stand for a distributed_type (accelerate 1.15.0, commands/launch.py)."""
SECTIONS = {"fsdp_": "fsdp_config", "megatron_lm_": "megatron_lm_config", "parallelism_config_": "parallelism_config"}
OF_DEEPSPEED = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
    "gradient_clipping", "deepspeed_config_file", "zero3_init_flag",
)  # fmt: skip


def is_one(text: str) -> bool:
    """Whether a value of --from is a command line, not a file's name."""
    first = next((word for word in text.split() if not VARIABLE.match(word)), "")
    return len(text.split()) > 1 and Path(first).name in STARTS and not os.path.isfile(text)


def of_script(path: str | os.PathLike[str]) -> str:
    """The command line that a file holds, in one line: its comments and line ends are left out (PlannerError)."""
    with refusing(OSError, "from", path, "cannot be read", "Give a training configuration"):
        raw = reading.read_bytes(Path(path), LONGEST)
    lines = raw.decode("utf-8", "replace").replace("\\\n", " ").splitlines()
    commands = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if len(commands) != 1 or not is_one(commands[0]):
        rule = "does not hold one command line that trains"
        raise PlannerError("from", path, rule, f"Known programs: {', '.join(STARTS)}")
    return commands[0]


def tables(text: str) -> list[NamedTable]:
    """The launcher's table, where there is one, and the script's (PlannerError for what is no such command line)."""
    if len(text) > LONGEST or not text.isprintable():
        raise PlannerError("from", text[:60], f"is not one line of at most {LONGEST:,} characters", "Give a file")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlannerError("from", text[:60], f"is no command line: {error}", "Close its quotes") from None
    variables = dict[str, str]()
    while words and VARIABLE.match(words[0]):
        name, _, value = words[0].partition("=")
        variables[name], words = value, words[1:]
    program, words = Path(words[0]).name, words[1:]
    if program == JOB_SCRIPT:
        module, config = variables.get("MODULE", "llama3"), variables.get("CONFIG", "llama3_debugmodel")
        words = ["--module", module, "--config", config, *words]
        processes = {"nproc_per_node": variables.get("NGPU", "8")}
        return [("torchrun", processes), ("command line", _script(words))]
    if program == "python" or program == "python3":
        if words[:2] not in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            return [("command line", _script(words))]
        program, words = "torchrun", words[2:]
    if program == "swift":
        return _swift(variables, words)
    if program not in LAUNCHERS:
        return [("command line", _script(words))]
    if program == "accelerate":
        if words[:1] != ["launch"]:
            raise PlannerError("from", text[:60], "launches nothing", "Give accelerate launch and what it starts")
        words = words[1:]
    given, rest = _options(words, script=True)
    found = [(program, _accelerate(given) if program == "accelerate" else given)] if given else []
    if not rest:
        raise PlannerError("from", text[:60], "names no script", "Give the whole command")
    return [*found, ("command line", _script(rest))]


def _swift(variables: Mapping[str, str], words: Sequence[str]) -> list[NamedTable]:
    """ms-swift's command, which starts torchrun by itself where variables ask for processes (3602360,
    swift/cli/main.py, use_torchrun); one process spreads layers over all devices that it sees."""
    script = _script(words[1:]) | {"swift_command": words[0] if words else ""}
    names = {"NPROC_PER_NODE": "nproc_per_node", "NNODES": "nnodes"}
    started: dict[str, Any] = {key: variables[name] for name, key in names.items() if name in variables}
    seen = len([one for one in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()])
    if not started and seen == 1:
        started = {"nproc_per_node": "1"}
    elif not started and seen > 1:
        script.setdefault("device_map", "auto")
    return [*([("torchrun", started)] if started else []), ("command line", script)]


def _script(words: Sequence[str]) -> dict[str, Any]:
    """What a script is given: the table of the file that it names, under its options."""
    if any(word.partition("=")[0] == "--module" for word in words):
        return _job(words)
    given, rest = _options(words, script=False)
    config = given.pop("config", None) or next((word for word in rest if word.endswith(files.SUFFIXES)), None)
    script = next((name for word in rest if OF_MEGATRON.fullmatch(name := Path(word).name)), None)
    if script is not None and "micro-batch-size" in given:
        given[SCRIPT] = script
    return (files.load(str(config)) if config else {}) | given


def _job(words: Sequence[str]) -> dict[str, Any]:
    """Options of torchtitan as tyro takes them: dashes for underscores, `no-` before what is off, policies as words."""
    policies = [word for word in words if POLICY.fullmatch(word)]
    given, _ = _options([word for word in words if not POLICY.fullmatch(word)], script=False)
    table: dict[str, Any] = {}
    for key, value in given.items():
        section, dot, name = key.replace("-", "_").rpartition(".")
        off = bool(dot) and name.startswith("no_") and value == ON
        table[f"{section}{dot}{name.removeprefix('no_') if off else name}"] = "false" if off else value
    for word in policies:
        section, _, name = word.replace("-", "_").partition(":")
        table[f"{section}.mode"] = name
    return table


def _accelerate(given: dict[str, Any]) -> dict[str, Any]:
    """Options of `accelerate launch` as its file has them, over the file that they name."""
    name = next((given.pop(key) for key in ("config_file", "config-file") if key in given), None)
    table: dict[str, Any] = files.load(str(name)) if name is not None else {"compute_environment": "LOCAL_MACHINE"}
    for key, value in given.items():
        section = next((place for start, place in SECTIONS.items() if key.startswith(start)), None)
        section = "deepspeed_config" if key in OF_DEEPSPEED else section
        if key in KINDS:
            table["distributed_type"] = KINDS[key]
        elif section is not None:
            inner = table.get(section)
            table[section] = {**(inner if isinstance(inner, dict) else {}), key: value}
        else:
            table[key] = value
    several = str(table.get("num_processes", 1)) != "1"
    return {"distributed_type": "MULTI_GPU" if several else "NO"} | table


def _options(words: Sequence[str], *, script: bool) -> tuple[dict[str, Any], list[str]]:
    """Options by name, and the other words. `script`: the first other word and all that follow are left as they are;
    an option takes the word after it unless that is an option, or the script."""
    found: dict[str, Any] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            if script:
                return found, list(words[place - 1 :])
            found.setdefault("", []).append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if script and name in ("m", "module"):
            return found, list(words[place:])
        values = [value] if equals else []
        while not equals and place < len(words) and not _is_option(words[place]):
            if script and (values or words[place].endswith(".py") or Path(words[place]).name in SCRIPTS):
                break
            values.append(words[place])
            place += 1
        found[name] = ON if not values else values[0] if len(values) == 1 else values
    rest = found.pop("", [])
    return found, rest


def _is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))

"""`executor generate`: what an exported model answers to a prompt.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (worker/generate.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from executor.preflight import preflight
from executor.system.processes import answer_of
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.help_page import PagedCommand, option
from planner.basics.saying import say


@click.command(cls=PagedCommand, example='executor generate my-model "a prompt"')
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.argument("prompt", metavar="PROMPT")
@option(
    "run",
    "--temperature",
    type=click.FloatRange(0, 100),
    callback=command.finite,
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token; 1 samples from the model's distribution.",
)
@option(
    "run",
    "--tokens",
    type=click.IntRange(1, 1_000_000),
    default=256,
    show_default=True,
    help="Tokens to generate at most.",
)
@option("run", "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the sampling.")
@option("question", "--plain", is_flag=True, help="Continue the prompt as text, not as a turn of a chat.")
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def generate(folder: Path, prompt: str, temperature: float, tokens: int, seed: int, plain: bool, as_json: bool) -> int:
    """Generate text from PROMPT with an exported model. FOLDER is what executor export wrote."""
    adapters = (folder / "adapter_config.json").is_file()
    if not adapters and not (folder / "config.json").is_file():
        fix = "Give the folder that executor export RUN FOLDER wrote"
        raise PlannerError("FOLDER", folder, "holds no model (no config.json)", fix)
    preflight.check_packages(["torch", "transformers", *(["peft"] if adapters else [])])
    words = (str(folder), prompt, repr(temperature), str(tokens), str(seed), "plain" if plain else "chat")
    said, why = answer_of("generate", *words, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if why:
        raise PlannerError("generate", None, f"its process failed: {why}", "See that FOLDER holds a whole model")
    say(msgspec.json.encode({"schema": "generate/1", **said}) if as_json else said["answer"])
    return 0

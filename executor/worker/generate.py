"""Generates text with an exported folder: a model, or adapters with their base, and its own tokenizer.

A process of its own, started by `executor generate`, which has checked the folder; it prints one line of JSON. Not
here: serving, or batches of prompts.

    python -m executor.worker.generate FOLDER PROMPT TEMPERATURE TOKENS SEED chat|plain
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from executor.worker.data.tokenizer import ByteTokenizer, OwnTokenizer
from executor.worker.model.layers import auto_class
from planner.basics import reading
from planner.basics.errors import PlannerError
from planner.basics.reading import holds_tokenizer


def main(arguments: Sequence[str]) -> int:
    """Print the answer, or what is refused."""
    folder, prompt, temperature, tokens, seed, form = arguments
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries that greet
            answer = generate(Path(folder), prompt, float(temperature), int(tokens), int(seed), chat=form == "chat")
            said: dict[str, Any] = {"answer": answer}
    except PlannerError as error:
        said = {"refused": [error.field, str(error.value), error.rule, error.fix]}
    print(json.dumps(said))
    return 0


def generate(folder: Path, prompt: str, temperature: float, tokens: int, seed: int, *, chat: bool) -> str:
    """The text that follows a prompt, up to an end or a number of tokens. A temperature of 0 takes the likeliest token.

    In a `chat` the prompt is one turn in the folder's template where it has one, else the beginning of a text.
    """
    model = model_of(folder)
    own = OwnTokenizer(str(folder)) if holds_tokenizer(folder) else None
    reader = own or ByteTokenizer()
    ids, ends = reader.opened(prompt, chat=chat), reader.ends
    torch.manual_seed(seed)
    chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    given = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens,
                              eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0, **chosen)  # fmt: skip
    return reader.text(made[0, len(ids) :].tolist())


def model_of(folder: Path) -> Any:
    """The model of a folder, adapters on their base; on a GPU where there is one."""
    from transformers import AutoConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    adapters, base = folder / "adapter_config.json", folder
    if adapters.is_file():
        base = Path(reading.read_json(reading.read_bytes(adapters))["base_model_name_or_path"])
        if not (base / "config.json").is_file():
            raise PlannerError("FOLDER", folder, f"holds adapters of {base}, which is not here", "Export with --merge")
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    model: Any = auto_class(config).from_pretrained(base, local_files_only=True, trust_remote_code=False)
    if adapters.is_file():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    return model.to(device).eval()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

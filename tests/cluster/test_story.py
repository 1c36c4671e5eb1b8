"""The story of a folder of chats in docs/finetuning.md, typed as written: every line of its block in a shell, from the
folder and a checkpoint to the answer of the model that was trained.

The checkpoint is tiny and its head is zero: it has never said a word. Not here: the other forms of data
(test_forms_trained.py), or whether the commands of other blocks parse (tests/test_docs.py).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from chats import MARKS, save_tokenizer

from executor.worker.generate import generate
from tests.test_docs import CHATS, FENCE, section

PATIENCE_S = 300
TOPICS = ("sea", "wind", "stone", "river", "light", "boat", "rain", "road")
ANSWER = "That it was cold and calm"
DAYS, A_DAY = 3, 40


def begun(folder: Path, asked: str) -> None:
    """What the story begins with: a folder of chats in which `asked` is answered, and a model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    prompts = [asked.replace(TOPICS[0], topic) for topic in TOPICS]
    assert TOPICS[0] in asked
    words = sorted({word for text in (*prompts, ANSWER) for word in text.split()})
    (folder / "chats").mkdir()
    for day in range(DAYS):
        chats = [
            [{"role": "user", "content": prompts[at % len(TOPICS)]}, {"role": "assistant", "content": ANSWER}]
            for at in range(A_DAY)
        ]
        lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
        (folder / "chats" / f"day-{day}.jsonl").write_text(lines)
    save_tokenizer(words, folder / "my-model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(MARKS) + len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder / "my-model")


def test_a_folder_of_chats_is_trained_on_and_answers_by_the_lines_of_the_page(tmp_path: Path) -> None:
    ((_, block),) = FENCE.findall(section(*CHATS))
    lines = block.splitlines()
    asked = shlex.split(lines[-1])[-1]
    begun(tmp_path, asked)
    assert generate(tmp_path / "my-model", asked, 0.0, 8, 0, chat=True) != ANSWER

    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert done.stdout.strip() == ANSWER

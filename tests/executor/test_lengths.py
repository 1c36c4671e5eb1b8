"""Lengths that a plan is made with are those of the rows that a rank trains on, counted by the same code.

Not here: what a plan makes of them (tests/planner/test_data_lengths.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from test_rundir import make_plan

from executor.preflight import lengths
from executor.worker.data import lengths as counting
from executor.worker.data.data import open_rows
from executor.worker.data.documents import Documents
from planner.spec import Layout, Recipe, TrainingJob

SEQ_LEN = 96
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}<a>{% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}<u>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of one to four turns, a few without an answer in reach, and a tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("lengths")
    chosen = random.Random(3)
    words = [f"w{number}" for number in range(50)]

    def said(most: int) -> str:
        return " ".join(chosen.choice(words) for _ in range(chosen.randint(1, most)))

    lines = []
    for number in range(60):
        turns = [("user", said(12)), ("assistant", said(9))] * chosen.choice((1, 1, 2, 4))
        if number % 20 == 7:
            turns = [("user", " ".join(["w1"] * 200)), ("assistant", "w2")]  # its answer lies behind the cut
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chats.jsonl").write_text("".join(lines))
    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "<u>", "<a>", "<unk>", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<u>", "<a>"]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "tokenizer")
    return folder


@pytest.mark.parametrize("own", [True, False])
def test_the_counts_are_those_of_the_trainers_own_rows(files, own):
    tokenizer = str(files / "tokenizer") if own else None
    recipe = Recipe(data=str(files / "chats.jsonl"), tokenizer=tokenizer)
    plan = make_plan(Layout(engine="ddp"), job=TrainingJob(seq_len=SEQ_LEN, recipe=recipe))
    rows = open_rows(plan, recipe.data)
    assert isinstance(rows, Documents) and rows.left_out == 3

    found = lengths.read(str(files / "chats.jsonl"), tokenizer, SEQ_LEN, packed=False)

    assert isinstance(found, dict)
    assert (found["examples"], found["read"], found["left_out"]) == (60, 60, rows.left_out)
    assert found["longest"] == rows.lengths.max() and found["mean"] == pytest.approx(rows.lengths.mean())
    # The same rows, in sequences of the longest one.
    narrower = msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, seq_len=int(found["longest"])))
    assert open_rows(narrower, recipe.data).lengths.tolist() == rows.lengths.tolist()


def test_of_many_examples_the_longest_lines_and_a_sample_are_read(tmp_path, monkeypatch):
    path = tmp_path / "pairs.jsonl"
    sizes = random.Random(5).sample(range(5000), 400)
    path.write_text("\n".join(json.dumps({"prompt": "p" * size, "response": "r"}) for size in sizes) + "\n")
    for name, value in (("ALL", 100), ("LONGEST", 10), ("SAMPLED", 60)):
        monkeypatch.setattr(counting, name, value)

    found = counting.count(path, 10_000, None)

    assert found["examples"] == 400 and 60 <= found["read"] <= 70
    assert found["longest"] == max(sizes) + 2
    assert found["mean"] == pytest.approx(sum(sizes) / 400, rel=0.2)


def test_what_cannot_be_counted_here_is_a_reason_and_no_refusal(files, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    found = lengths.read(str(files / "chats.jsonl"), str(files / "tokenizer"), SEQ_LEN, packed=False)

    assert found == "transformers is not installed"
    assert isinstance(lengths.read(str(files / "chats.jsonl"), None, SEQ_LEN, packed=False), dict)

"""A tiny model fine-tuned on 40 chats in every form that data have: exported, it answers its prompts word for word.

Every fine-tuning begins with a checkpoint that a full run on 40 other chats made, and has its tokenizer. Not here: what
a row of a form holds (tests/executor/test_forms.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
from agents import TINY, make_plan, run_warm
from chats import save_tokenizer

from executor.preflight.examples import ALPACA
from executor.preflight.meant import meant
from executor.worker.generate import generate
from executor.worker.weights.export import export
from executor.worker.weights.weights import SHARD_BYTES
from planner.spec import Layout, Lora, Optimizer, Recipe, TrainingJob

sys.path.append(str(Path(__file__).parents[1] / "executor"))  # where the files of each form are written
from forms import FORMS, Pairs, written

WORDS = [f"w{number}" for number in range(400)]
LAYOUTS = {
    "ddp": Layout(engine="ddp", dp_replicate=2),
    "fsdp2": Layout(engine="fsdp2", dp_shard=2, zero_stage=3),
    "zero3": Layout(engine="deepspeed", dp_shard=2, zero_stage=3),
    "lora": Layout(engine="ddp", dp_replicate=2),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ASKED, CHATS, ANSWERING = 10, 40, 47
BASE_STEPS, STEPS = 100, {"full": 40, "lora": 80, "alpaca": 100}
"""Alpaca's prompt is mostly words that the tokenizer does not know, among which one has to be found."""
PACKINGS = ("padded", "packed")
ALL = [(form, packing, layout) for form in FORMS for packing in PACKINGS for layout in LAYOUTS]
SAMPLE = [(form, PACKINGS[(at + at // 4) % 2], list(LAYOUTS)[at % 4]) for at, form in enumerate(FORMS)]
"""Each form once, and each layout with either packing."""
IN_CI = SAMPLE[::3]
"""Each layout once: what a row of every form holds is tested without training."""


def pairs(first: int) -> Pairs:
    """Forty prompts of a word of their own, and answers of three: no one answer from 0 and from 100."""
    numbers = range(first, first + CHATS)
    answers = [" ".join(WORDS[(at * step + first) % ANSWERING] for step in (3, 5, 11)) for at in numbers]
    return [(f"{WORDS[at]} w1", answer) for at, answer in zip(numbers, answers, strict=True)]


def steps_of(form: str, layout: str) -> int:
    return STEPS.get(form, STEPS["lora" if layout == "lora" else "full"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, trained on forty chats: the folder that a person would begin with."""
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(["look", "blue", *WORDS], folder / "tokenizer")
    data = written(folder, "lines", pairs(0))
    recipe = Recipe(data=str(data), tokenizer=str(folder / "tokenizer"), random_weights=True, steps=BASE_STEPS)
    return trained(folder, "fsdp2", "padded", recipe)


def trained(folder: Path, layout: str, packing: str, recipe: Recipe) -> Path:
    """The exported model of a run."""
    adapters = layout == "lora"
    job = TrainingJob(
        method="lora" if adapters else "full",
        lora=Lora(rank=16, alpha=32, targets=TARGETS) if adapters else None,
        precision="fp32",
        optimizer=Optimizer(lr=1e-2 if adapters else 5e-3, beta2=0.99, weight_decay=0.0),
        seq_len=96,
        mean_seq_len=12,
        packing=packing,
        recipe=recipe,
    )
    split = LAYOUTS[layout]
    split = msgspec.structs.replace(split, micro_batch_size=20 if packing == "padded" else 10)
    plan = meant(make_plan(split, job, nodes=1, per_node=2, model=TINY))
    run = folder / "run"
    done = run_warm(plan, run, "--no-meter", "--save-weights")
    assert set(done.exit_codes) == {0}, done.output
    export(run, folder / "model", None, SHARD_BYTES)
    return folder / "model"


def asked(form: str, prompt: str, answer: str) -> tuple[str, str, bool]:
    """What is asked of a model trained on a form, what it should answer, and whether in a chat's turn."""
    if form == "alpaca":
        return ALPACA.format(paired="", instruction=prompt) + "### Response:", answer, False
    if form == "tools":  # which executor generate has none of: the turn as the template puts it after them
        return f"<s> look <u> {prompt} <a>", answer, False
    return prompt, answer, form != "texts"


@pytest.fixture(scope="module")
def said_before(base: Path) -> Callable[[str, bool], str]:
    """What the model answers that fine-tuning begins with; most forms ask the same of it."""
    return cache(lambda given, chat: generate(base, given, 0.0, 8, 0, chat=chat))


@pytest.mark.parametrize(
    ("form", "packing", "layout"),
    [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.long) for one in ALL],
)
def test_a_model_fine_tuned_on_a_form_answers_its_prompts_word_for_word(
    form, packing, layout, base, said_before, tmp_path
) -> None:
    taught = pairs(100)
    data = written(tmp_path, form, taught)
    recipe = Recipe(data=str(data), checkpoint=str(base), tokenizer=str(base), steps=steps_of(form, layout))
    model = trained(tmp_path, layout, packing, recipe)

    for prompt, answer in taught[:: CHATS // ASKED]:
        given, expected, chat = asked(form, prompt, answer)
        said = generate(model, given, 0.0, 8, 0, chat=chat)
        assert said.split()[:3] == expected.split(), (said, expected)
        assert said_before(given, chat).split()[:3] != expected.split()

"""Fine-tuning data: which tokens are answers, how rows are laid out, in which order they come, and what is refused.

Not here: streams of text (test_data.py), or that split runs train what one process trains (tests/cluster).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datacheck import CHAT, plan, written

from executor.worker.data.data import open_rows, order_of, validation_batches
from executor.worker.data.documents import WIDTH_MULTIPLE, Documents, packed_bins
from executor.worker.data.order import Order, dealt
from executor.worker.data.rows import IGNORED, Batch, block_diagonal_mask
from executor.worker.data.tokenizer import load_tokenizer
from planner.basics.errors import PlannerError
from planner.spec import Layout

WORDS = ["<s>", "<end>", "system", "user", "assistant", ":", "s", "a", "b", "c", "later"]
PLAIN = "{% for m in messages %}{{ '<s> ' + m.role + ' : ' + m.content + ' <end> ' }}{% endfor %}"
OPENING = "{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
MARKED = (
    "{% for m in messages %}{{ '<s> ' + m.role + ' : ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + ' <end>' }}{% endgeneration %}{{ ' later ' }}"
    "{% else %}{{ m.content + ' <end> ' }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<s> ' + m.role + ' : ' }}"
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{{ ' <end> ' }}{% endfor %}" + OPENING
)


def tokenizer_folder(folder: Path, template: str | None) -> str:
    """One id a word, with or without a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="later"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    own.chat_template = template
    own.save_pretrained(folder)
    return str(folder)


def answers_of(batch: Batch, row: int = 0) -> list[list[int]]:
    """Runs of target tokens of a row."""
    runs: list[list[int]] = [[]]
    for token in batch.targets[row].tolist():
        if token == IGNORED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [run for run in runs if run]


# -- which tokens are answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [PLAIN + OPENING, MARKED, PLAIN.replace("<end> '", "<end> later '") + OPENING])
def test_the_loss_of_a_chat_is_on_what_the_assistant_writes_and_its_end(template: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", template)

    ids, answers = load_tokenizer(folder, 512).marked(_chat(CHAT), "line 1")

    kept = " ".join(WORDS[one] if marked else "_" for one, marked in zip(ids, answers, strict=True))
    assert [part.split() for part in kept.split("_") if part.strip()] == [["c", "<end>"], ["a", "c", "<end>"]]
    assert [WORDS[one] for one in ids if WORDS[one] in "abcs"] == ["s", "a", "b", "c", "b", "a", "c"]


def test_a_chat_in_bytes_is_a_text_a_message_and_its_answers_are_contents_with_their_ends(tmp_path: Path) -> None:
    rows = open_rows(plan(seq_len=256), written(tmp_path / "d.jsonl", {"messages": CHAT, "id": 7}))

    batch = rows.batch([0])

    whole = b"".join(b"\x01%s\n%s\x02" % (m["role"].encode(), m["content"].encode()) for m in CHAT)
    ids = [{1: 256, 2: 257}.get(byte, byte) for byte in whole]
    assert batch.inputs[0, : len(ids) - 1].tolist() == ids[:-1]
    assert answers_of(batch) == [[*b"c", 257], [*b"a c", 257]]
    assert rows.targets.tolist() == [6]
    assert rows.lengths.tolist() == [len(ids) - 1]


@pytest.mark.parametrize(
    ("line", "prompt", "answer"),
    [
        ({"prompt": "ab", "response": "c"}, "ab", "c"),
        ({"prompt": "ab", "completion": "cd"}, "ab", "cd"),
        ({"text": "abc"}, "", "abc"),
        (
            {"instruction": "Add", "input": "1 1", "output": "2"},
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
            " response that appropriately completes the request.\n\n### Instruction:\nAdd\n\n### Input:\n1 1\n\n"
            "### Response:",
            "2",
        ),
        (
            {"instruction": "Sing", "output": "la"},
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nSing\n\n### Response:",
            "la",
        ),
    ],
)
def test_a_prompt_is_read_and_its_response_learned(line: dict[str, str], prompt: str, answer: str, tmp_path: Path):
    one = open_rows(plan(seq_len=512, mean=9), written(tmp_path / "d.jsonl", line)).batch([0])

    assert answers_of(one) == [[*answer.encode(), 257]]
    assert one.inputs[0, : len(prompt) + 1].tolist() == [256, *prompt.encode()]


def test_a_template_that_rewrites_earlier_turns_is_refused_when_it_does(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "t", FORGETFUL), 512)

    tokenizer.marked(_chat(CHAT[:3]), "line 1")
    with pytest.raises(PlannerError, match=r"renders turn 3 of line 2 otherwise when more of the chat follows"):
        tokenizer.marked(_chat(CHAT), "line 2")


def _chat(messages: list[dict[str, str]]) -> Any:
    from executor.preflight.examples import Chat

    return Chat(messages)


# -- rows -----------------------------------------------------------------------------------------------------------


def documents(lengths: list[int], seq_len: int = 128, **options: bool) -> Documents:
    """Documents of so many ids, all but the first of each a target; ids count on from document to document."""
    first = np.cumsum([0, *lengths])
    marked = [(list(range(a, a + n)), [False] + [True] * (n - 1)) for a, n in zip(first, lengths, strict=False)]
    return Documents(marked, seq_len, **({"packed": False, "fixed_width": False} | options))


def test_rows_are_padded_to_their_longest_and_never_beyond_the_sequence() -> None:
    rows = documents([11, 70, 31, 129])

    assert rows.batch([0, 2]).inputs.shape == (2, WIDTH_MULTIPLE)
    assert tuple(rows.batch([0, 1]).targets.shape) == (2, 128)
    assert tuple(documents([101], seq_len=100).batch([0]).targets.shape) == (1, 100)
    assert tuple(documents([11], fixed_width=True).batch([0]).targets.shape) == (1, 128)
    assert int((rows.batch([0, 2]).targets != IGNORED).sum()) == 10 + 30
    assert int((rows.batch([0, -1]).targets != IGNORED).sum()) == 10


def test_what_is_too_long_is_cut_and_what_has_no_answer_before_the_cut_is_left_out(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * size, "response": "answer"} for size in (2, 60, 100)]

    rows = open_rows(plan(seq_len=64), written(tmp_path / "d.jsonl", *lines))

    assert rows.targets.tolist() == [7, 4]  # the second lost "er" and the end
    assert "1 cut at 64 tokens; 1 left out" in rows.summary
    with pytest.raises(PlannerError, match="none of its 3 examples has an answer within 1 tokens"):
        open_rows(plan(seq_len=1), written(tmp_path / "d.jsonl", *lines))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60))
def test_packing_loses_nothing_overfills_nothing_and_leaves_no_two_rows_that_fit_in_one(lengths: list[int]) -> None:
    bins = packed_bins(lengths, 50)

    filled = sorted(sum(lengths[one] for one in some) for some in bins)
    assert sorted(one for some in bins for one in some) == list(range(len(lengths)))
    assert all(total <= 50 for total in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 50


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_documents_have_the_logits_and_losses_they_have_alone(family: str) -> None:
    from transformers import AutoModelForCausalLM

    from executor.worker.model.model import transformers_config
    from planner.spec import ModelSpec

    given = {} if family == "llama" else {"norm": "layernorm", "positions": "learned", "activation": "gelu_new"}
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2 if family == "llama" else 4, "head_dim": 8, "ffn": 64}
    spec = ModelSpec(name="m", family=family, vocab=128, max_seq_len=64, **sizes, **given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers_config(spec, 64)).eval()
    lengths = [21, 9, 14, 17]
    packed, alone = documents(lengths, 64, packed=True), documents(lengths, 64)
    assert [len(some) for some in packed.bins] == [4]

    batch = packed.batch([0])
    assert batch.positions is not None
    mask = block_diagonal_mask(batch.positions, torch.float32)
    with torch.no_grad():
        together = model(input_ids=batch.inputs, position_ids=batch.positions, attention_mask=mask).logits[0]
        at = 0
        for one in packed.bins[0]:
            own = alone.batch([one])
            end = at + lengths[one] - 1
            expected = model(input_ids=own.inputs).logits[0, : end - at]
            assert (together[at:end] - expected).abs().max() < 1e-5
            assert batch.targets[0, at:end].tolist() == own.targets[0, : end - at].tolist()
            at = end
    assert (batch.targets[0, at:] == IGNORED).all()


# -- order ----------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=70)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_epochs_show_every_row_once_and_a_step_needs_no_step_before_it(
    lengths: list[int], size: int, grouped: bool
) -> None:
    def drawn() -> Order:
        return Order(np.array(lengths), size, 3, grouped=grouped)

    order, count = drawn(), len(lengths)

    assert sorted(order.at(place) for place in range(count, 2 * count)) == list(range(count))
    assert drawn().batch(7) == [order.at(place) for place in range(7 * size, 8 * size)]


def test_grouped_batches_have_similar_lengths_in_every_epoch_and_the_heaviest_comes_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, size=403)
    grouped, plain = (Order(lengths, 8, 5, grouped=one) for one in (True, False))

    def spread(order: Order) -> float:
        return float(np.mean([np.ptp(lengths[order.batch(step)]) for step in range(200)]))

    assert spread(grouped) < 0.12 * spread(plain)
    first = lengths[grouped.batch(0)].sum()
    assert first == max(lengths[grouped.batch(step)].sum() for step in range(50))
    assert grouped.batch(1) != grouped.batch(51)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 100), min_size=48, max_size=48),
)
def test_ranks_share_a_global_batch_evenly_and_completely(
    ranks: int, accum: int, micro: int, lengths: list[int]
) -> None:
    layout = Layout(engine="ddp", dp_replicate=ranks, grad_accum=accum, micro_batch_size=micro)
    rows, sizes = list(range(layout.global_batch_size)), np.array(lengths)

    shares = [dealt(rows, sizes, layout, rank) for rank in range(ranks)]

    assert sorted(row for share in shares for some in share for row in some) == rows
    for index in range(accum):
        passes = [share[index] for share in shares]
        assert all(len(some) == micro for some in passes)
        tokens = [sizes[some].sum() for some in passes]
        inside = sizes[[row for some in passes for row in some]]
        assert max(tokens) - min(tokens) <= np.ptp(inside)


def test_validation_counts_every_answer_once_over_all_ranks(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * (7 * n % 40), "response": "r" * (n % 5 + 1)} for n in range(11)]
    made = plan(seq_len=64)
    rows = open_rows(made, written(tmp_path / "d.jsonl", *lines))
    layout = Layout(engine="ddp", dp_replicate=3, micro_batch_size=2)

    batches = [list(validation_batches(rows, layout, rank)) for rank in range(3)]

    assert {len(some) for some in batches} == {2}
    counted = sum(int((one.targets != IGNORED).sum()) for some in batches for one in some)
    assert counted == rows.targets.sum() == sum(n % 5 + 2 for n in range(11))
    assert order_of(made, rows).batch(0) != order_of(made, rows).batch(1)

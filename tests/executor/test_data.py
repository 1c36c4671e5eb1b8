"""Data: what is refused before launch, how tokens become windows, and that all layouts see the same global batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datacheck import SEQ_LEN, plan

from executor.preflight.datacheck import DEMO_TEXT, check_inputs
from executor.worker.data.data import IGNORED, Windows, micro_batches, open_rows, validation_batches
from executor.worker.data.order import Order
from planner.basics.errors import PlannerError
from planner.spec import Layout


def windows(count: int) -> Windows:
    return Windows(np.arange(count * SEQ_LEN + 1, dtype=np.uint32), SEQ_LEN, vocab=10**6, name="numbers")


def test_every_token_but_the_first_is_a_target_exactly_once() -> None:
    batch = windows(5).batch(list(range(5)))

    assert batch.targets.flatten().tolist() == list(range(1, 5 * SEQ_LEN + 1))
    assert (batch.inputs + 1 == batch.targets).all()


@settings(max_examples=40, deadline=None)
@given(
    replicas=st.sampled_from([1, 2, 4]),
    accum=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 40),
    step=st.integers(0, 5),
)
def test_the_global_batch_does_not_depend_on_the_layout(replicas: int, accum: int, count: int, step: int) -> None:
    source = windows(count)
    layout = Layout(engine="ddp", dp_replicate=replicas, grad_accum=accum, micro_batch_size=16 // replicas // accum)
    order = Order(source.lengths, 16, 7, grouped=True)
    whole = next(micro_batches(source, order, Layout(engine="ddp", micro_batch_size=16), 0, step))

    seen = [batch.inputs for rank in range(replicas) for batch in micro_batches(source, order, layout, rank, step)]

    assert sorted(torch.cat(seen)[:, 0].tolist()) == sorted(whole.inputs[:, 0].tolist())


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order() -> None:
    def drawn() -> Order:
        return Order(windows(50).lengths, 8, seed=3, grouped=True)

    order = drawn()
    first, second = [order.at(k) for k in range(50)], [order.at(k) for k in range(50, 100)]

    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == [drawn().at(k) for k in range(50)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_validation_covers_every_window_once_and_padding_has_no_targets(replicas: int) -> None:
    layout = Layout(engine="ddp", dp_replicate=replicas, micro_batch_size=2)

    per_rank = [list(validation_batches(windows(7), layout, rank)) for rank in range(replicas)]

    assert len({len(batches) for batches in per_rank}) == 1
    targets = torch.cat([batch.targets.flatten() for batches in per_rank for batch in batches])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, 7 * SEQ_LEN + 1))


def test_padding_of_a_single_row_leaves_its_tokens_alone() -> None:
    """Taking targets away from the one row's own storage made token ids of -100."""
    batch = windows(3).batch([-1])
    assert batch.inputs.tolist() == windows(3).batch([0]).inputs.tolist()
    assert set(batch.targets.flatten().tolist()) == {IGNORED}


def test_the_demo_text_trains_without_any_file() -> None:
    check_inputs(plan())

    assert len(open_rows(plan(), None)) * SEQ_LEN > 30_000
    assert DEMO_TEXT.read_text().isascii()


def test_jsonl_documents_are_packed_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcdef", "ghé", "ijklmnop")))

    tokens = open_rows(plan(), str(path)).tokens.tolist()

    expected = [[256, *text.encode(), 257] for text in ("abcdef", "ghé", "ijklmnop")]
    assert tokens == [token for document in expected for token in document]


@pytest.mark.parametrize(("vocab", "dtype"), [(512, "<u2"), (100_000, "<u4")])
def test_bin_files_are_mapped_with_the_width_the_vocabulary_needs(vocab: int, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "d.bin"
    np.arange(100, dtype=dtype).tofile(path)

    found = open_rows(plan(vocab), str(path))

    assert isinstance(found.tokens, np.memmap)
    assert found.batch([1]).inputs.tolist() == [list(range(8, 16))]


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "d.txt").write_text("a b c " * 10)

    found = open_rows(plan(vocab=3, tokenizer=str(tmp_path / "tokenizer.json")), str(tmp_path / "d.txt"))

    assert found.tokens.tolist() == [0, 1, 2] * 10


def test_data_that_only_tokenising_can_judge_is_refused_by_the_worker(tmp_path: Path) -> None:
    (tmp_path / "high.bin").write_bytes((700).to_bytes(2, "little") * 50)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": 3}\n')
    (tmp_path / "short.jsonl").write_text('{"text": "hi"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 20)

    with pytest.raises(PlannerError, match=r"token id 700.*ends at 511"):
        open_rows(plan(), str(tmp_path / "high.bin")).batch([0])
    with pytest.raises(PlannerError, match=r"line 2: is not an object with .*.text."):
        open_rows(plan(), str(tmp_path / "bad.jsonl"))
    with pytest.raises(PlannerError, match="has 4 tokens"):
        open_rows(plan(), str(tmp_path / "short.jsonl"))
    with pytest.raises(PlannerError, match="not UTF-8"):
        open_rows(plan(), str(tmp_path / "latin.txt"))


def test_checks_before_launch_import_no_torch() -> None:
    modules = "executor.preflight.datacheck, executor.backends.accelerate, executor.backends.deepspeed"
    program = f"import sys, {modules}; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"

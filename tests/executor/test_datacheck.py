"""What is read of data, tokenizers and steps without a framework: refusals before launch, answers in bytes, lengths.

Not here: rows and their order (test_data.py, test_finetune.py), or checkpoints (test_checkpoint.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor.preflight.datacheck import check_inputs, has_chat_template, tokenizer_ids
from executor.preflight.examples import Chat, Pair, Text, read_examples
from executor.worker.data import lengths
from executor.worker.data.tokenizer import ByteTokenizer, load_tokenizer
from executor.worker.world.schedule import learning_rate
from planner.basics.errors import PlannerError
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Optimizer, Recipe, Runtime, TrainingJob
from planner.spec.lengths import token_bytes
from planner.spec.plan import Plan

SEQ_LEN = 8
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "a c"},
]


def plan(vocab: int = 512, seq_len: int = SEQ_LEN, mean: int | None = None, **recipe: object) -> Plan:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    return Plan(
        model=ModelSpec(name="m", layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=vocab),
        cluster=Cluster(
            name="c", gpu=Gpu(name="cpu", kind="cpu"), nodes=1, gpus_per_node=1, intra_link=link, inter_link=link
        ),
        job=TrainingJob(seq_len=seq_len, mean_seq_len=mean, recipe=Recipe(**recipe)),
        layout=Layout(engine="ddp"),
        runtime=Runtime(name="r", engine="ddp", kernels="k"),
    )


def written(path: Path, *lines: Any) -> str:
    """A .jsonl of these objects."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def refused(made: Plan) -> str:
    """The one line by which a plan's inputs are refused."""
    with pytest.raises(PlannerError) as caught:
        check_inputs(made)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.sentence
    return caught.value.sentence


# -- files ------------------------------------------------------------------------------------------------------------


def test_bad_inputs_are_refused_before_launch(tmp_path: Path) -> None:
    files = {
        "empty.txt": b"",
        "short.txt": b"hi",
        "odd.bin": b"123",
        "short.bin": b"1234",
        "ok.txt": b"x" * 99,
        "t.csv": b"1",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    def refusal(vocab: int = 512, **recipe: object) -> str:
        return refused(plan(vocab, **{name: str(tmp_path / str(value)) for name, value in recipe.items()}))

    assert "does not exist" in refusal(data="absent.txt")
    assert "is empty" in refusal(data="empty.txt")
    assert "has 4 tokens, one sequence needs 9" in refusal(data="short.txt")
    assert "no whole number" in refusal(data="odd.bin")
    assert "has 2 tokens" in refusal(data="short.bin")
    assert "must end in" in refusal(data="t.csv")
    assert "258 ids" in refusal(data="ok.txt", vocab=257)
    assert "recipe.validation_data" in refusal(validation_data="absent.txt")
    assert "recipe.tokenizer" in refusal(tokenizer="absent.json")
    assert "no config.json" in refusal(checkpoint="")


@pytest.mark.parametrize(("name", "size"), [("d.txt", 7), ("d.bin", 18)])
def test_a_file_of_exactly_one_sequence_and_its_last_target_is_enough(name: str, size: int, tmp_path: Path) -> None:
    """Nine tokens: seven bytes between two marks, or nine numbers of two bytes."""
    path = tmp_path / name
    path.write_bytes(b"x" * size)
    check_inputs(plan(258, data=str(path)))

    path.write_bytes(b"x" * (size - 2))
    assert "one sequence needs 9" in refused(plan(258, data=str(path)))


def test_a_token_takes_two_bytes_while_the_largest_id_fits_in_them() -> None:
    assert [token_bytes(vocab) for vocab in (2, 65_536, 65_537)] == [2, 2, 4]


def test_a_stream_has_no_documents_of_their_own_length(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("x" * 99)
    jsonl = written(tmp_path / "d.jsonl", {"text": "abc"})

    assert "is one stream of tokens" in refused(plan(seq_len=8, mean=4, data=str(tmp_path / "d.txt")))
    check_inputs(plan(seq_len=8, mean=4, data=jsonl))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{'messages': 1}"], "line 1: is not JSON"),
        (["[1]"], "example 1: is not a JSON object"),
        ([{"texts": "a"}], 'line 1: is not an object with "messages", or "conversations", or "prompt" and "response"'),
        ([{"messages": []}], "is not a list of messages"),
        ([{"messages": "c"}], "is not a list of messages"),
        ([{"messages": CHAT}, {"messages": [{"role": "user"}]}], 'line 2, message 1: has no "role" or no "content"'),
        ([{"messages": [*CHAT, {"role": "robot", "content": "x"}]}], 'message 6: has the unknown role "robot"'),
        ([{"messages": CHAT[:2]}], "no assistant message with content"),
        ([{"messages": [*CHAT[:2], {"role": "assistant", "content": ""}]}], "no assistant message with content"),
        ([{"prompt": "a", "response": ""}], 'an empty "response"'),
        ([{"prompt": "a", "response": 3}], '"response" that is not a string'),
        ([{"instruction": "a", "input": 3, "output": "b"}], 'has an "input" that is not a string'),
        ([{"messages": CHAT}, {"prompt": "a", "response": "b"}], 'line 2: has "prompt" and "response", the lines'),
        (["", " "], "holds no line that is not blank"),
    ],
)
def test_a_line_that_cannot_train_is_named_before_launch(lines: list[Any], words: str, tmp_path: Path) -> None:
    assert words in refused(plan(seq_len=64, data=written(tmp_path / "d.jsonl", *lines)))


def test_lines_are_read_in_order_by_their_number_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    given = [{"prompt": "a", "completion": "b"}, {"instruction": "c", "output": "d"}, {"text": "e"}, {"messages": CHAT}]

    made = [list(read_examples(Path(written(path, "", line)), "recipe.data")) for line in given]

    assert [[place.rpartition("line")[2] for place, _ in some] for some in made] == [[" 2"]] * 4
    pair, alpaca, text, chat = (some[0][1] for some in made)
    assert (pair, text, chat) == (Pair("a", "b"), Text("e"), Chat(CHAT))
    assert isinstance(alpaca, Pair) and alpaca.prompt.endswith("### Instruction:\nc\n\n### Response:")
    written(path, *[{"text": str(number)} for number in range(5)])
    chosen = list(read_examples(path, "recipe.data", only={2, 4}))
    assert [example for _, example in chosen] == [Text("1"), Text("3")]


# -- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer_json(path: Path, words: int | list[Any], added: tuple[int, ...] = ()) -> Path:
    """A tokenizer.json with this many words, as a table or, of a unigram model, as a list."""
    vocab = {f"w{number}": number for number in range(words)} if isinstance(words, int) else words
    text = json.dumps({"model": {"vocab": vocab}, "added_tokens": [{"id": number} for number in added]})
    path.write_text(text)
    return path


def test_ids_are_counted_up_to_the_largest_of_words_and_added_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    assert tokenizer_ids(path) is None
    assert tokenizer_ids(tokenizer_json(path, 11)) == 11
    assert tokenizer_ids(tokenizer_json(path, [["a", 0.0], ["b", -1.0]])) == 2
    assert tokenizer_ids(tokenizer_json(path, 11, added=(5, 20))) == 21
    path.write_text('{"model": {"vocab": 3}}')
    with pytest.raises(PlannerError, match="cannot be read"):
        tokenizer_ids(path)


def test_a_tokenizer_has_no_more_ids_than_the_model_and_chats_need_a_template(tmp_path: Path) -> None:
    data = written(tmp_path / "d.jsonl", {"messages": CHAT})
    folder = tmp_path / "t"
    folder.mkdir()
    tokenizer_json(folder / "tokenizer.json", 11)
    for without in (folder, folder / "tokenizer.json"):
        assert "has no chat template" in refused(plan(seq_len=64, data=data, tokenizer=str(without)))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')

    check_inputs(plan(vocab=11, seq_len=64, data=data, tokenizer=str(folder)))
    check_inputs(plan(vocab=64, seq_len=64, data=data, tokenizer=str(folder)))  # an embedding rounded up
    assert "has ids up to 10, so 11 of them, and the model's vocabulary has 10" in refused(
        plan(vocab=10, seq_len=64, data=data, tokenizer=str(folder))
    )


def test_a_template_stands_in_a_folder_s_configuration_or_in_a_file_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert not has_chat_template(tmp_path)
    for text, has in (("{}", False), ('{"chat_template": ""}', False), ("[1]", False), ("{", True)):
        config.write_text(text)
        assert has_chat_template(tmp_path) == has
    assert not has_chat_template(config)
    config.write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("")
    assert has_chat_template(tmp_path)


def test_bytes_stand_between_two_marks_and_answers_end_with_the_second() -> None:
    tokenizer = load_tokenizer(None, 10)

    assert tokenizer.size == 258
    assert tokenizer.stream("hé") == [256, *"hé".encode(), 257]
    assert tokenizer.marked(Text("ab"), "") == ([256, 97, 98, 257], [False, True, True, True])
    assert tokenizer.marked(Pair("a", "b"), "") == ([256, 97, 98, 257], [False, False, True, True])
    ids, answers = tokenizer.marked(Chat(CHAT), "")
    assert ids == [{1: 256, 2: 257}.get(x, x) for m in CHAT for x in f"\1{m['role']}\n{m['content']}\2".encode()]
    assert bytes(x % 256 for x, answer in zip(ids, answers, strict=True) if answer) == b"c\1a c\1"


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_are_of_examples_with_an_answer_in_reach_cut_at_the_sequence(tmp_path: Path) -> None:
    """A prompt of n bytes and an answer of one are n + 3 ids, so n + 2 tokens with a target; the answer is target n."""
    path = Path(written(tmp_path / "d.jsonl", *[{"prompt": "p" * n, "response": "r"} for n in (1, 5, 8, 9, 40)]))

    assert lengths.count(path, 9, None) == {
        "rows": 3, "examples": 5, "read": 5, "longest": 9, "mean": (3 + 7 + 9) / 3, "left_out": 2,
    }  # fmt: skip
    with pytest.raises(PlannerError, match="none of its examples has an answer within 1 tokens"):
        lengths.count(path, 1, None)


def test_of_many_lines_the_longest_and_a_sample_are_read_and_of_few_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ALL", 4), ("LONGEST", 1), ("SAMPLED", 2)):
        monkeypatch.setattr(lengths, name, value)

    assert lengths.drawn({1: 9, 2: 5, 4: 7, 5: 1}) == ([1, 2, 4, 5], [1, 2, 4, 5])
    read, sample = lengths.drawn({1: 9, 2: 5, 4: 7, 5: 1, 7: 3})
    assert read == sorted({1, *sample}) and len(sample) == 2


def test_lines_are_counted_from_1_and_the_command_prints_lengths_or_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(written(tmp_path / "d.jsonl", "", {"text": "ab"}))

    assert lengths.main([str(path), "16", "padded"]) == 0
    assert json.loads(capsys.readouterr().out)["longest"] == 3
    assert lengths.main([written(path, {"prompt": "p" * 20, "response": "r"}), "16", "padded"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"][:2] == ["recipe.data", str(path)]


# -- the rate ---------------------------------------------------------------------------------------------------------


def test_the_rate_warms_up_to_its_peak_and_ends_at_its_floor() -> None:
    optimizer, recipe = Optimizer(lr=1.0), Recipe(steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(optimizer, recipe, step) for step in range(101)]

    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(optimizer, recipe, 1000) == pytest.approx(0.1)
    assert learning_rate(optimizer, Recipe(steps=1, warmup_steps=1, min_lr_ratio=0.5), 1) == 1.0


def test_bytes_are_the_tokenizer_where_none_is_given() -> None:
    assert isinstance(load_tokenizer(None, 258), ByteTokenizer)

"""What of a chat, a pair and a text is an answer's, under a tokenizer of the person's own.

The tokenizer is the test's: a word has the id of its place in WORDS, and a template is a function of the messages. Not
here: Transformers' tokenizers and templates (test_finetune.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executor.preflight.examples import Chat, Pair, Text
from executor.worker.data import tokenizer
from executor.worker.data.tokenizer import OwnTokenizer, load_tokenizer
from planner.basics.errors import PlannerError

WORDS = ["<s>", "</s>", "\n", "[user]", "[assistant]", "hi", "there", "good", "day", "[system]"]
IDS = {word: place for place, word in enumerate(WORDS)}
Template = Callable[[list[dict[str, str]], bool], str]


def turns(messages: list[dict[str, str]], opened: bool) -> str:
    """Every message with its role before it; an answer ends with </s> and a line break after that."""
    ends = {"user": "", "assistant": "</s> \n "}
    said = "".join(f"[{one['role']}] {one['content']} {ends[one['role']]}" for one in messages)
    return said + ("[assistant] " if opened else "")


def without_earlier_answers(messages: list[dict[str, str]], opened: bool) -> str:
    """As templates of models that think: an answer is left out as soon as more of the chat follows."""
    return turns([one for one in messages[:-1] if one["role"] != "assistant"] + messages[-1:], opened)


def that_opens_otherwise(messages: list[dict[str, str]], opened: bool) -> str:
    return turns(messages, False) + ("[assistant] good " if opened else "")


class Words:
    """A tokenizer as Transformers' are called."""

    eos_token_id: int | None = IDS["</s>"]
    bos_token_id: int | None = IDS["<s>"]
    adds_begin = True
    chat_template = "{{ turns }}"
    template: Template = staticmethod(turns)

    def get_vocab(self) -> dict[str, int]:
        return IDS

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        begin = [IDS["<s>"]] if add_special_tokens and self.adds_begin else []
        return {"input_ids": begin + [IDS[word] for word in text.split(" ") if word]}

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        return_dict: bool,
        add_generation_prompt: bool = False,
        return_assistant_tokens_mask: bool = False,
    ) -> dict[str, list[int]]:
        assert tokenize and return_dict
        if any(one["role"] == "system" for one in messages):
            raise ValueError("no system here\nat line 3")
        ids = self(self.template(messages, add_generation_prompt), add_special_tokens=False)["input_ids"]
        mask = {"assistant_masks": [int(one == IDS["good"]) for one in ids]} if return_assistant_tokens_mask else {}
        return {"input_ids": ids} | mask


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OwnTokenizer]:
    def made(**changed: Any) -> OwnTokenizer:
        words = type("Changed", (Words,), changed)()
        monkeypatch.setattr(tokenizer, "own_tokenizer", lambda path: words)
        return OwnTokenizer("here")

    return made


def chat(*messages: str) -> Chat:
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return Chat([{"role": roles[one[0]], "content": one[2:]} for one in messages])


def words_of(ids: list[int], answers: list[bool]) -> tuple[str, str]:
    """All, and the answers' alone."""
    return " ".join(WORDS[one] for one in ids), " ".join(
        WORDS[one] for one, answer in zip(ids, answers, strict=True) if answer
    )


def test_its_size_is_one_more_than_its_largest_id_and_the_models_vocabulary_has_to_hold_it(own) -> None:
    assert own().size == len(WORDS) == 10
    assert own(get_vocab=lambda _: {"a": 3, "b": 7}).size == 8
    assert own(get_vocab=lambda _: {}).size == 0
    own()
    assert load_tokenizer("here", 10).size == 10
    with pytest.raises(PlannerError, match="10"):
        load_tokenizer("here", 9)
    assert load_tokenizer(None, 9).size == 258  # a vocabulary too small for bytes is the preflight's to refuse


def test_a_text_ends_with_the_end_and_begins_with_the_begin_where_the_tokenizer_puts_it_there(own) -> None:
    assert own().stream("hi there") == [5, 6, 1]
    assert own(eos_token_id=None).stream("hi there") == [5, 6]
    assert words_of(*own().marked(Text("hi there"), "line 1")) == ("<s> hi there </s>", "hi there </s>")
    assert words_of(*own(adds_begin=False).marked(Text("hi"), "line 1")) == ("hi </s>", "hi </s>")
    assert words_of(*own(bos_token_id=None).marked(Text("hi"), "line 1")) == ("hi </s>", "hi </s>")
    assert words_of(*own(bos_token_id=6).marked(Text("hi"), "line 1")) == ("hi </s>", "hi </s>")


def test_of_a_pair_the_response_and_the_end_are_the_answer(own) -> None:
    assert words_of(*own().marked(Pair("hi there", "good day"), "line 1")) == (
        "<s> hi there good day </s>",
        "good day </s>",
    )


def test_of_a_chat_each_answer_goes_from_its_opening_to_its_end_token(own) -> None:
    two = chat("u hi", "a good day", "u there", "a day")
    assert words_of(*own().marked(two, "line 1")) == (
        "[user] hi [assistant] good day </s> \n [user] there [assistant] day </s> \n",
        "good day </s> day </s>",
    )
    assert words_of(*own(eos_token_id=None).marked(two, "line 1"))[1] == "good day </s> \n day </s> \n"
    assert words_of(*own().marked(chat("u hi"), "line 1")) == ("[user] hi", "")
    # An end token before the answer is not the answer's, and the last of several is.
    ends = own(template=staticmethod(lambda messages, opened: turns(messages, opened).replace(" </s> \n ", " ")))
    assert words_of(*ends.marked(chat("u </s>", "a good day"), "line 1"))[1] == "good day"
    assert words_of(*ends.marked(chat("u hi", "a </s> day"), "line 1"))[1] == "</s>"
    assert words_of(*ends.marked(chat("u hi", "a </s> day </s> good"), "line 1"))[1] == "</s> day </s>"


def test_a_template_that_marks_what_it_generates_is_believed(own) -> None:
    for mark in ("{% generation %}", "{%- generation -%}", "{%generation%}"):
        marks = own(chat_template=f"{{{{ x }}}}{mark}y", template=staticmethod(without_earlier_answers))
        assert words_of(*marks.marked(chat("u hi", "a good day"), "line 1"))[1] == "good"
    assert words_of(*own(chat_template="generation").marked(chat("u hi", "a good day"), "1"))[1] == "good day </s>"


@pytest.mark.parametrize(
    ("changed", "example", "words"),
    [
        ({"chat_template": None}, chat("u hi", "a day"), "chat template"),
        ({}, chat("a day", "u hi"), "line 4.* begins with the assistant"),
        ({"template": staticmethod(without_earlier_answers)}, chat("u hi", "a good", "u hi", "a day"), "turn 2 of"),
        ({"template": staticmethod(that_opens_otherwise)}, chat("u hi", "a day"), "turn 2 of line 4"),
        ({}, chat("s good", "u hi", "a day"), r"refuses line 4 \(no system here\)"),
    ],
)
def test_a_chat_whose_answers_cannot_be_found_is_refused(own, changed, example, words) -> None:
    with pytest.raises(PlannerError, match=words):
        own(**changed).marked(example, "line 4")


def test_an_answer_that_opens_as_announced_and_is_the_last_needs_nothing_else(own) -> None:
    kept = own(template=staticmethod(without_earlier_answers))
    assert words_of(*kept.marked(chat("u hi", "a good"), "line 1"))[1] == "good </s>"
    opens = own(template=staticmethod(that_opens_otherwise))
    assert words_of(*opens.marked(chat("u hi", "a good day"), "line 1"))[1] == "day </s>"


def test_a_tokenizer_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> Any:
        raise KeyError("model")

    monkeypatch.setattr(tokenizer, "own_tokenizer", broken)
    with pytest.raises(PlannerError, match="cannot be read") as told:
        OwnTokenizer("there")
    assert (told.value.field, told.value.value) == ("recipe.tokenizer", "there")

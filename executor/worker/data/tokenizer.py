"""Text to token ids: one id a byte by default, or a tokenizer the person has on disk. Nothing is downloaded.

An example becomes ids and, for each, whether it is an answer's: what training takes the loss of. Not here: reading
the lines (executor/preflight/examples.py), or laying examples out in sequences (documents.py).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from typing_extensions import override

from executor.preflight.datacheck import BYTE_VOCABULARY, no_chat_template, vocabulary_too_small
from executor.preflight.examples import Chat, Example, Pair
from executor.preflight.turns import ChatTurn
from executor.worker.data.limited import limited
from planner.basics.errors import PlannerError

BEGIN_OF_TEXT, END_OF_TEXT = 256, 257

Marked = tuple[list[int], list[bool]]
"""Ids, and which of them are answers' tokens."""

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark by which a chat template says what the assistant writes."""


class Tokenizer(ABC):
    """The interface of a tokenizer."""

    size: int
    """One more than its largest id."""
    ends: list[int]
    """Ids that end a text."""

    @abstractmethod
    def opened(self, prompt: str, *, chat: bool) -> list[int]:
        """Ids of a prompt that an answer is to follow, in a chat's turn or as the beginning of a text."""

    @abstractmethod
    def text(self, ids: list[int]) -> str:
        """The text of what was answered, without its marks."""

    @abstractmethod
    def stream(self, text: str) -> list[int]:
        """One document of a stream, with the marks that separate it from the next."""

    @abstractmethod
    def _pieces(self, before: str, answer: str) -> tuple[list[int], list[int]]:
        """Ids of a text that begins a sequence, and of the answer that follows it and ends the sequence."""

    @abstractmethod
    def _chat(self, chat: Chat, place: str) -> Marked:
        """Ids of a whole chat, and which the assistant writes. `place` names the example in a refusal."""

    def marked(self, example: Example, place: str) -> Marked:
        """An example's ids, and which of them are answers'."""
        if isinstance(example, Chat):
            return self._chat(example, place)
        before, answer = (example.prompt, example.response) if isinstance(example, Pair) else ("", example.text)
        first, last = self._pieces(before, answer)
        return first + last, [False] * len(first) + [True] * len(last)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes between begin-of-text and end-of-text. In a chat each message is such a text: its role, a line break
    and its content, then its calls of tools as JSON; the answer is all but the role. Tools are one
    message before."""

    size = BYTE_VOCABULARY
    ends = [END_OF_TEXT]  # noqa: RUF012  # as each of another kind has its own

    @override
    def opened(self, prompt: str, *, chat: bool) -> list[int]:
        if not chat:
            return self._pieces(prompt, "")[0]
        return [BEGIN_OF_TEXT, *f"user\n{prompt}".encode(), *self.ends, BEGIN_OF_TEXT, *b"assistant\n"]

    @override
    def text(self, ids: list[int]) -> str:
        return bytes(one for one in ids if one < BEGIN_OF_TEXT).decode(errors="replace")

    @override
    def stream(self, text: str) -> list[int]:
        return [BEGIN_OF_TEXT, *text.encode(), END_OF_TEXT]

    @override
    def _pieces(self, before: str, answer: str) -> tuple[list[int], list[int]]:
        return [BEGIN_OF_TEXT, *before.encode()], [*answer.encode(), END_OF_TEXT]

    @override
    def _chat(self, chat: Chat, place: str) -> Marked:
        ids: list[int] = []
        answers: list[bool] = []
        tools = [{"role": "tools", "content": json.dumps(chat.tools)}] if chat.tools else []
        for message in [*tools, *chat.messages]:
            calls = json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
            head, body = self._pieces(message["role"] + "\n", message["content"] + calls)
            ids += head + body
            answers += [False] * len(head) + [message["role"] == "assistant"] * len(body)
        return ids, answers


class OwnTokenizer(Tokenizer):
    """A tokenizer.json, or a Transformers tokenizer folder with its chat template."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.own = own_tokenizer(path)
        except Exception as error:  # the libraries raise many kinds for a broken file
            raise PlannerError(
                "recipe.tokenizer", path, f"cannot be read ({error})", "Give a tokenizer.json or a tokenizer folder"
            ) from None
        self.size = max(self.own.get_vocab().values(), default=-1) + 1
        self.ends = [] if self.own.eos_token_id is None else [self.own.eos_token_id]
        begin = self.own.bos_token_id
        self.begin = [begin] if begin is not None and self.own("")["input_ids"][:1] == [begin] else []
        self.says_what_it_generates: bool | None = None

    @override
    def opened(self, prompt: str, *, chat: bool) -> list[int]:
        if not chat or not self.own.chat_template:
            return self._pieces(prompt, "")[0]
        turn: list[ChatTurn] = [{"role": "user", "content": prompt}]
        ids: list[int] = self._rendered(turn, "the prompt", add_generation_prompt=True)["input_ids"]
        return ids

    @override
    def text(self, ids: list[int]) -> str:
        return str(self.own.decode(ids, skip_special_tokens=True))

    @override
    def stream(self, text: str) -> list[int]:
        return [*self._plain(text), *self.ends]

    @override
    def _pieces(self, before: str, answer: str) -> tuple[list[int], list[int]]:
        # Apart, as the model will see the prompt when it answers.
        return self.begin + (self._plain(before) if before else []), self._plain(answer) + self.ends

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self.own(text, add_special_tokens=False)["input_ids"]
        return ids

    @override
    def _chat(self, chat: Chat, place: str) -> Marked:
        if self.says_what_it_generates is None:
            if not self.own.chat_template:
                raise no_chat_template(self.path)
            self.says_what_it_generates = bool(GENERATION.search(self.own.get_chat_template()))
        messages, given = chat.messages, {"tools": chat.tools} if chat.tools else {}
        if "tool" not in self.own.get_chat_template() and (chat.tools or any("tool_calls" in one for one in messages)):
            rule, fix = (
                f"its chat template has no tools, and {place} has",
                "Leave those chats out, or change the template",
            )
            raise PlannerError("recipe.tokenizer", self.path, rule, fix)
        if self.says_what_it_generates:
            whole = self._rendered(messages, place, **given, return_assistant_tokens_mask=True)
            return whole["input_ids"], [bool(one) for one in whole["assistant_masks"]]
        return self._by_prefixes(messages, place, given)

    def _by_prefixes(self, messages: list[ChatTurn], place: str, given: dict[str, Any]) -> Marked:
        """An answer is what its turn adds to the chat before it with the template's opening of an answer. That holds
        only where what is rendered so far never changes as the chat goes on, which is checked."""
        ids: list[int] = self._rendered(messages, place, **given)["input_ids"]
        answers = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise PlannerError("recipe.data", place, "begins with the assistant", "Begin with the user or a system")
            before = self._rendered(messages[:index], place, **given, add_generation_prompt=True)["input_ids"]
            after = self._rendered(messages[: index + 1], place, **given)["input_ids"]
            if after[: len(before)] != before or ids[: len(after)] != after:
                rule = f"its chat template renders turn {index + 1} of {place} otherwise when more of the chat follows"
                fix = "Mark the answers in the template with {% generation %}"
                raise PlannerError("recipe.tokenizer", self.path, f"{rule}, so its tokens cannot be marked", fix)
            for at in range(len(before), self._end_of_answer(after, len(before))):
                answers[at] = True
        return ids, answers

    def _end_of_answer(self, ids: list[int], begin: int) -> int:
        """After the answer's end token: many templates add a line break that no model has to write."""
        for at in range(len(ids) - 1, begin - 1, -1):
            if ids[at] in self.ends:
                return at + 1
        return len(ids)

    def _rendered(self, messages: list[ChatTurn], place: str, **options: Any) -> Any:
        try:
            with limited():
                return self.own.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # raised by a template for messages that it does not take
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PlannerError(
                "recipe.tokenizer",
                self.path,
                f"its chat template refuses {place} ({reason})",
                "Change the messages or the template",
            ) from None


def own_tokenizer(path: str) -> Any:
    """Transformers' tokenizer of a tokenizer.json or of a folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # only when asked for: slow to import

    if Path(path).is_dir():
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return PreTrainedTokenizerFast(tokenizer_file=path)


def load_tokenizer(path: str | None, vocab: int) -> Tokenizer:
    """The built-in byte tokenizer or the person's own, whose ids the model's vocabulary must hold."""
    tokenizer = ByteTokenizer() if path is None else OwnTokenizer(path)
    if tokenizer.size > vocab and path is not None:
        raise vocabulary_too_small(path, tokenizer.size, vocab)
    return tokenizer

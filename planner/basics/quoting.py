"""How a text is written into what another program reads: one function each for a shell, YAML, a comment, a terminal.

Every writer of scripts, manifests, drawings and logs goes through these (tests/test_architecture.py reads their code).
JSON is msgspec's and XML ElementTree's, which quote every text by construction. Not here: what a name may be
(names.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from planner.basics.errors import PlannerError, is_visible, visible

COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""Changes of colour alone: dropped, as they say nothing where they are not obeyed."""
NOT_SHELL = re.compile(r"[^\w@%+=:,./-]", re.ASCII)
UNSEEN = re.compile(r"[^\n -~]")
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
YAML_WORDS = frozenset("y n yes no on off true false null nan inf".split())  # noqa: SIM905
"""Plain words that a reader of YAML 1.1 or 1.2 takes for something else than text."""


def for_shell(words: Iterable[object]) -> str:
    """Words of a command line as one line of bash: each is one word with that very text, whatever is in it.
    PlannerError for a NUL, which no command line holds."""
    return " ".join(_shell_word(str(word)) for word in words)


def for_yaml(documents: Iterable[Any]) -> str:
    """Documents as YAML: plain identifiers, and every other text in double quotes, so that readers of YAML 1.1 and 1.2
    both read it as the text that it is."""
    import yaml  # of the executor's packages; the planner writes none

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})

    def text(to: Any, value: str) -> Any:
        plain = PLAIN.fullmatch(value) and value.lower() not in YAML_WORDS
        return to.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    dumper.add_representer(str, text)
    written: str = yaml.dump_all(list(documents), Dumper=dumper, sort_keys=False)
    return written


def yaml_value(value: Any) -> str:
    """One value of a YAML file: a text as `for_yaml` has it, a number with its point (YAML 1.1 reads 1e-05 as text), or
    a list of those on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, float):
        digits = repr(value)
        return digits if "e" not in digits or "." in digits else digits.replace("e", ".0e")
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in YAML_WORDS:
        return value
    return in_json(msgspec.json.encode(value)).decode()


def for_comment(text: str, mark: str = "#") -> str:
    """A text as comments of a script: every line of it behind the mark."""
    return "\n".join(f"{mark} {for_terminal(line)}".rstrip() for line in text.split("\n"))


def for_terminal(text: str) -> str:
    """A text of several lines as a terminal or log may have it: what would move the cursor, change a colour or turn
    the direction of writing is shown as an escape, such as \\x1b."""
    return visible(COLOURS.sub("", text) if "\x1b" in text else text)


def in_json(encoded: bytes) -> bytes:
    """JSON that parses as before, for a terminal: what `for_terminal` shows as an escape is one of JSON's own."""
    text = encoded.decode()
    if not UNSEEN.search(text):
        return encoded
    return UNSEEN.sub(_json_escape, text).encode()


def identifier(text: str) -> str:
    """A text as a word of ASCII letters, digits, dots, dashes and underscores, for the name of a job."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.") or "run"


def _json_escape(found: re.Match[str]) -> str:
    """A character as JSON's escape of its UTF-16 units, where a terminal would not print it."""
    char = found[0]
    units = char.encode("utf-16-be").hex()
    return char if is_visible(char) else "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _shell_word(word: str) -> str:
    if word and NOT_SHELL.search(word) is None:
        return word
    if "\0" in word:
        raise PlannerError("word", word, "has a NUL, which no command line holds", "Leave it out")
    if all(map(is_visible, word)):
        return "'" + word.replace("'", "'\"'\"'") + "'"
    escaped = "".join(map(_ansi_c, word))
    return f"$'{escaped}'"


def _ansi_c(char: str) -> str:
    r"""A character inside bash's $'...': what ends it or a line, or is not printed, as \x.. of its bytes."""
    if char in "\\'":
        return f"\\{char}"
    if is_visible(char):
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))

"""The one exception a user's mistake raises, "did you mean", and how long a line may be.

Not here: the checks themselves. They stand next to what they protect.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_LINE = 400
"""Characters of a line that says what is wrong: about 300 of words, more where paths are long."""
LONGEST_VALUE, LONGEST_FIELD, LONGEST_WORD = 80, 160, 100
"""Characters of what a person gave, which may be a file's whole text."""
JOINERS = "\u200c\u200d"
"""Between letters of Persian, Hindi and other scripts, which are misspelt without them."""
MOST_NAMES = 8
"""Known names that are listed, nearest first."""


class PlannerError(Exception):
    """A refusal: which field, which value, which rule it broke, and the nearest way out.

    `exit_code` follows the command contract in docs/architecture.md: 2 invalid input, 3 does not fit or
    preflight failed, 4 launch failed, 5 training failed.
    """

    def __init__(self, field: str, value: object, rule: str, fix: str = "", *, exit_code: int = 2) -> None:
        self.field, self.value, self.rule, self.fix, self.exit_code = field, value, rule, fix, exit_code
        super().__init__(self.sentence)

    @property
    def sentence(self) -> str:
        """One line: `field=value: rule. fix`, of which the rule is cut where the line would be too long."""
        head = shortened(visible(" ".join(self.field.split())), LONGEST_FIELD)
        if self.value is not None:
            head += f"={shortened(visible(' '.join(str(self.value).split())), LONGEST_VALUE)}"
        fix = shortened(_sentence(_words(self.fix)), LONGEST_LINE // 2)
        room = LONGEST_LINE - len(head) - len(fix) - 3
        return f"{head}: {shortened(_sentence(_words(self.rule)), max(room, MOST_NAMES))} {fix}".strip()


@contextmanager
def refusing(
    kinds: type[Exception] | tuple[type[Exception], ...],
    field: str,
    value: object,
    rule: str,
    fix: str = "",
    *,
    exit_code: int = 2,
) -> Iterator[None]:
    """Turn what is raised inside, where it is of these kinds, into a refusal that says why in the system's words."""
    try:
        yield
    except kinds as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise PlannerError(field, value, f"{rule} ({why})", fix, exit_code=exit_code) from None


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The nearest known names as advice; where none is near, the known ones, a few of many."""
    from difflib import SequenceMatcher, get_close_matches  # only on the error path

    names, lower = sorted(known), wrong[:LONGEST_VALUE].lower()
    if near := get_close_matches(lower, names, n=3, cutoff=0.5):
        return f"Did you mean {' or '.join(near)}?"
    if len(names) > MOST_NAMES:
        nearest = sorted(names, key=lambda name: -SequenceMatcher(None, lower, name).ratio())[:MOST_NAMES]
        return f"Known: {', '.join(nearest)} and {len(names) - MOST_NAMES} more"
    return f"Known: {', '.join(names)}"


def shortened(text: str, most: int) -> str:
    """A text without its middle where it is longer: of a long path, the end says which file it is."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[: most - 3 - half]}...{text[-half:]}"


def is_visible(char: str) -> bool:
    """Whether a character is printed as itself in any script: letters, signs, spaces, and the joiners between letters;
    no control character, and no mark that turns the direction of writing."""
    return char.isprintable() or char in JOINERS or unicodedata.category(char) == "Zs"


def visible(text: str) -> str:
    """A text of one or many lines in which everything else than `is_visible` is an escape, such as \\x1b."""
    if text.isprintable():
        return text
    kept = (char if char in "\n\t" or is_visible(char) else _escaped(char) for char in text)
    return "".join(kept)


def one_line(text: str) -> str:
    """A text of any length and many lines as a line that can be read."""
    return shortened(_words(text), LONGEST_LINE)


def _words(text: str) -> str:
    """The words of a text, none so long that it hides the others."""
    return " ".join(shortened(word, LONGEST_WORD) for word in visible(text).split())


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".?!" else f"{text}."

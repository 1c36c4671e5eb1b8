"""The one exception a user's mistake raises, and "did you mean".

Not here: the checks themselves. They stand next to what they protect.
"""

from __future__ import annotations

from collections.abc import Iterable


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
        """One line: `field=value: rule. fix`."""
        head = self.field if self.value is None else f"{self.field}={_short(self.value)}"
        parts = [f"{head}: {self.rule}", *([self.fix] if self.fix else [])]
        return " ".join(" ".join(part if part[-1:] in ".?!" else part + "." for part in parts).split())


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The nearest known names as advice, or the list of all of them when none is near."""
    from difflib import get_close_matches  # only on the error path

    names = sorted(known)
    near = get_close_matches(wrong.lower(), names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(names)}"


def _short(value: object) -> str:
    text = str(value)  # of a long path, the end says which file it is
    return text if len(text) <= 80 else f"{text[:38]}...{text[-39:]}"

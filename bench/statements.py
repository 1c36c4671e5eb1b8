"""Files, lines and statements of each package. A statement is a node of Python's syntax trees that is one, docstrings
left out; blank lines, comments and the wrapping of a line change no count.

    python bench/statements.py

Not here: what a reader of one command meets (reading.py).
"""

from __future__ import annotations

import ast
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "executor", "tui")


def statements(code: str) -> int:
    """Statements of a module without docstrings, strings below an attribute among them."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and is_text(node.value)) for node in nodes)


def is_text(value: ast.expr) -> bool:
    """Whether an expression is a string alone."""
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main() -> None:
    """Print a line for each package and the total."""
    print(f"{'':10s}{'files':>8s}{'lines':>10s}{'statements':>12s}")
    total = [0, 0, 0]
    for package in PACKAGES:
        codes = [path.read_text() for path in sorted((PROJECT / package).rglob("*.py"))]
        counts = [len(codes), sum(len(code.splitlines()) for code in codes), sum(map(statements, codes))]
        total = [one + other for one, other in zip(total, counts, strict=True)]
        print(f"{package:10s}{counts[0]:8,}{counts[1]:10,}{counts[2]:12,}")
    print(f"{'total':10s}{total[0]:8,}{total[1]:10,}{total[2]:12,}")


if __name__ == "__main__":
    main()

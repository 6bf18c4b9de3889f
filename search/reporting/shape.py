"""How a reader wants the table, read from words: the error behind ±, the columns, the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from archlab.search.formatting.filters import named

ERRORS = {"std": "standard deviation", "se": "standard error", "interval": "half of the 95% t interval of the mean"}
"""What may stand behind ±, over the n seeds of a row."""
ALSO = {"sd": "std", "sem": "se", "ci": "interval"}
"""What papers call them too."""


@dataclass(frozen=True)
class Shape:
    """How a reader wants the table: the error behind ±, which columns (None: the usual ones), which rows: those
    that a filter keeps, of these variants (None: all)."""

    error: str = "std"
    columns: tuple[str, ...] | None = None
    where: str = ""
    variants: tuple[str, ...] | None = None


USUAL = Shape()
"""As a report has it."""


def known_error(word: str) -> str:
    """The error of a mean that a word stands for. Raises ValueError with the nearest one."""
    if (found := ALSO.get(word, word)) in ERRORS:
        return found
    near = get_close_matches(word, [*ERRORS, *ALSO], n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ValueError(f"'{word[:40]}' is no error of a mean{hint} ({', '.join(ERRORS)})")


def known_column(word: str, columns: Collection[str]) -> str:
    """The column of a table that a word stands for: its name or the last steps of it. Raises ValueError."""
    try:
        return named(word[:80], columns)
    except ValueError as error:
        raise ValueError(f"columns: {error}") from None


def read_shape(columns: Iterable[str], error: str = "", asked: str = "", where: str = "") -> tuple[Shape, list[str]]:
    """The shape that words ask for, `asked` with commas between columns, and a sentence for each that says nothing."""
    known, wrong, chosen, behind = list(columns), list[str](), list[str](), "std"
    try:
        behind = known_error(error or "std")
    except ValueError as problem:
        wrong.append(str(problem))
    for word in filter(None, map(str.strip, asked.split(","))):
        try:
            chosen.append(known_column(word, known))
        except ValueError as problem:
            wrong.append(str(problem))
    return Shape(behind, tuple(chosen) if asked.strip() else None, where), wrong

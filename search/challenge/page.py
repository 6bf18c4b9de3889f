"""The ledger as it is printed."""

from __future__ import annotations

from collections.abc import Callable

from archlab.search.challenge.ledger import Entry, Ledger
from archlab.search.formatting.tables import DASH, Block, Cell, Column, Page, number, printable

_COLUMNS: tuple[tuple[str, str, Callable[[Entry], str]], ...] = (
    ("challenger", "l", lambda each: f"{each.number}. {each.name}"),
    ("against", "l", lambda each: each.against),
    ("verdict", "l", lambda each: each.verdict),
    ("Δ nats/token", "r", lambda each: number(each.difference, "+.4f")),
    ("±", "r", lambda each: number(each.half_width, ".4f")),
    ("seeds", "r", lambda each: str(each.seeds)),
    ("test Δ", "r", lambda each: number(each.test, "+.4f")),
    ("trials", "r", lambda each: str(each.trials)),
    ("near", "l", lambda each: ", ".join(each.near) or DASH),
)


def page(ledger: Ledger) -> Page:
    """A row per challenger, in the order in which they were tried, and what holds of them all."""
    cells = [[Cell(printable(cell(each))) for each in ledger.entries] for _, _, cell in _COLUMNS]
    columns = [Column(head, mine, side) for (head, side, _), mine in zip(_COLUMNS, cells, strict=True)]
    looks = len(ledger.kept)
    told = "never looked at" if not looks else "looked at once" if looks == 1 else f"looked at {looks} times"
    lines = [f"champion: {printable(ledger.champion)}; the test set was {told}"]
    if waiting := [each.name for each in ledger.candidate]:
        lines.append(f"to be confirmed: {printable(', '.join(waiting))}")
    blocks = [Block("", columns)] if ledger.entries else []
    notes = [printable(f"{each.name}: {each.reason}") for each in ledger.entries if each.reason]
    notes += [printable(f"{each.name}: {', '.join(each.parts)}") for each in ledger.entries if each.parts]
    return Page(printable(ledger.study), "", blocks, lines, notes, "", [])

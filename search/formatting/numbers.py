"""Numbers with units, as tables, plans and progress lines show them."""

from __future__ import annotations

from rich.console import Console

_ROUNDS_UP = 0.9995  # of a unit: with three digits that is one


def plain_console() -> Console:
    """Plain when not a terminal, and then wide enough for tables to stay whole."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 140))


def count(number: float) -> str:
    """1234567 as 1.23M, 999900 as 1M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size * _ROUNDS_UP:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """1234567 bytes as 1.23 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor * _ROUNDS_UP:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"


def signed(number: int) -> str:
    """How much more or less, or nothing for 0."""
    return f"{'+' if number > 0 else '-'}{count(abs(number))}" if number else ""


def duration(seconds: float) -> str:
    """4000 s as 1h 07m."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 90 else f"{minutes // 60}h {minutes % 60:02d}m"


def duration_in_words(seconds: float) -> str:
    """Such as 50 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

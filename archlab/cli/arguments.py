"""What comes in from the shell and goes out to it: bytes that are no text are refused, and written as escapes."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import click


def escaped(text: str) -> str:
    r"""A text that can be printed: bytes of the shell that are no UTF-8 stand as `\xff`."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half of a character, which JSON can hold
        return text.encode("utf-8", "backslashreplace").decode()


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8. Python reads other bytes of the shell as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_bytes(arguments: Sequence[str]) -> None:
    """Raises UsageError for an argument that is no text: YAML, Ray and the trackers take none as value or as path."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not is_text(argument):
            option = before if before.startswith("-") and "=" not in before else ""
            where = f" after {option}" if option else ""
            raise click.UsageError(f"'{escaped(argument)}'{where} is not UTF-8 text")


def print_escapes() -> None:
    """Has standard output print what its encoding lacks as an escape: a file's name may be any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")

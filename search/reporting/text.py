"""A report for a terminal: aligned plain text, at most 110 columns wide."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import replace

from archlab.search.formatting.tables import Block, Cell, Column, Page

WIDTH = 110
GAP = 2


def text(page: Page) -> str:
    """The page; the best of a column is marked `*`. The least needed columns are left out where they don't fit."""
    lines = [*_wrap(f"{page.study}: {page.question}" if page.question else page.study), ""]
    for block in page.blocks[:1]:
        lines += [*_block(block), ""]
    for line in page.lines:
        lines += _wrap(line)
    for block in page.blocks[1:]:
        lines += ["", *_wrap(block.title), *_block(block)]
    if page.notes:
        lines.append("")
    for note in page.notes:
        lines += _wrap(note, "- ")
    if page.provenance:
        lines += ["", *_wrap(page.provenance)]
    if page.findings:
        lines.append("")
    for sentence in page.findings:
        lines += _wrap(sentence, "> ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    """The table, in as many parts as its width needs (each repeats the first column), and its legend."""
    kept = _kept(block.columns)
    fitted = [_fitted(column) for column in _wrapped(kept)]
    if _width(fitted) > WIDTH:  # in several parts, which would have empty rows
        fitted = [_fitted(column) for column in kept]
    first, *others = fitted
    while others:
        count = len(others)
        while count > 1 and _width([first, *others[:count]]) > WIDTH:
            count -= 1
        yield from _lines([first, *others[:count]])
        others = others[count:]
    if block.legend:
        yield from _wrap(block.legend)
    if left_out := [column.header for column in block.columns if column not in kept]:
        yield from _wrap(f"left out, as the table is too wide for them (--format md has all): {', '.join(left_out)}")


def _kept(columns: list[Column]) -> list[Column]:
    """The columns that fit: those that must stay, then the most needed ones, all of one need or none."""
    kept = [column for column in columns if not column.keep]
    for need in sorted({column.keep for column in columns if column.keep}, reverse=True):
        more = [column for column in columns if column in kept or column.keep == need]
        if _width([_fitted(column) for column in more]) <= WIDTH:
            kept = more
    return kept


def _wrapped(columns: list[Column]) -> list[Column]:
    """The columns, where the last has little room and words with rows more for what goes on below."""
    last = columns[-1]
    if not last.room or last.align != "l" or len(columns) == 1:
        return columns
    parts = [textwrap.wrap(cell.text, last.room) or [""] for cell in last.cells]
    found = []
    for column in columns[:-1]:
        cells = [(cell, *([Cell("")] * (len(own) - 1))) for cell, own in zip(column.cells, parts, strict=True)]
        found.append(replace(column, cells=[each for row in cells for each in row]))
    wrapped = [Cell(part, cell.strong) for cell, own in zip(last.cells, parts, strict=True) for part in own]
    return [*found, replace(last, cells=wrapped)]


def _fitted(column: Column) -> list[str]:
    """Header and cells, all of one width; a mark stands right of the aligned numbers."""
    marked = any(cell.strong for cell in column.cells)
    texts = [column.header + " " * marked]
    texts += [_shorten(cell.text, column.room) + ("*" if cell.strong else " " * marked) for cell in column.cells]
    width = max(_cells(t) for t in texts)
    return [_pad(t, width, column.align) for t in texts]


def _shorten(text: str, room: int) -> str:
    """Long names and settings lose their middle."""
    return text if len(text) <= room else f"{text[: room - 16]}…{text[-15:]}"


def _pad(text: str, width: int, align: str) -> str:
    space = width - _cells(text)
    left = {"l": 0, "r": space, "c": space // 2}[align]
    return " " * left + text + " " * (space - left)


def _cells(text: str) -> int:
    """How many terminal cells a text takes: wide characters two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _width(columns: list[list[str]]) -> int:
    return sum(_cells(column[0]) for column in columns) + GAP * (len(columns) - 1)


def _lines(columns: list[list[str]]) -> Iterator[str]:
    rows = zip(*columns, strict=True)
    yield (" " * GAP).join(next(rows))
    yield (" " * GAP).join("─" * _cells(column[0]) for column in columns)
    for row in rows:
        yield (" " * GAP).join(row)


def _wrap(line: str, bullet: str = "") -> list[str]:
    """Lines of at most WIDTH terminal cells; half as many characters where wide ones don't fit otherwise."""
    for width in (WIDTH, WIDTH // 2):
        lines = textwrap.wrap(line, width, initial_indent=bullet, subsequent_indent=" " * len(bullet))
        if all(_cells(each) <= WIDTH for each in lines):
            break
    return lines or [""]

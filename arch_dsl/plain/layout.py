"""Trees as text that people read: double quotes, lines of at most 120 characters."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize

from archlab.arch_dsl.plain.trees import text

WIDTH = 120


def source(node: ast.AST, indent: int = 0) -> str:
    """The source of a tree, indented, with long lines broken."""
    return lines(text(node), indent)


def lines(code: str, indent: int = 0) -> str:
    """Code with double quotes and long lines broken, every line indented."""
    found: list[str] = []
    inside = False  # a docstring of several lines
    for line in _requoted(code).split("\n"):
        whole = " " * indent + line if line.strip() else ""
        found += [whole] if inside or '"""' in line else _wrapped(whole)
        inside ^= line.count('"""') % 2 == 1
    return "\n".join(found)


def _requoted(code: str) -> str:
    """'a' as "a"."""
    rows = code.split("\n")
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    for token in reversed(tokens):
        if token.type == tokenize.STRING and token.string.startswith("'") and '"' not in token.string:
            (row, start), (_, end) = token.start, token.end
            rows[row - 1] = rows[row - 1][:start] + '"' + token.string[1:-1] + '"' + rows[row - 1][end:]
    return "\n".join(rows)


def _wrapped(line: str) -> list[str]:
    """One line, or several with the contents of its last brackets on lines of their own."""
    if len(line) <= WIDTH:
        return [line]
    pairs = [pair for pair in _pairs(line) if pair[1] - pair[0] > 1]
    if not pairs:
        return [line]
    start, end = pairs[-1] if len(line) - pairs[-1][1] < WIDTH // 2 else max(pairs, key=lambda pair: pair[1] - pair[0])
    indent = " " * (len(line) - len(line.lstrip()))
    inner = line[start + 1 : end]
    body = f"{indent}    {inner}"
    parts = _parts(inner)
    if len(body) > WIDTH and len(parts) > 1:
        contents = [row for part in parts for row in _wrapped(f"{indent}    {part},")]
    elif len(body) > WIDTH and " for " in inner:
        head, _, tail = inner.partition(" for ")
        contents = [*_wrapped(f"{indent}    {head}"), *_wrapped(f"{indent}    for {tail}")]
    else:
        contents = _wrapped(body)
    return [line[: start + 1], *contents, indent + line[end:]]


def _masked(line: str) -> str:
    """The line without what its strings say."""
    return re.sub(r""""[^"]*"|'[^']*'""", lambda string: '"' * len(string[0]), line)


def _pairs(line: str) -> list[tuple[int, int]]:
    """The outermost brackets of a line."""
    found, stack = [], []
    for index, character in enumerate(_masked(line)):
        if character in "([{":
            stack.append(index)
        elif character in ")]}":
            start = stack.pop()
            if not stack:
                found.append((start, index))
    return found


def _parts(inner: str) -> list[str]:
    """The parts between the outermost commas."""
    pairs = _pairs(inner)
    found = (index for index, character in enumerate(_masked(inner)) if character == ",")
    commas = [index for index in found if not any(start < index < end for start, end in pairs)]
    borders = [-1, *commas, len(inner)]
    return [part for a, b in itertools.pairwise(borders) if (part := inner[a + 1 : b].strip())]

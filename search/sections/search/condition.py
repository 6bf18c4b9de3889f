"""The condition of an axis: `path == 'word'`, `path != 3`, `path in ['a', 'b']`, several joined by `and`.

It is parsed, never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, cast

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Spec
from archlab.search.utils.canonical import canonical_json

_CONDITION = re.compile(r"\s*(?P<path>[A-Za-z_][\w.*:-]*)\s*(?P<operator>==|!=|\bin\b)\s*(?P<value>\S.*?)\s*")
_LITERAL = re.compile(
    r"""\s*(?:'([^']*)'|"([^"]*)"|(true|false|null)|([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))\s*"""
)
_AND = re.compile(r"""\band\b(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")  # outside of quotes
_WORDS = {"true": True, "false": False, "null": None}
_FORMS = "write path == 'value', path != 'value' or path in ['a', 'b'], words in quotes, several joined by `and`"


class Condition(Spec):
    """Holds when the value at `path` equals the one literal (==), differs from it (!=), or is among them (in)."""

    path: str
    operator: Literal["==", "!=", "in"]
    literals: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        """Whether `value`, found at the path, satisfies the condition; 1 and 1.0 are equal, 1 and true are not."""
        equal = _spelling(value) in map(_spelling, self.literals)
        return not equal if self.operator == "!=" else equal

    def __str__(self) -> str:
        words = [canonical_json(literal) for literal in self.literals]
        return f"{self.path} {self.operator} {'[' + ', '.join(words) + ']' if self.operator == 'in' else words[0]}"


class When(Spec):
    """Holds when all of its conditions do."""

    terms: tuple[Condition, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """What it asks for, each once."""
        return tuple(dict.fromkeys(term.path for term in self.terms))

    def holds(self, at: Callable[[str], Any]) -> bool:
        """Whether all values, looked up by their paths, satisfy it."""
        return all(term.holds(at(term.path)) for term in self.terms)

    def __str__(self) -> str:
        return " and ".join(map(str, self.terms))


def parse_when(node: Node, path: str, problems: list[Problem]) -> Any:
    """The condition that stands here, or INVALID after noting in `problems` why there is none."""
    parts = [Node(part, node.mark) for part in _AND.split(node.value)] if isinstance(node.value, str) else [node]
    terms = [_term(part, path, problems, node) for part in parts]
    return INVALID if INVALID in terms else When(terms=tuple(terms))


def _term(node: Node, path: str, problems: list[Problem], whole: Node) -> Any:
    match = _CONDITION.fullmatch(node.value) if isinstance(node.value, str) else None
    if match is None:
        found = f"'{whole.value}'" if isinstance(node.value, str) else node.kind
        problems.append(Problem(path, f"is not a condition: {_FORMS}; found {found}", node.mark))
        return INVALID
    literals = _literals(match["value"], listed=match["operator"] == "in")
    if literals is None:
        problems.append(Problem(path, f"cannot compare with {match['value']}: {_FORMS}", node.mark))
        return INVALID
    operator = cast(Literal["==", "!=", "in"], match["operator"])
    return Condition(path=match["path"], operator=operator, literals=literals)


def _literals(text: str, listed: bool) -> tuple[Any, ...] | None:
    """The literals of a text, or None where it holds anything else."""
    if listed:
        if not (text.startswith("[") and text.endswith("]")):
            return None
        text = text[1:-1]
    found: list[Any] = []
    at = 0
    while match := _LITERAL.match(text, at):
        found.append(_value(match))
        at = match.end()
        if at == len(text):
            return tuple(found) if listed or len(found) == 1 else None
        if text[at] != ",":
            return None
        at += 1
    return None


def _value(match: re.Match[str]) -> Any:
    single, double, word, number = match.groups()
    if word is not None:
        return _WORDS[word]
    if number is not None:
        return int(number) if re.fullmatch(r"[-+]?\d+", number) else float(number)
    return single if single is not None else double


def _spelling(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return canonical_json(int(value) if whole else value)

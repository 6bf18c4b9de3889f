"""Notations of their own inside a field: an activation by name or formula, a choice among a branch's linear maps.

Each is the metadata of an `Annotated` type: `parse_node` reads it, `words` says what may stand there, `others` gives
different values to test with, and `schema` describes it to an editor.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from archlab.arch_dsl.language.errors import Problem, nearest, shorten, unknown
from archlab.arch_dsl.language.formula import FUNCTIONS, normal_form
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count
from archlab.kernels.activations import ACTIVATIONS


class ActivationNotation:
    """The name of an activation, or a formula in x: `x * sigmoid(1.702 * x)`."""

    def parse_node(self, node: Node, path: str, problems: list[Problem]) -> Any:
        """The name or the formula's normal form, or INVALID."""
        text = node.value
        if isinstance(text, str) and text in ACTIVATIONS:
            return text
        if not isinstance(text, str) or text.replace("_", "").isalnum():
            found = text if isinstance(text, str) else node.kind
            message = unknown(found, "activation", ACTIVATIONS) + ", or a formula in x such as 'x * sigmoid(x)'"
            return refuse(problems, path, message, node.mark)
        try:
            return normal_form(text)
        except ValueError as error:
            return refuse(problems, path, f"'{text}' is no formula in x: {error}", node.mark)

    def words(self) -> str:
        return f"{' | '.join(ACTIVATIONS)}, or a formula in x"

    def others(self, value: Any) -> list[Any]:
        return [*(name for name in ACTIVATIONS if name != value), "x * tanh(1.5 * x) + 0.1"]

    def schema(self) -> dict[str, Any]:
        formula = {"type": "string", "description": f"a formula in x with {', '.join(FUNCTIONS)}"}
        return {"anyOf": [{"enum": list(ACTIVATIONS)}, formula]}


class ProjectionNotation:
    """Which of a branch's linear maps: all (true), none (false), or a list of their names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def parse_node(self, node: Node, path: str, problems: list[Problem]) -> Any:
        """True, False or some of the names in their order, or INVALID."""
        if isinstance(node.value, bool):
            return node.value
        items = node.value if isinstance(node.value, list) else [node]
        before = len(problems)
        for item in items:
            if item.value not in self.names:
                found = f"'{shorten(item.value)}'" if isinstance(item.value, str) else item.plain()
                near = nearest(str(item.value), self.names)
                hint = f"; did you mean '{near}'?" if near else ""
                message = f"must be true, false or a list of {', '.join(self.names)}; found {found}{hint}"
                problems.append(Problem(path, message, item.mark))
        if len(problems) > before:
            return INVALID
        return self.normal({str(item.value) for item in items})

    def normal(self, chosen: set[str]) -> bool | tuple[str, ...]:
        """One spelling for each choice."""
        kept = tuple(name for name in self.names if name in chosen)
        return kept if 0 < len(kept) < len(self.names) else bool(kept)

    def words(self) -> str:
        return f"true | false | a list of {', '.join(self.names)}"

    def others(self, value: Any) -> list[Any]:
        return [other for other in (True, False, self.names[:1], self.names[1:]) if other != value]

    def schema(self) -> dict[str, Any]:
        names = {"enum": list(self.names)}
        return {"anyOf": [{"type": "boolean"}, names, {"type": "array", "items": names}]}


class WordOr:
    """A number of some kind, or a word that stands for one: `std: small`, `warmup: auto`. Or nothing, if `optional`."""

    def __init__(
        self, word: str, kind: Any, limits: str, schema: dict[str, float], other: float, optional: bool = False
    ) -> None:
        """`limits` and `schema` tell the kind's limits, to people and to editors; `other` is a number to test with."""
        self.word, self.kind, self.limits, self.limited, self.other = word, kind, limits, schema, other
        self.optional = optional

    def parse_node(self, node: Node, path: str, problems: list[Problem]) -> Any:
        """A number or the word, or INVALID."""
        if node.value is None and self.optional:
            return None
        wordlike = isinstance(node.value, str) and (node.value.isalpha() or "(" in node.value)
        if wordlike and node.value != self.word:
            message = f"{unknown(node.value, path.rpartition('.')[2], (self.word,))}, or a number {self.limits}"
            return refuse(problems, path, message, node.mark)
        return self.word if node.value == self.word else parse_value(self.kind, node, path, problems)

    def words(self) -> str:
        return f"{self.word}, or a number {self.limits}"

    def others(self, value: Any) -> list[Any]:
        return [other for other in (self.word, self.other) if other != value]

    def schema(self) -> dict[str, Any]:
        options = [{"enum": [self.word]}, {"type": "number", **self.limited}]
        return {"anyOf": [*options, *([{"type": "null"}] if self.optional else [])]}


_MULTIPLE = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")


class SizeNotation:
    """How many there are, or `2x`: so many that all heads together are twice as wide as the stream."""

    def __init__(self, optional: bool = False) -> None:
        self.optional = optional

    def parse_node(self, node: Node, path: str, problems: list[Problem]) -> Any:
        """An int, a multiple in its shortest spelling, or INVALID."""
        if node.value is None and self.optional:
            return None
        if isinstance(node.value, str) and (match := _MULTIPLE.fullmatch(node.value)) and float(match[1]):
            return f"{float(match[1]):g}x"
        if isinstance(node.value, str) and not node.value[:-1].isdecimal():
            message = f"must be an integer or a multiple of d_model such as 2x, found '{shorten(node.value)}'"
            return refuse(problems, path, message, node.mark)
        return parse_value(Count, node, path, problems)

    def words(self) -> str:
        return "integer > 0, or a multiple of d_model for all heads together: 2x"

    def others(self, value: Any) -> list[Any]:
        return [other for other in (1, 2, 4, 8, 12, "2x") if other != value]

    def schema(self) -> dict[str, Any]:
        options = [
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": f"^({_MULTIPLE.pattern}|[0-9.]+k)$"},
        ]
        return {"anyOf": [*options, *([{"type": "null"}] if self.optional else [])]}


def multiple_of(size: int | str | None, d_model: int) -> float:
    """The channels that a size written as a multiple of d_model stands for."""
    return float(str(size).removesuffix("x")) * d_model


def chosen(value: bool | tuple[str, ...], name: str) -> bool:
    """Whether a choice among linear maps holds this one."""
    return value if isinstance(value, bool) else name in value


Activation = Annotated[str, ActivationNotation()]
Projections = bool | tuple[str, ...]

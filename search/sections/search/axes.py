"""The axes of a search: choices, components, ranges of whole and of broken numbers, and the condition of an axis.

`path == 'word'`, `path != 3`, `path in ['a', 'b']`, several joined by `and`: it is parsed, never evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Spec, set_marks
from archlab.search.formatting.words import is_number
from archlab.search.utils.canonical import canonical_json

_OFF_GRID = 1e-6  # of a step, as decimal fractions are not exact
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
        """Whether `value`, found at the path, satisfies the condition; 1 and 1.0 are equal, 1 and true are not. A
        primitive is compared by its type."""
        value = type_of(value)
        equal = _spelling(value) in map(_spelling, self.literals)
        return not equal if self.operator == "!=" else equal

    def __str__(self) -> str:
        words = [canonical_json(literal) for literal in self.literals]
        return f"{self.path} {self.operator} {'[' + ', '.join(words) + ']' if self.operator == 'in' else words[0]}"


def type_of(value: Any) -> Any:
    """The type of a primitive, as a patch would have it; any other value as it is."""
    return value.get("type", value) if isinstance(value, dict) else value


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


class Choice(Spec):
    """One of these values; each is a scalar, a list or a mapping, as a patch would have it."""

    keys: ClassVar[tuple[str, ...]] = ("choice", "when")
    values: tuple[Any, ...]
    when: When | None = None

    def holds(self, value: Any) -> bool:
        """Whether the axis can take this value."""
        return canonical_json(value) in map(canonical_json, self.values)

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        return {self.keys[0]: list(self.values)}

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values to try before a search starts."""
        return self.values


class Components(Choice):
    """One of these components of the study: `on` is the one that the axis is named after, `off` is none."""

    keys: ClassVar[tuple[str, ...]] = ("component", "when")


class Integers(Spec):
    """A whole number from `low` to `high`, both included, in steps of `step`, or evenly in its logarithm."""

    keys: ClassVar[tuple[str, ...]] = ("int", "step", "log", "when")
    low: int
    high: int
    step: int = 1
    log: bool = False
    when: When | None = None

    def holds(self, value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0

    def plain(self) -> dict[str, Any]:
        return {"int": [self.low, self.high], "step": self.step, "log": self.log}

    @property
    def extremes(self) -> tuple[int, ...]:
        return self.low, self.high


class Floats(Spec):
    """A number from `low` to `high`, both included, evenly, in steps of `step`, or evenly in its logarithm."""

    keys: ClassVar[tuple[str, ...]] = ("float", "step", "log", "when")
    low: float
    high: float
    step: float | None = None
    log: bool = False
    when: When | None = None

    def holds(self, value: Any) -> bool:
        inside = is_number(value) and self.low <= value <= self.high
        return inside and (self.step is None or _on_grid(value - self.low, self.step))

    def plain(self) -> dict[str, Any]:
        step = {} if self.step is None else {"step": self.step}
        return {"float": [self.low, self.high], **step, "log": self.log}

    @property
    def extremes(self) -> tuple[float, ...]:
        inside = () if self.step else (self.low + (self.high - self.low) / 3**0.5,)  # a broken number
        return self.low, *inside, self.high


def _on_grid(length: float, step: float) -> bool:
    return abs(length / step - round(length / step)) < _OFF_GRID


Axis = Choice | Integers | Floats
KINDS: dict[str, type[Axis]] = {"choice": Choice, "component": Components, "int": Integers, "float": Floats}


def parse_axis(node: Node, path: str, problems: list[Problem]) -> Any:
    """One axis from `{choice: [..]}`, `{component: [..]}`, `{int: [low, high], ..}` or `{float: [low, high], ..}`."""
    if not isinstance(node.value, dict):
        return refuse(problems, path, f"must be a mapping with one of {', '.join(KINDS)}, found {node.kind}", node.mark)
    named = [name for name in node.value if name in KINDS]
    if len(named) != 1:
        stray = next((name for name in node.value if name not in KINDS), None)
        message = "has both " + " and ".join(named) if named else f"says none of {', '.join(KINDS)}"
        if not named and stray is not None:
            message = unknown(stray, "kind of axis", KINDS)
        return refuse(problems, path, message, node.key_marks.get(stray or "", node.mark))
    kind = KINDS[named[0]]
    before = len(problems)
    for name in node.value:
        if name not in kind.keys:
            mark = node.key_marks.get(name, node.mark)
            refuse(problems, f"{path}.{name}", unknown(name, f"key of {named[0]}", kind.keys), mark)
    reads = _choices if issubclass(kind, Choice) else _limits
    fields = reads(node, named[0], path, problems)
    if (condition := node.value.get("when")) is not None:
        fields["when"] = parse_when(condition, f"{path}.when", problems)
    if len(problems) > before:
        return INVALID
    axis = kind(**fields)
    set_marks(axis, {name: each.mark for name, each in {**node.value, "": node}.items() if each.mark})
    return axis


def _choices(node: Node, name: str, path: str, problems: list[Problem]) -> dict[str, Any]:
    """The values of a choice, each once."""
    assert isinstance(node.value, dict)
    body, where = node.value[name], f"{path}.{name}"
    if not isinstance(body.value, list) or not body.value:
        found = "an empty one" if isinstance(body.value, list) else body.kind
        refuse(problems, where, f"must be a list of values, found {found}", body.mark)
        return {}
    seen: set[str] = set()
    for index, child in enumerate(body.value):
        plain, place = child.plain(), f"{where}.{index}"
        if not _finite(plain):
            refuse(problems, place, "must be finite", child.mark)
        elif name == "component" and not isinstance(plain, str):
            refuse(problems, place, f"must be the name of a component, on or off, found {child.kind}", child.mark)
        elif (text := canonical_json(plain)) in seen:
            refuse(problems, place, f"{text} is already a choice", child.mark)
        else:
            seen.add(text)
    return {"values": tuple(body.plain())}


def _finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _limits(node: Node, name: str, path: str, problems: list[Problem]) -> dict[str, Any]:
    """low, high, step and log of a range, checked against each other."""
    assert isinstance(node.value, dict)
    body, number = node.value[name], int if name == "int" else float
    where = f"{path}.{name}"
    if not isinstance(body.value, list) or len(body.value) != 2:
        refuse(problems, where, "must be a list of two numbers, the lowest and the highest", body.mark)
        return {}
    before = len(problems)
    low, high = (parse_value(number, child, f"{where}.{index}", problems) for index, child in enumerate(body.value))
    fields = {"low": low, "high": high}
    for extra, kind in (("step", number), ("log", bool)):
        if extra in node.value:
            fields[extra] = parse_value(kind, node.value[extra], f"{path}.{extra}", problems)
    if len(problems) > before:
        return {}
    step, log = fields.get("step", 1 if number is int else None), fields.get("log", False)
    stepped = "step" in node.value and (number is float or step != 1)
    least = 1 if number is int else 0
    too_small = step is not None and (step < least or step == 0)
    complaints = [
        (low >= high, f"the lowest must be less than the highest, found {low:g} and {high:g}"),
        (log and low <= 0, f"`log: true` needs a lowest above 0, found {low:g}"),
        (too_small, f"a step must be {'at least 1' if number is int else 'above 0'}, found {step or 0:g}"),
        (log and stepped, "has a `step` and `log: true`; a range takes one of them"),
        (
            step is not None and not too_small and not _on_grid(high - low, step),
            f"no step of {step} from {low:g} ends at {high:g}",
        ),
    ]
    problems.extend(Problem(where, message, body.mark) for wrong, message in complaints if wrong)
    return fields


def parse_when(node: Node, path: str, problems: list[Problem]) -> Any:
    """The condition that stands here, or INVALID after noting in `problems` why there is none."""
    parts = [Node(part, node.mark) for part in _AND.split(node.value)] if isinstance(node.value, str) else [node]
    terms = [_term(part, path, problems, node) for part in parts]
    return INVALID if INVALID in terms else When(terms=tuple(terms))


def _term(node: Node, path: str, problems: list[Problem], whole: Node) -> Any:
    match = _CONDITION.fullmatch(node.value) if isinstance(node.value, str) else None
    if match is None:
        found = f"'{whole.value}'" if isinstance(node.value, str) else node.kind
        return refuse(problems, path, f"is not a condition: {_FORMS}; found {found}", node.mark)
    literals = _literals(match["value"], listed=match["operator"] == "in")
    if literals is None:
        return refuse(problems, path, f"cannot compare with {match['value']}: {_FORMS}", node.mark)
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


def same(one: Any) -> Callable[[Any], bool]:
    """Whether another value is that one as a condition compares them."""
    return lambda other: _spelling(one) == _spelling(other)


def _spelling(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return canonical_json(int(value) if whole else value)

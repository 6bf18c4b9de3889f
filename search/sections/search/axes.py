"""The axes of a search: choices, components, ranges of whole and of broken numbers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Mark, Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Spec, set_marks
from archlab.search.sections.search.condition import When, parse_when
from archlab.search.utils.canonical import canonical_json

_OFF_GRID = 1e-6  # of a step, as decimal fractions are not exact


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
        return {"choice": list(self.values)}

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values to try before a search starts."""
        return self.values


class Components(Spec):
    """One of these components of the study: `on` is the one that the axis is named after, `off` is none."""

    keys: ClassVar[tuple[str, ...]] = ("component", "when")
    values: tuple[str, ...]
    when: When | None = None

    def holds(self, value: Any) -> bool:
        """Whether the axis can take this value."""
        return value in self.values

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        return {"component": list(self.values)}

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values to try before a search starts."""
        return self.values


class Integers(Spec):
    """A whole number from `low` to `high`, both included, in steps of `step`, or evenly in its logarithm."""

    keys: ClassVar[tuple[str, ...]] = ("int", "step", "log", "when")
    low: int
    high: int
    step: int = 1
    log: bool = False
    when: When | None = None

    def holds(self, value: Any) -> bool:
        """Whether the axis can take this value."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        return {"int": [self.low, self.high], "step": self.step, "log": self.log}

    @property
    def extremes(self) -> tuple[int, ...]:
        """The values to try before a search starts."""
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
        """Whether the axis can take this value."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return (
            number and self.low <= value <= self.high and (self.step is None or _on_grid(value - self.low, self.step))
        )

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        step = {} if self.step is None else {"step": self.step}
        return {"float": [self.low, self.high], **step, "log": self.log}

    @property
    def extremes(self) -> tuple[float, ...]:
        """The values to try before a search starts: the ends, and a broken number between them."""
        inside = () if self.step else (self.low + (self.high - self.low) / 3**0.5,)
        return self.low, *inside, self.high


def _on_grid(length: float, step: float) -> bool:
    return abs(length / step - round(length / step)) < _OFF_GRID


Axis = Choice | Components | Integers | Floats
KINDS: dict[str, type[Axis]] = {"choice": Choice, "component": Components, "int": Integers, "float": Floats}


def parse_axis(node: Node, path: str, problems: list[Problem]) -> Any:
    """One axis from `{choice: [..]}`, `{component: [..]}`, `{int: [low, high], ..}` or `{float: [low, high], ..}`."""
    if not isinstance(node.value, dict):
        message = f"must be a mapping with one of {', '.join(KINDS)}, found {node.kind}"
        problems.append(Problem(path, message, node.mark))
        return INVALID
    named = [name for name in node.value if name in KINDS]
    if len(named) != 1:
        stray = next((name for name in node.value if name not in KINDS), None)
        message = "has both " + " and ".join(named) if named else f"says none of {', '.join(KINDS)}"
        if not named and stray is not None:
            message = unknown(stray, "kind of axis", KINDS)
        problems.append(Problem(path, message, node.key_marks.get(stray or "", node.mark)))
        return INVALID
    kind = KINDS[named[0]]
    before = len(problems)
    for name in node.value:
        if name not in kind.keys:
            mark = node.key_marks.get(name, node.mark)
            problems.append(Problem(f"{path}.{name}", unknown(name, f"key of {named[0]}", kind.keys), mark))
    body = node.value[named[0]]
    listed = kind in (Choice, Components)
    fields = _choices(body, f"{path}.{named[0]}", kind, problems) if listed else _limits(node, named[0], path, problems)
    if (condition := node.value.get("when")) is not None:
        fields["when"] = parse_when(condition, f"{path}.when", problems)
    if len(problems) > before:
        return INVALID
    axis = kind(**fields)
    marks: dict[str, Mark] = {name: child.mark for name, child in node.value.items() if child.mark}
    set_marks(axis, {**marks, "": node.mark} if node.mark else marks)
    return axis


def _choices(node: Node, path: str, kind: type[Axis], problems: list[Problem]) -> dict[str, Any]:
    if not isinstance(node.value, list) or not node.value:
        found = "an empty one" if isinstance(node.value, list) else node.kind
        problems.append(Problem(path, f"must be a list of values, found {found}", node.mark))
        return {}
    seen: set[str] = set()
    for index, child in enumerate(node.value):
        plain, place = child.plain(), f"{path}.{index}"
        if not _finite(plain):
            problems.append(Problem(place, "must be finite", child.mark))
        elif kind is Components and not isinstance(plain, str):
            problems.append(
                Problem(place, f"must be the name of a component, on or off, found {child.kind}", child.mark)
            )
        elif (text := canonical_json(plain)) in seen:
            problems.append(Problem(place, f"{text} is already a choice", child.mark))
        else:
            seen.add(text)
    return {"values": tuple(node.plain())}


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
        problems.append(Problem(where, "must be a list of two numbers, the lowest and the highest", body.mark))
        return {}
    before = len(problems)
    low, high = (parse_value(number, child, f"{where}.{index}", problems) for index, child in enumerate(body.value))
    fields = {"low": low, "high": high}
    kinds = {"step": number, "log": bool}
    for extra in ("step", "log"):
        if extra in node.value and extra in KINDS[name].keys:
            fields[extra] = parse_value(kinds[extra], node.value[extra], f"{path}.{extra}", problems)
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

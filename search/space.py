"""What a search may vary: one axis per path, each a choice or a range, some of them only under a condition.

    block.attention.kv_heads: {choice: [1, 2, 4, 8]}
    block.ffn.width: {int: [256, 2048], step: 64}
    train.lr: {float: [1e-4, 1e-2], log: true}
    block.attention.window: {int: [64, 512], when: "block.attention.mask == 'window'"}

A value is whatever a patch of its path accepts. An axis whose condition does not hold takes no value at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from arch_dsl.errors import Mark, Problem, SpecError, unknown
from arch_dsl.parse import INVALID, parse_value
from arch_dsl.patch import Setting
from arch_dsl.source import Node
from arch_dsl.spec import Spec, set_marks
from search.condition import Condition, parse_condition
from search.trial import canonical_json


class Choice(Spec):
    """One of these values; each is a scalar, a list or a mapping, as a patch would have it."""

    keys: ClassVar[tuple[str, ...]] = ("choice", "when")
    values: tuple[Any, ...]
    when: Condition | None = None

    def holds(self, value: Any) -> bool:
        """Whether the axis can take this value."""
        return canonical_json(value) in map(canonical_json, self.values)

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        return {"choice": list(self.values)}


class Integers(Spec):
    """A whole number from `low` to `high`, both included, in steps of `step`, or evenly in its logarithm."""

    keys: ClassVar[tuple[str, ...]] = ("int", "step", "log", "when")
    low: int
    high: int
    step: int = 1
    log: bool = False
    when: Condition | None = None

    def holds(self, value: Any) -> bool:
        """Whether the axis can take this value."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        return {"int": [self.low, self.high], "step": self.step, "log": self.log}


class Floats(Spec):
    """A number from `low` to `high`, both included, evenly or evenly in its logarithm."""

    keys: ClassVar[tuple[str, ...]] = ("float", "log", "when")
    low: float
    high: float
    log: bool = False
    when: Condition | None = None

    def holds(self, value: Any) -> bool:
        """Whether the axis can take this value."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high

    def plain(self) -> dict[str, Any]:
        """As a study file spells it."""
        return {"float": [self.low, self.high], "log": self.log}


Axis = Choice | Integers | Floats
_KINDS: dict[str, type[Choice] | type[Integers] | type[Floats]] = {"choice": Choice, "int": Integers, "float": Floats}


class Space(Spec):
    """Path to axis. Every path can be patched; a condition may ask for any path, varied or not."""

    axes: dict[str, Axis] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, data: Any, path: str = "space") -> Space:
        """A space from a node tree or plain data. Raises SpecError with all its problems."""
        problems: list[Problem] = []
        space = cls.parse_node(Node.of(data), path, problems)
        if problems:
            raise SpecError(problems)
        assert isinstance(space, Space)
        return space

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """The space that stands here, or INVALID after noting in `problems` why there is none."""
        if not isinstance(node.value, dict):
            problems.append(Problem(path, f"must be a mapping from path to axis, found {node.kind}", node.mark))
            return INVALID
        if not node.value:
            problems.append(Problem(path, "holds no axis: there is nothing to search", node.mark))
            return INVALID
        before = len(problems)
        axes = {name: _axis(child, f"{path}.{name}", problems) for name, child in node.value.items()}
        if len(problems) > before:
            return INVALID
        space = cls(axes=axes)
        places = {name: node.key_marks.get(name, child.mark) for name, child in node.value.items()}
        marks = {name: mark for name, mark in places.items() if mark}
        set_marks(space, {**marks, "": node.mark} if node.mark else marks)
        problems.extend(space._complaints(path))
        return space if len(problems) == before else INVALID

    def plain(self) -> dict[str, dict[str, Any]]:
        """The space as a study file spells it, defaults included."""
        return {
            path: {**axis.plain(), **({"when": str(axis.when)} if axis.when else {})}
            for path, axis in self.axes.items()
        }

    @property
    def needs(self) -> tuple[str, ...]:
        """The paths that conditions ask for and that no axis varies: the base has to say their values."""
        asked = (axis.when.path for axis in self.axes.values() if axis.when)
        return tuple(dict.fromkeys(path for path in asked if path not in self.axes))

    def ordered(self) -> list[tuple[str, Axis]]:
        """The axes, each after the one that its condition asks for, otherwise as written."""
        done: dict[str, Axis] = {}

        def visit(path: str, above: tuple[str, ...]) -> None:
            when = self.axes[path].when
            if when and when.path in self.axes and when.path not in above:
                visit(when.path, (*above, path))
            done.setdefault(path, self.axes[path])

        for path in self.axes:
            visit(path, ())
        return list(done.items())

    def active(self, path: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
        """Whether an axis takes a value, after the `values` drawn so far; `given` has those of the paths in `needs`.

        A condition on an axis that itself takes no value does not hold, whatever it asks.
        """
        when = self.axes[path].when
        if when is None:
            return True
        found = values if when.path in self.axes else given
        return when.path in found and when.holds(found[when.path])

    def _complaints(self, path: str) -> list[Problem]:
        """What is wrong with the conditions, seen together."""
        found = []
        for name, axis in self.axes.items():
            asked = self.axes.get(axis.when.path) if axis.when else None
            if axis.when is None or asked is None:
                continue
            where, mark = f"{path}.{name}.when", axis.mark("when")
            if self._circular(name):
                found.append(Problem(where, "its condition depends on itself", mark))
            for value in axis.when.literals:
                if not asked.holds(value):
                    found.append(Problem(where, _never(axis.when.path, value, asked), mark))
        return found

    def _circular(self, path: str) -> bool:
        seen, at = {path}, self.axes[path].when
        while at and at.path in self.axes:
            if at.path in seen:
                return at.path == path
            seen.add(at.path)
            at = self.axes[at.path].when
        return False


def probes(space: Space) -> Iterator[list[Setting]]:
    """The choices or the ends of each axis (and a broken number between) as a patch, after what its condition needs."""
    for path, axis in space.axes.items():
        if (needed := _enabling(space, path, ())) is None:
            continue
        inside = (axis.low + (axis.high - axis.low) / 3**0.5,) if isinstance(axis, Floats) else ()
        for value in axis.values if isinstance(axis, Choice) else (axis.low, *inside, axis.high):
            yield [*needed, _setting(space, path, value)]


def _setting(space: Space, path: str, value: Any) -> Setting:
    axis = space.axes[path]
    inside = axis.mark("choice" if isinstance(axis, Choice) else "int" if isinstance(axis, Integers) else "float")
    return Setting(path, Node.of(value, inside), "the search", space.mark(path))


def _enabling(space: Space, path: str, above: tuple[str, ...]) -> list[Setting] | None:
    """Settings under which the axis at `path` takes a value; None where its condition asks for the base."""
    when = space.axes[path].when
    if when is None:
        return []
    if when.path not in space.axes or when.path in above:
        return None
    axis = space.axes[when.path]
    ends = axis.values if isinstance(axis, Choice) else (axis.low, axis.high)
    value = next((value for value in (*when.literals, *ends) if when.holds(value) and axis.holds(value)), None)
    before = _enabling(space, when.path, (*above, path))
    return None if before is None or value is None else [*before, _setting(space, when.path, value)]


def _never(path: str, value: Any, asked: Axis) -> str:
    if isinstance(asked, Choice):
        return unknown(value, f"choice of {path}", [str(each) for each in asked.values])
    return f"{path} is never {value}: it goes from {asked.low:g} to {asked.high:g}"


def _axis(node: Node, path: str, problems: list[Problem]) -> Any:
    """One axis from `{choice: [..]}`, `{int: [low, high], ..}` or `{float: [low, high], ..}`."""
    if not isinstance(node.value, dict):
        message = f"must be a mapping with one of {', '.join(_KINDS)}, found {node.kind}"
        problems.append(Problem(path, message, node.mark))
        return INVALID
    named = [name for name in node.value if name in _KINDS]
    if len(named) != 1:
        stray = next((name for name in node.value if name not in _KINDS), None)
        message = "has both " + " and ".join(named) if named else f"says none of {', '.join(_KINDS)}"
        if not named and stray is not None:
            message = unknown(stray, "kind of axis", _KINDS)
        problems.append(Problem(path, message, node.key_marks.get(stray or "", node.mark)))
        return INVALID
    kind = _KINDS[named[0]]
    before = len(problems)
    for name in node.value:
        if name not in kind.keys:
            mark = node.key_marks.get(name, node.mark)
            problems.append(Problem(f"{path}.{name}", unknown(name, f"key of {named[0]}", kind.keys), mark))
    body = node.value[named[0]]
    fields = _choices(body, path, problems) if kind is Choice else _limits(node, named[0], path, problems)
    if (condition := node.value.get("when")) is not None:
        fields["when"] = parse_condition(condition, f"{path}.when", problems)
    if len(problems) > before:
        return INVALID
    axis = kind(**fields)
    marks: dict[str, Mark] = {name: child.mark for name, child in node.value.items() if child.mark}
    set_marks(axis, {**marks, "": node.mark} if node.mark else marks)
    return axis


def _choices(node: Node, path: str, problems: list[Problem]) -> dict[str, Any]:
    path = f"{path}.choice"
    if not isinstance(node.value, list) or not node.value:
        found = "an empty one" if isinstance(node.value, list) else node.kind
        problems.append(Problem(path, f"must be a list of values, found {found}", node.mark))
        return {}
    seen: set[str] = set()
    for index, child in enumerate(node.value):
        plain = child.plain()
        if not _finite(plain):
            problems.append(Problem(f"{path}.{index}", "must be finite", child.mark))
        elif (text := canonical_json(plain)) in seen:
            problems.append(Problem(f"{path}.{index}", f"{text} is already a choice", child.mark))
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
        if extra in node.value and extra in _KINDS[name].keys:
            fields[extra] = parse_value(kinds[extra], node.value[extra], f"{path}.{extra}", problems)
    if len(problems) > before:
        return {}
    step, log = fields.get("step", 1), fields.get("log", False)
    complaints = [
        (low >= high, f"the lowest must be less than the highest, found {low:g} and {high:g}"),
        (log and low <= 0, f"`log: true` needs a lowest above 0, found {low:g}"),
        (step < 1, f"a step must be at least 1, found {step:g}"),
        (log and step != 1, "has a `step` and `log: true`; a range takes one of them"),
        (step >= 1 and (high - low) % step != 0 and name == "int", f"no step of {step} from {low:g} ends at {high:g}"),
    ]
    problems.extend(Problem(where, message, body.mark) for wrong, message in complaints if wrong)
    return fields

"""What a search may vary: one axis per path, each a choice or a range, some of them only under a condition.

    block.attention.kv_heads: {choice: [1, 2, 4, 8]}
    block.ffn.width: {int: [256, 2048], step: 64}
    train.lr: {float: [1e-4, 1e-2], log: true}
    block.attention.window: {int: [64, 512], when: "block.attention.mask == 'window'"}
    qk_norm: {component: [on, off]}
    gate: {component: [off, sdpa_gate, value_gate], when: "qk_norm == 'on'"}

A value is whatever a patch of its path accepts; of an axis of components, one of the study's components. An axis whose
condition does not hold takes no value at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import set_marks
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.sections.search.axes import KINDS, Axis, Choice, Components, parse_axis, same, type_of
from archlab.search.variants.asks import Question
from archlab.search.variants.patches import Patch
from archlab.search.variants.section import Section

ON, OFF = "on", "off"


class Space(Section):
    """Path to axis, or a name to an axis of components. A condition may ask for any of them and for other paths."""

    key = "space"

    axes: dict[str, Axis] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """The space that stands here, or INVALID after noting in `problems` why there is none."""
        if not isinstance(node.value, dict):
            return refuse(problems, path, f"must be a mapping from path to axis, found {node.kind}", node.mark)
        if not node.value:
            return refuse(problems, path, "holds no axis: there is nothing to search", node.mark)
        before = len(problems)
        axes = {name: parse_axis(child, f"{path}.{name}", problems) for name, child in node.value.items()}
        if len(problems) > before:
            return INVALID
        space = cls(axes=axes)
        marks = {name: node.key_marks.get(name, child.mark) for name, child in node.value.items()}
        set_marks(space, {name: mark for name, mark in {**marks, "": node.mark}.items() if mark})
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
        asked = (path for axis in self.axes.values() if axis.when for path in axis.when.paths)
        return tuple(dict.fromkeys(path for path in asked if self.axis_asked(path) is None))

    def ordered(self) -> list[tuple[str, Axis]]:
        """The axes, each after those that its condition asks for, otherwise as written."""
        done: dict[str, Axis] = {}

        def visit(path: str, above: tuple[str, ...]) -> None:
            for asked in self._asked(path):
                if asked not in above:
                    visit(asked, (*above, path))
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
        found = dict[str, Any](given)
        for asked in when.paths:
            axis = self.axis_asked(asked)
            if axis is not None and axis not in values:
                return False
            if axis is not None:
                found[asked] = values[axis]
        return when.holds(lambda at: found[at])

    def settings(self, path: str, value: Any, components: Mapping[str, Patch]) -> list[Setting]:
        """What an axis at a value changes in the base."""
        axis = self.axes[path]
        if not isinstance(axis, Components):
            kind = next(name for name, each in KINDS.items() if isinstance(axis, each))
            return [Setting(path, Node.of(value, axis.mark(kind)), "the search", self.mark(path))]
        name = component_of(path, value)
        parts = components[name].settings if name else ()
        return [Setting(s.path, s.node, f"component {name}", s.mark) for s in parts]

    def problems(self, study: Question) -> Iterator[Problem]:
        """Without `search:` it means nothing."""
        if study.search is None:
            yield Problem("space", "needs `search:` beside it", study.mark("space"))

    def component_problems(self, components: Mapping[str, Patch]) -> Iterator[Problem]:
        """Axes of components that the study does not have, and paths that are names of its components."""
        for path, axis in self.axes.items():
            if isinstance(axis, Components):
                for index, value in enumerate(axis.values):
                    if (name := component_of(path, value)) is not None and name not in components:
                        message = unknown(name, "component", [*components, ON, OFF])
                        yield Problem(f"space.{path}.component.{index}", message, axis.mark("component"))
            elif path in components:
                message = "is the name of a component; an axis of components is {component: [on, off]}"
                yield Problem(f"space.{path}", message, self.mark(path))

    def axis_asked(self, asked: str) -> str | None:
        """The axis that a path of a condition asks for: its own, or where it asks for a type that of the primitive."""
        if asked in self.axes:
            return asked
        path = asked.removesuffix(".type")
        axis = self.axes.get(path)
        typed = isinstance(axis, Choice) and not any(isinstance(type_of(value), dict) for value in axis.values)
        return path if path != asked and typed else None

    def _asked(self, path: str) -> tuple[str, ...]:
        """The axes that the condition of an axis asks for."""
        when = self.axes[path].when
        axes = [self.axis_asked(asked) for asked in when.paths] if when else []
        return tuple(axis for axis in axes if axis is not None)

    def _complaints(self, path: str) -> list[Problem]:
        """What is wrong with the conditions, seen together."""
        found = []
        for name, axis in self.axes.items():
            where, mark = f"{path}.{name}.when", axis.mark("when")
            if name in self._below(name):
                found.append(Problem(where, "its condition depends on itself", mark))
            for term in axis.when.terms if axis.when else ():
                asked = self.axes.get(self.axis_asked(term.path) or "")
                for value in term.literals if asked else ():
                    if asked and not asked.holds(value) and not any(map(same(value), _types(asked))):
                        if isinstance(asked, Choice):
                            message = unknown(value, f"choice of {term.path}", [*map(str, _types(asked))])
                        else:
                            message = f"{term.path} is never {value}: it goes from {asked.low:g} to {asked.high:g}"
                        found.append(Problem(where, message, mark))
        return found

    def _below(self, path: str) -> set[str]:
        """All axes that the condition of an axis depends on, through those of others."""
        found: set[str] = set()
        left = list(self._asked(path))
        while left:
            asked = left.pop()
            if asked not in found:
                found.add(asked)
                left += self._asked(asked)
        return found


def component_of(path: str, value: str) -> str | None:
    """The component that an axis of components stands for at a value; None for none."""
    return None if value == OFF else path if value == ON else value


def _types(axis: Axis) -> list[Any]:
    """The values of an axis of choices as a condition compares them."""
    return [type_of(value) for value in axis.values] if isinstance(axis, Choice) else []


def probes(space: Space, components: Mapping[str, Patch]) -> Iterator[tuple[str, list[Setting]]]:
    """Each axis and one of its choices or ends as a patch, after what its condition needs."""
    for path, axis in space.axes.items():
        if (needed := _enabling(space, path, ())) is None:
            continue
        before = [setting for at, value in needed.items() for setting in space.settings(at, value, components)]
        for value in axis.extremes:
            yield path, [*before, *space.settings(path, value, components)]


def _enabling(space: Space, path: str, above: tuple[str, ...]) -> dict[str, Any] | None:
    """Values of other axes under which the axis at `path` takes one; None where its condition asks for the base."""
    found: dict[str, Any] = {}
    when = space.axes[path].when
    for path_asked in when.paths if when else ():
        asked = space.axis_asked(path_asked)
        if asked is None or asked in above:
            return None
        axis = space.axes[asked]
        terms = [term for term in when.terms if space.axis_asked(term.path) == asked] if when else []
        tried = [value for term in terms for value in term.literals]
        fitting = (v for v in (*tried, *axis.extremes) if axis.holds(v) and all(term.holds(v) for term in terms))
        value, before = next(fitting, None), _enabling(space, asked, (*above, path))
        if value is None or before is None:
            return None
        found |= before | {asked: value}
    return found

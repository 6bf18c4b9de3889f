"""What a knob is: a pure setter of the sites that it stands for, which can be read back from them.

What it stands for lies in one stack: it is given the stack that its path leads through, and the path from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family, Spec
from archlab.arch_dsl.parts.families import Carry, Gate, Norm, Rotary
from archlab.arch_dsl.tree.paths import Steps, get, stack_at, update

# The order in which families stand at a site; a knob inserts its primitive accordingly.
ORDER: dict[str, tuple[type[Family], ...]] = {
    "query": (Carry, Gate, Norm, Rotary),
    "key": (Carry, Gate, Norm, Rotary),
    "value": (Carry, Gate, Norm),
    "sdpa": (Norm, Gate),
    "post": (Gate, Norm),
    "pre": (Norm,),
}


@dataclass(frozen=True)
class Knob:
    """`reader` gives the knob's value as plain data, or None where the sites say nothing that it could say; `parse`
    makes a value of a node, and `putter` sets it; `occupies` names a site that already holds what it stands for, and
    `displaces` one whose content this value would replace."""

    name: str
    holder: type  # Block or a branch class
    doc: str
    reader: Callable[[Spec, Steps], Any]
    parse: Callable[[Node, str, list[Problem]], Any]
    putter: Callable[[Any, Steps, Any], Any]
    occupies: Callable[[Spec, Steps], str | None]
    displaces: Callable[[Any, Steps, Any], str | None] = lambda root, where, value: None
    fields: tuple[tuple[str, str, str], ...] = ()  # name, what may stand there, default

    def read(self, root: Spec, where: Steps) -> Any:
        """Its value at `where` as plain data; None where the sites say what it cannot."""
        stack, inner = stack_at(where)
        return self.reader(get(root, stack), inner)

    def put(self, root: Any, where: Steps, value: Any) -> Any:
        """The root with this knob of what stands at `where` set to a value."""
        stack, inner = stack_at(where)
        return update(root, type(root), stack, lambda old, kind: self.putter(old, inner, value))

    def occupied(self, root: Spec, where: Steps) -> str | None:
        """The path of a site that already holds what it stands for."""
        stack, inner = stack_at(where)
        return _below(stack, self.occupies(get(root, stack), inner))

    def replaces(self, root: Any, where: Steps, value: Any) -> str | None:
        """The path of a site whose content a value would replace."""
        stack, inner = stack_at(where)
        return _below(stack, self.displaces(get(root, stack), inner, value))

    def turn(self, root: Any, where: Steps, node: Node, path: str, problems: list[Problem]) -> Any:
        """The root with this knob of what stands at `where` set from a node, or INVALID."""
        value = self.parse(node, path, problems)
        return INVALID if value is INVALID else self.put(root, where, value)


def _below(stack: Steps, path: str | None) -> str | None:
    return None if path is None else ".".join((*stack, path))


def among(site: tuple[Any, ...], *kinds: type[Family]) -> tuple[Any, ...]:
    """The primitives of these families at a site."""
    return tuple(item for item in site if isinstance(item, kinds))


def without(site: tuple[Any, ...], *kinds: type[Family]) -> tuple[Any, ...]:
    """A site without the primitives of these families."""
    return tuple(item for item in site if not isinstance(item, kinds))


def inserted(site: tuple[Any, ...], name: str, item: Any) -> tuple[Any, ...]:
    """A site with one primitive more, where the order of families puts it."""
    order = ORDER[name]
    rank = next(index for index, kind in enumerate(order) if isinstance(item, kind))
    later = order[rank + 1 :]
    index = next((i for i, other in enumerate(site) if isinstance(other, later)), len(site)) if later else len(site)
    return (*site[:index], item, *site[index:])


def exchanged(site: tuple[Any, ...], name: str, kind: type[Family], items: list[Any]) -> tuple[Any, ...]:
    """A site with these primitives of one family instead of its own: in their places where there are as many, else
    where the order of families puts them."""
    if len(items) == len(among(site, kind)):
        new = iter(items)
        return tuple(next(new) if isinstance(item, kind) else item for item in site)
    site = without(site, kind)
    for item in items:
        site = inserted(site, name, item)
    return site


def put_at(root: Any, where: Steps, new: Any) -> Any:
    """The root with what stands at a path replaced."""
    return update(root, type(root), where, lambda old, kind: new)

"""Rules for what passes from layer to layer: values that are carried, and parameters that are shared."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import walk
from archlab.arch_dsl.model.places import Place, distinct
from archlab.arch_dsl.parts.families import Branch

if TYPE_CHECKING:
    from archlab.arch_dsl.model.stack import Stack


def values_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Values that no later layer takes, or that it cannot take."""
    carrying: dict[str, list[Place]] = {}
    for place in found:
        if any(item.type == "value_residual" for item in getattr(place.branch, "value", ())):
            carrying.setdefault(place.name, []).append(place)
    for users in carrying.values():
        mark = next(i for i in users[0].branch.value if i.type == "value_residual").mark()  # type: ignore[attr-defined]
        if len(users) < 2:
            message = "value_residual needs a second layer that has it: the first one's values go to the later ones"
            yield Problem(f"{users[0].path}.value", message, mark)
        first = _heads(users[0])
        for place in distinct(users):
            if (other := _heads(place)) != first:
                message = (
                    f"value_residual needs the same heads in all layers: {_spelt(other)} here, "
                    f"{_spelt(first)} in {users[0].path}"
                )
                yield Problem(f"{place.path}.kv_heads", message, place.branch.mark("kv_heads"))


def _heads(place: Place) -> tuple[int, int]:
    """How many value heads, and how many channels each has."""
    branch: Any = place.branch
    found: tuple[int, int] = branch.value_heads(place.ctx.d_model)
    return found


def _spelt(heads: tuple[int, int]) -> str:
    return f"{heads[0]} value heads of {heads[1]}"


def shared_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Parts that layers cannot share, or do not."""
    shared = {place.path: list(_shared(place)) for place in distinct(found)}
    if not any(shared.values()):
        return
    layers = Counter(key for place in found for key in dict(shared[place.path]))
    owners: dict[str, tuple[Any, Place]] = {}
    for place in distinct(found):
        inside: set[str] = set()
        for key, item in shared[place.path]:
            where = place.path + key.removeprefix(place.name)
            if key in inside:
                message = f"two shared {item.type} in one site would be one; share one of them"
                yield Problem(where.rpartition(".")[0], message, item.mark())
            inside.add(key)
            owner, first = owners.setdefault(key, (item, place))
            if owner != item:
                message = f"is shared with {first.path}, which has other fields; what is shared is the same everywhere"
                yield Problem(where, message, item.mark())
            elif item is not place.branch and (other := _other_fact(place, first, key)):
                yield Problem(where, f"is shared with {first.path}, {other}", item.mark())
            if layers[key] < 2:
                yield Problem(f"{where}.share", "needs a second layer to share it with", item.mark("share"))
            if item is place.branch:
                yield from _all_shared(item, where)


def _shared(place: Place) -> Iterator[tuple[str, Any]]:
    """What layers share of a branch, all of it or its parts, by the path that is the same in all layers."""
    if place.branch.share == "stack":
        yield place.name, place.branch
        return
    for path, part in walk(place.branch):
        if getattr(part, "share", "none") == "stack" and not path.startswith("branches."):
            yield f"{place.name}.{path.rpartition('.')[0]}.{part.type}", part  # type: ignore[attr-defined]


_OUTER = ("pre", "post", "join")  # the sites that are as wide as the stream
_FACTS = (  # that a part of a branch is built with
    *("heads", "kv_heads", "key_heads", "head_dim", "value_dim"),
    *("width", "scale", "mask.documents", "documents"),
)


def _other_fact(place: Place, first: Place, key: str) -> str:
    """What stands in the way of sharing a part of two branches: the first fact in which they differ."""
    if key.removeprefix(f"{place.name}.").split(".")[0] in _OUTER:
        return ""
    here, there = (_facts(spot.branch.resolve(spot.ctx)) for spot in (place, first))
    names = (name for name in here if here[name] != there.get(name))
    return next((f"whose {name} is {there.get(name)}, and here it is {here[name]}" for name in names), "")


def _facts(branch: Branch) -> dict[str, Any]:
    """What the parts of a branch are built with, by path."""
    found = {}
    for path in _FACTS:
        with contextlib.suppress(AttributeError):
            found[path] = operator.attrgetter(path)(branch)
    return found


def _all_shared(branch: Branch, where: str) -> Iterator[Problem]:
    """What makes no sense in a branch that layers share as a whole."""
    for path, part in walk(branch):
        at = f"{where}.{path.removeprefix('branches.')}".removesuffix(".")
        if path and getattr(part, "share", "none") == "stack":
            yield Problem(f"{at}.share", f"{where} is shared, and all its parts with it", part.mark("share"))
        if getattr(part, "by_layer", False):
            message = f"{part.type} differs from layer to layer, and {where} is shared by them"  # type: ignore[attr-defined]
            yield Problem(at, message, part.mark())

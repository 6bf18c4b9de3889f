"""What is known before a search begins, as points of its space: the base, and what published models have of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply, settings_of
from archlab.arch_dsl.tree.identity import diff
from archlab.arch_dsl.zoo import entries
from archlab.search.sections.search.axes import Choice, Components
from archlab.search.sections.search.space import OFF, Space
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.patches import Patch

_DECODER = "causal-dec"
_LAYER = re.compile(r"overrides\.[^.]*\.")


def known_points(
    space: Space, model: Model, components: Mapping[str, Patch], given: Callable[[str], Any], most: int
) -> list[dict[str, Any]]:
    """The base `model`; the base with one choice in all layers, where layers choose one by one; then what decoders of
    the zoo have in its place, the most frequent first: at most `most` points. `given` has the base's value of a path.

    A model has a choice where setting it would change nothing but numbers. Of axes that it has no choice of, and of
    axes of numbers, it takes the base's value. Where the base has none either, the axis is left out.
    """
    own = {**dict(_base_numbers(space, given)), **dict(_chosen(space, components, model))}
    points = [own, *({**own, **alike} for alike in _in_all_layers(space, components))]
    found = Counter[str]()
    stacks = model.stacks()
    for published in _published(len(stacks[""].layers())) if "" in stacks else ():
        found[canonical_json({**own, **dict(_chosen(space, components, published))})] += 1
    points += [json.loads(point) for point, _ in found.most_common()]
    return [point for index, point in enumerate(points) if point not in points[:index]][:most]


def _base_numbers(space: Space, given: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """What the base has on axes of numbers and of the recipe."""
    for path, axis in space.axes.items():
        if not isinstance(axis, Components) and (path.startswith("train.") or not isinstance(axis, Choice)):
            value = given(path)
            if axis.holds(value):
                yield path, value


def _chosen(space: Space, components: Mapping[str, Patch], model: Model) -> Iterator[tuple[str, Any]]:
    """Which choice of each axis a model has; none of the components only where it has no other."""
    for path, axis in _choices(space):
        none = [OFF] if isinstance(axis, Components) and OFF in axis.values else []
        for value in [value for value in axis.values if value not in none]:
            if _has(model, space.settings(path, value, components)):
                yield path, value
                break
        else:
            yield from ((path, value) for value in none)


def _published(n_layers: int) -> Iterator[Model]:
    """The zoo's decoders, of so many layers."""
    for name in entries.names():
        if entries.entry(name).card.category == _DECODER:
            with suppress(SpecError):  # of those that may not be so deep or shallow
                yield apply(entries.load(name, "tiny"), settings_of(Node.of({"n_layers": n_layers})))


def _choices(space: Space) -> Iterator[tuple[str, Choice]]:
    """The axes of the model that are no numbers."""
    for path, axis in space.axes.items():
        if isinstance(axis, Choice) and not path.startswith("train."):
            yield path, axis


def _in_all_layers(space: Space, components: Mapping[str, Patch]) -> Iterator[dict[str, Any]]:
    """Values of axes that do the same to one layer each."""
    alike: dict[str, dict[str, Any]] = {}
    for path, axis in _choices(space):
        for value in axis.values:
            settings = space.settings(path, value, components)
            if settings and all(_LAYER.match(setting.path) for setting in settings):
                said = [(_LAYER.sub("", setting.path), setting.node.plain()) for setting in settings]
                alike.setdefault(canonical_json(said), {})[path] = value
    yield from (each for each in alike.values() if len(each) > 1)


def _has(model: Model, settings: list[Setting]) -> bool:
    """Whether these settings would change nothing of a model but sizes."""
    try:
        changes = diff(model, apply(model, settings))
    except SpecError:
        return False
    return all(_alike(change.before, change.after) for change in changes)


def _alike(one: Any, other: Any) -> bool:
    """Whether two values differ in numbers alone: of primitives only the type counts."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and "type" in one:
        return bool(one["type"] == other.get("type"))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    numbers = [isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other)]
    return all(numbers) or canonical_json(one) == canonical_json(other)

"""What is known before a search begins, as points of its space: the base, and what published models have of it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from archlab.arch_dsl import load
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply, settings_of
from archlab.arch_dsl.tree.identity import diff
from archlab.arch_dsl.tree.paths import get
from archlab.arch_dsl.zoo import entries
from archlab.search.formatting.words import is_number
from archlab.search.results.selection import loss
from archlab.search.sections.search.axes import Choice, Components
from archlab.search.sections.search.space import OFF, Space
from archlab.search.store.store import Store
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.asks import Planned
from archlab.search.variants.patches import Patch

DECISION = "known points"  # the name of a study's decision about them
_TRAINED = 3  # models of other studies
_DECODER = "causal-dec"
_LAYER = re.compile(r"overrides\.[^.]*\.")


def decided(plan: Planned, store: Store, model: Model, most: int) -> list[dict[str, Any]]:
    """What a study's search begins with, as it was found when it began. `model` is its base, resolved."""
    study, builder = plan.study, plan.builder
    space = study.space
    assert isinstance(space, Space)
    trained = partial(trained_models, store, builder.data(study.train).identity, study.train.all_tokens)
    known = partial(known_points, space, model, study.components, builder.given)
    found: list[dict[str, Any]] = store.decide(study.study, DECISION, lambda: known(trained(), most))
    return found


def known_points(
    space: Space,
    model: Model,
    components: Mapping[str, Patch],
    given: Callable[[str], Any],
    trained: Iterable[Model],
    most: int,
) -> list[dict[str, Any]]:
    """The base, a resolved `model`; the base with one choice in all layers, where layers choose one by one; what
    `trained` models have in its place; then what decoders of the zoo have, the most frequent first: at most `most`
    points. `given` has the recipe's value of a path.

    A model has a choice where setting it would change nothing but numbers. Of axes that it has no choice of, and of
    axes of numbers, it takes the base's value. Where the base has none either, the axis is left out.
    """
    own = {**dict(_base_numbers(space, model, given)), **dict(_chosen(space, components, model))}
    points = [own, *({**own, **alike} for alike in _in_all_layers(space, components))]
    layers = _layers(model)
    points += [{**own, **dict(_chosen(space, components, each))} for each in trained if _layers(each) == layers]
    found = Counter[str]()
    for published in _published(layers) if layers else ():
        found[canonical_json({**own, **dict(_chosen(space, components, published))})] += 1
    points += [json.loads(point) for point, _ in found.most_common()]
    return [point for index, point in enumerate(points) if point not in points[:index]][:most]


def trained_models(store: Store, data: str, tokens: int) -> Iterator[Model]:
    """The best models that a store has trained on these data for so many tokens, by validation: three, or fewer."""
    found: dict[str, float] = {}
    trials = {row["key"]: row for row in store.everything() if row["state"] == "complete" and row["spec"]}
    for key, row in store.known(trials).items():
        spec = json.loads(trials[key]["spec"])
        if spec["data"] == data and spec["recipe"].get("tokens") == tokens:
            value, model = loss(row, "validation"), canonical_json(spec["model"])
            if value is not None and value < found.get(model, math.inf):
                found[model] = value
    for model in sorted(found, key=found.__getitem__)[:_TRAINED]:
        with suppress(SpecError):  # of a plug-in that is not there now
            yield load(json.loads(model))


def _layers(model: Model) -> int:
    """How many layers a model has; 0 of one with two stacks."""
    stacks = model.stacks()
    return len(stacks[""].layers()) if "" in stacks else 0


def _base_numbers(space: Space, model: Model, given: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """What the base has on axes of numbers and of the recipe."""
    choices = dict(_choices(space))
    for path in (path for path in space.axes if path not in choices):
        with suppress(SpecError):  # of a path that the base does not have
            value = given(path) if path.startswith("train.") else get(model, tuple(path.split(".")))
            if space.axes[path].holds(value):
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
    """The axes of the model whose values are no numbers."""
    for path, axis in space.axes.items():
        if isinstance(axis, Choice) and not path.startswith("train.") and not all(map(is_number, axis.values)):
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
    """Whether these settings would change nothing of a model but numbers."""
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
    return (is_number(one) and is_number(other)) or canonical_json(one) == canonical_json(other)

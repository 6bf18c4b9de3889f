"""Every field changes the result: other values that a field may take, and what each of them changes."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator
from typing import Any

from archlab.arch_dsl.conformance.effects import build, differ, effect
from archlab.arch_dsl.conformance.hosts import UNSHARED, Case, member_data, resolve
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family, Spec, alternatives, families, fields_of, walk
from archlab.arch_dsl.model.depths import Depths
from archlab.arch_dsl.model.exits import Exit
from archlab.arch_dsl.model.loop import Loop
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.families import Rotary
from archlab.arch_dsl.primitives.feedforward import MLP
from archlab.arch_dsl.primitives.rope_scaling import RopeScaling
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import canonical, diff, identity
from archlab.arch_dsl.tree.knob import put_at
from archlab.arch_dsl.tree.overrides import Overrides


def altered(annotation: Any, value: Any) -> list[Any]:
    """Other values that a field's annotation allows."""
    for item in getattr(annotation, "__metadata__", ()):
        if hasattr(item, "others"):
            return list(item.others(value))
    if annotation is Overrides:
        patches = ({"1": {"block.attention.kv_heads": 4}}, {"0": {"block.ffn": None}})
        return [other for other in (Overrides(Node.of(patch).value) for patch in patches) if other != value]  # type: ignore[arg-type]
    options = [option for option in alternatives(annotation) if option is not type(None)]
    kinds = families(annotation)
    members = [parse(kind, member_data(member)) for kind in kinds for member in kind.members.values()]
    first = options[0]
    if typing.get_origin(first) is typing.Annotated:
        first = typing.get_args(first)[0]
    if first is annotation and hasattr(annotation, "__metadata__"):
        first = typing.get_args(annotation)[0]
    if typing.get_origin(first) is typing.Literal:
        return [word for word in typing.get_args(first) if word != value]
    if typing.get_origin(first) is tuple:
        return [(member,) for member in members if (member,) != value] + ([()] if value else [])
    if kinds:
        return [member for member in members if member != value]
    if first is bool:
        return [not value]
    if first is int:
        numbers = [1, 2, 5, 8, 0] if value is None else [value + 1, 2 * value, max(value // 2, 1)]
        return [number for number in numbers if number != value]
    if first is float:
        start = 0.5 if value is None else value
        return [number for number in (start * 2, start / 2, start + 1) if number != value]
    if first is Block:
        more = [*value.items(), ("another", MLP(width=20))]
        return [Block(more), *([Block(list(value.items())[:-1])] if len(value) > 2 else [])]
    if value is None and first is Loop:
        return [Loop(turns=2)]
    if value is None and first is Exit:
        return [Exit(entropy=0.2)]
    if value is None and first is Depths:
        return [Depths(capacity=0.4)]
    assert isinstance(value, Spec), f"no altered values for {annotation}"
    return []  # its own fields are altered


def alterations(case: Case, seed: str | None = None) -> Iterator[tuple[str, Model]]:
    """(path of a field, the case's model with another value there), for every field on trial that is accepted.

    All values at the defaults; one or two at each of the other starting points. With a `seed`, of each field the first
    value that is accepted, in an order drawn from the seed and the path. Rotations of queries and keys change together,
    as they must be alike.
    """
    most = None if case.plain else 2
    parts = dict(walk(case.model))
    for path, spec in parts.items():
        if (spec.type if isinstance(spec, Family) else path) not in case.tried:
            continue
        for name, item in fields_of(type(spec)).items():
            where = f"{path}.{name}" if path else name
            turns = isinstance(spec, Rotary | RopeScaling)
            keys = path.replace(".query.", ".key.") if turns else path
            places = {where, f"{keys}.{name}"} if type(parts.get(keys)) is type(spec) and keys else {where}
            values = altered(item.annotation, getattr(spec, name))[:most]
            if seed is not None:
                random.Random(f"{seed} {where}").shuffle(values)
            for value in values:
                data = _later(case.model, where, value) if name in getattr(spec, "later", ()) else None
                changed = case.model
                for place in places:
                    changed = put_at(changed, tuple(place.split(".")), value)
                try:
                    accepted = resolve(parse(Model, data or canonical(changed)))
                except SpecError:
                    continue
                yield where, accepted
                if seed is not None and accepted != case.model:
                    break


def _later(model: Model, where: str, value: Any) -> dict[str, Any]:
    """The plain data of a model with a value in its last layer that a first layer does not take."""
    data: dict[str, Any] = canonical(model)
    return {**data, "overrides": {**data.get("overrides", {}), "-1": {where: canonical(value)}}}


def tried(case: Case, seed: str | None = None) -> tuple[set[str], list[str]]:
    """The fields that took another value, and the paths at which that changed nothing: no result, hash or diff. With a
    `seed` each takes one value."""
    before, known = effect(case.model), identity(case.model)
    reached, ignored = set(), []
    for where, model in alterations(case, seed):
        if model == case.model:
            continue  # what was derived, written out
        reached.add(_kind(case, where))
        if identity(model) == known or not diff(case.model, model) or not differ(before, effect(model)):
            ignored.append(where)
    return reached, ignored


def accepted(case: Case) -> set[str]:
    """The fields that took another value, by their names and by their paths."""
    changed = [where for where, model in alterations(case) if model != case.model]
    return {_kind(case, where) for where in changed} | set(changed)


def choices(case: Case) -> set[str]:
    """All fields on trial that hold a choice of their own; what has no parameters has none to share."""
    found = set()
    for path, spec in walk(case.model):
        if (spec.type if isinstance(spec, Family) else path) in case.tried:
            for name, item in fields_of(type(spec)).items():
                if name == "share" and (getattr(spec, "type", "") in UNSHARED or not has_parameters(case)):
                    continue
                if altered(item.annotation, getattr(spec, name)):
                    found.add(_kind(case, f"{path}.{name}" if path else name))
    return found


def has_parameters(case: Case) -> bool:
    """Whether what is on trial owns parameters."""
    module = build(case.model)
    return any(f".{kind}." in f".{name}" for kind in case.tried for name, _ in module.named_parameters())


def _kind(case: Case, where: str) -> str:
    """A field's own name where one member stands at many places, and its path in the model itself."""
    return where if case.id == "model" else where.rsplit(".", 1)[-1]

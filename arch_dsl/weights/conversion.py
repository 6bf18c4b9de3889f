"""A model's parameters out of tensors in another library's layout, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from archlab.arch_dsl.compiler.shapes import Shapes, stored_shapes
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.name_patterns import filled, match, matches_any
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.layers import without_groups
from archlab.arch_dsl.weights.layout import Layout
from archlab.arch_dsl.weights.moves import Move, moves

_BRANCH = re.compile(r"(?:[a-z]+\.)?block\.[^.]+\.([^.*]+)")
_STEP = re.compile(r"\.[0-9]+\b")


@dataclass(frozen=True)
class Imported:
    """Our parameters from another library's, those that it does not have, and the tensors that are no parameters."""

    tensors: dict[str, Tensor]
    fresh: list[str]
    ignored: list[str]


def import_tensors(layout: Layout, model: Model, given: Mapping[str, Tensor], shapes: Shapes | None = None) -> Imported:
    """A resolved model's parameters, of these `shapes`, out of tensors in a layout.

    Raises SpecError with everything at once: a tensor that is missing, has another shape, or has no place.
    """
    shapes = shapes or stored_shapes(model)
    left = {_whole_name(name, layout): name for name in given}
    problems: list[Problem] = []
    tensors: dict[str, Tensor] = {}
    known: set[str] = set()
    for move in moves(layout, model, shapes, left.keys()):
        known.update(move.ours)
        stored = [move.names(name) for name in (move.theirs, *move.also)]
        names = next((each for each in stored if any(name in left for name in each)), stored[0])
        if missing := [name for name in names if name not in left]:
            problems.append(Problem(missing[0], f"is not in the checkpoint; {_described(move, shapes)} comes from it"))
            continue
        mine = [left.pop(name) for name in names]
        like = move.gather([torch.empty(*shapes[name], device="meta") for name in move.ours])
        wanted = tuple(like.shape if move.experts is None else like.shape[1:])
        if strange := [name for name in mine if tuple(given[name].shape) != wanted]:
            found, needs = list(given[strange[0]].shape), f"{_described(move, shapes)} needs {list(wanted)}"
            problems.append(Problem(strange[0], f"has shape {found}; {needs}"))
            continue
        tensor = given[mine[0]] if move.experts is None else torch.stack([given[name] for name in mine])
        parts = move.scatter(tensor, [shapes[ours] for ours in move.ours])
        tensors |= dict(zip(move.ours, parts, strict=True))
    short = without_groups(shapes)
    fresh = [name for name in shapes if name not in known and matches_any(layout.fresh, short[name])]
    for name in shapes:
        if name not in known and name not in fresh:
            message = f"is a parameter of this model for which the map names no tensor{_renamed(short[name], layout)}"
            problems.append(Problem(name, message))
    ignored = [name for whole, name in left.items() if matches_any(layout.ignore, whole)]
    for whole, name in left.items():
        if name not in ignored and (problem := _unused(layout, whole, name, given)):
            problems.append(problem)
    if problems:
        raise SpecError(_folded(problems))
    return Imported(tensors, fresh, ignored)


def export_tensors(layout: Layout, model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in a layout from a resolved model's parameters. Raises SpecError for those that it has no place for."""
    found = moves(layout, model, {name: value.shape for name, value in tensors.items()})
    placed = {name for move in found for name in move.ours}
    if homeless := [name for name in tensors if name not in placed]:
        raise SpecError(Problem(name, "has no place in this layout") for name in homeless)
    stored: dict[str, Tensor] = {}
    for move in found:
        whole = move.gather([tensors[name] for name in move.ours])
        parts = [whole] if move.experts is None else whole.unbind()
        stored |= {name: part.contiguous() for name, part in zip(move.names(move.theirs), parts, strict=True)}
    return stored


def _folded(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Of problems that differ in the number of the layer alone, the first."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(_STEP.sub(".*", f"{problem.path} {problem.message}"), []).append(problem)
    for first, *others in alike.values():
        more = f", and so in {len(others)} more layers" if others else ""
        yield Problem(first.path, first.message + more)


def _unused(layout: Layout, whole: str, name: str, given: Mapping[str, Tensor]) -> Problem | None:
    """What is wrong with a tensor that no parameter of ours takes; nothing if ours is tied to one that equals it."""
    for pattern, stored in layout.tensors.items():
        holes = match(pattern, whole)
        if holes is None or stored.tied is None:
            continue
        twin = next((other for other in given if _whole_name(other, layout) == filled(str(stored.tied), holes)), None)
        if twin is None or not torch.equal(given[name], given[twin]):
            return Problem(name, f"differs from {twin or stored.tied}, to which this model ties it")
        return None
    return Problem(name, f"of shape {list(given[name].shape)} has no place in this model")


def _renamed(name: str, layout: Layout) -> str:
    """What to do about a parameter of a branch whose name no tensor of the map has."""
    own = _BRANCH.match(name)
    patterns = (
        _BRANCH.match(each) for stored in layout.tensors.values() for to in stored.to for each in to.split(" | ")
    )
    known = sorted({found[1] for found in patterns if found})
    if own is None or not known or own[1] in known:
        return ""
    return (
        f"; branches are called {', '.join(known)} there, and this one '{own[1]}': name it so, or give your own --map"
    )


def _described(move: Move, shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shapes[name])}" for name in move.ours)


def _whole_name(name: str, layout: Layout) -> str:
    """A name with the prefix that checkpoints of a bare model leave out, and those of several models replace."""
    if layout.text and name.startswith(layout.text):
        return layout.prefix + name.removeprefix(layout.text)
    others = (other for stored in layout.tensors.values() for other in stored.also)
    if not layout.prefix or any(match(each, name) is not None for each in (*layout.tensors, *layout.ignore, *others)):
        return name
    return layout.prefix + name

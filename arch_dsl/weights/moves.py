"""Where each parameter of a model lies in a layout, and how it gets there and back."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archlab.arch_dsl.compiler.shapes import Shapes
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.name_patterns import filled, fillings, place
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.model.stack import Stack
from archlab.arch_dsl.parts.layers import without_groups
from archlab.arch_dsl.tree.paths import stack_at
from archlab.arch_dsl.weights.layout import Layout, Stored

_EXPERT = "{expert}"
_NUMBER = re.compile(r"\.[0-9]+\.")


@dataclass(frozen=True)
class Move:
    """One tensor of theirs, or one for each expert, and the parameters of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    stored: Stored
    also: tuple[str, ...] = ()
    groups: int = 1
    experts: int | None = None  # how many tensors, if there is one for each

    def names(self, stored: str) -> list[str]:
        """The tensors of theirs under one of its names."""
        if self.experts is None:
            return [stored]
        return [stored.replace(_EXPERT, str(expert)) for expert in range(self.experts)]

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Their tensor from our parameters; a stack of theirs if there is one for each expert."""
        whole, stored, axis = parts[0], self.stored, self.stored.axis
        if len(parts) > 1:
            grouped = [part.unflatten(axis, (self.groups, -1)) for part in parts]
            whole = torch.cat(grouped, axis + 1).flatten(axis, axis + 1)
        if stored.flatten:
            whole = whole.flatten()
        if stored.ones:
            whole = whole[(None,) * stored.ones]
        return whole.mT if stored.transpose and whole.ndim > 1 else whole

    def scatter(self, whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Our parameters, of these shapes, from their tensor."""
        if self.stored.transpose and whole.ndim > 1:
            whole = whole.mT
        if len(shapes) == 1:
            return [whole.reshape(*shapes[0])]
        axis = self.stored.axis
        sizes = [shape[axis] // self.groups for shape in shapes]
        parts = whole.unflatten(axis, (self.groups, -1)).split(sizes, axis + 1)
        return [part.flatten(axis, axis + 1) for part in parts]


def moves(layout: Layout, model: Model, shapes: Shapes, held: Collection[str] | None = None) -> list[Move]:
    """Where each parameter of a resolved model is stored in a layout. Raises SpecError where a tensor holds more.

    Where a parameter could be in several tensors, as one of a branch that is attention in some layers and recurrent in
    others, it is in the one that a checkpoint has, if the names that it has are given as `held`.
    """
    layout, ends = _of_depth(layout, model)
    names = {short: name for name, short in without_groups(shapes).items()}
    problems: list[Problem] = []
    found: list[Move] = []
    taken: dict[str, str] = {}
    chosen = _chosen(layout, names, held)
    chosen |= {name: end for end in ends for name in place(layout.tensors[end].to[0], names)}
    chosen |= _beside(layout, names)
    for theirs, stored in layout.tensors.items():
        uses = _uses(stored.to[0], names) if "{use}" in theirs else {}
        for filling in fillings(stored.to[0], names):
            holes = filling | {"expert": _EXPERT} | uses.get(filling.get("i", ""), {})
            name, mark = filled(theirs, holes), layout.mark(f"tensors.{theirs}")
            parts = [place(filled(item, holes), names) for item in stored.to]
            if any(chosen.get(part[0], theirs) != theirs for part in parts if part):
                continue  # in another tensor
            if stored.import_only and any(chosen.get(part[0]) != theirs for part in parts if part):
                continue
            if stored.beside and not place(filled(stored.beside, holes), names):
                continue
            if stored.type and parts[0] and _branch(model, names[parts[0][0]]).type != stored.type:
                continue
            complaints = _misplaced(stored, holes, parts, taken)
            if not complaints:
                ours = tuple(names[part[0]] for part in parts)
                groups = stored.groups if isinstance(stored.groups, int) else _field(model, ours[0], stored.groups)
                also = tuple(filled(other, holes) for other in stored.also)
                complaints = _uneven(ours, groups, stored.axis, shapes)
                experts = shapes[ours[0]][0] if stored.each else None
                found.append(Move(name, ours, stored, also, groups, experts))
                taken |= {part[0]: name for part in parts}
            problems += [Problem(f"tensors.{name}", complaint, mark) for complaint in complaints]
    if problems:
        raise SpecError(problems)
    return found


def _of_depth(layout: Layout, model: Model) -> tuple[Layout, list[str]]:
    """The layout with the number of the last layer, `{last}`, and those of all, `{all}`, filled in; and the tensors of
    the last layer alone."""
    *_, stack = model.stacks().values()
    ends = [theirs for theirs, stored in layout.tensors.items() if "{last}" in stored.to[0]]
    tensors = {theirs: stored.replace(to=_numbered(stored.to, stack)) for theirs, stored in layout.tensors.items()}
    return layout.replace(tensors=tensors), ends


def _numbered(names: Sequence[str], stack: Stack) -> tuple[str, ...]:
    """Names with `{last}` as the number of the last layer, and one with `{all}` as that of each layer."""
    last, every = stack.n_layers - 1, range(stack.n_layers)
    of_each = [[name.replace("{all}", str(i)) for i in every] if "{all}" in name else [name] for name in names]
    return tuple(name.replace("{last}", str(last)) for each in of_each for name in each)


def _beside(layout: Layout, names: Mapping[str, str]) -> dict[str, str]:
    """The parameters of layers that have another one too, and the pattern of the tensor that is of such layers."""
    return {
        part: theirs
        for theirs, stored in layout.tensors.items()
        if stored.beside
        for holes in fillings(stored.to[0], names)
        if place(filled(stored.beside, holes), names)
        for item in stored.to
        for part in place(filled(item, holes), names)
    }


def _uses(pattern: str, names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By the number of each layer that uses a shared branch: which use it is, and the first layer with that branch."""
    layers = sorted((filling["i"] for filling in fillings(pattern, names)), key=int)
    found: dict[str, dict[str, str]] = {}
    owners: dict[str, str] = {}
    for use, layer in enumerate(layers):
        (short,) = place(filled(pattern, {"i": layer}), names)
        branch = _NUMBER.sub(".", names[short])
        found[layer] = {"use": str(use), "owner": owners.setdefault(branch, layer)}
    return found


def _chosen(layout: Layout, names: Mapping[str, str], held: Collection[str] | None) -> dict[str, str]:
    """Of parameters that could be in several tensors and are in one that a checkpoint has, the pattern of that one."""
    fitting: dict[str, list[tuple[str, bool]]] = {}
    for theirs, stored in layout.tensors.items() if held is not None else ():
        for filling in fillings(stored.to[0], names):
            holes = filling | {"expert": "0", "use": "0", "owner": "0"}
            here = any(filled(name, holes) in held for name in (theirs, *stored.also))  # type: ignore[operator]
            for part in (place(filled(item, holes), names) for item in stored.to):
                if len(part) == 1:
                    fitting.setdefault(part[0], []).append((theirs, here))
    several = {name: [theirs for theirs, here in each if here] for name, each in fitting.items() if len(each) > 1}
    return {name: each[0] for name, each in several.items() if len(each) == 1}


def _misplaced(
    stored: Stored, holes: Mapping[str, str], parts: Sequence[Sequence[str]], taken: Mapping[str, str]
) -> list[str]:
    """What is wrong with the parameters that a tensor should hold: none, several or those of another tensor."""
    complaints = []
    for pattern, part in zip(stored.to, parts, strict=True):
        if not part:
            complaints.append(f"holds {filled(pattern, holes)}, which this model lacks")
        elif part[1:]:
            complaints.append(f"would be {' and '.join(part)} at once")
        elif part[0] in taken:
            remedy = "; if they are of branches of two types, say the `type` of each"
            complaints.append(f"holds {part[0]}, as does {taken[part[0]]}{remedy}")
    return complaints


def _uneven(ours: Sequence[str], groups: int, axis: int, shapes: Shapes) -> list[str]:
    """What is wrong with the sizes of parameters that lie in one tensor."""

    def others(name: str) -> tuple[int, ...]:
        return (*shapes[name][:axis], *shapes[name][axis + 1 :])

    if uneven := [f"{name} {list(shapes[name])}" for name in ours if shapes[name][axis] % groups]:
        return [f"holds {part}, which {groups} groups do not divide" for part in uneven]
    first = ours[0]
    strange = next((name for name in ours if others(name) != others(first)), None)
    if strange is None:
        return []
    return [f"holds {first} {list(shapes[first])} and {strange} {list(shapes[strange])}, which differ in form"]


def _field(model: Model, name: str, field: str) -> int:
    """A number of the branch that a parameter belongs to."""
    return int(getattr(_branch(model, name), field))


def _branch(model: Model, name: str) -> Any:
    """The branch that a parameter belongs to."""
    stack, (_, depth, branch, *rest) = stack_at(tuple(name.split(".")))
    spec: Any = model.stacks()[".".join(stack)].layers()[int(depth)][branch]
    while rest[0] == "members":
        _, branch, *rest = rest
        spec = spec.branches[branch]
    return spec

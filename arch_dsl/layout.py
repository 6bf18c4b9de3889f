"""A layout says how another library names and stores the parameters of a model: a YAML file, read in both directions.

`tensors` maps each name there to our parameter, or to the several that one matrix holds. `{i}` stands for one step of a
path, the same on both sides; `*` for any one step; `a | b` for the first of two that the model has. The name of a
parallel group is left out: `block.{i}.attention.…` is also `block.{i}.parallel.members.attention.…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from arch_dsl.errors import Problem, SpecError, unknown
from arch_dsl.layers import without_groups
from arch_dsl.model import Model
from arch_dsl.modules import build
from arch_dsl.parse import parse, parse_record
from arch_dsl.paths import stack_at
from arch_dsl.source import Node, read
from arch_dsl.spec import Spec

FOLDER = Path(__file__).parent / "zoo" / "maps"
_STEP = re.compile(r"\.[0-9]+\b")
_EXPERT = "{expert}"
_HOLE = re.compile(r"\{([a-z]+)\}|\*")

Shapes = Mapping[str, Sequence[int]]


class Stored(Spec):
    """One tensor of a layout: our parameters in it, and how they lie there.

    `transpose`: matrices are stored as [inputs, outputs]. `flatten`: ours has several dimensions, theirs one. `ones`:
    theirs begins with so many dimensions of size 1. Several parameters in one tensor lie one after another along the
    outputs, in each of `groups` equal groups: 1, another number, or a field of the branch, as `kv_heads`. Outputs are
    the dimension `axis` of ours, 1 where ours holds the matrices of all experts; with `each` there is a tensor for each
    of them, `{expert}` in the name. `tied` names the tensor that this one equals where ours is tied; `also` are other
    names that checkpoints have for it.
    """

    title: ClassVar[str] = "tensor"
    to: tuple[str, ...]
    transpose: bool = False
    flatten: bool = False
    ones: int = 0
    groups: int | str = 1
    axis: int = 0
    each: bool = False
    tied: str | None = None
    also: tuple[str, ...] = ()

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """A bare string is the one parameter that the tensor is."""
        return parse_record(cls, Node({"to": node}, node.mark) if isinstance(node.value, str) else node, path, problems)


class Layout(Spec):
    """Names and forms of all parameters. `zoo` lists the models stored this way.

    `prefix` is what checkpoints of the model without its head leave out of all names. Tensors that match `ignore` are
    no parameters (caches, masks); parameters of ours that match `fresh` are in no checkpoint.
    """

    title: ClassVar[str] = "map"
    zoo: tuple[str, ...] = ()
    prefix: str = ""
    tensors: dict[str, Stored]
    ignore: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True)
class Move:
    """One tensor of theirs, or one for each expert, and the parameters of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    also: tuple[str, ...] = ()
    transpose: bool = False
    flatten: bool = False
    ones: int = 0
    groups: int = 1
    axis: int = 0
    experts: int | None = None  # how many tensors, if there is one for each

    def names(self, stored: str) -> list[str]:
        """The tensors of theirs under one of its names."""
        if self.experts is None:
            return [stored]
        return [stored.replace(_EXPERT, str(expert)) for expert in range(self.experts)]

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Their tensor from our parameters; a stack of theirs if there is one for each expert."""
        whole, axis = parts[0], self.axis
        if len(parts) > 1:
            grouped = [part.unflatten(axis, (self.groups, -1)) for part in parts]
            whole = torch.cat(grouped, axis + 1).flatten(axis, axis + 1)
        if self.flatten:
            whole = whole.flatten()
        if self.ones:
            whole = whole[(None,) * self.ones]
        return whole.mT if self.transpose and whole.ndim > 1 else whole

    def scatter(self, whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Our parameters, of these shapes, from their tensor."""
        if self.transpose and whole.ndim > 1:
            whole = whole.mT
        if len(shapes) == 1:
            return [whole.reshape(*shapes[0])]
        axis = self.axis
        sizes = [shape[axis] // self.groups for shape in shapes]
        parts = whole.unflatten(axis, (self.groups, -1)).split(sizes, axis + 1)
        return [part.flatten(axis, axis + 1) for part in parts]


def load_layout(name: str | Path) -> Layout:
    """A layout by its name or from its file. Raises SpecError."""
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and not path.exists():
        raise SpecError.of("", unknown(str(name), "map", layouts()))
    return parse(Layout, read(path))


def layouts() -> list[str]:
    """The names of all layouts that come with the zoo."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def layout_of(zoo: str) -> str:
    """The name of the layout in which checkpoints of a model of the zoo are published. Raises SpecError."""
    if found := [name for name in layouts() if zoo in load_layout(name).zoo]:
        return found[0]
    message = f"no map says how checkpoints of '{zoo}' are stored; give one of {', '.join(layouts())}"
    raise SpecError.of("", message)


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter of a resolved model with its shape; nothing is allocated."""
    with torch.device("meta"):
        module = build(model, model.context(backend="reference"))
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def moves(layout: Layout, model: Model, shapes: Shapes) -> list[Move]:
    """Where each parameter of a resolved model is stored in a layout. Raises SpecError where a tensor holds more."""
    names = {short: name for name, short in without_groups(shapes).items()}
    problems: list[Problem] = []
    found: list[Move] = []
    taken: dict[str, str] = {}
    for theirs, stored in layout.tensors.items():
        for filling in _fillings(stored.to[0], names):
            holes = filling | {"expert": _EXPERT}
            name, mark = _filled(theirs, holes), layout.mark(f"tensors.{theirs}")
            parts = [_place(_filled(item, holes), names) for item in stored.to]
            complaints = _misplaced(stored, holes, parts, taken)
            if not complaints:
                ours = tuple(names[part[0]] for part in parts)
                groups = stored.groups if isinstance(stored.groups, int) else _field(model, ours[0], stored.groups)
                also = tuple(_filled(other, holes) for other in stored.also)
                complaints = _uneven(ours, groups, stored.axis, shapes)
                experts = shapes[ours[0]][0] if stored.each else None
                found.append(
                    Move(name, ours, also, stored.transpose, stored.flatten, stored.ones, groups, stored.axis, experts)
                )
                taken |= {part[0]: name for part in parts}
            problems += [Problem(f"tensors.{name}", complaint, mark) for complaint in complaints]
    if problems:
        raise SpecError(problems)
    return found


def _misplaced(
    stored: Stored, holes: Mapping[str, str], parts: Sequence[Sequence[str]], taken: Mapping[str, str]
) -> list[str]:
    """What is wrong with the parameters that a tensor should hold: none, several or those of another tensor."""
    complaints = []
    for pattern, part in zip(stored.to, parts, strict=True):
        if not part:
            complaints.append(f"holds {_filled(pattern, holes)}, which this model lacks")
        elif part[1:]:
            complaints.append(f"would be {' and '.join(part)} at once")
        elif part[0] in taken:
            complaints.append(f"holds {part[0]}, as does {taken[part[0]]}")
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
    shapes = shapes or shapes_of(model)
    left = {_whole_name(name, layout): name for name in given}
    problems: list[Problem] = []
    tensors: dict[str, Tensor] = {}
    known: set[str] = set()
    for move in moves(layout, model, shapes):
        known.update(move.ours)
        stored = [move.names(name) for name in (move.theirs, *move.also)]
        names = next((each for each in stored if any(name in left for name in each)), stored[0])
        if missing := [name for name in names if name not in left]:
            problems.append(Problem(missing[0], f"is not in the checkpoint; {_described(move, shapes)} comes from it"))
            continue
        mine = [left.pop(name) for name in names]
        wanted = _stored_shape(move, shapes)
        if strange := [name for name in mine if tuple(given[name].shape) != wanted]:
            found, needs = list(given[strange[0]].shape), f"{_described(move, shapes)} needs {list(wanted)}"
            problems.append(Problem(strange[0], f"has shape {found}; {needs}"))
            continue
        tensor = given[mine[0]] if move.experts is None else torch.stack([given[name] for name in mine])
        parts = move.scatter(tensor, [shapes[ours] for ours in move.ours])
        tensors |= dict(zip(move.ours, parts, strict=True))
    short = without_groups(shapes)
    fresh = [name for name in shapes if name not in known and _any(layout.fresh, short[name])]
    for name in shapes:
        if name not in known and name not in fresh:
            problems.append(Problem(name, "is a parameter of this model for which the map names no tensor"))
    ignored = [name for whole, name in left.items() if _any(layout.ignore, whole)]
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
        holes = _match(pattern, whole)
        if holes is None or stored.tied is None:
            continue
        twin = next((other for other in given if _whole_name(other, layout) == _filled(str(stored.tied), holes)), None)
        if twin is None or not torch.equal(given[name], given[twin]):
            return Problem(name, f"differs from {twin or stored.tied}, to which this model ties it")
        return None
    return Problem(name, f"of shape {list(given[name].shape)} has no place in this model")


def _stored_shape(move: Move, shapes: Shapes) -> tuple[int, ...]:
    """The shape of their tensor, or of each of them."""
    whole = move.gather([torch.empty(*shapes[name], device="meta") for name in move.ours])
    return tuple(whole.shape if move.experts is None else whole.shape[1:])


def _described(move: Move, shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shapes[name])}" for name in move.ours)


def _whole_name(name: str, layout: Layout) -> str:
    """A name with the prefix that checkpoints of a bare model leave out."""
    if not layout.prefix or any(_match(pattern, name) is not None for pattern in _names(layout)):
        return name
    return layout.prefix + name


def _names(layout: Layout) -> Iterator[str]:
    yield from layout.tensors
    yield from layout.ignore
    for stored in layout.tensors.values():
        yield from stored.also


def _field(model: Model, name: str, field: str) -> int:
    """A number of the branch that a parameter belongs to."""
    stack, (_, depth, branch, *rest) = stack_at(tuple(name.split(".")))
    spec: Any = model.stacks()[".".join(stack)].layers()[int(depth)][branch]
    if rest[0] == "members":
        spec = spec.branches[rest[1]]
    return int(getattr(spec, field))


def _fillings(pattern: str, names: Iterable[str]) -> Iterator[dict[str, str]]:
    """What the holes of a pattern of ours stand for, once for each place in the model."""
    seen: list[dict[str, str]] = []
    for alternative in pattern.split(" | "):
        for name in names:
            holes = _match(alternative, name)
            if holes is not None and holes not in seen:
                seen.append(holes)
                yield holes


def _place(pattern: str, names: Iterable[str]) -> list[str]:
    """The parameters that the first fitting alternative of a filled pattern means: one, if all is well."""
    for alternative in pattern.split(" | "):
        if found := [name for name in names if _match(alternative, name) is not None]:
            return found
    return []


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(_match(pattern, name) is not None for pattern in patterns)


def _match(pattern: str, name: str) -> dict[str, str] | None:
    match = _regex(pattern).fullmatch(name)
    return None if match is None else match.groupdict()


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    """Holes match one step of a path."""
    text, end, seen = "", 0, set()
    for hole in _HOLE.finditer(pattern):
        text += re.escape(pattern[end : hole.start()])
        name = hole[1]
        text += "[^.]+" if name is None else f"(?P={name})" if name in seen else f"(?P<{name}>[^.]+)"
        seen.add(name)
        end = hole.end()
    return re.compile(text + re.escape(pattern[end:]))


def _filled(pattern: str, holes: Mapping[str, str]) -> str:
    return _HOLE.sub(lambda hole: hole[0] if hole[1] is None else holes[hole[1]], pattern)

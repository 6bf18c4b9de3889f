"""What may be a slot: differences of two models by structure, then by knobs, then by fields, as patches in this order.

Each is a patch and leads from the first model towards the second one after those before it; whether it can also stand
without them is for `slots` to find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family, Spec, fields_of
from archlab.arch_dsl.model.model import STACKS, Model, resolve
from archlab.arch_dsl.model.stack import Stack
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.patching.knobs import knobs_of
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import canonical, identity
from archlab.arch_dsl.tree.knob import Knob
from archlab.arch_dsl.tree.overrides import Overrides
from archlab.arch_dsl.tree.paths import Steps, get

Changes = tuple[tuple[str, Any], ...]  # paths with plain values, in order

_TOGETHER = ("bias", "zero")  # fields that all branches change as one
_NAMES = {"unembedding.tied": "tied", "unembedding.bias": "unembedding_bias", "embedding.width": "embedding_width"}


@dataclass(frozen=True)
class Slot:
    """One difference between two models: its name, the patch, and the names of the parts that cannot vary alone."""

    name: str
    changes: Changes
    parts: tuple[str, ...] = ()


def settings(found: Iterable[Slot]) -> list[Setting]:
    """The changes of slots as a patch makes them."""
    return [Setting(path, Node.of(value), slot.name) for slot in found for path, value in slot.changes]


def applied(model: Model, found: Iterable[Slot]) -> Model | None:
    """The model with the changes of slots; None if they contradict each other or the model."""
    try:
        return apply(model, settings(found))
    except SpecError:
        return None


def meaning(model: Model) -> str | None:
    """The identity of a model whose open sizes are those of an example; None if it makes no sense."""
    sized = model.replace(vocab=model.vocab or 256, max_positions=model.max_positions or 256)
    try:
        return identity(resolve(sized))
    except SpecError:
        return None


def candidates(before: Model, after: Model) -> Iterator[Slot]:
    """Slots that lead from one model to the other when applied in this order, whether or not they vary alone."""
    current = before
    for phase in (_structure, _knobs, _fields):
        for slot in phase(current, after):
            yield slot
            changed = applied(current, [slot])
            current = current if changed is None else changed


def _structure(before: Model, after: Model) -> Iterator[Slot]:
    """Branches that are new, gone, or of another type, in the block and in its groups."""
    theirs = blocks(after)
    for where, block in blocks(before).items():
        yield from _branch_slots(block, theirs[where], where)


def _branch_slots(before: Block, after: Block, where: Steps) -> Iterator[Slot]:
    kept = [name for name in before if name in after]
    if not kept or [*kept, *(name for name in after if name not in before)] != list(after):
        path = ".".join(where)
        whole = where[-1] == "block"
        changed = canonical(after) if whole else {"branches": canonical(after)}
        yield Slot("_".join(where) if whole else where[-1], ((path, changed),))
        return
    stack = f"{where[0]}_" if where[0] in STACKS else ""
    for name in before:
        if name not in after:
            yield Slot(f"{stack}{name}", ((".".join((*where, name)), None),))
    for name, branch in after.items():
        path = ".".join((*where, name))
        if name not in before:
            yield Slot(f"{stack}{name}", ((path, canonical(branch)),))
            continue
        if branch.type != before[name].type:
            yield Slot(f"{stack}{name}", ((f"{path}.type", branch.type),))
        inside, theirs = (getattr(block[name], "branches", None) for block in (before, after))
        if isinstance(inside, Block) and isinstance(theirs, Block):
            yield from _branch_slots(inside, theirs, (*where, name))


def _knobs(before: Model, after: Model) -> Iterator[Slot]:
    """Knobs that both models can be read by, and that stand differently."""
    for where, knob in readable(before, after):
        old, new = knob.read(before, where), knob.read(after, where)
        if old == new:
            continue
        path = ".".join((*where, knob.name))
        if knob.name == "norm" and isinstance(old, dict) and isinstance(new, dict):
            yield from _norm_slots(where, path, old, new)
        else:
            yield Slot(_named(where, knob.name, after), ((path, new),))


def _norm_slots(where: Steps, path: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Slot]:
    """The norm itself, and its place."""
    stack = "" if len(where) == 1 else f"{where[0]}_"
    fields = {name: value for name, value in new.items() if name != "placement"}
    if {name: value for name, value in old.items() if name != "placement"} != fields:
        yield Slot(f"{stack}norm", tuple((f"{path}.{name}", value) for name, value in fields.items()))
    if old["placement"] != new["placement"]:
        yield Slot(f"{stack}norm_placement", ((f"{path}.placement", new["placement"]),))


def readable(before: Model, after: Model) -> list[tuple[Steps, Knob]]:
    """The knobs that can be read in both models, with where they stand."""
    both = [where for where in holders(before) if where in holders(after)]
    return [
        (where, knob)
        for where in both
        for name, knob in knobs_of(get(before, where)).items()
        if name in knobs_of(get(after, where)) and None not in (knob.read(before, where), knob.read(after, where))
    ]


def holders(model: Model) -> list[Steps]:
    """Every block and every branch, members of groups too."""
    return [*blocks(model), *(path for path, _ in all_branches(model))]


def blocks(model: Model) -> dict[Steps, Block]:
    """The block of every stack by its path."""
    return {(name, "block") if name else ("block",): stack.block for name, stack in model.stacks().items()}


def all_branches(model: Model) -> Iterator[tuple[Steps, Branch]]:
    """Every branch of every stack with its path."""
    for where, block in blocks(model).items():
        yield from block.walk(*where)


def _named(where: Steps, name: str, model: Model) -> str:
    """The name of a knob or field of a branch: without the branch where no other has one of that name."""
    if len(where) < 2:
        return name
    others = [(path, branch) for path, branch in all_branches(model) if path != where]
    alike = [path for path, other in others if name in fields_of(type(other)) or name in knobs_of(other)]
    stack = f"{where[0]}_" if any(path[-1] == where[-1] for path in alike) else ""
    return f"{stack}{where[-1]}_{name}" if alike else name


def _fields(before: Model, after: Model) -> Iterator[Slot]:
    """Every field that still differs, by the unit that it belongs to."""
    units: dict[str, list[tuple[str, Any]]] = {}
    old, new = dict(paths(before)), dict(paths(after))
    for path, value in new.items():
        if path in old and old[path] != value:
            edits = _edits(before, path, get(after, tuple(path.split("."))))
            units.setdefault(_unit(path, after), []).extend(edits or [(path, value)])
    for name, changes in units.items():
        yield Slot(f"{name}{_came(changes)}", tuple(changes))


def _came(changes: list[tuple[str, Any]]) -> str:
    """The primitive whose coming to a site is all of a unit, as the end of its name: `key_shift`."""
    if len(changes) != 1 or not isinstance(changes[0][1], dict):
        return ""
    items = [item for edit in ("prepend", "append") for item in changes[0][1].get(edit, ())]
    kinds = [item["type"] if isinstance(item, dict) else item for item in items]
    return f"_{kinds[0]}" if len(kinds) == 1 else ""


def _edits(before: Model, path: str, goal: Any) -> list[tuple[str, Any]]:
    """The change of a site as edits, which leave room for others: what goes, what comes first, what comes last. Empty
    where that does not lead to the goal."""
    site = get(before, tuple(path.split(".")))
    if not (isinstance(site, tuple) and isinstance(goal, tuple) and all(isinstance(i, Family) for i in (*site, *goal))):
        return []
    kept = [item for item in site if item in goal]
    first, last = (goal.index(kept[0]), goal.index(kept[-1]) + 1) if kept else (0, 0)
    edits: list[tuple[str, Any]] = [(path, {"remove": item.type}) for item in site if item not in goal]
    edits += [(path, {"prepend": _plain(goal[:first])})] if first else []
    edits += [(path, {"append": _plain(goal[last:])})] if last < len(goal) else []
    changed = applied(before, [Slot(path, tuple(edits))])
    return edits if changed is not None and get(changed, tuple(path.split("."))) == goal else []


def _unit(path: str, model: Model) -> str:
    if path in _NAMES:
        return _NAMES[path]
    *where, name = path.split(".")
    if "block" in where:
        return name if name in _TOGETHER else _named(tuple(where), name, model)
    if where and where[0] in STACKS:
        return f"{where[0]}_{name}"
    return where[0] if where else name


def paths(spec: Spec, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a model with their plain values, by the paths of patches."""
    for field, item in fields_of(type(spec)).items():
        name, value = f"{prefix}{field}", getattr(spec, field)
        if isinstance(value, Stack):
            yield from paths(value, f"{name}.")
        elif isinstance(value, Block):
            for where, branch in value.walk(*name.split(".")):
                for inner in fields_of(type(branch)):
                    if inner != "branches":
                        yield ".".join((*where, inner)), _plain(getattr(branch, inner))
        elif isinstance(value, Spec) and not isinstance(value, Family) and item.default is not None:
            for inner in fields_of(type(value)):
                yield f"{name}.{inner}", _plain(getattr(value, inner))
        else:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Overrides) else canonical(value, brief=True)


def top_level(before: Model, after: Model) -> Iterator[tuple[str, Any]]:
    """The fields of the model itself that differ, whole."""
    for name in fields_of(type(before)):
        old, new = _plain(getattr(before, name)), _plain(getattr(after, name))
        if old != new:
            yield name, canonical(getattr(after, name)) if name in ("block", *STACKS) else new

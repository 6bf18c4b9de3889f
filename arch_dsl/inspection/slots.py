"""Slots: what lies between two models, in units that a researcher names and that can vary one by one.

A slot is a patch. All of them, in order, make the second model of the first; each by itself makes a model too, and so
do all without it. What cannot vary alone is one slot with what it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from archlab.arch_dsl.inspection.slot_candidates import (
    Slot,
    all_branches,
    applied,
    candidates,
    holders,
    meaning,
    paths,
    readable,
    settings,
    top_level,
)
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Family
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.paths import get

__all__ = ["Slot", "settings", "slots"]

Leaves = dict[str, Any]
Group = tuple[int, ...]  # slots by their places

_SIZES = ("d_model", "heads", "kv_heads", "key_heads", "head_dim", "value_dim")
_MOST = 3  # slots that are tried beside one that cannot vary alone, before all are one


def slots(before: Model, after: Model, solved: Sequence[str] = ()) -> list[Slot]:
    """The slots between two models; none if they mean the same. The fields `solved` are left to who solves them.

    Raises SpecError for models of different kinds.
    """
    if before.stacks().keys() != after.stacks().keys():
        message = "one of the two has an encoder and the other has none: no patch leads from one to the other"
        raise SpecError.of("ablate", message)
    found = [slot for slot in candidates(before, after) if slot.changes]
    end = applied(before, found)
    if end is None or meaning(end) != meaning(after):
        found = [Slot("everything", tuple(top_level(before, after)), tuple(slot.name for slot in found))]
        return found if meaning(before) != meaning(after) else []
    if solved:
        found = [Slot(s.name, tuple(c for c in s.changes if c[0] not in solved)) for s in found]
        found = [slot for slot in found if slot.changes]
    return _Independent(before, _without_spelling(before, found)).merged()


def _without_spelling(before: Model, found: list[Slot]) -> list[Slot]:
    """Without what only spells out what would be derived: it changes neither end."""
    kept = list(found)
    end, start = applied(before, found), meaning(before)
    for slot in found:
        rest = [other for other in kept if other is not slot]
        alone, others = applied(before, [slot]), applied(before, rest)
        if end and alone and others and meaning(alone) == start and meaning(others) == meaning(end):
            kept = rest
    return kept


# what varies alone


class _Independent:
    """Finds the finest grouping of slots in which each varies alone."""

    def __init__(self, before: Model, found: list[Slot]) -> None:
        self.before, self.found = before, found
        after = applied(before, found)
        assert after is not None
        self.knobs = readable(before, after)
        self.old, self.new = self.leaves(before), self.leaves(after)
        self.known: dict[Group, frozenset[str] | None] = {}
        self.meanings: dict[Group, str | None] = {}

    def merged(self) -> list[Slot]:
        """Groups of slots, each the smallest that varies alone, as slots."""
        groups: list[Group] = [(index,) for index in range(len(self.found))]
        while (grown := self._grown(groups)) is not None:
            groups = grown
        return [self._slot(group) for group in sorted(groups)]

    def _grown(self, groups: list[Group]) -> list[Group] | None:
        """With one group joined to what it needs; None if all vary alone, and nothing belongs to two of them."""
        for group in groups:
            if self.touched(group) is None:
                return self._join(groups, group, self._needed(groups, group))
        for one, other in itertools.combinations(groups, 2):
            if (self.touched(one) or frozenset()) & (self.touched(other) or frozenset()):
                return self._join(groups, one, [other])
        return None

    def _needed(self, groups: list[Group], group: Group) -> Sequence[Group]:
        others = [other for other in groups if other != group]
        for size in range(1, min(_MOST, len(others)) + 1):
            for chosen in itertools.combinations(others, size):
                if self._counts(group, chosen) and self.touched(_union(group, *chosen)) is not None:
                    return chosen
        sizes = [other for other in others if all(self.found[index].name in _SIZES for index in other)]
        return sizes if sizes and self.touched(_union(group, *sizes)) is not None else others

    def _counts(self, group: Group, chosen: Sequence[Group]) -> bool:
        """Whether a group that changes nothing at an end by itself does where the chosen ones stand as at the other."""
        beside = _union(*chosen)
        joined = _union(group, beside)
        at_start = self._idle_at_start(group) and self.meaning(beside) == self.meaning(joined)
        at_end = self._idle_at_end(group) and self.meaning(self._rest(beside)) == self.meaning(self._rest(joined))
        return not at_start and not at_end

    def _idle_at_start(self, group: Group) -> bool:
        return self.meaning(group) == self.meaning(())

    def _idle_at_end(self, group: Group) -> bool:
        return self.meaning(self._rest(group)) == self.meaning(self._rest(()))

    def _rest(self, group: Group) -> Group:
        return tuple(index for index in range(len(self.found)) if index not in group)

    def meaning(self, group: Group) -> str | None:
        """What the first model means with the slots of a group; None if it makes no sense."""
        if group not in self.meanings:
            model = applied(self.before, (self.found[index] for index in group))
            self.meanings[group] = None if model is None else meaning(model)
        return self.meanings[group]

    def _join(self, groups: list[Group], group: Group, others: Sequence[Group]) -> list[Group] | None:
        if not others:
            return None
        return [_union(group, *others), *(other for other in groups if other != group and other not in others)]

    def touched(self, group: Group) -> frozenset[str] | None:
        """The leaves that a group changes in the first model; None unless it, and all others, make a model in which
        exactly these leaves have changed, and which means something else for it."""
        if group not in self.known:
            mine = self._changed(group, self.old, self.new)
            others = self._changed(self._rest(group), self.new, self.old)
            idle = self._idle_at_start(group) or self._idle_at_end(group)
            self.known[group] = mine if mine and mine == others and not idle else None
        return self.known[group]

    def _changed(self, group: Group, base: Leaves, goal: Leaves) -> frozenset[str] | None:
        """The leaves that differ from those of `base`, if all of them are as in `goal` and the model makes sense."""
        model = applied(self.before, (self.found[index] for index in group))
        if model is None or self.meaning(group) is None:
            return None
        mine = self.leaves(model)
        changed = [name for name in {**base, **mine} if mine.get(name) != base.get(name)]
        return frozenset(changed) if all(mine.get(name) == goal.get(name) for name in changed) else None

    def leaves(self, model: Model) -> Leaves:
        """What a model says, by knobs where both ends can be read by them, else by families within each site."""
        found: Leaves = {}
        embedded = False  # whether the knob `norm` stands for the norm at `embed` too
        for where, knob in self.knobs:
            value = knob.read(model, where) if where in holders(model) else None
            name = ".".join((*where, knob.name))
            if knob.name == "norm" and isinstance(value, dict):
                found[f"{name}.placement"] = value["placement"]
                embedded = value["placement"] == "peri"
                value = {key: item for key, item in value.items() if key != "placement"}
            found[name] = value
        for where, branch in all_branches(model):
            found[".".join(where)] = branch.type
        covered = {knob.name for _, knob in self.knobs} | ({"norm of embeddings"} if embedded else set())
        for path, value in paths(model):
            site = get(model, tuple(path.split("."))) if isinstance(value, list) else None
            if isinstance(site, tuple) and all(isinstance(item, Family) for item in site):
                found |= _by_family(path, site, covered)
            elif not (path.endswith(".join") and "norm" in covered):
                found[path] = value
        return found

    def _slot(self, group: Group) -> Slot:
        parts = [self.found[index] for index in group]
        if len(parts) == 1:
            return parts[0]
        names = tuple(slot.name for slot in parts)
        changes = tuple(change for slot in parts for change in slot.changes)
        return Slot("_and_".join(names[:3]) + ("_…" if len(names) > 3 else ""), changes, names)


def _union(*groups: Group) -> Group:
    return tuple(sorted(itertools.chain(*groups)))


def _by_family(path: str, site: tuple[Any, ...], covered: set[str]) -> Leaves:
    """The primitives of a site, apart by their families, without those that a knob reads."""
    name = path.rpartition(".")[2]
    found: Leaves = {}
    for item in site:
        noun = item.noun
        known = (
            (noun == "gate" and "gate" in covered)
            or (noun == "norm" and name in ("query", "key") and "qk_norm" in covered)
            or (name in ("pre", "post", "final") and "norm" in covered and noun in ("norm", "scale", "carry"))
            or (name == "embed" and "norm of embeddings" in covered and noun == "norm")
            or (noun in ("rotary encoding", "positional encoding") and "positional" in covered)
            or (name == "scores" and "positional" in covered and getattr(item, "positional", True))
        )
        if not known:
            found.setdefault(f"{path}.{noun}", []).append(canonical(item))
    return found

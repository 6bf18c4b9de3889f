"""One spelling per spec: its canonical form, the hash of it, the YAML of it, and the difference between two."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family, Spec, fields_of
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.overrides import Overrides, ranges


def canonical(value: Any, *, brief: bool = False) -> Any:
    """A spec as plain JSON data: every field, `type` first, blocks as lists of named branches (their order matters).

    With `brief`, fields at their defaults and versions are left out, blocks are mappings, and a member without fields
    is its name: the form that people read.
    """
    if isinstance(value, Block):
        if brief:
            return {name: canonical(branch, brief=True) for name, branch in value.items()}
        return [{"name": name, **canonical(branch)} for name, branch in value.items()]
    if isinstance(value, Overrides):
        return value.plain()
    if isinstance(value, tuple):
        return [canonical(item, brief=brief) for item in value]
    if isinstance(value, Mapping):
        return {name: canonical(item, brief=brief) for name, item in value.items()}
    return _canonical_spec(value, brief) if isinstance(value, Spec) else value


def _canonical_spec(spec: Spec, brief: bool) -> Any:
    data: dict[str, Any] = {}
    if isinstance(spec, Family):
        data["type"] = spec.type
        if spec.numbers() > 1 and not brief:
            data["version"] = spec.numbers()
        if spec.plugin and not brief:
            data["plugin"] = spec.plugin
    for name, item in fields_of(type(spec)).items():
        value = getattr(spec, name)
        if (brief or item.added) and not item.required and value == item.default:
            continue
        data[name] = canonical(value, brief=brief)
    alone = list(data) == ["type"] and (brief or getattr(spec, "word", False))
    return data["type"] if alone else data


def normal_form(blocks: list[Block]) -> tuple[Block, Overrides]:
    """The block of the first layer, and every other distinct block with its layers: one spelling for each stack."""
    places: dict[Block, list[int]] = {}
    for depth, block in enumerate(blocks):
        places.setdefault(block, []).append(depth)
    first, *others = places
    patches = {",".join(map(str, places[block])): Node.of({"block": canonical(block)}) for block in others}
    return first, Overrides(patches)


def identity(spec: Spec) -> str:
    """sha256 of the canonical form: the same for two specs exactly if they mean the same."""
    return digest(canonical(spec))


def digest(plain: Any) -> str:
    """sha256 of plain JSON data, such as a canonical form that was stored: 64 hexadecimal digits."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def dump(spec: Spec) -> str:
    """YAML that loads to an equal spec; fields at their defaults are left out."""
    text: str = yaml.safe_dump(canonical(spec, brief=True), sort_keys=False, default_flow_style=None, width=110)
    return text


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two specs: a path, and the value there in each (None where it has none)."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {brief_text(self.before)} → {brief_text(self.after)}"


def diff(before: Spec, after: Spec) -> list[Change]:
    """What differs, path by path; a list (a site) is compared as a whole, and so is the order of branches.

    Where layers of a model differ, a path says of which it speaks: `block[1,3-5].attention.mask`. What another member
    of a family lacks is not said of it, nor what it has by default.
    """
    changes: list[Change] = []
    old, new = copy.copy(_base_tree(before)), _tree(after)
    mine, theirs = (spec.stacks() if hasattr(spec, "stacks") else {} for spec in (before, after))
    for name in mine if mine.keys() == theirs.keys() else ():
        if mine[name].overrides or theirs[name].overrides:
            if name:
                old[name] = copy.copy(old[name])
            for tree in (old, new):
                part = tree[name] if name else tree
                del part["overrides"], part["block"]
            _diff_layers(mine[name].layers(), theirs[name].layers(), f"{name}.block" if name else "block", changes)
    _diff(old, new, "", changes)
    return changes


def _diff_layers(before: list[Block], after: list[Block], path: str, changes: list[Change]) -> None:
    """The differences of layers that both have, each once with the layers that have it; what all have names none."""
    pairs: dict[tuple[Block, Block], list[int]] = {}
    for depth, pair in enumerate(zip(before, after, strict=False)):
        pairs.setdefault(pair, []).append(depth)
    found: dict[tuple[str, str, str], tuple[Change, list[int]]] = {}
    for (old, new), depths in pairs.items():
        own: list[Change] = []
        _diff(_tree(old), _tree(new), "", own)
        for change in own:
            key = (change.path, brief_text(change.before), brief_text(change.after))
            found.setdefault(key, (change, []))[1].extend(depths)
    for change, depths in found.values():
        where = path if len(depths) == sum(map(len, pairs.values())) else f"{path}[{ranges(sorted(depths))}]"
        changes.append(Change(f"{where}.{change.path}" if change.path else where, change.before, change.after))


class _Ordered(dict[str, Any]):
    """Branches, whose order is a difference."""


class _Fields(dict[str, Any]):
    """The fields of a spec, which is shown whole where the other side has none."""

    spec: Spec


@lru_cache(maxsize=4)
def _base_tree(spec: Spec) -> Any:
    """The tree of what a plan compares all its variants with."""
    return _tree(spec)


def _tree(value: Any) -> Any:
    """Nested mappings down to sites and plain values."""
    if isinstance(value, Spec):
        fields = _Fields({"type": value.type} if isinstance(value, Family) else {})
        fields |= {name: _tree(getattr(value, name)) for name in fields_of(type(value))}
        fields.spec = value
        return fields
    if isinstance(value, Overrides):
        return value.plain()
    if isinstance(value, Mapping):
        kind = _Ordered if isinstance(value, Block) else dict
        return kind({name: _tree(item) for name, item in value.items()})
    return [canonical(item, brief=True) for item in value] if isinstance(value, tuple) else value


def _diff(before: Any, after: Any, path: str, changes: list[Change]) -> None:
    if isinstance(before, _Ordered) and isinstance(after, _Ordered):
        kept = [name for name in before if name in after], [name for name in after if name in before]
        if kept[0] != kept[1]:
            changes.append(Change(path, *kept))
    if isinstance(before, dict) and isinstance(after, dict):
        for name in _compared(before, after):
            where = f"{path}.{name}" if path else name
            _diff(before.get(name), after.get(name), where, changes)
    elif before != after:
        changes.append(Change(path, _whole(before), _whole(after)))


def _compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names that both have, one has alone, or, of members of a family, the new one has alone and not by default."""
    fresh = [name for name in after if name not in before]
    if not isinstance(after, _Fields) or before.get("type") == after.get("type"):
        return [*before, *fresh]
    fields = fields_of(type(after.spec))
    said = [name for name in fresh if fields[name].required or getattr(after.spec, name) != fields[name].default]
    return [*(name for name in before if name in after), *said]


def _whole(tree: Any) -> Any:
    if isinstance(tree, _Fields):
        return canonical(tree.spec, brief=True)
    return {name: _whole(item) for name, item in tree.items()} if isinstance(tree, dict) else tree


def brief_text(value: Any) -> str:
    """A value on one line, as it would be written in YAML."""
    if isinstance(value, str):
        return value
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").strip()

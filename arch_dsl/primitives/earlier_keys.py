"""Keys and values of an earlier layer: what a layer is that has none of its own, and in what both must be alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from archlab.arch_dsl.language.notation import chosen
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Rotary, place_of
from archlab.arch_dsl.tree.identity import brief_text, canonical

NAMES = ("key", "value")
PARTS = ("key_projection", "value_projection", *NAMES)  # of the costs of a branch


def without_own(branch: Any) -> Any:
    """A branch as it is: where it takes keys and values of an earlier layer, nothing of it is about its own."""
    if branch.kv == "own":
        return branch
    switch = tuple(kept for item in branch.switch for kept in item.without(*NAMES))
    maps = {name: _others(getattr(branch, name)) for name in ("bias", "zero")}
    return branch.replace(key=(), value=(), switch=switch, **maps)


def _others(names: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
    """A choice among the maps of queries and the output, all that there are."""
    return tuple(name for name in ("query", "output") if chosen(names, name)) or False


def wrong(branch: Any) -> Iterator[tuple[str, str]]:
    """What makes no sense in a branch that takes keys and values of an earlier layer, whichever that is."""
    if branch.kv == "own":
        return
    if branch.queries == "positions":
        yield "queries", "from positions go with keys and values of the same layer; take hidden"
    if branch.share == "stack":
        yield "share", "lets layers share a branch of which each takes keys and values of another layer"


def unlike(branch: Any, owner: Any, where: str, ctx: BuildContext) -> Iterator[tuple[str, str]]:
    """In what a branch, as it is written, cannot take the keys and values of the `owner`: the field, and why."""
    here, there = without_own(branch).resolve(ctx), owner.resolve(ctx)
    for name in NAMES:
        ours, theirs = here.grids()[name], there.grids()[name]
        if ours != theirs:
            field = "kv_heads" if ours[0] != theirs[0] else "head_dim"
            both = f"{theirs[0]} {name} heads of {theirs[1]} channels, and here are {ours[0]} of {ours[1]}"
            yield field, f"must be as in {where}, whose keys and values it takes: there are {both}"
            return
    for name, mine, other in _own(branch, owner):
        if mine and mine != other:
            yield name, f"is for keys and values, which are those of {where}; leave it out, or say what is said there"
    if _rotary(branch.query) != _rotary(owner.key):
        message = f"must be rotated as the keys of {where} are, which it takes"
        yield "query", f"{message}: only the difference of two rotations counts"


def _own(branch: Any, owner: Any) -> Iterator[tuple[str, Any, Any]]:
    """The fields that are about keys and values, with what both branches have there."""
    for name in NAMES:
        yield name, getattr(branch, name), getattr(owner, name)
    for name in ("bias", "zero", "switch"):
        yield name, _named(branch, name), _named(owner, name)


def _named(branch: Any, field: str) -> list[Any]:
    """What a field says of the maps of keys and values."""
    value = getattr(branch, field)
    if field == "switch":
        return [item for item in value if {*item.names} & {*NAMES}]
    return [name for name in NAMES if chosen(value, name)]


def _rotary(items: tuple[Any, ...]) -> list[Rotary]:
    return [item for item in items if isinstance(item, Rotary)]


def borrowed(module: Any, spec: Any, ctx: BuildContext) -> str:
    """What the keys and values are called that the module of a resolved branch takes, '' where it has its own; then it
    is entered as the one of which later layers take them."""
    name = f"{place_of(ctx)} {brief_text(canonical(spec.mask, brief=True))}"
    if spec.kv == "own":
        ctx.shared[name] = module
        return ""
    del module.key_projection, module.value_projection
    ctx.shared[name].lends = name
    return name


def kept(spec: Any, ctx: BuildContext, tokens: int) -> int:
    """What attention reads of an earlier layer as it is: its owner counts it as kept for the backward pass. Most
    implementations copy it, as plain products of some queries at a time do; the spec must be resolved."""
    if spec.kv == "own" or spec.memory or not spec.softmax:
        return 0
    sizes, widths, own = spec.sizes(), spec.widths(), spec.places(ctx)["scores"]
    pattern = spec.mask.pattern(sizes.heads)
    whole = pattern.order == "full" and pattern.blocks is None
    copied = not whole and spec.products(pattern, tokens)
    if (
        copied
        or sizes.head_dim != sizes.value_dim
        or any(item.kind == "sinks" or item.learned(own) for item in spec.scores)
    ):
        return 0
    return int(tokens * (widths["key"] + widths["value"]))

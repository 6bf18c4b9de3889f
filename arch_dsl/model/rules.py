"""Rules: combinations across the parts of a stack that make no sense. A part's own mistakes are its `check`'s."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import walk
from archlab.arch_dsl.model.places import Place, distinct, places
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch, Carry, Join, Position, Rotary
from archlab.arch_dsl.primitives.attention import Attention
from archlab.arch_dsl.primitives.branch import OUTER, Headed
from archlab.arch_dsl.primitives.earlier_keys import unlike
from archlab.arch_dsl.primitives.groups import Group
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import normal_form

if TYPE_CHECKING:
    from archlab.arch_dsl.model.stack import Stack

Pass = Callable[["Stack"], "Stack"]


@dataclass(frozen=True)
class Rule:
    """What must hold across the parts of a stack. `broken` says where it does not, and `repair` is a pass that makes
    it hold where the parts leave no doubt what was meant."""

    name: str
    holds: str
    broken: Callable[[Stack, list[Place]], Iterable[Problem]]
    repair: Pass | None = None


def problems(stack: Stack, ctx: BuildContext) -> list[Problem]:
    """What the rules find in a stack, `ctx` being the facts that hold in it."""
    found = places(stack, ctx, stack.layers())
    return [problem for rule in RULES for problem in rule.broken(stack, found)]


def _map(block: Block, change: Callable[[Branch], Branch]) -> Block:
    """A block with all its branches changed, members of groups too."""
    changed = []
    for name, branch in block.items():
        if isinstance(branch, Group):
            branch = branch.replace(branches=_map(branch.branches, change))
        changed.append((name, change(branch)))
    return Block(changed)


# the end of a dual stream


def _dual_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    ends = [item for item in stack.final if item.type == "dual"]
    top = [place for place in found if "." not in place.name]
    dual = [place for place in top if _join(place).type == "residual_dual"]
    if len(ends) > 1:
        yield Problem("final", "holds `dual` twice: there is one second stream to add", ends[1].mark())
    if dual and not ends:
        message = "needs `dual`: the joins residual_dual carry a second stream, which nothing else would read"
        yield Problem("final", message, _join(dual[0]).mark())
    if not (dual or ends):
        return
    for place in distinct([place for place in top if place not in dual]):
        why = "`dual` at final ends" if ends else f"{dual[0].path} joins"
        message = (
            f"must be residual_dual, as {why} a second stream that every branch adds to; found {_join(place).type}"
        )
        yield Problem(f"{place.path}.join", message, place.branch.mark("join"))


def _join(place: Place) -> Any:
    return getattr(place.branch, "join", None) or Join()


def _dual_repair(stack: Stack) -> Stack:
    """Adds `dual` where all branches join so, and removes it where none does."""
    joins = [branch.join for block in stack.layers() for branch in block.values()]  # type: ignore[attr-defined]
    kept = tuple(item for item in stack.final if item.type != "dual")
    kinds = {join.type for join in joins}
    if "residual_dual" not in kinds:
        return stack.replace(final=kept)
    if len(kinds) > 1:
        return stack
    end = next((item for item in stack.final if item.type == "dual"), None)
    return stack.replace(final=(end or Carry.members["dual"](norm=joins[0].norm), *kept))


# the order of what changes the logits

_KINDS = ("softcap", "bias", "sinks")


def _scores_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    for place in distinct(found):
        scores = getattr(place.branch, "scores", ())
        kinds = [item.kind for item in scores]
        for index, item in enumerate(scores):
            path = f"{place.path}.scores.{index}"
            if item.type in [other.type for other in scores[:index]]:
                yield Problem(path, f"{item.type} stands twice; one of each is enough", item.mark())
            elif any(_KINDS.index(kind) > _KINDS.index(item.kind) for kind in kinds[:index]):
                message = f"{item.type} must stand before {scores[index - 1].type}: a cap, then biases, then sinks"
                yield Problem(path, message, item.mark())


def _scores_repair(stack: Stack) -> Stack:
    def ordered(branch: Branch) -> Branch:
        if not getattr(branch, "scores", ()):
            return branch
        return branch.replace(scores=tuple(sorted(branch.scores, key=lambda item: _KINDS.index(item.kind))))  # type: ignore[attr-defined]

    block, overrides = normal_form([_map(block, ordered) for block in stack.layers()])
    return stack.replace(block=block, overrides=overrides)


# rotations


def _rotary_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    for place in distinct(found):
        if isinstance(place.branch, Headed) and getattr(place.branch, "kv", "own") == "own":
            query, key = ([i for i in getattr(place.branch, n) if isinstance(i, Rotary)] for n in ("query", "key"))
            if query != key:
                name = "key" if len(key) >= len(query) else "query"
                item = (key if name == "key" else query)[-1]
                message = f"{item.type} must stand on query and key alike: only the difference of two rotations counts"
                yield Problem(f"{place.path}.{name}", message, item.mark())


# positions at the embeddings


def _positions_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    learned = [item for item in stack.embed if isinstance(item, Position) and item.type == "learned"]
    if len(learned) > 1:
        yield Problem("embed", "holds two tables of learned positions, whose sum is one table", learned[1].mark())


def _positions_repair(stack: Stack) -> Stack:
    first = next(item for item in stack.embed if item.type == "learned")
    return stack.replace(embed=tuple(i for i in stack.embed if i.type != "learned" or i is first))


# values that are carried from layer to layer, and parameters that layers share


def _values_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Values that no later layer takes, or that it cannot take."""
    carrying: dict[str, list[Place]] = {}
    for place in found:
        if any(item.type == "value_residual" for item in getattr(place.branch, "value", ())):
            carrying.setdefault(place.name, []).append(place)
    for users in carrying.values():
        mark = next(i for i in users[0].branch.value if i.type == "value_residual").mark()  # type: ignore[attr-defined]
        if len(users) < 2:
            message = "value_residual needs a second layer that has it: the first one's values go to the later ones"
            yield Problem(f"{users[0].path}.value", message, mark)
        first = _value_heads(users[0])
        for place in distinct(users):
            if (other := _value_heads(place)) != first:
                there = f"{first} in {users[0].path}"
                message = f"value_residual needs the same heads in all layers: {other} here, {there}"
                yield Problem(f"{place.path}.kv_heads", message, place.branch.mark("kv_heads"))


def _keys_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Keys and values of an earlier layer that there are none of, or that are unlike those a layer would have."""
    owners: dict[tuple[str, Any], Place] = {}
    told: dict[tuple[str, str], Problem] = {}
    written = [branch for block in stack.layers() for _, branch in block.walk()]
    for place, branch in zip(found, written, strict=True):
        if not isinstance(branch, Attention):
            continue
        own = (place.name, branch.mask)
        if branch.kv == "own":
            owners[own] = place
        elif own not in owners:
            message = "needs an earlier layer with keys and values of its own and the same mask; there is none"
            told.setdefault((place.path, "kv"), Problem(f"{place.path}.kv", message, branch.mark("kv")))
        else:
            first = owners[own]
            for name, message in unlike(branch, first.branch, first.path, place.ctx):
                told.setdefault((place.path, name), Problem(f"{place.path}.{name}", message, branch.mark(name)))
    yield from told.values()


def _value_heads(place: Place) -> str:
    branch: Any = place.branch
    return "{} value heads of {}".format(*branch.value_heads(place.ctx.d_model))


def _shared_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Parts that layers cannot share, or do not."""
    shared = {place.path: list(_shared(place)) for place in distinct(found)}
    if not any(shared.values()):
        return
    layers = Counter(key for place in found for key in dict(shared[place.path]))
    owners: dict[str, tuple[Any, Place]] = {}
    for place in distinct(found):
        inside: set[str] = set()
        for key, item in shared[place.path]:
            where = place.path + key.removeprefix(place.name)
            if key in inside:
                message = f"two shared {item.type} in one site would be one; share one of them"
                yield Problem(where.rpartition(".")[0], message, item.mark())
            inside.add(key)
            owner, first = owners.setdefault(key, (item, place))
            if owner != item:
                message = f"is shared with {first.path}, which has other fields; what is shared is the same everywhere"
                yield Problem(where, message, item.mark())
            elif item is not place.branch and (other := _other_fact(place, first, key)):
                yield Problem(where, f"is shared with {first.path}, {other}", item.mark())
            if layers[key] < 2:
                yield Problem(f"{where}.share", "needs a second layer to share it with", item.mark("share"))
            if item is place.branch:
                yield from _all_shared(item, where)


def _shared(place: Place) -> Iterator[tuple[str, Any]]:
    """What layers share of a branch, all of it or its parts, by the path that is the same in all layers."""
    if place.branch.share == "stack":
        yield place.name, place.branch
        return
    for path, part in walk(place.branch):
        if getattr(part, "share", "none") == "stack" and not path.startswith("branches."):
            steps = (place.name, path.rpartition(".")[0] or path, part.type)  # type: ignore[attr-defined]
            yield ".".join(steps), part


_FACTS = (  # that a part of a branch is built with
    *("heads", "kv_heads", "key_heads", "head_dim", "value_dim"),
    *("width", "kv_latent", "query_latent", "rotary_dim", "scale", "mask.documents", "documents"),
)


def _other_fact(place: Place, first: Place, key: str) -> str:
    """What stands in the way of sharing a part of two branches: the first fact in which they differ."""
    if key.removeprefix(f"{place.name}.").split(".")[0] in OUTER:
        return ""
    here, there = (_facts(spot.branch.resolve(spot.ctx)) for spot in (place, first))
    names = (name for name in here if here[name] != there.get(name))
    return next((f"whose {name} is {there.get(name)}, and here it is {here[name]}" for name in names), "")


def _facts(branch: Branch) -> dict[str, Any]:
    """What the parts of a branch are built with, by path."""
    found = {}
    for path in _FACTS:
        with contextlib.suppress(AttributeError):
            found[path] = operator.attrgetter(path)(branch)
    return found


def _all_shared(branch: Branch, where: str) -> Iterator[Problem]:
    """What makes no sense in a branch that layers share as a whole."""
    for path, part in walk(branch):
        at = f"{where}.{path.removeprefix('branches.')}".removesuffix(".")
        if path and getattr(part, "share", "none") == "stack":
            yield Problem(f"{at}.share", f"{where} is shared, and all its parts with it", part.mark("share"))
        if getattr(part, "by_layer", False):
            message = f"{part.type} differs from layer to layer, and {where} is shared by them"  # type: ignore[attr-defined]
            yield Problem(at, message, part.mark())


# several residual streams, and what is mixed into them


def _streams_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Joins that several residual streams leave nothing to do."""
    if stack.streams is None:
        return
    mixes = not stack.streams.of_layers
    for place in distinct([place for place in found if "." not in place.name]):
        if mixes and _join(place).type != "add":
            message = f"must be add, as {stack.streams.type} streams mix the update in themselves"
            yield Problem(f"{place.path}.join", f"{message}; found {_join(place).type}", place.branch.mark("join"))
        if place.name == "streams":
            yield Problem(place.path, "is the name of what mixes the streams; name the branch otherwise")
    for name, message in stack.streams.misplaced(list(dict.fromkeys(stack.layers()))):
        yield Problem(f"streams.{name}", message, stack.streams.mark(name))


def _tokens_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Values of other tokens than the stack's own."""
    for place in distinct(found):
        for index, item in enumerate(getattr(place.branch, "value", ())):
            if getattr(item, "reads_tokens", False) and place.branch.type == "cross_attention":
                message = f"{item.type} looks up the tokens of this stack, and the values are those of the source"
                yield Problem(f"{place.path}.value.{index}", message, item.mark())


def _tables_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    """Tables of another layer, where that is no earlier one with a table that fits."""
    owners: dict[tuple[str, int], int] = {}  # how many channels the table has
    told: set[str] = set()
    for place in found:
        if not isinstance(place.branch, Headed):
            continue
        for index, item in enumerate(getattr(place.branch, "value", ())):
            if item.type != "value_embedding" or item.share != "none":
                continue
            heads, width = place.branch.value_heads(place.ctx.d_model)
            where, of = f"{place.path}.value.{index}.table_of", item.table_of
            if of is None:
                if place.branch.share == "none" or all(name != place.name for name, _ in owners):
                    owners[place.name, place.depth] = heads * width
            elif where not in told and owners.get((place.name, of)) != heads * width:
                told.add(where)
                message = (
                    f"layer {of} is no earlier one with a value_embedding of its own, {heads * width} channels wide"
                )
                yield Problem(where, message, item.mark("table_of"))


def _skips_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    kinds = [item.type for item in stack.skips]
    for index, item in enumerate(stack.skips):
        if item.type in kinds[:index]:
            yield Problem(f"skips.{index}", f"{item.type} stands twice; one of each is enough", item.mark())


RULES = (
    Rule("dual stream", "`dual` at final and residual_dual at every branch go together", _dual_broken, _dual_repair),
    Rule("order of scores", "a cap first, then biases, then sinks, one of each", _scores_broken, _scores_repair),
    Rule("rotations", "query and key are rotated alike", _rotary_broken),
    Rule("learned positions", "one table of learned positions", _positions_broken, _positions_repair),
    Rule("values across layers", "value_residual in at least two layers with equal heads", _values_broken),
    Rule("keys of earlier layers", "there is one with keys and values that fit", _keys_broken),
    Rule("residual streams", "several streams are joined by their own mixing", _streams_broken),
    Rule("skips", "one of each", _skips_broken),
    Rule("value embeddings", "values are those of the stack's own tokens", _tokens_broken),
    Rule("tables of other layers", "an earlier layer has such a table", _tables_broken),
    Rule("shared parts", "what layers share is the same in all of them, and there are some", _shared_broken),
)

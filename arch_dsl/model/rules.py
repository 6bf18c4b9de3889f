"""Rules: combinations across the parts of a stack that make no sense. A part's own mistakes are its `check`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.model.places import Place, distinct, places
from archlab.arch_dsl.model.sharing import shared_broken, values_broken
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch, Carry, Join, Position, Rotary
from archlab.arch_dsl.primitives.branch import Headed
from archlab.arch_dsl.primitives.parallel import Parallel
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.normal_form import normal_form

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


def rewritten(stack: Stack, change: Callable[[Block], Block]) -> Stack:
    """The stack with the block of every layer changed."""
    if not stack.overrides:
        return stack.replace(block=change(stack.block))
    block, overrides = normal_form([change(block) for block in stack.layers()])
    return stack.replace(block=block, overrides=overrides)


def _map(block: Block, change: Callable[[Branch], Branch]) -> Block:
    """A block with all its branches changed, members of groups too."""
    changed = []
    for name, branch in block.items():
        if isinstance(branch, Parallel):
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

    return rewritten(stack, lambda block: _map(block, ordered))


# rotations


def _rotary_broken(stack: Stack, found: list[Place]) -> Iterator[Problem]:
    for place in distinct(found):
        if isinstance(place.branch, Headed):
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


RULES = (
    Rule("dual stream", "`dual` at final and residual_dual at every branch go together", _dual_broken, _dual_repair),
    Rule("order of scores", "a cap first, then biases, then sinks, one of each", _scores_broken, _scores_repair),
    Rule("rotations", "query and key are rotated alike", _rotary_broken),
    Rule("learned positions", "one table of learned positions", _positions_broken, _positions_repair),
    Rule("values across layers", "value_residual in at least two layers with equal heads", values_broken),
    Rule("shared parts", "what layers share is the same in all of them, and there are some", shared_broken),
)

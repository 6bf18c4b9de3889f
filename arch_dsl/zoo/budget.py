"""A size that nobody published: width and depth of an entry's shape for a number of parameters."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Positive, Spec
from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.model.stack import Stack
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.primitives.attention import Attention
from archlab.arch_dsl.primitives.feedforward import FeedForward
from archlab.arch_dsl.primitives.groups import Group
from archlab.arch_dsl.primitives.heads import MultiHead
from archlab.arch_dsl.primitives.latent_attention import LatentAttention
from archlab.arch_dsl.primitives.lightning_indexer import LightningIndexer
from archlab.arch_dsl.primitives.linear_attention import LinearAttention
from archlab.arch_dsl.primitives.moe import MoE
from archlab.arch_dsl.primitives.norms import RMSNorm
from archlab.arch_dsl.primitives.rwkv7 import RWKV7
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.overrides import layers_of

FEWEST_HEADS, NARROWEST_HEAD, FEWEST_LAYERS = 4, 16, 2
MOST_OFF = 0.25  # of the parameters asked for
_NEAR = 2  # sizes whose count is further off than by this factor are not looked at
NOT_COUNTED = ("embedding", "embed", "unembedding")


Width = tuple[int, int]  # of the stream, and of a head


class Budget(Spec):
    """How a shape scales: `aspect` = d_model / n_layers, heads of `head_dim`, widths a multiple of `multiple_of`.

    n_layers are the decoder's; an encoder keeps its share of them.
    """

    title: ClassVar[str] = "budget"
    aspect: Positive
    head_dim: Count
    multiple_of: Count = 8


def body(model: Model) -> int:
    """Parameters of a resolved model without its tables of tokens and positions, in layers too."""
    total = cost(model, tokens=0)  # so that what training keeps is not worked out
    parts = (total, *(total.children[name] for name in model.stacks() if name))
    return total.non_embedding - sum(
        part.children[name].non_embedding for part in parts for name in NOT_COUNTED if name in part.children
    )


def solve(model: Model, budget: Budget, parameters: int) -> list[Setting]:
    """The changes that bring a model nearest to so many parameters, embeddings not counted.

    d_model is a multiple of the head size, which is halved until there are four heads; n_layers is d_model / aspect,
    rounded, or one more or less, and at least as many as the overrides name. Key/value heads and written widths keep
    their share of heads and d_model. Of all these the one whose count is nearest (by its ratio) is taken, of equals the
    narrower. Raises SpecError when it is far off.
    """

    def counted(changes: dict[str, Any]) -> int:
        return body(resolve(apply(model, _settings(changes)), vocab=1, max_positions=1))

    def least(width: Width) -> int:
        return counted(next(_candidates(model, budget, [width])))

    widths = list(_widths(budget.head_dim))
    beyond = 1  # sizes are looked at from the narrow side: wide ones are deep, and take longest
    while beyond < len(widths) and least(widths[beyond]) < parameters / _NEAR:
        beyond *= 2
    first = bisect_left(widths, parameters / _NEAR, beyond // 2, min(beyond, len(widths)), key=least)
    found: tuple[float, int, dict[str, Any]] | None = None
    for changes in _candidates(model, budget, widths[max(first - 1, 0) :]):
        count = counted(changes)
        off = abs(math.log(count / parameters))
        if found is None or off < found[0] - 1e-12:
            found = (off, count, changes)
        if count > _NEAR * parameters:
            break
    assert found is not None
    _, count, changes = found
    if abs(count - parameters) > MOST_OFF * parameters:
        raise SpecError.of(
            "size.parameters", f"no size of this shape has about {parameters:,}; the nearest has {count:,}"
        )
    return _settings(changes)


def _settings(changes: dict[str, Any]) -> list[Setting]:
    return [Setting(path, Node.of(value), "the size") for path, value in changes.items()]


def _candidates(model: Model, budget: Budget, widths: Iterable[Width]) -> Iterator[dict[str, Any]]:
    """Sizes of a shape, the narrowest first, of each width the shallowest."""
    for d_model, head_dim in widths:
        depth = round(d_model / budget.aspect)
        for n_layers in sorted({max(depth + more, FEWEST_LAYERS) for more in (-1, 0, 1)}):
            changes: dict[str, Any] = {"d_model": d_model}
            stacks = model.stacks()
            deepest = list(stacks.values())[-1].n_layers
            for name, stack in stacks.items():
                prefix = f"{name}." if name else ""
                changes[f"{prefix}n_layers"] = max(round(n_layers * stack.n_layers / deepest), fewest_layers(stack))
                place = (model.d_model, d_model, head_dim, budget)
                block = _inside(stack.block, "block", *place)
                block |= _overridden(stack, block)
                changes |= {f"{prefix}{path}": value for path, value in block.items()}
            yield changes


def _overridden(stack: Stack, block: dict[str, Any]) -> dict[str, Any]:
    """Key and value heads that only some layers have, of as many heads as a size gives the block."""
    branches = {".".join(("block", *steps)): branch for steps, branch in stack.block.walk()}
    found: dict[str, Any] = {}
    for layers, patch in stack.overrides.plain().items():
        for path, value in patch.items():
            where, _, field = path.rpartition(".")
            branch = branches.get(where)
            if field == "kv_heads" and isinstance(branch, MultiHead):
                found[f"overrides.{layers}.{path}"] = _groups(block[f"{where}.heads"], value, branch.heads)
    return found


def fewest_layers(stack: Stack) -> int:
    """The fewest layers of which each slice of a stack's overrides names one, a loop has one, and each shared branch
    is in two."""
    outside = 0 if stack.loop is None else stack.loop.prelude + stack.loop.coda
    depths = range(outside + 1, stack.n_layers + 1)
    named = (depth for depth in depths if all(layers_of(layers, depth) for layers in stack.overrides))
    shared, found = _shared(stack.layers()), stack.layers()
    return next(depth for depth in named if all(_shared(found[:depth])[path] > 1 for path in shared))


def _shared(layers: list[Block]) -> Counter[tuple[str, ...]]:
    """How many layers have each branch that layers share, by its path."""
    found = (steps for block in layers for steps, branch in block.walk() if branch.share != "none")
    return Counter(found)


def _widths(head_dim: int) -> Iterator[Width]:
    """Widths of the stream with the size of their heads, ascending."""
    sizes = [head_dim]
    while sizes[0] % 2 == 0 and sizes[0] // 2 >= NARROWEST_HEAD:
        sizes.insert(0, sizes[0] // 2)
    for size in sizes[:-1]:
        yield from ((heads * size, size) for heads in range(FEWEST_HEADS, 2 * FEWEST_HEADS))
    yield from ((heads * head_dim, head_dim) for heads in range(FEWEST_HEADS, 4096))


def _inside(block: Block, path: str, before: int, d_model: int, head_dim: int, budget: Budget) -> dict[str, Any]:
    """What a width of the stream means for the branches of a block, group members among them."""
    found: dict[str, Any] = {}
    for name, branch in block.items():
        where = f"{path}.{name}"
        if isinstance(branch, Group):
            found |= _inside(branch.branches, where, before, d_model, head_dim, budget)
        elif isinstance(branch, MultiHead):
            wide = branch.heads * (branch.head_dim or before // branch.heads) / before  # of the stream, all heads
            heads = round(wide * d_model / head_dim)
            found[f"{where}.heads"] = heads
            if branch.head_dim is not None:
                found[f"{where}.head_dim"] = head_dim
            if isinstance(branch, Attention) and branch.value_dim is not None and branch.head_dim is not None:
                found[f"{where}.value_dim"] = max(round(branch.value_dim * head_dim / branch.head_dim), 1)
            if branch.kv_heads is not None:
                found[f"{where}.kv_heads"] = _groups(heads, branch.kv_heads, branch.heads)
            for item in branch.scores:
                if isinstance(item, LightningIndexer):
                    place, of_head = f"{where}.scores.{item.type}", branch.head_dim or before // branch.heads
                    found[f"{place}.heads"] = max(round(item.heads * heads / branch.heads), 1)
                    found[f"{place}.head_dim"] = 4 * max(round(item.head_dim * head_dim / of_head / 4), 1)
            if isinstance(branch, LatentAttention):
                own = branch.replace(head_dim=branch.head_dim or before // branch.heads)
                found |= {f"{where}.{name}": size for name, size in _latent(own, d_model / before, head_dim, budget)}
        elif isinstance(branch, FeedForward | MoE):
            for field in ("width", "shared"):
                if width := getattr(branch, field, None):
                    share = width * d_model / before
                    found[f"{where}.{field}"] = max(round(share / budget.multiple_of), 1) * budget.multiple_of
        elif isinstance(branch, LinearAttention):
            found |= {f"{where}.{name}": size for name, size in _linear(branch, before, d_model, head_dim, budget)}
        elif isinstance(branch, RWKV7):
            found[f"{where}.head_dim"] = head_dim
    return found


def _latent(branch: LatentAttention, wider: float, head_dim: int, budget: Budget) -> Iterator[tuple[str, int | float]]:
    """Sizes of latent attention. The latent of keys and values is so many heads wide (four in arXiv:2405.04434, section
    2.1.4), as are the parts of a head; that of queries keeps its share of d_model."""
    assert branch.head_dim is not None
    of_head = head_dim / branch.head_dim
    yield "kv_latent", max(round(of_head * branch.kv_latent), 1)
    if branch.query_latent is not None:
        yield "query_latent", max(round(wider * branch.query_latent / budget.multiple_of), 1) * budget.multiple_of
    rotated, before = branch.rotary_dim or 0, branch.head_dim + (branch.rotary_dim or 0)
    if rotated:
        rotated = 2 * max(round(of_head * rotated / 2), 1)
        yield "rotary_dim", rotated
    if branch.value_dim is not None:
        yield "value_dim", max(round(of_head * branch.value_dim), 1)
    if branch.scale is not None:
        yield "scale", branch.scale * math.sqrt(before / (head_dim + rotated))


def _linear(
    branch: LinearAttention, before: int, d_model: int, head_dim: int, budget: Budget
) -> Iterator[tuple[str, int]]:
    """Sizes of linear attention whose unit was the head size of the budget: channels keep their ratio to it."""
    if isinstance(branch.heads, int):
        heads = max(round(branch.heads * d_model * budget.head_dim / (before * head_dim)), 1)
        yield "heads", heads
        if branch.key_heads is not None:
            yield "key_heads", _groups(heads, branch.key_heads, branch.heads)
        for item in branch.sdpa:
            if isinstance(item, RMSNorm) and item.groups > 1:
                yield f"sdpa.{item.type}.groups", _groups(heads, item.groups, branch.heads)
        if isinstance(branch.head_dim, int):
            yield "head_dim", max(branch.head_dim * head_dim // budget.head_dim, 1)
    if isinstance(branch.value_dim, int):
        yield "value_dim", max(branch.value_dim * head_dim // budget.head_dim, 1)


def _groups(heads: int, kv_heads: int, of_heads: int) -> int:
    """Key/value heads, or those of keys, for so many heads: one stays one, else a divisor with the nearest share."""
    if kv_heads == 1 or kv_heads == of_heads:
        return 1 if kv_heads == 1 else heads
    divisors = [count for count in range(1, heads) if heads % count == 0] or [1]
    return min(divisors, key=lambda count: abs(math.log(count * of_heads / (heads * kv_heads))))

"""What the parts of a stack cost over so many tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from archlab.arch_dsl.model.stack import Stack, reading
from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.families import shared_cost, site_cost
from archlab.arch_dsl.primitives.stream_ends import ends_cost
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.overrides import ranges


def stacks_cost(
    stacks: Mapping[str, tuple[Stack, BuildContext]], d_model: int, tokens: int, source: int
) -> dict[str, Cost]:
    """What stacks cost at their places, an encoder over `source` tokens: the parts of the only one, or of each."""
    parts = {
        name: stack_cost(stack, place, source if name == "encoder" else tokens)
        for name, (stack, place) in stacks.items()
    }
    if "" in parts:
        return parts[""]
    read = Cost().keeping(source * d_model)  # what all cross-attention reads, and so keeps
    encoder = Cost.total({**parts["encoder"], "source": read}).without_cache()
    return {"encoder": encoder, "decoder": Cost.total(parts["decoder"])}


def stack_cost(stack: Stack, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
    """What the parts of a stack cost over `tokens` tokens."""
    prompt = Cost(parameters=(stack.prompt or 0) * ctx.d_model)
    tokens += stack.prompt or 0
    return {
        "prompt": prompt,
        "embed": site_cost(stack.embed, ctx, "embed", tokens),
        "streams": _streams_cost(stack, ctx, tokens),
        "skips": _skips_cost(stack, ctx, tokens),
        "loop": Cost() if stack.loop is None else stack.loop.cost(_on_streams(stack, ctx), tokens),
        "stack": _layers_cost(stack, ctx, tokens),
        "final": site_cost(stack.final, ctx, "final", tokens).repeated(1 if stack.loop is None else stack.loop.ends),
    }


def _streams_cost(stack: Stack, ctx: BuildContext, tokens: int) -> Cost:
    """What mixing the residual streams costs, at all branches or layers together, and the maps before and after."""
    if stack.streams is None:
        return Cost()
    one = stack.streams.cost(ctx, tokens)
    counts = [1 if stack.streams.of_layers else len(block) for block in stack.layers()]
    mixed = {str(depth): one.times(count).repeated(stack.turns_of(depth)) for depth, count in enumerate(counts)}
    n, maps = stack.streams.n, stack.streams.maps()
    ends = {name: ends_cost(n, ctx, tokens, 1 if name == "entry" else n) for name in maps}
    apart = reading(stack, "embeddings") and "entry" not in maps  # beside their copies
    embeddings = tokens * ctx.d_model if apart else 0
    return Cost.total(mixed | ends).keeping(embeddings)


def _on_streams(stack: Stack, ctx: BuildContext) -> BuildContext:
    """The context of what acts on the residual streams, one or several."""
    return ctx.where(heads=stack.streams.n if stack.streams else None)


def _skips_cost(stack: Stack, ctx: BuildContext, tokens: int) -> Cost:
    """What the skips of all layers cost."""
    place = _on_streams(stack, ctx)
    layers = range(stack.n_layers if stack.skips else 0)
    return Cost.total(
        {str(depth): site_cost(stack.skips, place.where(depth=depth), "skips", tokens) for depth in layers}
    )


def _layers_cost(stack: Stack, ctx: BuildContext, tokens: int) -> Cost:
    """All layers; equal ones are counted once, and once more where the first owns what the others share, a loop has
    some of them, or some choose their tokens. One in a loop is counted with all its turns."""
    found: dict[tuple[Block, bool, int, bool], tuple[Cost, list[int]]] = {}
    owned: dict[Block, bool] = {}  # whether a layer before owns what the block shares
    for depth, block in enumerate(stack.layers()):
        again, turns, chooses = owned.get(block, False), stack.turns_of(depth), stack.chooses(depth)
        if (block, again, turns, chooses) not in found:
            before = len(ctx.shared)
            one = _layer_cost(stack, block, ctx.at(f"block.{depth}", depth=depth), tokens)
            found[block, again, turns, chooses] = (one.repeated(turns), [])
            owned[block] = len(ctx.shared) > before or again
        found[block, again, turns, chooses][1].append(depth)
    parts = {}
    for one, depths in found.values():
        label = f"layer (x{len(depths)})" if len(found) == 1 else f"layers {ranges(depths)}"
        parts[label] = dataclasses.replace(one.times(len(depths)), children={"each": one})
    if len(found) == 1:
        ((label, part),) = parts.items()
        return dataclasses.replace(part, children={label: part.children["each"]})
    return Cost.total(parts)


def _layer_cost(stack: Stack, block: Block, ctx: BuildContext, tokens: int) -> Cost:
    """One layer: its branches, of the tokens that it chooses where it does, and its router."""
    router: dict[str, Cost] = {}
    if stack.depths is not None and stack.chooses(ctx.depth):
        router = {"depths": stack.depths.cost(ctx, tokens)}
        tokens = stack.depths.taken(tokens)
    return Cost.total({name: shared_cost(branch, ctx.at(name), tokens) for name, branch in block.items()} | router)

"""A stack: what acts on one stream, from the embeddings through blocks to a last norm. Spec, module, cost."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Range, Spec, added, walk
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Norm, Position, Scale, build_site, check_site, shared_cost, site_cost
from archlab.arch_dsl.parts.layers import normal, table
from archlab.arch_dsl.patching.patch import apply, settings_of
from archlab.arch_dsl.patching.shortform import parse_with_knobs
from archlab.arch_dsl.tree.block import Block, Branches
from archlab.arch_dsl.tree.identity import normal_form
from archlab.arch_dsl.tree.overrides import Overrides, layers_of, ranges


class Stack(Spec):
    """Blocks one after another, what acts on the embeddings before them, and what acts on the stream after them.

    `prompt` is how many learned vectors stand before the embeddings of the tokens, read by what may look back at them
    (arXiv:2104.08691, section 2); what the stack makes of them is dropped.
    """

    title: ClassVar[str] = "stack"
    n_layers: Annotated[int, Range(min=1, max=10_000)]
    block: Block
    overrides: Overrides = added(default=Overrides())
    embed: tuple[Norm | Position | Scale, ...] = ()
    final: tuple[Norm | Carry | Scale, ...] = ()
    prompt: Count | None = added(default=None)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From sites, knobs, or both; knobs are expanded into the sites that they stand for."""
        return parse_with_knobs(cls, node, path, problems)

    def layers(self) -> list[Block]:
        """The block of every layer: `block` with its overrides. Raises SpecError where a patch does not fit."""
        blocks = [self.block] * self.n_layers
        for layers, node in self.overrides.items():
            patched: dict[Block, Block] = {}
            for depth in layers_of(layers, self.n_layers):
                old = blocks[depth]
                if old not in patched:
                    patched[old] = self._patched(old, layers, node)
                blocks[depth] = patched[old]
        return blocks

    def _patched(self, block: Block, layers: str, node: Node) -> Block:
        alone = self.replace(block=block, overrides=Overrides())
        try:
            changed = apply(alone, settings_of(node, f"overrides.{layers}"))
        except SpecError as error:
            raise SpecError(
                dataclasses.replace(p, path=f"overrides.{layers}.{p.path}") for p in error.problems
            ) from error
        kept, found = (tuple(item for item in root.embed if not isinstance(item, Norm)) for root in (alone, changed))
        if kept != found or any(item not in alone.embed for item in changed.embed):
            message = "sets what is added to the embeddings, which all layers share; set it at `embed`"
            raise SpecError.of(f"overrides.{layers}", message, node.mark)
        return changed.block


def check_ends(items: tuple[Any, ...], ctx: BuildContext, name: str) -> list[Problem]:
    """What is wrong with the primitives of a site that stands once in a model."""
    return check_site(items, ctx, name) + [
        Problem(f"{name}.{index}.share", "stands once in a model: there is nothing to share", item.mark("share"))
        for index, item in enumerate(items)
        if getattr(item, "share", "none") != "none"
    ]


def check_stack(stack: Stack, ctx: BuildContext) -> list[Problem]:
    """Everything that makes no sense in the parts of a stack, at once."""
    problems = check_ends(stack.embed, ctx, "embed") + check_ends(stack.final, ctx, "final")
    for layers in stack.overrides:
        if not layers_of(layers, stack.n_layers):
            message = f"'{layers}' names no layer of {stack.n_layers}"
            problems.append(Problem("overrides", message, stack.overrides.mark(layers)))
    try:
        blocks = stack.layers()
    except SpecError as error:
        return [*problems, *error.problems]
    if stack.prompt and any(getattr(part, "documents", False) for _, part in walk(tuple(blocks))):
        message = "belongs to no document, and a mask of this stack keeps documents apart"
        problems.append(Problem("prompt", message, stack.mark("prompt")))
    for depth, block in first_places(blocks):
        where = "block" if block == stack.block else f"block (layer {depth})"
        if not block:
            problems.append(Problem(where, "needs at least one branch; all are removed", stack.mark("block")))
        for name, branch in block.items():
            problems += branch.check(ctx.at(name, depth=depth), f"{where}.{name}")
    return problems


def first_places(blocks: list[Block]) -> list[tuple[int, Block]]:
    """Each distinct block with the first layer that has it."""
    found: dict[Block, int] = {}
    for depth, block in enumerate(blocks):
        found.setdefault(block, depth)
    return [(depth, block) for block, depth in found.items()]


def resolved_stack(stack: Stack, ctx: BuildContext) -> Stack:
    """The stack with everything derived: its layers, head sizes and widths."""
    blocks = stack.layers()
    distinct = {block: Block((name, branch.resolve(ctx)) for name, branch in block.items()) for block in set(blocks)}
    block, overrides = normal_form([distinct[block] for block in blocks])
    return stack.replace(block=block, overrides=overrides)


def stack_cost(stack: Stack, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
    """What the parts of a stack cost over `tokens` tokens."""
    prompt = Cost(parameters=(stack.prompt or 0) * ctx.d_model)
    tokens += stack.prompt or 0
    return {
        "prompt": prompt,
        "embed": site_cost(stack.embed, ctx, "embed", tokens),
        "stack": _layers_cost(stack, ctx, tokens),
        "final": site_cost(stack.final, ctx, "final", tokens),
    }


def _layers_cost(stack: Stack, ctx: BuildContext, tokens: int) -> Cost:
    """All layers; equal ones are counted once, and once more where the first owns what the others share."""
    found: dict[tuple[Block, bool], tuple[Cost, list[int]]] = {}
    owned: dict[Block, bool] = {}  # whether a layer before owns what the block shares
    for depth, block in enumerate(stack.layers()):
        again = owned.get(block, False)
        if (block, again) not in found:
            before = len(ctx.shared)
            place = ctx.at(f"block.{depth}", depth=depth)
            one = Cost.total({name: shared_cost(branch, place.at(name), tokens) for name, branch in block.items()})
            found[block, again] = (one, [])
            owned[block] = len(ctx.shared) > before or again
        found[block, again][1].append(depth)
    parts = {}
    for one, depths in found.values():
        label = f"layer (x{len(depths)})" if len(found) == 1 else f"layers {ranges(depths)}"
        parts[label] = dataclasses.replace(one.times(len(depths)), children={"each": one})
    if len(found) == 1:
        ((label, part),) = parts.items()
        return dataclasses.replace(part, children={label: part.children["each"]})
    return Cost.total(parts)


class StackModule(nn.Module):
    """embeddings -> final(block(… block(embed(embeddings)))), all `[batch, time, d_model]`.

    `keeps_documents_apart` says whether a part of it does. Where `recompute` is set, training keeps of each layer only
    what it reads, and computes the rest again for the gradients (arXiv:1604.06174, section 4.1): the same bits.
    """

    recompute: bool = False

    def __init__(self, spec: Stack, ctx: BuildContext) -> None:
        super().__init__()
        self.add_layers(spec, ctx)

    def add_layers(self, spec: Stack, ctx: BuildContext) -> None:
        """Builds the parts of the stack, in their order."""
        self.prompt = table((spec.prompt, ctx.d_model), normal(ctx.std)) if spec.prompt else None
        self.embed = build_site(spec.embed, ctx, "embed")
        places = ((depth, block) for depth, block in enumerate(spec.layers()))
        self.block = nn.ModuleList(Branches(block, ctx.at(f"block.{depth}", depth=depth)) for depth, block in places)
        self.final = build_site(spec.final, ctx, "final")
        fused.sums(self, self.block, ctx)
        parts = (part for block in spec.layers() for _, part in walk(block))
        self.keeps_documents_apart = any(getattr(part, "documents", False) for part in parts)

    def through(self, stream: Tensor, call: Call) -> Tensor:
        """The stream after the last norm, from the token embeddings."""
        if self.prompt is None or (call.state is not None and call.state.tokens):
            return self._through(stream, call)
        count = len(self.prompt)
        prompt = self.prompt.to(stream.dtype).expand(len(stream), -1, -1)
        return self._through(torch.cat([prompt, stream], 1), _prompted(call, count))[:, count:]

    def _through(self, stream: Tensor, call: Call) -> Tensor:
        stream = self.embed(stream, call, iter(()))
        for layer in self.block:
            again = self.recompute and self.training and torch.is_grad_enabled()
            stream = _recomputed(layer, stream, call) if again else layer(stream, call)
        last: Tensor = self.final(stream, call, iter(()))
        if call.state is not None:
            call.state.tokens += stream.shape[1]
        return last


def _prompted(call: Call, count: int) -> Call:
    """The call as it is with so many vectors before its tokens."""
    positions = call.positions
    if positions is not None:
        positions = torch.cat([positions[:1] + torch.arange(count, device=positions.device), positions + count])
    return dataclasses.replace(
        call,
        positions=positions,
        prefix=None if call.prefix is None else call.prefix + count,
        padding=None if call.padding is None else nn.functional.pad(call.padding, (count, 0)),
    )


def _recomputed(layer: nn.Module, stream: Tensor, call: Call) -> Tensor:
    """What a layer gives, and leaves in the call, with nothing of it kept for the gradients."""

    def run(stream: Tensor, across: dict[str, Tensor]) -> tuple[Tensor, Call]:
        own = dataclasses.replace(call, across=dict(across), losses={}, measures={})
        return layer(stream, own), own

    stream, own = checkpoint(run, stream, dict(call.across), use_reentrant=False)
    for name in ("across", "losses", "measures"):
        getattr(call, name).update(getattr(own, name))
    return stream

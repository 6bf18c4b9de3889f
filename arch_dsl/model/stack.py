"""A stack: what acts on one stream, from the embeddings through blocks to a last norm. Spec, module, cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Family, Range, Spec, added, walk
from archlab.arch_dsl.model.depths import ChosenBranches, Depths
from archlab.arch_dsl.model.loop import Loop, LoopModule
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Carry, Norm, Position, Scale, build_site, check_site
from archlab.arch_dsl.parts.layers import Site, may_draw, normal, table
from archlab.arch_dsl.patching.patch import apply, settings_of
from archlab.arch_dsl.patching.shortform import parse_with_knobs
from archlab.arch_dsl.primitives.altup import StreamLayer
from archlab.arch_dsl.primitives.skips import Skip
from archlab.arch_dsl.primitives.stream_ends import StreamEnds
from archlab.arch_dsl.primitives.streams import StreamBranches, Streams
from archlab.arch_dsl.tree.block import Block, Branches
from archlab.arch_dsl.tree.identity import normal_form
from archlab.arch_dsl.tree.overrides import Overrides, layers_of


class Stack(Spec):
    """Blocks one after another, what acts on the embeddings before them, and what acts on the stream after them.

    `prompt` is how many learned vectors stand before the embeddings of the tokens, read by what may look back at them
    (arXiv:2104.08691, section 2); what the stack makes of them is dropped. `streams` are several residual streams in
    place of one. `skips` act on the stream before every layer, and mix in what stood there before an earlier one.
    `loop` has layers applied several times: all, or those in the middle. `depths` has some layers applied to some
    tokens alone.
    """

    title: ClassVar[str] = "stack"
    n_layers: Annotated[int, Range(min=1, max=10_000)]
    block: Block
    overrides: Overrides = added(default=Overrides())
    embed: tuple[Norm | Carry | Position | Scale, ...] = ()
    final: tuple[Norm | Carry | Scale, ...] = ()
    prompt: Count | None = added(default=None)
    streams: Streams | None = added(default=None)
    skips: tuple[Skip, ...] = added(default=())
    loop: Loop | None = added(default=None)
    depths: Depths | None = added(default=None)

    @property
    def effective_depth(self) -> int:
        """How many layers a token passes, those of a loop once in every turn."""
        return sum(self.turns_of(depth) for depth in range(self.n_layers))

    def turns_of(self, depth: int) -> int:
        """How many times a layer is applied."""
        return 1 if self.loop is None else self.loop.turns_of(depth, self.n_layers)

    def chooses(self, depth: int) -> bool:
        """Whether a layer is applied to the tokens alone that its router chooses."""
        return self.depths is not None and depth in layers_of(self.depths.layers, self.n_layers)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From sites, knobs, or both; knobs are expanded into the sites that they stand for."""
        return parse_with_knobs(cls, node, path, problems)

    def layers(self) -> list[Block]:
        """The block of every layer: `block` with its overrides. Raises SpecError where a patch does not fit."""
        return list(self._patched_layers)

    @cached_property
    def _patched_layers(self) -> tuple[Block, ...]:
        """Patched once per stack, as a plan asks for it in a dozen places."""
        blocks = [self.block] * self.n_layers
        for layers, node in self.overrides.items():
            patched: dict[Block, Block] = {}
            for depth in layers_of(layers, self.n_layers):
                old = blocks[depth]
                if old not in patched:
                    patched[old] = self._patched(old, layers, node)
                blocks[depth] = patched[old]
        return tuple(blocks)

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
    problems += check_site(stack.skips, ctx, "skips")
    if stack.streams is not None:
        problems += stack.streams.check(ctx, "streams")
    for layers in stack.overrides:
        if not layers_of(layers, stack.n_layers):
            message = f"'{layers}' names no layer of {stack.n_layers}"
            problems.append(Problem("overrides", message, stack.overrides.mark(layers)))
    try:
        blocks = stack.layers()
    except SpecError as error:
        return [*problems, *error.problems]
    if stack.loop is not None:
        others = ("skips", "predict", "streams", "prompt", "final")
        problems += stack.loop.check(blocks, [name for name in others if getattr(stack, name, None)])
    if stack.depths is not None:
        problems += stack.depths.check(blocks, [name for name in ("loop", "streams") if getattr(stack, name)])
    if stack.prompt and any(getattr(part, "documents", False) for _, part in walk(tuple(blocks))):
        message = "belongs to no document, and a mask of this stack keeps documents apart"
        problems.append(Problem("prompt", message, stack.mark("prompt")))
    if stack.prompt and (kinds := sorted(reading(stack, "tokens"))):
        problems.append(Problem("prompt", f"is no token, and a {kinds[0]} looks tokens up", stack.mark("prompt")))
    for depth, block in first_places(blocks):
        where = "block" if block == stack.block else f"block (layer {depth})"
        if not block:
            problems.append(Problem(where, "needs at least one branch; all are removed", stack.mark("block")))
        for name, branch in block.items():
            problems += branch.check(ctx.at(name, depth=depth), f"{where}.{name}")
    return problems


def reading(stack: Stack, what: Literal["tokens", "embeddings"]) -> set[str]:
    """The types of its parts that read the tokens beside the stream, or the embeddings that enter the first layer."""
    parts = (part for _, part in walk((stack.embed, *stack.layers())))
    return {part.type for part in parts if isinstance(part, Family) and getattr(part, f"reads_{what}", False)}


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


class StackModule(nn.Module):
    """embeddings -> final(block(… block(embed(embeddings)))), all `[batch, time, d_model]`, with several streams in
    between `[batch, time, n, d_model]`.

    `keeps_documents_apart` says whether a part of it does; `reads_tokens` and `reads_embeddings` whether one reads
    these beside the stream. Where `recompute` is set, training keeps of each layer only what it reads, and computes the
    rest again for the gradients (arXiv:1604.06174, section 4.1): the same bits.
    """

    recompute: bool = False
    read_by_heads: bool = False  # whether, in training, heads read the streams before and after the last layer

    def __init__(self, spec: Stack, ctx: BuildContext) -> None:
        super().__init__()
        self.add_layers(spec, ctx)

    def add_layers(self, spec: Stack, ctx: BuildContext) -> None:
        """Builds the parts of the stack, in their order."""
        self.prompt = table((spec.prompt, ctx.d_model), normal(ctx.std)) if spec.prompt else None
        parts = [part for block in spec.layers() for _, part in walk(block)]
        self.keeps_documents_apart = any(getattr(part, "documents", False) for part in parts)
        self.reads_prefix = any(getattr(part, "reads_prefix", False) for part in parts)
        self.embed = build_site(spec.embed, ctx.where(documents=self.keeps_documents_apart), "embed")
        self.streams = StreamEnds(spec.streams, ctx) if spec.streams is not None else None
        places = [ctx.at(f"block.{depth}", depth=depth) for depth in range(spec.n_layers)]
        self.block = nn.ModuleList(_layers(spec, places))
        self.layers_draw = may_draw(self.block)
        self.skips = _skips(spec, ctx) if spec.skips else None
        self.loop = LoopModule(spec.loop, spec.n_layers, ctx.at("loop")) if spec.loop else None
        self.final = build_site(spec.final, ctx, "final")
        self._fuse_sums(spec, ctx)
        self.reads_tokens, self.reads_embeddings = bool(reading(spec, "tokens")), bool(reading(spec, "embeddings"))

    def _fuse_sums(self, spec: Stack, ctx: BuildContext) -> None:
        if spec.streams is None and not spec.skips and spec.loop is None and spec.depths is None:
            fused.sums(self, self.block, ctx)
        elif spec.streams is None:  # what follows a layer is no norm, or not always the same
            for layer in self.block:
                fused.sums(layer, [layer], ctx)

    def through(self, stream: Tensor, call: Call) -> Tensor:
        """The stream after the last norm, from the token embeddings."""
        if self.prompt is None or (call.state is not None and call.state.tokens):
            return self._through(stream, call)
        count = self.prompt.shape[0]
        prompt = self.prompt.to(stream.dtype).expand(stream.shape[0], -1, -1)
        moved = call.positions is not None or call.padding is not None or self.reads_prefix
        call = call.behind(count) if moved else call
        return self._through(torch.cat([prompt, stream], 1), call)[:, count:]

    def applied(self, layer: nn.Module, stream: Tensor, call: Call) -> Tensor:
        """What a layer makes of the stream, with nothing of it kept where that is asked."""
        again = self.recompute and self.training and torch.is_grad_enabled()
        found: Tensor = _recomputed(layer, stream, call, self.layers_draw) if again else layer(stream, call)
        return found

    def _layers(self, stream: Tensor, call: Call) -> Tensor:
        for layer in self.block:
            if self.read_by_heads and self.training:
                call.across["before_last"] = stream
            stream = self.applied(layer, stream, call)
        return stream

    def _layers_and_skips(self, stream: Tensor, call: Call) -> Tensor:
        assert self.skips is not None
        for depth, layer in self.block.named_children():
            stream = self.applied(layer, self.skips[depth](stream, call, iter(())), call)
        return stream

    def _turn(self, stream: Tensor, entered: Tensor, turn: int, call: Call) -> Tensor:
        """One turn of a loop that `entered` went into."""
        assert self.loop is not None
        stream = self.loop.injected(stream, entered)
        for layer in self.block[self.loop.core]:
            stream = self.applied(layer, stream, call.after(turn * self.loop.length))
        return stream

    def _layers_and_loop(self, stream: Tensor, call: Call) -> Tensor:
        assert self.loop is not None
        for layer in self.block[self.loop.prelude]:
            stream = self.applied(layer, stream, call)
        entered = stream
        stream = self.loop.start(entered)
        for turn in self.loop.turns:
            stream = self.loop.injected(stream, entered)
            for layer in self.block[self.loop.core]:
                stream = self.applied(layer, stream, call.after(turn * self.loop.length))
            if self.loop.handed_on:
                stream = self.final(stream, call.outside("final"), iter(()))
        for layer in self.block[self.loop.coda]:
            stream = self.applied(layer, stream, call.after(self.loop.last * self.loop.length))
        return stream

    def turns(self, stream: Tensor, call: Call) -> list[Tensor]:
        """What logits are made of after each turn of a loop, from the token embeddings."""
        assert self.loop is not None
        stream = self._embedded(stream, call)
        for layer in self.block[self.loop.prelude]:
            stream = self.applied(layer, stream, call)
        entered, stream, found = stream, self.loop.start(stream), []
        for turn in self.loop.turns:
            stream = self._turn(stream, entered, turn, call)
            found.append(self.final(stream, call.outside("final"), iter(())))
            stream = found[turn] if self.loop.handed_on else stream
        return found

    def _embedded(self, stream: Tensor, call: Call) -> Tensor:
        stream = self.embed(stream, call.outside("embed"), iter(()))
        if self.reads_embeddings:
            call.across["embeddings"] = stream
        return stream

    def _through(self, stream: Tensor, call: Call) -> Tensor:
        if self.loop is not None and self.loop.exit is not None and self.loop.by_exit:
            last = self.loop.exit.read(self.turns(stream, call))
        else:
            last = self._after_all(self._embedded(stream, call), call)
        if call.state is not None:
            call.state.tokens += stream.shape[1]
        return last

    def _after_all(self, stream: Tensor, call: Call) -> Tensor:
        if self.streams is not None:
            stream = self.streams.several(stream)
        if self.skips is not None:
            stream = self._layers_and_skips(stream, call)
        elif self.loop is not None:
            stream = self._layers_and_loop(stream, call)
        else:
            stream = self._layers(stream, call)
        if self.streams is not None:
            stream = self.streams.one(stream)
        if self.read_by_heads and self.training:
            call.across["after_last"] = stream
        if self.loop is not None and self.loop.handed_on:
            return stream
        last: Tensor = self.final(stream, call.outside("final"), iter(()))
        return last


def _layers(spec: Stack, places: list[BuildContext]) -> Iterator[Branches]:
    """The layers, each at its place."""
    before = 0
    kind = StreamLayer if spec.streams is not None and spec.streams.of_layers else StreamBranches
    for block, place in zip(spec.layers(), places, strict=True):
        if spec.depths is not None and spec.chooses(place.depth):
            yield ChosenBranches(block, place, spec.depths)
        elif spec.streams is not None:
            yield kind(block, place, spec.streams, before)
        else:
            yield Branches(block, place)
        before += len(block)


def _skips(spec: Stack, ctx: BuildContext) -> nn.ModuleDict:
    """What acts on the stream before each layer, by the number of the layer."""
    places = {str(depth): ctx.at(f"skips.{depth}", depth=depth) for depth in range(spec.n_layers)}
    sites = {depth: [(item.type, item.build(place)) for item in spec.skips] for depth, place in places.items()}
    return nn.ModuleDict({depth: Site(items, places[depth].path) for depth, items in sites.items()})


def _recomputed(layer: nn.Module, stream: Tensor, call: Call, draws: bool) -> Tensor:
    """What a layer gives, and leaves in the call, with nothing of it kept for the gradients.

    Only for one that draws is the state of the generators kept: to read a GPU's would refuse a CUDA graph.
    """

    def run(stream: Tensor, across: dict[str, Tensor]) -> tuple[Tensor, Call]:
        own = dataclasses.replace(call, across=dict(across), losses={}, measures={})
        return layer(stream, own), own

    stream, own = checkpoint(run, stream, dict(call.across), use_reentrant=False, preserve_rng_state=draws)
    for name in ("across", "losses", "measures"):
        getattr(call, name).update(getattr(own, name))
    return stream

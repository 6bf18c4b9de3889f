"""Alternating updates: each layer is applied to one of several residual streams, and corrects all by what it adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.spec import Positive, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Norm, check_part
from archlab.arch_dsl.parts.layers import Linear, constant, equal_to, undecayed
from archlab.arch_dsl.primitives.streams import StreamBranches, Streams, weighted
from archlab.arch_dsl.tree.block import Block


@Streams.register("altup")
class AltUp(Streams):
    """H <- P H + g^T (L(x) - x) with x = (P H)[k mod n], for layer k as a whole: alternating updates (AltUp,
    arXiv:2301.13310, algorithm 1): a layer is applied to one stream, and the others are predicted and corrected.

    L reads the predicted stream, as in Gemma 3n; the paper's L reads the stream as it was, which is the same while P is
    the identity. P `[n, n]` and g `[n]` are numbers of each layer, without weight decay. Here they start as the
    identity and ones: as a network with one residual stream, once a norm has taken the factor n from the sum.
    That all streams begin as the embeddings is its Recycled-AltUp. With `stream: first` layers are always applied to
    the first stream.

    With a norm as `router` P and g are made of the token (transformers' modeling_gemma3n.py, `Gemma3nTextAltUp`):
    P = 1 + W_P m(h) with the stream h = H[k mod n] as it was, and g = 1 + W_g m(L(x)), with m(h) = tanh(norm(h) W_m /
    d_model) `[n]`. The numbers in W_P and W_g are held within `clip`, and start at 0.

    The branches named in `others` stand apart: they are the last of a block, read the corrected stream of the layer,
    and add to all streams but that one.
    """

    examples = (
        {},
        {"n": 2, "entry": "projected", "exit": "projected"},
        {"n": 3, "router": "rmsnorm", "clip": 0.2, "stream": "first"},
        {"n": 2, "others": ["ffn"]},
    )
    of_layers: ClassVar[bool] = True
    stream: Literal["alternating", "first"] = added(default="alternating")
    router: Norm | None = added(default=None)
    clip: Positive | None = added(default=None)
    others: tuple[str, ...] = added(default=())

    def first_read(self, depth: int) -> int:
        return 0 if self.stream == "first" else super().first_read(depth)

    def build(self, ctx: BuildContext) -> nn.Module:
        return _AltUp(self, ctx) if self.router is None else _RoutedAltUp(self, ctx)

    def inside(self, ctx: BuildContext) -> BuildContext:
        """The context of the norm of what the router reads, `[batch, time, d_model]`."""
        return ctx.at("norm", held=False, site="norm")

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        n, width = self.n, ctx.d_model
        # Each of the others reads a part of streams that no other keeps: it counts that part itself.
        mixing = self.mixing(tokens, width).keeping(tokens * (n - 1) * width * len(self.others))
        if self.router is None:
            return mixing.keeping(0, parameters=n * (n + 1))
        # The router reads one of the streams, which the mixing keeps, and what the layer gives, by the same parameters.
        place, clipped = self.inside(ctx), n * n * (n + 1) if self.clip else 0
        first, second = (self.router.cost(place.where(held=held), tokens) for held in (True, False))
        routed = Cost.product(tokens, width, n).keeping(tokens * (width + n))
        parts = {
            "mixing": mixing.keeping(tokens * n * (n + 1)),
            "norm": Cost.total({"stream": first, "result": second.without_parameters()}),
            "router": routed.repeated(2),
            "prediction": Cost.product(tokens, n, n * n).keeping(clipped),
            "correction": Cost.product(tokens, n, n),
        }
        return Cost.total(parts)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        yield from super().wrong(ctx)
        if self.clip is not None and self.router is None:
            yield "clip", "bounds the maps of a router, and there is none; set router to a norm"
        if self.router is not None and self.router.share != "none":
            yield "router", "is one of each layer; leave out its share"
        if self.n == 1 and self.others:
            yield "others", "add to all streams but one, and there is no other; give n of at least 2"
        if self.n == 1 and self.stream == "first":
            yield "stream", "is chosen among several, and there is one; leave it out"

    def misplaced(self, blocks: list[Block]) -> Iterator[tuple[str, str]]:
        names = dict.fromkeys(name for block in blocks for name in block)
        for name in self.others:
            if name not in names:
                yield "others", unknown(name, "branch of the block", names)
        for block in blocks if self.others else ():
            apart = [name in self.others for name in block]
            if apart[:1] == [True] or apart != sorted(apart):
                message = "must be the last branches of a block, after one that is the layer's"
                yield "others", f"{message}; found {', '.join(block)}"
                return
            for name in self.others:
                join: Any = getattr(block.get(name), "join", None)
                if join is not None and join.type != "add":
                    yield "others", f"add, and so their join must be add; that of {name} is {join.type}"
                    return

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        return found if self.router is None else found + check_part(self.router, self.inside(ctx), f"{path}.router")


class _AltUp(Module):
    def __init__(self, spec: AltUp, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.active = spec.first_read(ctx.depth)
        self.predict = undecayed((spec.n, spec.n), equal_to(torch.eye(spec.n, device="cpu")))
        self.correct = undecayed((spec.n,), constant(1.0))

    def forward(self, streams: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return self.predict[self.active], self.predict

    def written(self, result: Tensor, call: Call) -> Tensor:
        """g, by which what the layer adds is written to each stream."""
        return self.correct


class _RoutedAltUp(Module):
    def __init__(self, spec: AltUp, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert spec.router is not None
        self.n, self.active, self.clip = spec.n, spec.first_read(ctx.depth), spec.clip
        self.norm = spec.router.build(spec.inside(ctx))
        self.router = Linear(ctx.d_model, spec.n, std=ctx.std)
        self.prediction = Linear(spec.n, spec.n * spec.n, std=0.0)
        self.correction = Linear(spec.n, spec.n, std=0.0)
        self.factor = 1 / ctx.d_model

    def made(self, weight: Tensor, stream: Tensor, call: Call) -> Tensor:
        """What a map with this weight makes of m `[batch, time, n]` of a stream `[batch, time, d_model]`."""
        if self.clip is not None:
            weight = weight.clamp(-self.clip, self.clip)
        return nn.functional.linear((self.router(self.norm(stream, call)) * self.factor).tanh(), weight)

    def forward(self, streams: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        made = self.made(self.prediction.weight, streams[:, :, self.active], call).unflatten(-1, (self.n, self.n))
        predict = made + torch.eye(self.n, dtype=made.dtype, device=made.device)
        return predict[..., self.active, :], predict

    def written(self, result: Tensor, call: Call) -> Tensor:
        """g `[batch, time, n]`, by which what the layer adds is written to each stream, from what the layer gives."""
        return self.made(self.correction.weight, result, call) + 1


class StreamLayer(StreamBranches):
    """The branches of one layer on several streams, for connections of a layer as a whole."""

    def __init__(self, block: Block, ctx: BuildContext, spec: Streams, before: int) -> None:
        super().__init__(block, ctx, spec, before)
        self.active, apart = spec.first_read(ctx.depth), getattr(spec, "others", ())
        self.inside = [name for name in block if name not in apart]
        self.outside = [name for name in block if name in apart]

    def forward(self, streams: Tensor, call: Call) -> Tensor:
        call = call.layer(self.path)
        mix: Any = self.streams["layer"]
        with torch.autocast(streams.device.type, enabled=False):  # which would round the streams
            read, mixed = mix(streams, call)
            stream = weighted(read[..., None, :], streams).squeeze(-2)
            kept = weighted(mixed, streams)
        result = stream
        for name in self.inside:
            result = self.get_submodule(name)(result, call)
        with torch.autocast(streams.device.type, enabled=False):
            write = mix.written(result, call)
        streams = kept + write.to(kept.dtype)[..., None] * (result - stream)[..., None, :]
        for name in self.outside:
            streams = self.beside(self.get_submodule(name), streams, call)
        if call.watch is not None:
            call.watch.tell("stream", self.path, call.padding, output=streams.sum(-2))
        return streams

    def beside(self, branch: Any, streams: Tensor, call: Call) -> Tensor:
        """The streams after a branch that reads the one of the layer, and adds to all the others."""
        own = self.active
        update = branch.update(streams[:, :, own], call)
        if call.watch is not None:
            call.watch.tell("update", branch.path, call.padding, output=update)
        added = streams + update[..., None, :]
        return torch.cat([added[:, :, :own], streams[:, :, own : own + 1], added[:, :, own + 1 :]], 2)

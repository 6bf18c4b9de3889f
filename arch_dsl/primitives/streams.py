"""Several residual streams: every branch reads a mix of them, and what it adds is written to each by its own weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Count, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Primitive
from archlab.arch_dsl.parts.layers import Linear, constant, equal_to, parameter, undecayed
from archlab.arch_dsl.primitives.norms import LayerNorm
from archlab.arch_dsl.tree.block import Block, Branches
from archlab.kernels.activations import at_least_float32


class Streams(Primitive):
    """Keeps n residual streams in place of one: all begin as the embeddings, and their sum is what `final` reads.

    A branch F has weights of its own, by which it reads the streams H `[n, d_model]`, mixes them and writes its update:
    H <- R H + w^T F(r H) with r `[1, n]`, R `[n, n]` and w `[1, n]`. Its `join` is `add`, which this stands for. With
    `of_layers` F is instead what all branches of a layer add, one after another and each by its own join.

    With `entry: projected` the first stream begins as the embeddings x, and the others as y |x| / |y| with y = x E_i.
    With `exit: projected` `final` reads the mean of the first stream s and of z |s| / |z| with z = s_i X_i of the
    others. E_i and X_i are learned maps (Gemma 3n, which has no paper: transformers' modeling_gemma3n.py).

    The module's `forward(streams, call)` gives r, R and w `[..., n]`, or that of layers r and R alone and w by
    `written(result, call)`. The `depth` that it is built at is the number of its branch, or of its layer.
    """

    noun: ClassVar[str] = "stream connection"
    of_layers: ClassVar[bool] = False
    n: Count = 4
    entry: Literal["copies", "projected"] = added(default="copies")
    exit: Literal["sum", "projected"] = added(default="sum")

    def mixing(self, tokens: int, d_model: int) -> Cost:
        """What reading, mixing and writing cost, the weights being there; they keep the streams and the update."""
        elements = tokens * self.n * d_model
        flops = 2 * (self.n + 1) * elements
        return Cost(flops_matmul=flops, flops_model=flops, activations=elements + tokens * d_model)

    def first_read(self, depth: int) -> int:
        """The stream that the branch, or the layer, of this number reads at first."""
        return depth % self.n

    def maps(self) -> list[str]:
        """The ends that have maps, `entry` or `exit`."""
        return [name for name in ("entry", "exit") if getattr(self, name) == "projected"]

    def misplaced(self, blocks: list[Block]) -> Iterable[tuple[str, str]]:
        """What makes no sense over layers of these blocks: the field, and the reason."""
        return ()

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        for name in self.maps() if self.n == 1 else ():
            yield name, "maps all streams but the first, and there is no other; give n of at least 2"


class Connections(Streams):
    """Streams whose weights are made of the token's own streams, or with `dynamic: false` the same for all tokens."""

    dynamic: bool = True


@Streams.register("hyper")
class Hyper(Connections):
    """r = A_m^T, R = A_r^T, w = B with A = s_a tanh(norm(H) W_a) + S_a and B = s_b tanh(norm(H) W_b) + S_b:
    hyper-connections (arXiv:2409.19606, eq. 2 to 5 and 10 to 13; the code in its appendix J).

    W `[d_model, n + 2]` sees each stream by itself, after a layer norm, and starts at 0, s_a and s_b at 0.01. S starts
    so that branch k reads stream k mod n, all streams stay as they are, and all get the whole update (eq. 14): as a
    network with one residual stream, once a norm has taken the factor n from the sum. Static hyper-connections
    (`dynamic: false`) are S alone. Weight decay leaves S alone (section 4).
    """

    examples = ({}, {"n": 2, "dynamic": False}, {"n": 1})
    ops: ClassVar[tuple[str, ...]] = ("layer_norm",)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        n, width = self.n, ctx.d_model
        parts = {"mixing": self.mixing(tokens, width).keeping(0, parameters=n * (n + 2))}
        if self.dynamic:
            parts["norm"] = LayerNorm().cost(ctx.where(width=width, heads=n, held=True), tokens)
            made = Cost.product(tokens * n, width, n + 2).keeping(tokens * n * (width + 2 * (n + 2)), parameters=2)
            parts["projection"] = made
        return Cost.total(parts)


class _Hyper(Module, of=Hyper):
    def __init__(self, spec: Hyper, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        n = self.n = spec.n
        start = torch.zeros(n, n + 2, device="cpu")
        start[spec.first_read(ctx.depth), 0] = 1
        start[:, 1:-1] = torch.eye(n, device="cpu")
        start[:, -1] = 1
        self.static = undecayed(start.shape, equal_to(start))
        self.dynamic = spec.dynamic
        if spec.dynamic:
            self.norm = LayerNorm().build(ctx.at("norm", width=ctx.d_model))
            self.projection = Linear(ctx.d_model, n + 2, std=0.0)
            self.scale = parameter((2,), constant(0.01))

    def forward(self, streams: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.static
        if self.dynamic:
            made = self.projection(self.norm(streams, call)).tanh()  # [batch, time, n, n + 2]
            scale = torch.cat([self.scale[:1].expand(self.n + 1), self.scale[1:]])
            weights = weights + scale * made
        return weights[..., 0], weights[..., 1:-1].mT, weights[..., -1]


@Streams.register("manifold")
class Manifold(Connections):
    """r = sigmoid(P_r), R = Sinkhorn(P_R), w = 2 sigmoid(P_w) with P = a (rms(vec(H)) F) + b: manifold-constrained
    hyper-connections (mHC, arXiv:2512.24880, eq. 7 to 9).

    Sinkhorn scales the columns and then the rows of exp(P_R) to sum to 1, `iterations` times, so that R is doubly
    stochastic: it keeps the mean of the streams. F `[n d_model, n (n + 2)]` sees all streams at once; `dynamic: false`
    leaves b alone. The three a start at 0.01, as in the paper (appendix A.1), which says nothing of F and b. Here F
    starts at 0, and b so that branch k reads stream k mod n by 1/2 and the others by equal parts of the rest, R has
    0.99 on its diagonal, and w is 1: as a network with one residual stream, once a norm has taken the factor n.
    """

    examples = ({}, {"n": 2, "iterations": 3}, {"n": 3, "dynamic": False, "iterations": 2})
    iterations: Count = 20

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        n, width = self.n, ctx.d_model
        own = n * (n + 2)
        rows = tokens if self.dynamic else 1
        scales = rows * (3 * n * (n + 1) + 2 * n * self.iterations)  # see doubly_stochastic
        parts = {"mixing": self.mixing(tokens, width).keeping(scales, parameters=own)}
        if self.dynamic:
            made = Cost.product(tokens, n * width, own).keeping(tokens * (2 * own + 1), parameters=3)
            parts["projection"] = made
        return Cost.total(parts)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        yield from super().wrong(ctx)
        if self.n == 1:
            yield "n", "one stream leaves nothing to mix: its only doubly stochastic matrix is 1; give at least 2"


class _Manifold(Module, of=Manifold):
    def __init__(self, spec: Manifold, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        n = self.n = spec.n
        self.iterations, self.dynamic = spec.iterations, spec.dynamic
        start = torch.zeros(n * (n + 2), device="cpu")
        start[:n] = -math.log(2 * n - 3)  # the logit of 1 / (2 n - 2)
        start[spec.first_read(ctx.depth)] = 0.0
        start[2 * n :] = math.log(99 * (n - 1)) * torch.eye(n, device="cpu").flatten()
        self.static = undecayed(start.shape, equal_to(start))
        if spec.dynamic:
            self.projection = Linear(n * ctx.d_model, n * (n + 2), std=0.0)
            self.scale = parameter((3,), constant(0.01))

    def forward(self, streams: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        n, weights = self.n, at_least_float32(self.static)
        if self.dynamic:
            rows = streams.flatten(-2)  # [batch, time, n d_model]
            over = (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            scale = torch.cat([self.scale[:1].expand(n), self.scale[1:2].expand(n), self.scale[2:].expand(n * n)])
            weights = weights + scale * (over * self.projection(rows))
        read, write, mixed = weights.split([n, n, n * n], dim=-1)
        return read.sigmoid(), doubly_stochastic(mixed.unflatten(-1, (n, n)), self.iterations), 2 * write.sigmoid()


def doubly_stochastic(logits: Tensor, iterations: int) -> Tensor:
    """exp(logits) `[..., n, n]` with its columns and then its rows scaled to sum to 1, `iterations` times.

    The scales are carried from one to the next, as they are less to keep than matrices."""
    matrix = (logits - logits.detach().amax(-2, keepdim=True)).exp()  # columns are scaled first: this changes nothing
    columns = matrix.sum(-2).reciprocal()
    rows = (matrix * columns[..., None, :]).sum(-1).reciprocal()
    for _ in range(iterations - 1):
        columns = (matrix * rows[..., None]).sum(-2).reciprocal()
        rows = (matrix * columns[..., None, :]).sum(-1).reciprocal()
    return rows[..., None] * matrix * columns[..., None, :]


class StreamBranches(Branches):
    """The branches of one layer on several streams `[batch, time, n, d_model]`."""

    def __init__(self, block: Block, ctx: BuildContext, spec: Streams, before: int) -> None:
        """`before` are the branches of the layers before this one."""
        super().__init__(block, ctx)
        places = {name: ctx.at(f"streams.{name}", depth=before + index) for index, name in enumerate(block)}
        if spec.of_layers:
            places = {"layer": ctx.at("streams.layer")}
        self.streams = nn.ModuleDict({name: spec.build(place) for name, place in places.items()})

    def forward(self, streams: Tensor, call: Call) -> Tensor:
        call = call.layer(self.path)
        parts: list[Any] = list(self.children())[:-1]  # the last one is `streams`
        for branch, mix in zip(parts, self.streams.values(), strict=True):
            with torch.autocast(streams.device.type, enabled=False):  # which would round the streams
                read, mixed, write = mix(streams, call)
                stream = weighted(read[..., None, :], streams).squeeze(-2)
                kept = weighted(mixed, streams)
            update = branch.update(stream, call)
            if call.watch is not None:
                call.watch.tell("update", branch.path, call.padding, output=update)
            streams = kept + write.to(kept.dtype)[..., None] * update[..., None, :]
        if call.watch is not None:
            call.watch.tell("stream", self.path, call.padding, output=streams.sum(-2))
        return streams


def weighted(weights: Tensor, streams: Tensor) -> Tensor:
    """Sums `[batch, time, m, d_model]` of streams `[batch, time, n, d_model]` by weights `[..., m, n]`."""
    return weights.to(streams.dtype).expand(*streams.shape[:2], -1, -1) @ streams

"""Native sparse attention: compressed blocks of keys, a few blocks that these point to, and a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count, Range
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Norm, Rotary, Scale, build_site, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Linear, Site, normal, parameter, writing
from archlab.arch_dsl.parts.state import padding_of_keys, recent
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.kernels.activations import at_least_float32

FIXED = 3  # blocks that are always selected: the first, and the last two


@Branch.register("native_sparse")
class NativeSparse(Sublayer):
    """sum_c g_c softmax(scale q k_c^T) v_c over compressed, selected and window keys, each with maps of its own, and
    g_c a sigmoid per head of the branch's input: native sparse attention (NSA, arXiv:2502.11089, eq. 5).

    Compressed keys and values are MLPs, W_2 relu(W_1 .) with `width` hidden channels (by default head_dim), of the
    `block` tokens that follow every `stride`-th one, each plus a learned vector of its place in the block (eq. 7); a
    query reads those whose tokens all stand before it or are its own. Of the stretches of `selected_block` tokens a
    query reads the `top` to which it gives most of its compressed probability, summed over the query heads of a
    key/value head (eq. 9, 10); the first stretch and the last two always count among them. The `window` is the last
    tokens. Without `top` or `window` there is no such branch; with `mix: sum` all g are 1.

    The site `query` acts on queries, `key` on the keys of every branch before they are compressed. All three are
    computed of all pairs here, so nothing is saved; FLOPs of the model count the pairs that are read.
    """

    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "kv_heads", "head_dim", "query", "key", "block", "stride", "width",
        "selected_block", "top", "window", "mix", "share",
    )  # fmt: skip
    examples = (
        {"heads": 4, "kv_heads": 2, "block": 4, "stride": 2, "selected_block": 2, "top": 4, "window": 3,
         "query": ["rope"], "key": ["rope"], "pre": ["rmsnorm"]},
        {"heads": 4, "head_dim": 6, "block": 3, "stride": 1, "width": 5, "selected_block": 3, "top": 3, "window": None,
         "mix": "sum"},
        {"heads": 4, "kv_heads": 1, "block": 2, "stride": 2, "top": None, "window": 4, "key": ["rmsnorm"]},
    )  # fmt: skip

    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    query: tuple[Norm | Rotary | Scale, ...] = ()
    key: tuple[Norm | Rotary | Scale, ...] = ()
    block: Count = 32
    stride: Count = 16
    width: Count | None = None
    selected_block: Count = 64
    top: Annotated[int, Range(min=FIXED)] | None = 16
    window: Count | None = 512
    mix: Literal["gates", "sum"] = "gates"

    def resolve(self, ctx: BuildContext) -> Self:
        head_dim = self.head_dim or max(ctx.d_model // self.heads, 1)
        return self.replace(kv_heads=self.kv_heads or self.heads, head_dim=head_dim, width=self.width or head_dim)

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches that there are, each with keys and values of its own."""
        there = {"compressed": True, "selected": self.top is not None, "window": self.window is not None}
        return tuple(name for name, given in there.items() if given)

    def places(self, ctx: BuildContext) -> dict[str, BuildContext]:
        """The contexts of the sites; the spec must be resolved."""
        own = ctx.where(width=self.head_dim, held=False)
        return {"query": own.where(heads=self.heads), "key": own.where(heads=self.kv_heads)}

    def blocks(self, tokens: int) -> int:
        """How many compressed blocks so many tokens complete."""
        return max((tokens - self.block) // self.stride + 1, 0)

    def pairs(self, tokens: int) -> dict[str, int]:
        """How many pairs of a query and a key each branch reads in one head."""
        found = {"compressed": sum(self.blocks(t + 1) for t in range(tokens))}
        if self.top is not None:
            whole = self.top * self.selected_block - self.selected_block
            found["selected"] = sum(min(t + 1, whole + t % self.selected_block + 1) for t in range(tokens))
        if self.window is not None:
            found["window"] = sum(min(t + 1, self.window) for t in range(tokens))
        return found

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec = self.resolve(ctx)
        assert spec.head_dim is not None and spec.kv_heads is not None
        wide, narrow = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        places = spec.places(ctx)
        parts = {"query_projection": Cost.product(tokens, ctx.d_model, wide).keeping(spec.read(ctx, tokens))}
        parts["query"] = site_cost(spec.query, places["query"], "query", tokens)
        for name in spec.branches:
            parts[f"{name}_maps"] = Cost.product(tokens, ctx.d_model, 2 * narrow)
            parts[f"{name}_key"] = site_cost(spec.key, places["key"], "key", tokens)
        if spec.mix == "gates":
            scores, outputs = len(spec.branches) * spec.heads, len(spec.branches) * wide
            parts["gate_projection"] = Cost.product(tokens, ctx.d_model, scores).keeping(tokens * (scores + outputs))
        parts["compress"] = spec.compress_cost(tokens)
        parts["attend"] = spec.attend_cost(tokens)
        parts["output_projection"] = Cost.product(tokens, wide, ctx.d_model).keeping(tokens * wide)
        return Cost.total(spec.outer_cost(ctx, tokens) | parts)

    def compress_cost(self, tokens: int) -> Cost:
        """Both MLPs and their vectors of places; the spec must be resolved."""
        assert self.head_dim is not None and self.kv_heads is not None and self.width is not None
        rows, inputs = self.blocks(tokens) * self.kv_heads, self.block * self.head_dim
        both = Cost.total(
            {
                "input": Cost.product(rows, inputs, self.width).keeping(rows * inputs),
                "output": Cost.product(rows, self.width, self.head_dim).keeping(rows * (self.width + self.head_dim)),
            }
        )
        return both.keeping(0, parameters=inputs).times(2)

    def attend_cost(self, tokens: int) -> Cost:
        """The three attentions, and what decoding holds for them; the spec must be resolved."""
        assert self.head_dim is not None and self.kv_heads is not None
        a_pair, blocks, pairs = 4 * self.heads * self.head_dim, self.blocks(tokens), self.pairs(tokens)
        computed = {"compressed": tokens * blocks, "selected": tokens * tokens, "window": tokens * tokens}
        held = {"compressed": blocks + tokens - blocks * self.stride, "selected": tokens}
        held["window"] = min(tokens, self.window or tokens)
        masks = {"compressed": 2, "selected": self.kv_heads, "window": 1}  # a byte per pair
        kept = tokens * self.heads * self.head_dim
        for name in self.branches:
            weights = self.heads * computed[name] * (2 if name == "compressed" else 1)
            vectors = 0 if name == "compressed" else 2 * tokens * self.kv_heads * self.head_dim
            kept += weights + vectors + masks[name] * computed[name] // 4
        stretches = 0 if self.top is None else -(-tokens // self.selected_block)
        scores = 2 * self.kv_heads * tokens * blocks * stretches  # sums of a few numbers each, as one product
        return Cost(
            flops_matmul=a_pair * sum(computed[name] for name in self.branches) + scores,
            flops_model=a_pair * sum(pairs.values()),
            activations=kept,
            cache=2 * self.kv_heads * self.head_dim * sum(held[name] for name in self.branches),
        )

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        if self.head_dim is None and ctx.d_model % self.heads:
            message = f"{self.heads} heads do not divide d_model {ctx.d_model}; give head_dim or other heads"
            return [*found, Problem(f"{path}.heads", message, self.mark("heads"))]
        spec = self.resolve(ctx)
        return found + check_sites(spec, spec.places(ctx), path)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.heads % (self.kv_heads or self.heads):
            yield "kv_heads", f"{self.kv_heads} key/value heads do not divide {self.heads} query heads"
        if self.block % self.stride:
            yield "stride", f"must divide block {self.block}, found {self.stride}"
        if self.top is None and self.window is None:
            yield "top", "without it and window a query before the first whole block reads nothing; give one"
        if self.top is None and self.selected_block != NativeSparse.selected_block:
            yield "selected_block", "is the size of what top selects, and there is no top"
        elif self.top is not None and self.selected_block % self.stride:
            yield "selected_block", f"must be a multiple of stride {self.stride}, found {self.selected_block}"


class _NativeSparse(SublayerModule, of=NativeSparse):
    # B batch, T time, S keys (those that decoding holds, and T), N compressed ones, H heads, K key/value heads, G heads
    # of each, C branches, D head_dim
    query: Site

    def __init__(self, spec: NativeSparse, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert spec.head_dim is not None and spec.kv_heads is not None
        self.head_dim, self.kv_heads, self.scale = spec.head_dim, spec.kv_heads, spec.head_dim**-0.5
        self.branches, self.stride, self.window = spec.branches, spec.stride, spec.window
        self.block, self.selected_block, self.top = spec.block, spec.selected_block, spec.top
        wide, narrow, places = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.places(ctx)
        self.query_projection = Linear(ctx.d_model, wide, std=ctx.std)
        self.keys, self.values = nn.ModuleDict(), nn.ModuleDict()
        self.key_sites = nn.ModuleDict()
        for name in spec.branches:
            self.keys[name] = Linear(ctx.d_model, narrow, std=ctx.std)
            self.values[name] = Linear(ctx.d_model, narrow, std=ctx.std * ctx.gain)
            self.key_sites[name] = build_site(spec.key, places["key"].at(name), "key")
        count = len(spec.branches) * spec.heads
        self.gate_projection = None if spec.mix == "sum" else Linear(ctx.d_model, count, std=ctx.std)
        self.output_projection = writing(Linear(wide, ctx.d_model, std=ctx.residual_std))
        self.add_module("query", build_site(spec.query, places["query"], "query"))
        self.compress_keys = _Compression(spec, ctx.at("compressed_keys"))
        self.compress_values = _Compression(spec, ctx.at("compressed_values"))

    def reads(self) -> list[Linear]:
        gates = [] if self.gate_projection is None else [self.gate_projection]
        pairs = [part for name in self.branches for part in (self.keys[name], self.values[name])]
        return [self.query_projection, *pairs, *gates]  # type: ignore[list-item]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        q_BTHD = self.query(next(products).unflatten(-1, (-1, self.head_dim)), call, products)
        pairs = {name: self.pair(name, products, call) for name in self.branches}
        queries = q_BTHD.shape[1]
        read = queries if call.state is None else call.state.tokens + queries
        padding = padding_of_keys(call, self.path, q_BTHD, read)
        q_BKGTD = q_BTHD.transpose(1, 2).contiguous().unflatten(1, (self.kv_heads, -1))
        at_T1 = torch.arange(read - queries, read, device=q_BTHD.device)[:, None]
        probabilities = self.probabilities(q_BKGTD, self.compress_keys(pairs["compressed"][0], call), at_T1, padding)
        outputs = [mixed(probabilities, self.compress_values(pairs["compressed"][1], call))]
        if self.top is not None:
            near = self.selected(probabilities.detach().sum(2), at_T1, read, self.top)[:, :, None]
            outputs.append(self.read("selected", q_BKGTD, pairs["selected"], heard(near, padding), call))
        if self.window is not None:
            places = torch.arange(max(read - queries - self.window, 0), read, device=at_T1.device)
            near = ((places <= at_T1) & (at_T1 - places < self.window))[None, None, None]
            outputs.append(self.read("window", q_BKGTD, pairs["window"], heard(near, padding), call))
        out_BTCHD = torch.stack([out.flatten(1, 2).transpose(1, 2) for out in outputs], 2)
        if self.gate_projection is not None:
            out_BTCHD = out_BTCHD * next(products).sigmoid().unflatten(-1, (len(outputs), -1))[..., None]
        update: Tensor = self.output_projection(out_BTCHD.sum(2).flatten(-2))
        return update

    def probabilities(self, q: Tensor, k: Tensor, at: Tensor, padding: Tensor | None) -> Tensor:
        """The weights `[B, K, G, T, N]` of compressed keys `[B, N, K, D]`; 0 where a query stands before all blocks.

        q `[B, K, G, T, D]` are the queries at the positions `at` `[T, 1]`.
        """
        ends = torch.arange(k.shape[1], device=q.device) * self.stride + self.block - 1
        seen = (ends <= at)[None, None, None]
        if padding is not None:
            within = F.pad(padding, (0, max(self.block - padding.shape[1], 0))).unfold(1, self.block, self.stride)
            seen = seen & ~within.any(-1)[:, None, None, None, : k.shape[1]]
        return weights(q, k, seen | ~seen.any(-1, keepdim=True), self.scale) * seen

    def pair(self, name: str, products: Iterator[Tensor], call: Call) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, T, K, D]` of a branch."""
        key = self.key_sites[name](next(products).unflatten(-1, (-1, self.head_dim)), call, products)
        return key, next(products).unflatten(-1, (-1, self.head_dim))

    def read(self, name: str, q: Tensor, pair: tuple[Tensor, Tensor], near: Tensor, call: Call) -> Tensor:
        """What queries `[B, K, G, T, D]` read of the keys of a branch that are `near`, in that shape."""
        most = self.window if name == "window" else None
        k_BSKD = recent(call, self.path, pair[0], most, f".{name}.key")
        v_BSKD = recent(call, self.path, pair[1], most, f".{name}.value")
        return mixed(weights(q, k_BSKD, near, self.scale), v_BSKD)

    def selected(self, probabilities: Tensor, at: Tensor, tokens: int, top: int) -> Tensor:
        """Which of all `tokens` a query may read `[B, K, T, S]`, of compressed probabilities `[B, K, T, N]`."""
        device, size = at.device, self.selected_block
        starts = torch.arange(probabilities.shape[-1], device=device)[:, None] * self.stride
        stretches = torch.arange(-(-tokens // size), device=device)
        first, last = stretches * size, stretches * size + size
        shared = torch.minimum(starts + self.block, last) - torch.maximum(starts, first)
        with torch.autocast(device.type, enabled=False):
            scores = probabilities @ (shared.clamp(min=0) // self.stride).to(probabilities.dtype)
        here = at // size
        scores = scores.masked_fill((stretches == 0) | (here - stretches <= 1), float("inf"))
        scores = scores.masked_fill(stretches > here, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        keys = torch.arange(tokens, device=device)
        return chosen[..., keys // size] & (keys <= at)


class _Compression(nn.Module):
    """One vector per head for each block of tokens that is whole: an MLP of the vectors of its tokens."""

    def __init__(self, spec: NativeSparse, ctx: BuildContext) -> None:
        super().__init__()
        assert spec.head_dim is not None and spec.width is not None
        self.path, self.block, self.stride = ctx.path, spec.block, spec.stride
        self.places = parameter((spec.block, spec.head_dim), normal(ctx.std))
        self.input_projection = Linear(spec.block * spec.head_dim, spec.width, std=ctx.std)
        self.output_projection = Linear(spec.width, spec.head_dim, std=ctx.std)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """Those `[B, N, K, D]` of all blocks so far, with vectors of tokens `[B, T, K, D]`.

        Decoding holds them, and the tokens from the first block on that is not whole yet.
        """
        whole = recent(call, self.path, x, what=".tokens")
        count = max((whole.shape[1] - self.block) // self.stride + 1, 0)
        long = F.pad(whole, (0, 0, 0, 0, 0, max(self.block - whole.shape[1], 0)))
        blocks = long.unfold(1, self.block, self.stride)[:, :count].transpose(-1, -2)
        made = self.output_projection(self.input_projection((blocks + self.places).flatten(-2)).relu())
        if call.held is not None:
            call.held[f"{self.path}.tokens"] = whole[:, count * self.stride :].clone()
        return recent(call, self.path, made, what=".blocks")


def weights(q: Tensor, k: Tensor, near: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) `[B, K, G, T, S]` over the keys `[B, S, K, D]` that are `near`, of q `[B, K, G, T, D]`."""
    logits = (q.flatten(2, 3) @ k.permute(0, 2, 3, 1)).unflatten(2, q.shape[2:4])
    return (at_least_float32(logits) * scale).masked_fill(~near, float("-inf")).softmax(-1)


def mixed(shares: Tensor, v: Tensor) -> Tensor:
    """The sum `[B, K, G, T, D]` of values `[B, S, K, D]` by shares `[B, K, G, T, S]`."""
    found: Tensor = (shares.to(v.dtype).flatten(2, 3) @ v.transpose(1, 2)).unflatten(2, shares.shape[2:4])
    return found


def heard(near: Tensor, padding: Tensor | None) -> Tensor:
    """Which keys `[B, K, 1, T, S]` are read of those that are `near`: no padding `[B, keys]` but by itself."""
    if padding is None:
        return near
    queries, keys = near.shape[-2:]
    own = torch.ones(queries, keys, dtype=torch.bool, device=near.device).triu(keys - queries).tril(keys - queries)
    return near & (~padding[:, None, None, None, -keys:] | own)

"""Softmax attention with grouped heads, and a site for every place where papers change it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Mask
from archlab.arch_dsl.parts.layers import Linear, normal, table
from archlab.arch_dsl.parts.state import recent
from archlab.arch_dsl.primitives.branch import projections_of
from archlab.arch_dsl.primitives.heads import MultiHead, MultiHeadModule
from archlab.arch_dsl.primitives.masks import Causal
from archlab.kernels.attention import CAUSAL, CROSS, FULL, Pattern
from archlab.kernels.attention.listed import elements, listed
from archlab.kernels.attention.torch_ops import stretches


@Branch.register("attention")
class Attention(MultiHead):
    """softmax(scale q k^T + scores) v, per head, then one output map (arXiv:1706.03762, eq. 1).

    `kv_heads` groups query heads over fewer keys and values (arXiv:2305.13245); it defaults to `heads`, `head_dim` to
    d_model / heads, and `scale` to 1 / sqrt(head_dim). Of the linear maps named in `bias` each has one; those named in
    `zero` start at zero. With `queries: positions` the queries come from a learned table of positions instead of the
    stream: the layer on top of PanGu-alpha (arXiv:2104.12369, section 2.2). With `memory` every query also reads that
    many learned keys and values, as in prefix tuning (arXiv:2101.00190, section 4.2; arXiv:1907.01470, eq. 9). The
    sites hold what acts on queries, keys, values `[batch, time, heads, head_dim]`, on the logits, and on each head's
    output (`sdpa`) before the output map.
    """

    examples = (
        {"heads": 4, "kv_heads": 2, "query": ["rope"], "key": ["rope"]},
        {"heads": 4, "kv_heads": 1, "head_dim": 6, "bias": True, "mask": {"type": "window", "size": 4}},
        {"heads": 4, "bias": ["query", "output"], "zero": ["output"], "scale": 1.0, "queries": "positions"},
        {"heads": 4, "kv_heads": 2, "memory": 3, "mask": {"type": "window", "size": 4}},
    )
    short_forms: ClassVar[tuple[str, ...]] = ("gate", "positional", "qk_norm")
    queries: Literal["hidden", "positions"] = added(default="hidden")
    mask: Mask = Causal()
    memory: Count | None = added(default=None)

    def build(self, ctx: BuildContext) -> nn.Module:
        return (_Attention if self.queries == "hidden" else _PositionAttention)(self.resolve(ctx), ctx)

    def facts(self) -> dict[str, Any]:
        ahead = self.mask.looks_ahead or self.mask.reads_prefix
        return {"documents": self.mask.documents, "window": self.mask.window, "ahead": ahead}

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec = self.resolve(ctx)
        own, _ = spec.places(ctx)
        widths = spec.widths()
        more = spec.memory or 0
        pattern = spec.mask.pattern(spec.heads)
        by_head = pattern.blocks is not None and not pattern.blocks.cover(tokens)
        drawn = spec.drawn(pattern, tokens) if by_head else 0
        masked = more > 0 or spec.mask.documents or pattern not in (CAUSAL, FULL)
        seen = min(tokens, spec.mask.window or tokens)
        pairs = 0 if spec.memory is not None else spec.products(pattern, tokens)
        attend = Cost(
            flops_matmul=4 * widths["query"] * tokens * (tokens + more),
            flops_model=4 * widths["query"] * (spec.mask.pairs(tokens) + tokens * more),
            activations=spec.kept(own, tokens, tokens + more, spec.heads if by_head else int(masked), pairs) + drawn,
            cache=seen * (2 * widths["key"] + sum(item.per_key(own) for item in spec.scores)),
        )
        parts = spec.parts(ctx, tokens, tokens, attend)
        parts["memory"] = Cost(parameters=2 * more * widths["key"])
        reader = "query_projection"
        if spec.queries == "positions":
            rows = (ctx.max_positions or tokens) * ctx.d_model
            parts["query_table"] = Cost(parameters=rows, activations=tokens * ctx.d_model)
            reader = "key_projection"
        parts[reader] = parts[reader].keeping(spec.read(ctx, tokens))
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def products(self, pattern: Pattern, tokens: int) -> int:
        """How many pairs plain products compute of a head where they do it some queries at a time (kernels/attention);
        0 where another implementation is chosen, or all pairs are."""
        kinds = {item.kind for item in self.scores}
        if self.mask.documents or self.mask.reads_prefix:
            return 0
        if pattern.blocks is not None:
            return elements(pattern, tokens)[0] if not self.scores and listed(pattern, tokens) else 0
        if pattern.order == "full":
            return tokens * tokens if "bias" in kinds else 0
        if pattern == CAUSAL and kinds <= {"softcap"}:
            return 0
        return sum((part.stop - part.start) * (part.last - part.first) for part in stretches(tokens, tokens, pattern))

    def drawn(self, pattern: Pattern, tokens: int) -> int:
        """What drawing blocks for each head keeps: copies of keys and values and the places that they come from, in
        integers of 64 bits; or a byte per pair, from which the mask is made. The spec must be resolved."""
        if self.memory is not None or not self.products(pattern, tokens):
            return self.heads * tokens * tokens // 4
        assert self.head_dim is not None and pattern.blocks is not None
        copied = elements(pattern, tokens)[1]
        return 2 * self.heads * (copied * self.head_dim + copied // pattern.blocks.size)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return super().check(ctx, path) + self.mask.check(ctx, f"{path}.mask")

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.queries == "positions" and ctx.max_positions is None:
            yield "queries", "queries from positions need max_positions, which nothing gives here"


class _Attention(MultiHeadModule):
    # B batch, T time, S keys (those that decoding holds, and T), H heads, K key/value heads, D head_dim
    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        mask = spec.mask
        pattern = mask.pattern(spec.heads, ctx.depth)
        asked = pattern if spec.memory is None else CROSS
        super().__init__(spec, ctx, asked, documents=mask.documents, prefix=mask.reads_prefix)
        self.memory = None if spec.memory is None else _Memory(spec, ctx, pattern)
        self.memory_size = spec.memory or 0
        self.window, self.documents, self.reads_prefix = mask.window, mask.documents, mask.reads_prefix
        self.looks_ahead = mask.looks_ahead

    def reads(self) -> list[Linear]:
        inner = projections_of(self.query, self.key, self.value, self.scores, self.sdpa)
        return [self.query_projection, self.key_projection, self.value_projection, *inner]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        return self.mix(next(products), products, call)

    def mix(self, query: Tensor, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update `[batch, time, d_model]` from projected queries `[batch, time, H D]` and the other products."""
        if call.held is not None and (self.looks_ahead or (self.documents and call.documents is not None)):
            what = "a mask that looks ahead reads" if self.looks_ahead else "documents are kept apart by"
            raise ValueError(f"{self.path}: {what} all tokens at once, and cannot decode them one after another")
        q, k, v = (self.heads_of(product) for product in (query, next(products), next(products)))
        q_BTHD = self.query(q, call, products)
        k_BTKD = self.key(k, call, products)
        k_BSKD = recent(call, f"{self.path}.key", k_BTKD, self.window)
        v_BSKD = recent(call, f"{self.path}.value", self.value(v, call, products), self.window)
        prefix = call.prefix if self.reads_prefix else None
        if call.held is not None and prefix is not None and bool((prefix > k_BSKD.shape[1]).any()):
            raise ValueError(f"{self.path}: a prefix is read at once, and here its end was not read yet")
        if self.apart and call.positions is None:
            given = self.scores.parts(q_BTHD, k_BSKD, call, products)
        else:
            given = {"bias": self.scores(q_BTHD, k_BSKD, call, products)}
        hidden = {
            "prefix": prefix,
            "documents": call.documents if self.documents else None,
            "padding": self.key_padding(k_BTKD, k_BSKD, call),
        }
        if self.memory is not None:
            k_BSKD, v_BSKD, bias = self.memory(q_BTHD.shape[1], k_BSKD, v_BSKD, given["bias"], hidden)
            given, hidden = {"bias": bias}, {}
        return self.attention(q_BTHD, k_BSKD, v_BSKD, products, call, **given, **hidden)

    def key_padding(self, own: Tensor, keys: Tensor, call: Call) -> Tensor | None:
        """Which of all keys `[batch, keys]` nothing may read, of which `own` are those of this call."""
        path = f"{self.path}.padding"
        if call.held is None or (call.padding is None and path not in call.held):
            return call.padding
        new = own.new_zeros(own.shape[:2], dtype=torch.bool) if call.padding is None else call.padding
        whole = recent(call, path, new, self.window)
        return F.pad(whole, (keys.shape[1] - whole.shape[1], 0))


class _Memory(nn.Module):
    """Learned keys and values, which every query reads beside those that `pattern` lets it read."""

    def __init__(self, spec: Attention, ctx: BuildContext, pattern: Pattern) -> None:
        super().__init__()
        assert spec.memory is not None and spec.kv_heads is not None and spec.head_dim is not None
        shape = spec.memory, spec.kv_heads, spec.head_dim
        self.keys, self.values = table(shape, normal(ctx.std)), table(shape, normal(ctx.std))
        self.pattern = pattern

    def forward(
        self, queries: int, k: Tensor, v: Tensor, bias: Tensor | None, hidden: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[B, memory + S, K, D]`, and a bias that hides what is not to be read, for all pairs."""
        seen = self.pattern.dense(queries, k.shape[1], k.device, **hidden)
        bias = k.new_zeros(1, 1, queries, k.shape[1]) if bias is None else bias
        if seen is not None:
            bias = bias.masked_fill(~seen, float("-inf"))
        own = (part.to(k.dtype).expand(len(k), -1, -1, -1) for part in (self.keys, self.values))
        keys, values = (torch.cat(pair, 1) for pair in zip(own, (k, v), strict=True))
        return keys, values, F.pad(bias, (len(self.keys), 0))


class _PositionAttention(_Attention):
    """Its queries are those of positions: row t of a learned table asks for the token after position t."""

    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert ctx.max_positions is not None
        self.query_table = table((ctx.max_positions, ctx.d_model), normal(ctx.std))

    def reads(self) -> list[Linear]:
        return super().reads()[1:]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        first = next(products)
        rows = self.query_table[call.positions_of(first.shape[1], first.device)]
        query = self.query_projection(rows).expand(first.shape[0], -1, -1)
        return self.mix(query, itertools.chain((first,), products), call)

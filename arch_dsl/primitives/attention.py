"""Softmax attention with grouped heads, and a site for every place where papers change it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import Linear, Site, normal, table
from archlab.arch_dsl.primitives import earlier_keys
from archlab.arch_dsl.primitives.branch import projections_of
from archlab.arch_dsl.primitives.heads import MultiHead, Sizes
from archlab.arch_dsl.primitives.low_rank import AdaptedModule, LowRank, check_low_rank, low_rank_cost
from archlab.arch_dsl.primitives.low_rank import normal as normal_updates
from archlab.arch_dsl.primitives.self_attention import SelfAttention
from archlab.arch_dsl.primitives.switch import Switch, SwitchedModule, check_switch, copies, switch_cost
from archlab.kernels.attention import CROSS, Pattern


@Branch.register("attention")
class Attention(SelfAttention):
    """softmax(scale q k^T + scores) v, per head, then one output map (arXiv:1706.03762, eq. 1).

    `kv_heads` groups query heads over fewer keys and values (arXiv:2305.13245); it defaults to `heads`, `head_dim` to
    d_model / heads, and `scale` to 1 / sqrt(head_dim). A value has `value_dim` channels, by default `head_dim`. Of the
    linear maps named in `bias` each has one; those named in `zero` start at zero. With `queries: positions` the queries
    come from a learned table of positions instead of the stream: the layer on top of PanGu-alpha (arXiv:2104.12369,
    section 2.2). With `memory` every query also reads that many learned keys and values, as in prefix tuning
    (arXiv:2101.00190, section 4.2; arXiv:1907.01470, eq. 9). The sites hold what acts on queries, keys, values `[batch,
    time, heads, head_dim]`, on the logits, and on each head's output (`sdpa`) before the output map.

    With `kv: earlier` there are no maps of keys and values: both are those of the nearest earlier layer of the same
    mask that has its own (cross-layer attention, arXiv:2405.12981, section 3), which decoding holds once. What acts on
    them is that layer's: the same said here, or nothing. `switch` gives maps several experts, `lora` low-rank updates.

    With `concat: embeddings` its input is `[x; x_0]` with 2 d_model channels, x_0 being what enters the first layer
    (Zamba, arXiv:2405.16712, section 3): `pre` and the maps read both, and sizes that derive from d_model stay.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"heads": 4, "kv_heads": 2, "query": ["rope"], "key": ["rope"]},
        {"heads": 4, "kv_heads": 1, "head_dim": 6, "bias": True, "mask": {"type": "window", "size": 4}},
        {"heads": 4, "bias": ["query", "output"], "zero": ["output"], "scale": 1.0, "queries": "positions"},
        {"heads": 4, "kv_heads": 2, "memory": 3, "mask": {"type": "window", "size": 4}},
        {"heads": 4, "kv_heads": 2, "kv": "earlier", "query": ["rope"], "key": ["rope"], "bias": True},
        {"heads": 4, "kv_heads": 2, "value_dim": 6, "value": ["rmsnorm"], "sdpa": ["rmsnorm"]},
        {"heads": 4, "concat": "embeddings", "pre": ["rmsnorm"], "query": ["rope"], "key": ["rope"]},
    )
    short_forms: ClassVar[tuple[str, ...]] = ("gate", "positional", "qk_norm")
    queries: Literal["hidden", "positions"] = added(default="hidden")
    value_dim: Count | None = added(default=None)
    memory: Count | None = added(default=None)
    kv: Literal["own", "earlier"] = added(default="own")
    switch: tuple[Switch, ...] = added(default=())
    concat: Literal["none", "embeddings"] = added(default="none")
    lora: tuple[LowRank, ...] = added(default=())
    unshared: ClassVar[tuple[str, ...]] = ("lora",)
    later: ClassVar[tuple[str, ...]] = ("kv",)

    def build(self, ctx: BuildContext) -> nn.Module:
        return (_Attention if self.queries == "hidden" else _PositionAttention)(self.resolve(ctx), ctx)

    def resolve(self, ctx: BuildContext) -> Self:
        spec: Self = earlier_keys.without_own(super().resolve(ctx))
        if spec.value_dim == MultiHead.sizes(spec).value_dim:
            spec = spec.replace(value_dim=None)
        return spec.replace(lora=normal_updates(self.lora, self.updatable()))

    def sizes(self) -> Sizes:
        found = super().sizes()
        return found if self.value_dim is None else found._replace(value_dim=self.value_dim)

    def value_heads(self, d_model: int) -> tuple[int, int]:
        heads, head_dim = super().value_heads(d_model)
        return heads, self.value_dim or head_dim

    @property
    def reads_embeddings(self) -> bool:
        """Whether it reads what enters the first layer."""
        return self.concat == "embeddings"

    def placed(self, ctx: BuildContext) -> BuildContext:
        return ctx.where(hidden=2 * ctx.d_model, held=False) if self.reads_embeddings else ctx

    def inputs(self, d_model: int) -> dict[str, int]:
        own = super().inputs(2 * d_model if self.reads_embeddings else d_model)
        return own if self.queries == "hidden" else own | {"query": d_model}

    def updatable(self) -> tuple[str, ...]:
        """The maps of the branch's input that are plain ones, and so may have low-rank updates."""
        names = ("query",) if self.kv == "earlier" else ("query", "key", "value")
        return tuple(x for x in names if self.copies(x) == 1 and (x, self.queries) != ("query", "positions"))

    @property
    def more(self) -> int:
        return self.memory or 0

    def copies(self, name: str) -> int:
        return copies(self.switch, name)

    def cached(self) -> int:
        return super().cached() if self.kv == "own" else 0

    def attend_cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return super().attend_cost(ctx, tokens).keeping(-earlier_keys.kept(self, ctx, tokens))

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec, ctx = self.resolve(ctx), self.placed(ctx)
        parts = spec.parts(ctx, tokens, tokens, spec.attend_cost(ctx, tokens))
        widths = spec.widths()
        parts |= spec.weights_cost(ctx, tokens)
        parts["memory"] = Cost(parameters=spec.more * (widths["key"] + widths["value"]))
        parts = {"switch": Cost()} | parts | switch_cost(spec, ctx, tokens)
        read = spec.inputs(ctx.d_model)
        maps = {name: (read[name], widths[name]) for name in spec.updatable()}
        parts["lora"] = low_rank_cost(spec.lora, maps, tokens)
        if spec.kv == "earlier":
            parts = {name: part for name, part in parts.items() if name not in earlier_keys.PARTS}
        reader = "query_projection"
        if spec.queries == "positions":
            rows = (ctx.max_positions or tokens) * ctx.d_model
            parts["query_table"] = Cost(parameters=rows, activations=tokens * ctx.d_model)
            reader = "key_projection"
        parts[reader] = parts[reader].keeping(spec.read(ctx, tokens))
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(self.placed(ctx), path) + check_low_rank(self, self.updatable(), path)
        if self.head_dim is None and ctx.d_model % (self.maps * self.heads):
            return found
        return found + check_switch(self.resolve(ctx), self.placed(ctx), path)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.queries == "positions" and ctx.max_positions is None:
            yield "queries", "queries from positions need max_positions, which nothing gives here"
        yield from earlier_keys.wrong(self)


class _Attention(AdaptedModule, SwitchedModule):
    # B batch, T time, S keys (those that decoding holds, and T), H heads, K key/value heads, D head_dim
    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        ctx = spec.placed(ctx)
        super().__init__(spec, ctx, None if spec.memory is None else CROSS)
        if spec.reads_embeddings:
            self.pre = Site([("concat", _Concat()), *self.pre.named_children()], self.pre.path)
        pattern = spec.mask.pattern(spec.sizes().heads, ctx.depth)
        self.memory = None if spec.memory is None else _Memory(spec, ctx, pattern)
        self.memory_size = spec.more
        self.lends = ""  # what later layers call its keys and values
        self.borrows = earlier_keys.borrowed(self, spec, ctx)
        self.inputs = ("query",) if self.borrows else ("query", "key", "value")
        self.add_routers(spec, ctx)
        maps: dict[str, Any] = {name: self.get_submodule(f"{name}_projection") for name in spec.updatable()}
        self.add_low_rank(spec, maps, ctx)

    def reads(self) -> list[Linear]:
        inner = projections_of(self.query, self.key, self.value, self.scores, self.sdpa)
        return [*self.wanted(), *inner, *self.wanted_late()]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        return self.mix(next(products), products, call)

    def mix(self, query: Tensor, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update `[batch, time, d_model]` from projected queries `[batch, time, H D]` and the other products."""
        self.refuse(call)
        made = self.made(query, products)
        q_BTHD = self.query(self.heads_of(made[0]), call, products)
        if self.borrows:
            k_BSKD, v_BSKD = call.across[f"{self.borrows} keys"], call.across[f"{self.borrows} values"]
        else:
            k_BSKD = self.held("key", self.key(self.heads_of(made[1]), call, products), call)
            v_BSKD = self.held("value", self.value(self.values_of(made[2]), call, products), call)
        if self.lends:
            call.across[f"{self.lends} keys"], call.across[f"{self.lends} values"] = k_BSKD, v_BSKD
        return self.masked(q_BTHD, k_BSKD, v_BSKD, products, call)

    def shown(
        self, q: Tensor, k: Tensor, v: Tensor, products: Iterator[Tensor], call: Call, given: dict[str, Any],
        hidden: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        if self.memory is not None:
            k, v, bias = self.memory(q.shape[1], k, v, given["bias"], hidden)
            given, hidden = {"bias": bias}, {}
        return super().shown(q, k, v, products, call, given, hidden)


class _Concat(nn.Module):
    """Beside the stream `[batch, time, d_model]` what enters the first layer."""

    def forward(self, stream: Tensor, call: Call) -> Tensor:
        return torch.cat([stream, call.across["embeddings"]], -1)


class _Memory(nn.Module):
    """Learned keys and values, which every query reads beside those that `pattern` lets it read."""

    def __init__(self, spec: Attention, ctx: BuildContext, pattern: Pattern) -> None:
        super().__init__()
        grids = spec.grids()
        self.keys = table((spec.more, *grids["key"]), normal(ctx.std))
        self.values = table((spec.more, *grids["value"]), normal(ctx.std))
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

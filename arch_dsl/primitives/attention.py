"""Softmax attention with grouped heads, and a site for every place where papers change it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arch_dsl.context import BuildContext, Call, Cost
from arch_dsl.decoding import recent
from arch_dsl.errors import Problem
from arch_dsl.families import (
    Branch,
    Carry,
    Gate,
    Mask,
    Norm,
    Rotary,
    Scale,
    Score,
    build_shared,
    build_site,
    check_site,
    site_cost,
)
from arch_dsl.layers import Linear, normal, parameter
from arch_dsl.notation import ProjectionNotation, Projections, chosen
from arch_dsl.primitives.branch import Headed, SublayerModule
from arch_dsl.primitives.masks import Causal
from arch_dsl.spec import Count, Positive, added
from kernels.attention import CAUSAL, FULL

NAMES = ("query", "key", "value", "output")


@Branch.register("attention")
class Attention(Headed):
    """softmax(scale q k^T + scores) v, per head, then one output map (arXiv:1706.03762, eq. 1).

    `kv_heads` groups query heads over fewer keys and values (arXiv:2305.13245); it defaults to `heads`, `head_dim` to
    d_model / heads, and `scale` to 1 / sqrt(head_dim). Of the linear maps named in `bias` each has one; those named in
    `zero` start at zero. With `queries: positions` the queries come from a learned table of positions instead of the
    stream: the layer on top of PanGu-alpha (arXiv:2104.12369, section 2.2). The sites hold what acts on queries, keys,
    values `[batch, time, heads, head_dim]`, on the logits, and on each head's output (`sdpa`) before the output map.
    """

    ops: ClassVar[tuple[str, ...]] = ("attention",)
    examples = (
        {"heads": 4, "kv_heads": 2, "query": ["rope"], "key": ["rope"]},
        {"heads": 4, "kv_heads": 1, "head_dim": 6, "bias": True, "mask": {"type": "window", "size": 4}},
        {"heads": 4, "bias": ["query", "output"], "zero": ["output"], "scale": 1.0, "queries": "positions"},
    )
    short_forms: ClassVar[tuple[str, ...]] = ("gate", "positional", "qk_norm")
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    bias: Annotated[Projections, ProjectionNotation(*NAMES)] = False
    zero: Annotated[Projections, ProjectionNotation(*NAMES)] = added(default=False)
    scale: Positive | None = added(default=None)
    queries: Literal["hidden", "positions"] = added(default="hidden")
    query: tuple[Carry | Gate | Norm | Rotary | Scale, ...] = ()
    key: tuple[Carry | Gate | Norm | Rotary | Scale, ...] = ()
    value: tuple[Carry | Gate | Norm | Scale, ...] = ()
    mask: Mask = Causal()
    scores: tuple[Score, ...] = ()
    sdpa: tuple[Norm | Gate | Scale, ...] = ()

    def resolve(self, ctx: BuildContext) -> Self:
        head_dim = self.head_dim or max(ctx.d_model // self.heads, 1)
        scale = None if self.scale == head_dim**-0.5 else self.scale
        return self.replace(kv_heads=self.kv_heads or self.heads, head_dim=head_dim, scale=scale)

    def build(self, ctx: BuildContext) -> nn.Module:
        kind = _Attention if self.queries == "hidden" else _PositionAttention
        return kind(self.resolve(ctx), ctx)

    def places(self, ctx: BuildContext) -> tuple[BuildContext, BuildContext]:
        """The contexts of tensors with query heads and with key/value heads; the spec must be resolved."""
        assert self.kv_heads is not None and self.head_dim is not None
        scale = self.scale or self.head_dim**-0.5
        own = ctx.where(
            heads=self.heads,
            width=self.head_dim,
            logit_scale=scale,
            documents=self.mask.documents,
            window=self.mask.window,
            ahead=self.mask.looks_ahead or self.mask.reads_prefix,
            held=False,
        )
        return own, own.where(heads=self.kv_heads)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec = self.resolve(ctx)
        assert spec.kv_heads is not None and spec.head_dim is not None
        own, shared = spec.places(ctx)
        widths = spec.widths()
        per_pair = 4 * widths["query"]
        parts = {
            f"{name}_projection": Cost.product(tokens, ctx.d_model, widths[name], chosen(spec.bias, name))
            for name in NAMES[:3]
        }
        reader = "query_projection"
        if spec.queries == "positions":
            rows = (ctx.max_positions or tokens) * ctx.d_model
            parts["query_table"] = Cost(parameters=rows, activations=tokens * ctx.d_model)
            reader = "key_projection"
        parts[reader] = parts[reader].keeping(spec.read(ctx, tokens))
        for name, place in (("query", own), ("key", shared), ("value", shared), ("scores", own)):
            parts[name] = site_cost(getattr(spec, name), place, name, tokens)
        seen = min(tokens, spec.mask.window or tokens)
        parts["attend"] = Cost(
            flops_matmul=per_pair * tokens * tokens,
            flops_model=per_pair * spec.mask.pairs(tokens),
            activations=spec.kept(own, tokens),
            cache=seen * (2 * widths["key"] + sum(item.per_key(own) for item in spec.scores)),
        )
        parts["sdpa"] = site_cost(spec.sdpa, own.where(held=True), "sdpa", tokens)
        output = Cost.product(tokens, widths["query"], ctx.d_model, chosen(spec.bias, "output"))
        parts["output_projection"] = output.keeping(tokens * widths["query"] if spec.sdpa else 0)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def kept(self, ctx: BuildContext, tokens: int) -> int:
        """What the attention itself keeps: queries, keys, values, outputs, and what its implementation needs more.

        The fused one needs a log-sum-exp per query and a mask or bias as a matrix; torch's own with a learned bias
        keeps the weights, keys and values for every head; plain products keep the matrix of each of their steps.
        """
        query, key = (self.widths()[name] for name in ("query", "key"))
        kinds = {item.kind for item in self.scores}
        learned = any(item.kind == "bias" and item.cost(ctx, 1).parameters for item in self.scores)
        if plain := kinds - {"bias"}:
            vectors, squares = 2 * query + 2 * key, self.heads * (1 + len(plain))
            vectors += query + 2 * self.heads if "sinks" in kinds else 0
        elif learned:
            vectors, squares = 4 * query + tokens // 4, self.heads  # the mask is a byte per pair
        else:
            vectors, masked = 2 * query + 2 * key + self.heads, self.mask.documents or not self.is_plain()
            squares = self.heads if kinds else int(masked)
        return tokens * (vectors + squares * tokens)

    def is_plain(self) -> bool:
        """Whether no matrix has to say which pairs exist."""
        return self.mask.pattern() in (CAUSAL, FULL)

    def widths(self) -> dict[str, int]:
        """The widths of queries, keys and values, all heads together."""
        assert self.kv_heads is not None and self.head_dim is not None
        own, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"query": own, "key": shared, "value": shared}

    def value_heads(self, d_model: int) -> tuple[int, int]:
        return self.kv_heads or self.heads, self.head_dim or d_model // self.heads

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        problems = super().check(ctx, path)
        if self.head_dim is None and ctx.d_model % self.heads:
            message = f"{self.heads} heads do not divide d_model {ctx.d_model}; give head_dim or other heads"
            return [*problems, Problem(f"{path}.heads", message, self.mark("heads"))]  # the rest would only echo it
        spec = self.resolve(ctx)
        assert spec.kv_heads is not None
        if self.heads % spec.kv_heads:
            message = f"{spec.kv_heads} key/value heads do not divide {self.heads} query heads"
            problems.append(Problem(f"{path}.kv_heads", message, self.mark("kv_heads")))
        if self.queries == "positions" and ctx.max_positions is None:
            message = "queries from positions need max_positions, which nothing gives here"
            problems.append(Problem(f"{path}.queries", message, self.mark("queries")))
        own, shared = spec.places(ctx)
        problems += self.mask.check(own, f"{path}.mask")
        for name, place in (("query", own), ("key", shared), ("value", shared), ("scores", own), ("sdpa", own)):
            problems += check_site(getattr(spec, name), place, f"{path}.{name}")
        return problems


class _Attention(SublayerModule):
    # B batch, T time, S keys (those that decoding holds, and T), H heads, K key/value heads, D head_dim
    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert spec.head_dim is not None
        own, shared = spec.places(ctx)
        self.head_dim, self.window, self.scale = spec.head_dim, spec.mask.window, own.logit_scale
        self.path, self.documents = ctx.path, spec.mask.documents
        self.pattern, self.reads_prefix = spec.mask.pattern(spec.heads, ctx.depth), spec.mask.reads_prefix
        self.looks_ahead = spec.mask.looks_ahead
        width = spec.widths()

        def linear(name: str, inputs: int, outputs: int, std: float) -> Linear:
            std = 0.0 if chosen(spec.zero, name) else std
            return Linear(inputs, outputs, std=std, bias=chosen(spec.bias, name))

        self.query_projection = linear("query", ctx.d_model, width["query"], ctx.std)
        self.key_projection = linear("key", ctx.d_model, width["key"], ctx.std)
        self.value_projection = linear("value", ctx.d_model, width["value"], ctx.std * ctx.gain)
        self.output_projection = linear("output", width["query"], ctx.d_model, ctx.residual_std)
        self.query = build_site(spec.query, own, "query")
        self.key = build_site(spec.key, shared, "key")
        self.value = build_site(spec.value, shared, "value")
        self.sdpa = build_site(spec.sdpa, own, "sdpa")
        self.scores = Scores(spec.scores, own)
        self.attend = ctx.select(
            "attention",
            **self.pattern.options(),
            bias=len(self.scores.biases) > 0,
            softcap=self.scores.softcap is not None,
            sinks=self.scores.sinks is not None,
            documents=self.documents,
            prefix=self.reads_prefix,
        )

    def reads(self) -> list[Linear]:
        sites = (self.query, self.key, self.value, self.scores, self.sdpa)
        inner = [projection for site in sites for projection in site.projections()]
        return [self.query_projection, self.key_projection, self.value_projection, *inner]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        return self.mix(next(products), products, call)

    def mix(self, query: Tensor, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update `[batch, time, d_model]` from projected queries `[batch, time, H D]` and the other products."""
        if call.held is not None and (self.looks_ahead or (self.documents and call.documents is not None)):
            what = "a mask that looks ahead reads" if self.looks_ahead else "documents are kept apart by"
            raise ValueError(f"{self.path}: {what} all tokens at once, and cannot decode them one after another")
        q = query.unflatten(-1, (-1, self.head_dim))
        k, v = (next(products).unflatten(-1, (-1, self.head_dim)) for _ in range(2))
        q_BTHD = self.query(q, call, products)
        k_BTKD = self.key(k, call, products)
        k_BSKD = recent(call, f"{self.path}.key", k_BTKD, self.window)
        v_BSKD = recent(call, f"{self.path}.value", self.value(v, call, products), self.window)
        bias = self.scores(q_BTHD, k_BSKD, call, products)
        o_BHTD = self.attend(
            q_BTHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            bias=bias,
            pattern=self.pattern,
            scale=self.scale,
            softcap=self.scores.softcap,
            sinks=self.scores.sink_logits(),
            prefix=call.prefix if self.reads_prefix else None,
            documents=call.documents if self.documents else None,
            padding=self.key_padding(k_BTKD, k_BSKD, call),
        )
        o_BTHD = self.sdpa(o_BHTD.transpose(1, 2), call, products)
        return self.output_projection(o_BTHD.flatten(-2))  # type: ignore[no-any-return]

    def key_padding(self, own: Tensor, keys: Tensor, call: Call) -> Tensor | None:
        """Which of all keys `[batch, keys]` nothing may read, of which `own` are those of this call."""
        path = f"{self.path}.padding"
        if call.held is None or (call.padding is None and path not in call.held):
            return call.padding
        new = own.new_zeros(own.shape[:2], dtype=torch.bool) if call.padding is None else call.padding
        whole = recent(call, path, new, self.window)
        return F.pad(whole, (keys.shape[1] - whole.shape[1], 0))


class _PositionAttention(_Attention):
    """Its queries are those of positions: row t of a learned table asks for the token after position t."""

    def __init__(self, spec: Attention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert ctx.max_positions is not None
        self.query_table = parameter((ctx.max_positions, ctx.d_model), normal(ctx.std))

    def reads(self) -> list[Linear]:
        return super().reads()[1:]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        first = next(products)
        rows = self.query_table[call.positions_of(first.shape[1], first.device)]
        query = self.query_projection(rows).expand(first.shape[0], -1, -1)
        return self.mix(query, itertools.chain((first,), products), call)


class Scores(nn.Module):
    """What changes the logits: biases, summed; a cap; sinks."""

    def __init__(self, items: tuple[Score, ...], ctx: BuildContext) -> None:
        super().__init__()
        place = ctx.where(site="scores")
        self.softcap = next((item.cap for item in items if item.kind == "softcap"), None)  # type: ignore[attr-defined]
        self.sinks: nn.Module | None = None
        self.biases = nn.ModuleDict()
        for item in items:
            if item.kind == "bias":
                self.biases[item.type] = build_shared(item, place.at(f"scores.{item.type}"))
            elif item.kind == "sinks":
                self.sinks = build_shared(item, place.at(f"scores.{item.type}"))

    def projections(self) -> list[Linear]:
        """The linear maps of the branch's input that biases need, in order."""
        return [item.projection for item in self.biases.values() if _has_projection(item)]  # type: ignore[misc]

    def forward(self, q: Tensor, k: Tensor, call: Call, projected: Iterator[Tensor]) -> Tensor | None:
        total: Tensor | None = None
        for item in self.biases.values():
            bias = item(q, k, call, next(projected)) if _has_projection(item) else item(q, k, call)
            total = bias if total is None else total + bias
        return total

    def sink_logits(self) -> Tensor | None:
        """The logit of each head's sink `[heads]`."""
        return None if self.sinks is None else self.sinks.logits  # type: ignore[return-value]


def _has_projection(item: nn.Module) -> bool:
    return getattr(item, "projection", None) is not None

"""Cross-attention: queries from the stream, keys and values from what an encoder made of the source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.primitives.heads import MultiHead, MultiHeadModule
from archlab.kernels.attention import CROSS


@Branch.register("cross_attention")
class CrossAttention(MultiHead):
    """softmax(scale q k^T + scores) v with keys and values from the encoder's last stream (arXiv:1706.03762, section
    3.2.3).

    Every position reads all of the source but its padding. The fields are those of `attention`; gates of keys and
    values read the source. Keys have the positions 0, 1, 2, … of the source, queries those of the decoder.
    """

    examples = (
        {"heads": 4, "kv_heads": 2, "query": ["rope"], "key": ["rope"]},
        {"heads": 4, "kv_heads": 1, "head_dim": 6, "bias": True, "scores": ["sinks"]},
        {"heads": 4, "bias": ["query", "output"], "zero": ["output"], "scale": 1.0},
    )

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec, source = self.resolve(ctx), ctx.source_tokens or tokens
        widths = spec.widths()
        flops = 4 * widths["query"] * tokens * source
        kept = spec.kept(spec.places(ctx)["scores"], tokens, source, masks=0)
        attend = Cost(flops_matmul=flops, flops_model=flops, activations=kept, cache=2 * source * widths["key"])
        parts = spec.parts(ctx, tokens, source, attend)
        parts["query_projection"] = parts["query_projection"].keeping(spec.read(ctx, tokens))
        parts |= {name: parts[name].without_cache() for name in ("key", "value")}  # the source is read once
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.source_tokens is None:
            yield "", "reads the source of an encoder, and here is none: it stands in the decoder of a model with both"

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        message = "{} sees positions within one sequence, and cross_attention reads another one"
        return super().check(ctx, path) + [
            Problem(f"{path}.scores.{index}", message.format(item.type), item.mark())
            for index, item in enumerate(self.scores)
            if item.kind == "bias"
        ]


class _CrossAttention(MultiHeadModule, of=CrossAttention):
    # B batch, T time, S source_time, H heads, K key/value heads, D head_dim
    def __init__(self, spec: CrossAttention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx, CROSS)

    def reads(self) -> list[Linear]:
        return [self.query_projection, *self.query.projections(), *self.sdpa.projections()]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        q_BTHD = self.query(self.heads_of(next(products)), call, products)
        k_BSKD, v_BSKD = self.read(call)
        return self.attention(q_BTHD, k_BSKD, v_BSKD, products, call, padding=call.source_padding)

    def read(self, call: Call) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, which decoding computes once."""
        places = (f"{self.path}.key", f"{self.path}.value")
        if call.held is not None and places[0] in call.held:
            return call.held[places[0]], call.held[places[1]]
        if call.source is None:
            raise ValueError(f"{self.path}: reads the source of an encoder, and the call has none")
        own = dataclasses.replace(
            call, positions=None, documents=None, padding=call.source_padding, state=None, held=None
        )
        sites = [*self.key.projections(), *self.value.projections()]
        products = iter(self.products(call.source, [self.key_projection, self.value_projection, *sites]))
        k, v = self.heads_of(next(products)), self.values_of(next(products))
        k_BSKD, v_BSKD = self.key(k, own, products), self.value(v, own, products)
        if call.held is not None:
            call.held[places[0]], call.held[places[1]] = k_BSKD, v_BSKD
        return k_BSKD, v_BSKD

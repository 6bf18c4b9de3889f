"""Latent attention: keys and values of all heads from one narrow vector per token, which is what decoding holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import ProjectionNotation, Projections
from archlab.arch_dsl.language.spec import Count, Positive
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Carry, Gate, Norm, Rotary, Scale, build_site, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Linear, Site
from archlab.arch_dsl.primitives.branch import linear, projections_of
from archlab.arch_dsl.primitives.heads import Sizes
from archlab.arch_dsl.primitives.rotary import Rope
from archlab.arch_dsl.primitives.self_attention import SelfAttention, SelfAttentionModule
from archlab.kernels.attention.torch_ops import plain

# The linear maps, in the order in which they are computed: first those of the branch's input.
MAPS = ("query_latent", "kv_latent", "rotary_key", "query", "rotary_query", "key", "value", "output")


@Branch.register("latent_attention")
class LatentAttention(SelfAttention):
    """softmax(scale q k^T + scores) v with k = c W_k, v = c W_v of a latent c = x W_c, `kv_latent` channels per token:
    multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, eq. 9 to 11).

    With `query_latent` queries come from a latent of their own (eq. 12, 13). `rotary_dim` adds as many channels to
    each query and key, turned by `rotary`: a query's own, and for keys one vector that all heads share (eq. 14 to 19).
    With `rotary: none` these stay as they are (Kimi Linear, arXiv:2510.26692, section 4).
    `scale` defaults to 1 / sqrt(head_dim + rotary_dim), `value_dim` to `head_dim`, and that to d_model / heads.

    The sites `query_inner` and `kv_inner` act on the latents `[batch, time, channels]` (both an RMS norm in DeepSeek);
    `query`, `key` and `value` on what comes from them `[batch, time, heads, head_dim]`, without the rotated channels,
    which `scores` see too. Decoding holds the latent and the rotated key of each token. A few tokens at a time read
    latents as they are, with W_k in the query and W_v in the output (section 2.1.2). Keys and values are computed anew
    for more tokens, and where these maps or the scores have a bias. A site `key` or `value` has them computed anew too,
    and one with more than norms and scales has decoding hold them instead.
    """

    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "kv_heads", "head_dim", "value_dim", "kv_latent", "query_latent", "rotary_dim",
        "rotary", "bias", "zero", "scale", "query_inner", "kv_inner", "query", "key", "value", "mask", "scores",
        "weights", "sdpa", "share",
    )  # fmt: skip
    examples = (
        {"heads": 4, "kv_latent": 6},
        {"heads": 4, "kv_latent": 6, "kv_inner": ["rmsnorm"], "rotary_dim": 2, "value_dim": 5, "key": ["rmsnorm"]},
        {"heads": 4, "kv_heads": 2, "kv_latent": 6, "query_latent": 5, "query_inner": ["rmsnorm"], "rotary_dim": 4,
         "rotary": {"type": "rope", "pairs": "interleaved"}, "bias": True, "scale": 1.0},
        {"heads": 4, "kv_latent": 6, "rotary_dim": 2, "bias": ["kv_latent", "rotary_key"], "zero": ["output"],
         "value": ["gate"], "mask": {"type": "window", "size": 4}},
        {"heads": 4, "kv_latent": 6, "rotary_dim": 3, "rotary": None},
        {"heads": 4, "kv_latent": 6, "query": ["rope"], "key": ["rope"], "scores": [{"type": "softcap", "cap": 2.0}]},
    )  # fmt: skip
    kv_latent: Count
    query_latent: Count | None = None
    rotary_dim: Count | None = None
    rotary: Rotary | None = Rope()
    value_dim: Count | None = None
    bias: Annotated[Projections, ProjectionNotation(*MAPS)] = False
    zero: Annotated[Projections, ProjectionNotation(*MAPS)] = False
    scale: Positive | None = None
    query_inner: tuple[Norm | Carry | Gate | Scale, ...] = ()
    kv_inner: tuple[Norm | Carry | Gate | Scale, ...] = ()

    def resolve(self, ctx: BuildContext) -> Self:
        spec = super().resolve(ctx)
        there = tuple(name for name in MAPS if name not in spec.absent())
        whole = {name: True for name in ("bias", "zero") if getattr(spec, name) == there}
        return spec.replace(value_dim=spec.value_dim or spec.head_dim, **whole)

    def absent(self) -> set[str]:
        """The maps that it does not have."""
        queries = set() if self.query_latent else {"query_latent"}
        return queries if self.rotary_dim else queries | {"rotary_key", "rotary_query"}

    def sizes(self) -> Sizes:
        heads, kv_heads, head_dim, _ = super().sizes()
        return Sizes(heads, kv_heads, head_dim + (self.rotary_dim or 0), self.value_dim or head_dim)

    def value_heads(self, d_model: int) -> tuple[int, int]:
        heads, head_dim = super().value_heads(d_model)
        return heads, self.value_dim or head_dim

    def grids(self) -> dict[str, tuple[int, int]]:
        found = super().grids()
        assert self.head_dim is not None
        return found | {name: (found[name][0], self.head_dim) for name in ("query", "key")}

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"query_latent": self.query_latent}

    def latents(self, ctx: BuildContext) -> dict[str, BuildContext]:
        """The contexts of the latents, by the sites that act on them."""
        own = ctx.where(held=False, **self.facts())
        found = {"query_inner": own.where(width=self.query_latent), "kv_inner": own.where(width=self.kv_latent)}
        return found if self.query_latent else {"kv_inner": found["kv_inner"]}

    def turned(self, ctx: BuildContext) -> dict[str, BuildContext]:
        """The contexts of the rotated channels of queries and keys; none where there are no such channels."""
        own = ctx.where(width=self.rotary_dim, held=False, **self.facts())
        heads = {"query": self.heads, "key": 1} if self.rotary_dim else {}
        return {name: own.at(f"rotary_{name}", heads=count, site=name) for name, count in heads.items()}

    def inputs(self, d_model: int) -> dict[str, int]:
        return {"query": self.query_latent or d_model, "key": self.kv_latent, "value": self.kv_latent}

    def widths(self) -> dict[str, int]:
        assert self.kv_heads is not None and self.head_dim is not None
        own = {"query": self.heads * self.head_dim, "key": self.kv_heads * self.head_dim}
        latents = {"query_latent": self.query_latent or 0, "kv_latent": self.kv_latent}
        rotated = self.rotary_dim or 0
        return super().widths() | own | latents | {"rotary_key": rotated, "rotary_query": self.heads * rotated}

    def anew(self, name: str) -> bool:
        """Whether decoding computes all keys, or values, from the latents: nothing in their site knows their tokens."""
        return all(isinstance(item, Norm | Scale) for item in getattr(self, name))

    def few(self) -> int:
        """The most tokens at a time that read latents as they are, which takes fewer products for each token that is
        held than its keys and values; none where something comes between latents and keys or values."""
        given = () if self.bias is False else MAPS if self.bias is True else self.bias
        between = self.key or self.value or {"key", "value"}.intersection(given) or not self.softmax
        if between or any(item.kind == "bias" for item in self.scores):
            return 0
        heads, kv_heads, _, value_dim = self.sizes()
        assert self.head_dim is not None
        anew = kv_heads * self.kv_latent * (self.head_dim + value_dim)
        more = heads * (2 * self.kv_latent - self.head_dim - value_dim)
        return anew // more if more > 0 else anew

    def cached(self) -> int:
        widths = self.widths()
        latent = self.kv_latent if self.anew("key") or self.anew("value") else 0
        whole = sum(widths[name] for name in ("key", "value") if not self.anew(name))
        return latent + widths["rotary_key"] + whole

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        spec = self.resolve(ctx)
        widths, parts = spec.widths(), {}
        for name in ("query_latent", "kv_latent", "rotary_key"):
            if name not in spec.absent():
                parts[f"{name}_projection"] = spec.map_cost(name, tokens, ctx.d_model, widths[name])
        for name, place in spec.latents(ctx).items():
            parts[name] = site_cost(getattr(spec, name), place, name, tokens)
        for name, place in spec.turned(ctx).items():
            parts[f"rotary_{name}"] = spec.rotary.cost(place, tokens) if spec.rotary else Cost()
        if spec.rotary_dim:
            inputs = spec.inputs(ctx.d_model)["query"]
            name = "rotary_query"
            parts[f"{name}_projection"] = spec.map_cost(name, tokens, inputs, widths[name])
        parts |= spec.parts(ctx, tokens, tokens, spec.attend_cost(ctx, tokens)) | spec.weights_cost(ctx, tokens)
        for name, latent in (("query", spec.query_latent), ("key", spec.kv_latent)):
            parts[f"{name}_projection"] = parts[f"{name}_projection"].keeping(tokens * (latent or 0))
        parts["kv_latent_projection"] = parts["kv_latent_projection"].keeping(spec.read(ctx, tokens))
        return Cost.total(spec.outer_cost(ctx, tokens) | parts)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        if self.head_dim is None and ctx.d_model % self.heads:
            return found
        spec = self.resolve(ctx)
        found += check_sites(spec, spec.latents(ctx), path)
        place = spec.turned(ctx).get("query")
        if place is None or place.width % 2 or spec.rotary is None:
            return found
        return found + spec.rotary.check(place, f"{path}.rotary")

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.query_inner and not self.query_latent:
            yield "query_inner", "acts on the latent of queries, and there is none; give query_latent"
        if self.rotary != Rope() and not self.rotary_dim:
            yield "rotary", "turns the rotary_dim channels beside the others, and there are none; give rotary_dim"
        if self.rotary and self.rotary_dim and self.rotary_dim % 2:
            yield "rotary_dim", f"must be even, as rotations turn pairs of channels, found {self.rotary_dim}"
        for name in ("bias", "zero"):
            given = getattr(self, name)
            for absent in MAPS:
                if not isinstance(given, bool) and absent in given and absent in self.absent():
                    field = "query_latent" if absent == "query_latent" else "rotary_dim"
                    yield name, f"there is no map {absent} without {field}"


class _Unturned(nn.Module):
    def forward(self, x: Tensor, call: Call) -> Tensor:
        return x


class _LatentAttention(SelfAttentionModule, of=LatentAttention):
    # B batch, T time, S keys (those that decoding holds, and T), H heads, K key/value heads, D head_dim, R rotary_dim
    query_inner: Site
    kv_inner: Site
    rotary_query: nn.Module
    rotary_key: nn.Module

    def __init__(self, spec: LatentAttention, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        widths = spec.widths()
        inputs = {
            "query_latent": ctx.d_model,
            "rotary_key": ctx.d_model,
            "rotary_query": spec.inputs(ctx.d_model)["query"],
        }
        maps = {
            name: None if name in spec.absent() else linear(spec, name, read, widths[name], ctx.std)
            for name, read in inputs.items()
        }
        self.query_latent_projection = maps["query_latent"]
        self.kv_latent_projection = linear(spec, "kv_latent", ctx.d_model, spec.kv_latent, ctx.std)
        self.rotary_key_projection, self.rotary_query_projection = maps["rotary_key"], maps["rotary_query"]
        for name, place in spec.latents(ctx).items():
            self.add_module(name, build_site(getattr(spec, name), place, name))
        for name, place in spec.turned(ctx).items():
            self.add_module(f"rotary_{name}", spec.rotary.build(place) if spec.rotary else _Unturned())
        self.keys_anew, self.values_anew = spec.anew("key"), spec.anew("value")
        self.rotary_dim, self.kv_heads = spec.rotary_dim, spec.sizes().kv_heads
        self.few = spec.few()
        self.lends = any(getattr(item, "queries", "hidden") == "latent" for item in spec.scores)

    def reads(self) -> list[Linear]:
        late = [] if self.rotary_key_projection is None else [self.rotary_key_projection]
        latent = [self.kv_latent_projection, *projections_of(self.kv_inner, self.key, self.value)]
        rest = [*self.query.projections(), *latent, *late, *projections_of(self.scores, self.sdpa)]
        if self.query_latent_projection is None:
            return [*self.query_maps(), *rest]
        return [self.query_latent_projection, *self.query_inner.projections(), *rest]

    def query_maps(self) -> list[Linear]:
        """The maps that make queries, of their latent or of the branch's input."""
        if self.rotary_query_projection is None:
            return [self.query_projection]
        return [self.query_projection, self.rotary_query_projection]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        self.refuse(call)
        if self.query_latent_projection is None:
            q_BTHD = self.queries(products, products, call)
        else:
            latent = self.query_inner(next(products), call, products)
            if self.lends:
                call.across["query_latent"] = latent
            q_BTHD = self.queries(iter(self.products(latent, self.query_maps())), products, call)
        latent = self.kv_inner(next(products), call, products)
        if call.held is not None and call.watch is None and q_BTHD.shape[1] <= self.few:
            return self.absorbed(q_BTHD, latent, products, call)
        k_BSKD, v_BSKD = self.expanded(latent, products, call)
        if self.rotary_dim:
            k_BSKR = self.turned_keys(products, call).expand(-1, -1, k_BSKD.shape[2], -1)
            k_BSKD = torch.cat([k_BSKD, k_BSKR], -1)
        return self.masked(q_BTHD, k_BSKD, v_BSKD, products, call)

    def absorbed(self, q_BTHD: Tensor, latent: Tensor, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update `[B, T, d_model]` with latents as keys and values of one head (arXiv:2405.04434, section 2.1.2):
        q^T (W_k c) = (W_k^T q)^T c, and the weighted sum of W_v c is W_v of that of c."""
        key, value = (m.weight.unflatten(0, (self.kv_heads, -1)) for m in (self.key_projection, self.value_projection))
        own, turned = q_BTHD.split([key.shape[1], q_BTHD.shape[-1] - key.shape[1]], -1)
        grouped = own.unflatten(2, (self.kv_heads, -1))
        q_BTHC = torch.einsum("btkgd,kdc->btkgc", grouped, key.to(own.dtype)).flatten(2, 3)
        c_BS1C = self.held("kv_latent", latent, call)[:, :, None]
        k_BS1C = c_BS1C
        if self.rotary_dim:
            q_BTHC = torch.cat([q_BTHC, turned], -1)
            k_BS1C = torch.cat([c_BS1C, self.turned_keys(products, call)], -1)
        o_BHTC = plain(
            q_BTHC.transpose(1, 2),
            k_BS1C.transpose(1, 2),
            c_BS1C.transpose(1, 2),
            pattern=self.pattern,
            scale=self.scale,
            softcap=self.scores.softcap,
            sinks=self.scores.sink_logits(),
            **self.hidden(q_BTHC, k_BS1C, call),
        )
        o_BTKGC = o_BHTC.transpose(1, 2).unflatten(2, (self.kv_heads, -1))
        o_BTHD = torch.einsum("btkgc,kdc->btkgd", o_BTKGC, value.to(o_BTKGC.dtype)).flatten(2, 3)
        return self.joined(self.sdpa(o_BTHD, call, products), products)

    def turned_keys(self, products: Iterator[Tensor], call: Call) -> Tensor:
        """The rotated channels of keys `[B, S, 1, R]`, which all heads share."""
        return self.held("rotary_key", self.rotary_key(next(products)[:, :, None], call), call)

    def queries(self, made: Iterator[Tensor], products: Iterator[Tensor], call: Call) -> Tensor:
        """Queries `[B, T, H, D + R]` of what their maps have `made`."""
        query = next(made)
        if not self.rotary_dim:
            return self.query(self.heads_of(query), call, products)  # type: ignore[no-any-return]
        turned = self.rotary_query(next(made).unflatten(-1, (-1, self.rotary_dim)), call)
        return torch.cat([self.query(self.heads_of(query), call, products), turned], -1)

    def expanded(self, latent: Tensor, products: Iterator[Tensor], call: Call) -> tuple[Tensor, Tensor]:
        """Keys `[B, S, K, D]` and values of the latents `[B, T, kv_latent]`, and of those that decoding holds."""
        whole = self.held("kv_latent", latent, call) if self.keys_anew or self.values_anew else latent
        if self.keys_anew == self.values_anew:
            key, value = self.products(whole, [self.key_projection, self.value_projection])
        else:
            key = self.key_projection(whole if self.keys_anew else latent)
            value = self.value_projection(whole if self.values_anew else latent)
        k_BSKD = self.key(self.heads_of(key), call, products)
        v_BSKD = self.value(self.values_of(value), call, products)
        k_BSKD = k_BSKD if self.keys_anew else self.held("key", k_BSKD, call)
        v_BSKD = v_BSKD if self.values_anew else self.held("value", v_BSKD, call)
        return k_BSKD, v_BSKD


# DeepSeek-V2, arXiv:2405.04434, section 2.1
Branch.alias("mla", type="latent_attention", kv_inner=["rmsnorm"])

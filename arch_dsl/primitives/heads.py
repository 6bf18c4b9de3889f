"""What attention branches share: projections into heads, the sites that act on them, and the attention itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import ProjectionNotation, Projections
from archlab.arch_dsl.language.spec import Count, Positive, added
from archlab.arch_dsl.parts import fused
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Score, build_shared, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Linear, has_projection, writing
from archlab.arch_dsl.primitives.branch import Headed, SublayerModule, linear
from archlab.kernels.attention import WIDEST, Pattern

NAMES = ("query", "key", "value", "output")


class Sizes(NamedTuple):
    """How queries, keys and values meet: heads of queries, of keys and values; channels of a query, of a value."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class MultiHead(Headed):
    """Queries, keys and values of several heads, from linear maps, and one output map."""

    maps: ClassVar[int] = 1  # softmaxes of a head, each with queries and keys of its own
    ops: ClassVar[tuple[str, ...]] = ("attention",)
    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "heads", "kv_heads", "head_dim", "value_dim", "bias", "zero", "scale", "queries", "kv",
        "query", "key", "value", "mask", "scores", "weights", "sdpa", "memory", "switch", "concat", "lora", "share",
    )  # fmt: skip
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    bias: Annotated[Projections, ProjectionNotation(*NAMES)] = False
    zero: Annotated[Projections, ProjectionNotation(*NAMES)] = added(default=False)
    scale: Positive | None = added(default=None)
    scores: tuple[Score, ...] = ()

    def resolve(self, ctx: BuildContext) -> Self:
        head_dim = self.head_dim or max(ctx.d_model // (self.maps * self.heads), 1)
        spec = self.replace(kv_heads=self.kv_heads or self.heads, head_dim=head_dim)
        return spec if spec.scale != spec.sizes().head_dim ** -0.5 else spec.replace(scale=None)

    def facts(self) -> dict[str, Any]:
        """What the parts of the branch see of its mask."""
        return {}

    @property
    def softmax(self) -> bool:
        """Whether its weights are a softmax, which is what kernels compute."""
        return True

    def sizes(self) -> Sizes:
        """How queries, keys and values meet; the spec must be resolved."""
        assert self.kv_heads is not None and self.head_dim is not None
        return Sizes(self.maps * self.heads, self.maps * self.kv_heads, self.head_dim, self.maps * self.head_dim)

    def grids(self) -> dict[str, tuple[int, int]]:
        """Heads and channels of the tensors that sites act on; the spec must be resolved."""
        heads, kv_heads, head_dim, value_dim = self.sizes()
        values, out = (self.kv_heads or self.heads, value_dim), (self.heads, value_dim)
        own = heads, head_dim
        return {"query": own, "key": (kv_heads, head_dim), "value": values, "scores": own, "sdpa": out}

    def places(self, ctx: BuildContext) -> dict[str, BuildContext]:
        """The contexts of the same tensors."""
        own = ctx.where(logit_scale=self.scale or self.sizes().head_dim ** -0.5, held=False, **self.facts())
        return {name: own.where(heads=heads, width=width) for name, (heads, width) in self.grids().items()}

    def inputs(self, d_model: int) -> dict[str, int]:
        """The widths that the maps of queries, keys and values read."""
        return dict.fromkeys(("query", "key", "value"), d_model)

    def widths(self) -> dict[str, int]:
        """The widths of queries, keys, values, and of what the output map reads, all heads together."""
        heads, kv_heads, head_dim, value_dim = self.sizes()
        assert self.kv_heads is not None
        values, out = self.kv_heads * value_dim, self.heads * value_dim
        return {"query": heads * head_dim, "key": kv_heads * head_dim, "value": values, "output": out}

    def copies(self, name: str) -> int:
        """How many maps of that name each head has: experts, of which tokens choose."""
        return 1

    def value_heads(self, d_model: int) -> tuple[int, int]:
        return self.kv_heads or self.heads, self.maps * (self.head_dim or d_model // (self.maps * self.heads))

    def output_width(self, ctx: BuildContext) -> int | None:
        return self.resolve(ctx).widths()["output"] if self.copies("output") == 1 else None

    def parts(self, ctx: BuildContext, queries: int, keys: int, attend: Cost) -> dict[str, Cost]:
        """What the maps, the sites and the attention itself cost, in their order; the spec must be resolved."""
        places, widths, inputs = self.places(ctx), self.widths(), self.inputs(ctx.d_model)
        counts = {"query": queries, "key": keys, "value": keys}
        found = {f"{name}_projection": self.map_cost(name, counts[name], inputs[name], widths[name]) for name in counts}
        for name, tokens in counts.items():
            found[name] = site_cost(getattr(self, name), places[name], name, tokens)
        found["scores"] = site_cost(self.scores, places["scores"], "scores", queries)
        found["attend"] = attend
        found["sdpa"] = site_cost(self.sdpa, places["sdpa"].where(held=True), "sdpa", queries)
        kept = queries * widths["output"] if self.sdpa else 0
        found["output_projection"] = self.map_cost("output", queries, widths["output"], ctx.d_model, kept)
        return found

    def kept(self, ctx: BuildContext, queries: int, keys: int, masks: int, pairs: int = 0) -> int:
        """What the attention itself keeps: queries, keys, values, outputs, and what its implementation needs more.

        The fused one needs a log-sum-exp per query and a bias as a matrix, or `masks` that say which pairs exist;
        torch's own with a learned bias, or values of another width than keys, keeps the weights, keys and values for
        every head; plain products keep each of their steps for all pairs, or for as many as `pairs` where they compute
        no more.
        """
        heads, kv_heads, head_dim, value_dim = self.sizes()
        out, read = heads * value_dim, keys * kv_heads * (head_dim + value_dim)
        kinds = {item.kind for item in self.scores}
        learned = any(item.learned(ctx) for item in self.scores)
        vectors, squares = queries * (heads * head_dim + out), heads
        if (plain := kinds - {"bias"}) or pairs:
            squares *= 1 + len(plain)
            vectors += read + (queries * (out + 2 * heads) if "sinks" in kinds else 0)
        elif learned or head_dim != value_dim:
            vectors += keys * heads * (head_dim + value_dim)
            vectors += queries * keys // 4 if learned else 0  # the mask is a byte per pair
        else:
            vectors += read + queries * heads
            apart = any(item.kind == "bias" and not item.hides for item in self.scores)
            squares = heads if apart else max(masks, len(kinds))
        return vectors + squares * (pairs or queries * keys)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        problems = super().check(ctx, path)
        if self.head_dim is None and ctx.d_model % (self.maps * self.heads):
            heads = f"{self.heads} heads" if self.maps == 1 else f"{self.heads} heads of {self.maps} queries each"
            message = f"{heads} do not divide d_model {ctx.d_model}; give head_dim or other heads"
            return [*problems, Problem(f"{path}.heads", message, self.mark("heads"))]  # the rest would only echo it
        spec = self.resolve(ctx)
        assert spec.kv_heads is not None
        if self.heads % spec.kv_heads:
            message = f"{spec.kv_heads} key/value heads do not divide {self.heads} query heads"
            problems.append(Problem(f"{path}.kv_heads", message, self.mark("kv_heads")))
        problems += check_sites(spec, spec.places(ctx), path)
        raising = [item.type for item in self.scores if item.kind == "bias" and not item.fading]
        for index, item in enumerate(self.scores):
            if getattr(item, "prune", None) is not None and raising:
                message = f"bounds the weights of far keys, which {raising[0]} may raise"
                problems.append(Problem(f"{path}.scores.{index}.prune", message, item.mark("prune")))
        return problems


class MultiHeadModule(SublayerModule):
    """The maps and sites of a branch with heads."""

    documents = False  # whether its mask keeps documents apart
    memory_size = 0  # learned keys before those of tokens

    # B batch, T time, S keys, H heads, K key/value heads, D head_dim
    def __init__(self, spec: MultiHead, ctx: BuildContext, pattern: Pattern, **options: bool) -> None:
        super().__init__(spec, ctx)
        places, width, read = spec.places(ctx), spec.widths(), spec.inputs(ctx.d_model)
        own, wide = places.pop("scores"), max(spec.sizes()[2:])
        self.head_dim, self.scale, self.pattern = places["query"].width, own.logit_scale, pattern
        self.value_dim = None if places["value"].width == self.head_dim else places["value"].width
        width = {name: size * spec.copies(name) for name, size in width.items()}
        self.query_projection = linear(spec, "query", read["query"], width["query"], ctx.std)
        self.key_projection = linear(spec, "key", read["key"], width["key"], ctx.std)
        self.value_projection = linear(spec, "value", read["value"], width["value"], ctx.std * ctx.gain)
        self.output_projection = writing(linear(spec, "output", width["output"], ctx.d_model, ctx.residual_std))
        self.add_sites(spec, places)
        self.scores = Scores(spec.scores, own)
        dense = getattr(spec, "memory", None) is not None
        ask = {
            **pattern.options(),
            **self.scores.asked(dense),
            "softcap": self.scores.softcap is not None,
            "sinks": self.scores.sinks is not None,
            "wide": wide > WIDEST,
            "beyond_128": wide > 128,
            **options,
        }
        self.choose(spec, ctx, ask)

    def choose(self, spec: MultiHead, ctx: BuildContext, ask: dict[str, bool]) -> None:
        """Chooses the implementation of attention that serves what is asked for."""
        self.attend = ctx.select("attention", **ask)
        family = ctx.choices[-1].implementation
        self.apart = family != "reference" and getattr(spec, "memory", None) is None
        self.opens = family == "triton" and spec.maps == 1 and fused.epilogue(self.sdpa, ctx, **ask)

    def heads_of(self, product: Tensor) -> Tensor:
        """Queries or keys `[B, T, H, D]` of what their map gave, `[B, T, H D]`."""
        return product.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]

    def values_of(self, product: Tensor) -> Tensor:
        """Values of what their map gave."""
        if self.value_dim is None:
            return self.heads_of(product)
        return product.unflatten(-1, (-1, self.value_dim))  # type: ignore[no-any-return]

    def attention(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, products: Iterator[Tensor], call: Call, **given: Any
    ) -> Tensor:
        """The update `[B, T, d_model]`: the op, asked for what is `given` too, the site `sdpa`, and the output map."""
        gate = self.opening(products, call)
        o_BHTD = self.weigh(q_BTHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2), gate, given)
        o_BTHD = o_BHTD.transpose(1, 2)
        if call.watch is not None:
            self.tell(call, q_BTHD, k_BSKD, o_BTHD, given)
        if gate is None:
            o_BTHD = self.sdpa(o_BTHD, call, products)
        return self.joined(o_BTHD, products)

    def joined(self, o_BTHD: Tensor, products: Iterator[Tensor]) -> Tensor:
        """What the output map makes of each head's output, `[B, T, d_model]`."""
        update: Tensor = self.output_projection(o_BTHD.flatten(-2))
        return update

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, given: dict[str, Any]) -> Tensor:
        """Each head's output `[B, H, T, D]`, from queries, keys and values whose heads stand before their times."""
        out: Tensor = self.attend(
            q,
            k,
            v,
            pattern=self.pattern,
            scale=self.scale,
            softcap=self.scores.softcap,
            sinks=self.scores.sink_logits(),
            gate=gate,
            **given,
        )
        return out

    def tell(self, call: Call, q_BTHD: Tensor, k_BSKD: Tensor, o_BTHD: Tensor, given: dict[str, Any]) -> None:
        """To who watches, what the attention got and gave."""
        assert call.watch is not None
        factors = {"pattern": self.pattern, "scale": self.scale, "softcap": self.scores.softcap}
        given = {**factors, "sinks": self.scores.sink_logits(), **given}
        tensors = {"query": q_BTHD.transpose(1, 2), "key": k_BSKD.transpose(1, 2), "given": given}
        documents = call.documents if self.documents else None
        call.watch.tell("attention", self.path, call.padding, **tensors, memory=self.memory_size, documents=documents)
        call.watch.tell("heads", self.path, call.padding, output=o_BTHD)

    def opening(self, products: Iterator[Tensor], call: Call) -> Tensor | None:
        """The scores of the gate that attention itself applies; None where the site does, as for who watches."""
        if not self.opens or call.watch is not None:
            return None
        (gate,) = self.sdpa.children()
        return gate.opening(next(products))  # type: ignore[operator,no-any-return]


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
        return [item.projection for item in self.biases.values() if has_projection(item)]  # type: ignore[misc]

    def forward(self, q: Tensor, k: Tensor, call: Call, projected: Iterator[Tensor]) -> Tensor | None:
        total: Tensor | None = None
        for item in self.biases.values():
            bias = item(q, k, call, next(projected)) if has_projection(item) else item(q, k, call)
            total = bias if total is None else total + bias
        return total

    def asked(self, dense: bool) -> dict[str, bool]:
        """Which biases attention is asked for: all in one matrix if they are to be dense."""
        kinds = {_kind(item) for item in self.biases.values()}
        if dense:
            return {"bias": True}
        closing = any(getattr(item, "prune", None) is not None for item in self.biases.values())
        return {name: name in kinds for name in ("bias", "relative", "decay")} | {"reach": closing}

    def parts(self, q: Tensor, k: Tensor, call: Call, projected: Iterator[Tensor]) -> dict[str, Tensor]:
        """The biases by what they consist of, added by implementations as they need it: `relative` by distance, `decay`
        as running sums with the `reach` of queries, what is neither as a matrix. Positions must be evenly spaced."""
        found: dict[str, Tensor] = {}
        for item in self.biases.values():
            more = (next(projected),) if has_projection(item) else ()
            kind = _kind(item)
            value = item(q, k, call, *more) if kind == "bias" else getattr(item, kind)(q, k, call, *more)
            found[kind] = found[kind] + value if kind in found else value
            if kind == "decay" and (near := item.reach(q, k, value)) is not None:  # type: ignore[operator]
                found["reach"] = near
        return found

    def sink_logits(self) -> Tensor | None:
        """The logit of each head's sink `[heads]`."""
        return None if self.sinks is None else self.sinks.logits  # type: ignore[return-value]


def _kind(item: nn.Module) -> str:
    """What a module gives of its bias: `relative`, `decay`, or the whole matrix."""
    return next((name for name in ("relative", "decay") if hasattr(item, name)), "bias")

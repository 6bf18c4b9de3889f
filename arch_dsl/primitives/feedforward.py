"""Feed-forward branches: one hidden layer, plain or gated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation, ProjectionNotation, Projections
from archlab.arch_dsl.language.spec import added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Carry, Gate, Norm, Scale, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Linear, Site, writing
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.primitives.branch import Widened, linear, projections_of
from archlab.arch_dsl.primitives.low_rank import AdaptedModule, LowRank, check_low_rank, low_rank_cost, normal
from archlab.kernels.activations import ACTIVATIONS


class FeedForward(Widened):
    """What both feed-forward branches share: a hidden `width`, an activation, and the site `inner` on the hidden.

    Of the linear maps named in `bias` each has one; those named in `zero` start at zero. The site `preactivation`
    acts on what the activation reads, `linear` of a `glu` on the factor without one; a `canon` at both is Canon-D
    (arXiv:2512.17351). With a `short_conv` and a gate at `inner` a `glu` is a gated short convolution (the code of
    LFM2, arXiv:2511.23404). `lora` adds low-rank updates to the maps of the input.
    """

    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "width", "activation", "bias", "zero", "preactivation", "linear", "inner", "lora",
    )  # fmt: skip
    activation: Activation = "gelu"
    bias: Projections = False
    zero: Projections = added(default=False)
    preactivation: tuple[Norm | Scale | Carry, ...] = added(default=())
    inner: tuple[Norm | Scale | Carry | Gate, ...] = ()
    lora: tuple[LowRank, ...] = added(default=())
    unshared: ClassVar[tuple[str, ...]] = ("lora",)
    inputs: ClassVar[tuple[str, ...]] = ()
    sites: ClassVar[tuple[str, ...]] = ("preactivation",)  # of what the maps of the input give

    def resolve(self, ctx: BuildContext) -> Self:
        return super().resolve(ctx).replace(lora=normal(self.lora, self.inputs))

    def output_width(self, ctx: BuildContext) -> int | None:
        return self.width or self.default_width(ctx.d_model)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        width = self.width or self.default_width(ctx.d_model)
        parts = {f"{name}_projection": self.map_cost(name, tokens, ctx.d_model, width) for name in self.inputs}
        first = f"{self.inputs[0]}_projection"
        parts[first] = parts[first].keeping(self.read(ctx, tokens))
        parts["lora"] = low_rank_cost(self.lora, dict.fromkeys(self.inputs, (ctx.d_model, width)), tokens)
        for name in self.sites:
            parts[name] = site_cost(getattr(self, name), self.inside(ctx), name, tokens)
        hidden, gated = tokens * width, len(self.inputs) == 2
        own, _ = kept_of(self.activation)
        parts["activation"] = Cost(activations=(own + 2 * gated) * hidden)  # a gate keeps both of its factors
        parts["inner"] = site_cost(self.inner, self.inside(ctx), "inner", tokens)
        parts["output_projection"] = self.map_cost("output", tokens, width, ctx.d_model, hidden)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path) + check_sites(self, dict.fromkeys(self.sites, self.inside(ctx)), path)
        return found + check_low_rank(self, self.inputs, path)


class _FeedForward(AdaptedModule):
    preactivation: Site
    linear: Site

    def __init__(self, spec: FeedForward, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert spec.width is not None
        own = {name: linear(spec, name, ctx.d_model, spec.width, ctx.std * ctx.gain) for name in spec.inputs}
        for name, item in own.items():
            self.add_module(f"{name}_projection", item)
        self.inputs, self.sites = spec.inputs, spec.sites
        self.add_sites(spec, dict.fromkeys((*spec.sites, "inner"), spec.inside(ctx)))
        self.output_projection = writing(linear(spec, "output", spec.width, ctx.d_model, ctx.residual_std))
        self.add_low_rank(spec, own, ctx)

    def reads(self) -> list[Linear]:
        own: list[Linear] = [self.get_submodule(f"{name}_projection") for name in self.inputs]  # type: ignore[misc]
        return [*own, *projections_of(*(getattr(self, name) for name in self.sites), self.inner)]

    def finish(self, hidden: Tensor, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update from the hidden activations `[batch, time, width]`."""
        return self.output_projection(self.inner(hidden, call, products))  # type: ignore[no-any-return]


@Branch.register("mlp")
class MLP(FeedForward):
    """act(x W_1) W_2 (arXiv:1706.03762, eq. 2). The width defaults to 4 d_model."""

    bias: Annotated[Projections, ProjectionNotation("input", "output")] = False
    zero: Annotated[Projections, ProjectionNotation("input", "output")] = added(default=False)
    inputs: ClassVar[tuple[str, ...]] = ("input",)
    examples = ({}, {"width": 20, "bias": True, "activation": "relu2"}, {"width": 20, "preactivation": ["canon"]})

    def default_width(self, d_model: int) -> int:
        return 4 * d_model


class _MLP(_FeedForward, of=MLP):
    def __init__(self, spec: MLP, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.activation = function_of(spec.activation)

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        return self.finish(self.activation(self.preactivation(next(products), call, products)), products, call)


@Branch.register("glu")
class GLU(FeedForward):
    """(act(x W_g) * x W_u) W_o: gated linear units (arXiv:2002.05202, eq. 5; SwiGLU with silu, GEGLU with gelu).

    The width defaults to 8/3 d_model, rounded up to a multiple of 8: the parameters of an MLP of width 4 d_model.
    """

    ops: ClassVar[tuple[str, ...]] = ("glu",)
    activation: Activation = "silu"
    bias: Annotated[Projections, ProjectionNotation("gate", "input", "output")] = False
    zero: Annotated[Projections, ProjectionNotation("gate", "input", "output")] = added(default=False)
    linear: tuple[Norm | Scale | Carry, ...] = added(default=())
    inputs: ClassVar[tuple[str, ...]] = ("gate", "input")
    sites: ClassVar[tuple[str, ...]] = ("preactivation", "linear")
    examples = (
        {},
        {"width": 20, "bias": True, "activation": "gelu"},
        {"width": 20, "activation": "identity", "inner": ["short_conv", {"type": "gate", "activation": "identity"}]},
        {"width": 20, "preactivation": ["canon"], "linear": ["canon"]},
    )

    def default_width(self, d_model: int) -> int:
        return -(-8 * d_model // 24) * 8


class _GLU(_FeedForward, of=GLU):
    def __init__(self, spec: GLU, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        named = spec.activation in ACTIVATIONS
        self.activation = spec.activation if named else function_of(spec.activation)
        self.glu = ctx.select("glu", activation=spec.activation if named else "function")

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        gate, value = next(products), next(products)
        gate, value = self.preactivation(gate, call, products), self.linear(value, call, products)
        return self.finish(self.glu(gate, value, self.activation), products, call)


Branch.alias("swiglu", type="glu", activation="silu")
Branch.alias("geglu", type="glu", activation="gelu")
Branch.alias("reglu", type="glu", activation="relu")

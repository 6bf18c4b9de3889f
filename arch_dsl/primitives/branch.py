"""What every branch shares: it reads a normed copy of the stream, changes the update, and joins it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import chosen
from archlab.arch_dsl.language.spec import Count, walk
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import (
    Adapter,
    Branch,
    Carry,
    Gate,
    Join,
    Module,
    Norm,
    Rotary,
    Scale,
    build_site,
    check_sites,
    site_cost,
)
from archlab.arch_dsl.parts.layers import Linear, Products, Site, merged, separate
from archlab.arch_dsl.primitives.joins import Add

OUTER = ("pre", "post", "join")  # the sites that all branches have, as wide as the stream


class Sublayer(Branch):
    """A branch with the sites `pre` (the copy that is read), `post` (the update) and `join`."""

    pre: tuple[Norm | Carry | Scale, ...] = ()
    post: tuple[Norm | Gate | Scale | Adapter, ...] = ()
    join: Join = Add()

    def placed(self, ctx: BuildContext) -> BuildContext:
        """The context of what is inside, with the width of the branch's input."""
        return ctx

    def output_width(self, ctx: BuildContext) -> int | None:
        """How many channels its `output_projection` reads, the linear map with which it ends; None where it has none,
        or several."""
        return None

    def outer_cost(self, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
        """The cost of the three sites."""
        ctx = self.placed(ctx)
        fresh = ctx.where(held=False)
        return {
            "pre": site_cost(self.pre, ctx.where(width=ctx.hidden), "pre", tokens),
            "post": site_cost(self.post, fresh, "post", tokens),
            "join": self.join.cost(fresh, tokens),
        }

    def read(self, ctx: BuildContext, tokens: int) -> int:
        """The elements of the copy that all maps of the branch's input keep, once."""
        ctx = self.placed(ctx)
        return 0 if ctx.held and not self.pre else tokens * ctx.hidden

    def map_cost(self, name: str, tokens: int, inputs: int, outputs: int, kept: int = 0) -> Cost:
        """The linear map that the fields of the branch call `name`, whose input is `kept` elements."""
        return Cost.product(tokens, inputs, outputs, chosen(getattr(self, "bias", False), name)).keeping(kept)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        ctx = self.placed(ctx)
        outer = {"pre": ctx.where(width=ctx.hidden), "post": ctx}
        found = check_sites(self, outer, path) + self.join.check(ctx, f"{path}.join")
        return found + super().check(ctx, path)


class Widened(Sublayer):
    """A branch with a hidden `width`, and the site `inner` on what is so wide."""

    width: Count | None = None

    def default_width(self, d_model: int) -> int:
        """The width where none is given."""
        raise TypeError(f"{type(self).__name__} has no default width")

    def resolve(self, ctx: BuildContext) -> Self:
        return self if self.width else self.replace(width=self.default_width(ctx.d_model))

    def inside(self, ctx: BuildContext) -> BuildContext:
        """The context of the hidden activations `[batch, time, width]`."""
        return ctx.where(width=self.width or self.default_width(ctx.d_model), held=False)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return super().check(ctx, path) + check_sites(self, {"inner": self.inside(ctx)}, path)


class Headed(Sublayer):
    """A branch with heads, and the sites `query`, `key`, `value` and `sdpa` (each head's output) that act on them."""

    short_forms: ClassVar[tuple[str, ...]] = ("gate", "qk_norm")
    query: tuple[Carry | Gate | Norm | Rotary | Scale, ...] = ()
    key: tuple[Carry | Gate | Norm | Rotary | Scale, ...] = ()
    value: tuple[Carry | Gate | Norm | Scale, ...] = ()
    sdpa: tuple[Norm | Gate | Scale, ...] = ()

    def value_heads(self, d_model: int) -> tuple[int, int]:
        """How many heads values have, and how many channels each."""
        raise TypeError(f"{type(self).__name__} has no values")


class SublayerModule(Module):
    """stream -> join(stream, post(transform(pre(stream)))). All maps of the normed copy are planned together."""

    inner: Site  # those that a branch has of the sites inside
    query: Site
    key: Site
    value: Site
    sdpa: Site

    def __init__(self, spec: Sublayer, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.path, ctx = ctx.path, spec.placed(ctx)
        apart = any(getattr(part, "documents", False) for _, part in walk(spec))
        self.pre = build_site(spec.pre, ctx.where(documents=apart, width=ctx.hidden), "pre")
        self.post = build_site(spec.post, ctx, "post")
        self.join = spec.join.build(ctx.at("join"))
        self.products = plan_products(ctx)

    def add_sites(self, spec: Sublayer, places: Mapping[str, BuildContext]) -> None:
        """Builds the sites inside, given by their names with the context of each."""
        for name, place in places.items():
            self.add_module(name, build_site(getattr(spec, name), place, name))

    def reads(self) -> list[Linear]:
        """The maps of the normed copy that the transformation itself needs, in the order in which it takes them."""
        raise TypeError(f"{type(self).__name__} reads nothing")

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update `[batch, time, d_model]` from the products of `reads`."""
        raise TypeError(f"{type(self).__name__} transforms nothing")

    def maps(self) -> list[Linear]:
        """All maps of the normed copy, in the order in which they are taken."""
        return [*self.reads(), *self.post.projections()]

    def from_products(self, products: Iterator[Tensor], call: Call) -> Tensor:
        """What this branch would add to the stream, from the products of `maps`."""
        return self.post(self.transform(products, call), call, products)  # type: ignore[no-any-return]

    def update(self, stream: Tensor, call: Call) -> Tensor:
        """What this branch would add to the stream."""
        hidden = self.pre(stream, call, iter(()))
        return self.from_products(iter(self.products(hidden, self.maps())), call)

    def forward(self, stream: Tensor, call: Call) -> Tensor:
        if call.watch is not None:
            return self.watched(stream, call)
        return self.join(stream, self.update(stream, call), call)  # type: ignore[no-any-return]

    def watched(self, stream: Tensor, call: Call) -> Tensor:
        """The same, told to who watches."""
        update = self.update(stream, call)
        assert call.watch is not None
        call.watch.tell("update", self.path, call.padding, output=update)
        return self.join(stream, update, call)  # type: ignore[no-any-return]


def linear(spec: Sublayer, name: str, inputs: int, outputs: int, std: float) -> Linear:
    """The map of a branch that its fields call `name`: `zero` has it start at zero, `bias` gives it one."""
    std = 0.0 if chosen(getattr(spec, "zero", False), name) else std
    return Linear(inputs, outputs, std=std, bias=chosen(getattr(spec, "bias", False), name))


def projections_of(*sites: Any) -> list[Linear]:
    """The maps of the branch's input that sites need, in their order."""
    return [projection for site in sites for projection in site.projections()]


def plan_products(ctx: BuildContext) -> Products:
    """How the maps that read one tensor are multiplied: as one product where launches cost, else each by itself."""
    if ctx.device.kind == "cuda":
        ctx.note("projections", "merged", "one matrix product for all maps of the branch's input")
        return merged
    ctx.note("projections", "separate", "on the CPU joining the weights costs more than one product saves")
    return separate

"""The families of primitives and what each kind must offer: build a module, and say what it costs."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import nn

from arch_dsl.context import BuildContext, Cost
from arch_dsl.errors import Problem
from arch_dsl.layers import Site
from arch_dsl.spec import Family

__all__ = [
    "Branch",
    "Gate",
    "Join",
    "Mask",
    "Norm",
    "Position",
    "Primitive",
    "Rotary",
    "Score",
    "build_site",
    "site_cost",
]


class Primitive(Family):
    """One typed component. A member defines its spec, its module, its cost, and what it cannot be combined with."""

    def build(self, ctx: BuildContext) -> nn.Module:
        """The module that computes it; `forward(x, call)` keeps the shape of x."""
        raise TypeError(f"{type(self).__name__} has no module")

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """Parameters and FLOPs over a sequence of `tokens` tokens."""
        return Cost()

    def resolve(self, ctx: BuildContext) -> Self:
        """The same choice with everything that can be derived from its place filled in."""
        return self

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        """What makes no sense at this place, each with the reason."""
        return []


class Norm(Primitive):
    """Rescales the last dimension."""

    noun: ClassVar[str] = "norm"


class Gate(Primitive):
    """Modulates a tensor by an activation of another one."""

    noun: ClassVar[str] = "gate"


class Position(Primitive):
    """Adds positions to the token embeddings."""

    noun: ClassVar[str] = "positional encoding"


class Rotary(Primitive):
    """Rotates queries and keys by their positions."""

    noun: ClassVar[str] = "rotary encoding"


class Score(Primitive):
    """Changes the attention logits; `forward(length, call)` gives a bias `[heads, time, time]`."""

    noun: ClassVar[str] = "score modifier"


class Mask(Primitive):
    """Says which key positions a query position may read."""

    noun: ClassVar[str] = "mask"
    window: ClassVar[int | None] = None

    def pairs(self, tokens: int) -> int:
        """How many (query, key) pairs the mask keeps in a sequence of `tokens` tokens."""
        raise TypeError(f"{type(self).__name__} has no pairs")


class Join(Primitive):
    """Brings a branch's update back to the stream; `forward(stream, update, call)`."""

    noun: ClassVar[str] = "join"


class Branch(Primitive):
    """Reads the residual stream, transforms, joins back; `forward(stream, call)`."""

    noun: ClassVar[str] = "branch"


def build_site(items: tuple[Primitive, ...], ctx: BuildContext, name: str) -> Site:
    """The primitives of one site as a module."""
    return Site([(item.type, item.build(ctx.at(f"{name}.{item.type}"))) for item in items])


def site_cost(items: tuple[Primitive, ...], ctx: BuildContext, tokens: int) -> Cost:
    """What the primitives of one site cost together."""
    children: dict[str, Cost] = {}
    for item in items:
        name = item.type if item.type not in children else f"{item.type}_{len(children) + 1}"
        children[name] = item.cost(ctx, tokens)
    return Cost.total(children)


def check_site(items: tuple[Primitive, ...], ctx: BuildContext, path: str) -> list[Problem]:
    """What is wrong with the primitives of one site."""
    return [problem for index, item in enumerate(items) for problem in item.check(ctx, f"{path}.{index}")]

"""Injections: what entered a loop of layers, brought in again before each of its turns."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.families import Module, Primitive
from archlab.arch_dsl.parts.layers import Linear, writing


class Injection(Primitive):
    """What the layers of a loop read in place of h, which the turn before gave: a function of h and of the stream e
    that entered the loop. The first turn finds h = 0.

    Its module's `forward(stream, entered)` keeps their shape. Where there are several residual streams, it acts on each
    alike.
    """

    noun: ClassVar[str] = "injection"


@Injection.register("concat")
class Concatenated(Injection):
    """A [h; e] with a linear map A `[d_model, 2 d_model]`: the adapter of Huginn (arXiv:2502.05171, section 3.2).

    Huginn draws the h of its first turn at random; here it is 0.
    """

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        rows = tokens * (ctx.heads or 1)
        return Cost.product(rows, 2 * ctx.d_model, ctx.d_model).keeping(2 * rows * ctx.d_model)


class _Concatenated(Module, of=Concatenated):
    def __init__(self, spec: Concatenated, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.projection = writing(Linear(2 * ctx.d_model, ctx.d_model, std=ctx.std))

    def forward(self, stream: Tensor, entered: Tensor) -> Tensor:
        found: Tensor = self.projection(torch.cat([stream, entered], -1))
        return found


@Injection.register("sum")
class Summed(Injection):
    """h + e, as looped transformers inject their input (arXiv:2311.12424)."""


class _Summed(Module, of=Summed):
    def forward(self, stream: Tensor, entered: Tensor) -> Tensor:
        return stream + entered

"""Dropout: noise of training, and nothing at any other time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from torch import Tensor, nn

from archlab.arch_dsl.language.spec import Range
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Scale


@Scale.register("dropout")
class Dropout(Scale):
    """x m / (1 - rate) in training, with m 0 at random elements of share `rate`, else 1 (arXiv:1207.0580, section 1).

    The noise follows from the trial's seed. Outside training it is the identity.
    """

    examples = ({"rate": 0.25},)

    rate: Annotated[float, Range(above=0, below=1)]

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(activations=tokens * ctx.channels)  # the noise

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.site == "logits":
            yield "", "dropout of logits hides tokens at random; put it at final"


class _Dropout(Module, of=Dropout):
    draws = True

    def __init__(self, spec: Dropout, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.rate = spec.rate

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return nn.functional.dropout(x, self.rate, self.training)

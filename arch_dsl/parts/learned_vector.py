"""A learned vector with a size and a rate of its own: nGPT's scales and step sizes (arXiv:2410.01131, section 2.5)."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor, nn

from archlab.arch_dsl.language.notation import WordOr
from archlab.arch_dsl.language.spec import Positive
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.layers import constant, undecayed

ROOT, OVER_ROOT = "sqrt(d_model)", "1/sqrt(d_model)"
StartOfVector = Annotated[float | str, WordOr(ROOT, Positive, "> 0", {"exclusiveMinimum": 0}, 0.7)]
StartOfParameter = Annotated[float | str, WordOr(OVER_ROOT, Positive, "> 0", {"exclusiveMinimum": 0}, 0.3)]


def number(value: float | str, ctx: BuildContext) -> float:
    """A number that may be written as a power of d_model."""
    return {ROOT: ctx.d_model**0.5, OVER_ROOT: ctx.d_model**-0.5}[value] if isinstance(value, str) else value


class LearnedVector(nn.Module):
    """s = weight init / scale, whose weight starts at `scale`, and so s at `init`; weight decay leaves it alone."""

    def __init__(self, shape: tuple[int, ...], init: float, scale: float) -> None:
        super().__init__()
        self.weight = undecayed(shape, constant(scale))
        self.factor = init / scale

    def forward(self) -> Tensor:
        return self.weight * self.factor

"""A short convolution: each channel mixed with its own last few values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

from torch import Tensor

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.language.spec import Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Module
from archlab.arch_dsl.parts.layers import constant, parameter, uniform
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.parts.state import recent
from archlab.kernels.activations import ACTIVATIONS
from archlab.kernels.short_conv import WIDEST


@Carry.register("short_conv")
class ShortConv(Carry):
    """y_t = act(sum over i < width of w_i x_(t-i) + b), channel by channel, with zeros before the first token
    (H3, arXiv:2212.14052, section 3.1; Mamba, arXiv:2312.00752, section 3.4).

    With `residual` x_t + y_t: a Canon layer (arXiv:2512.17351), whose width is 4. w starts uniform within
    1 / sqrt(width), as torch's convolutions do. Where the branch keeps documents apart, so does the convolution.
    Products with w are no products of matrices, and not among the FLOPs.
    """

    ops: ClassVar[tuple[str, ...]] = ("short_conv",)
    examples = ({}, {"width": 3, "bias": True, "activation": "silu"}, {"residual": True})

    width: Annotated[int, Range(min=2)] = 4
    bias: bool = False
    activation: Activation = "identity"
    residual: bool = added(default=False)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        kept = tokens + self.width - 1 + kept_of(self.activation)[0] * tokens
        parameters, cache = (self.width + self.bias) * ctx.channels, min(tokens, self.width - 1) * ctx.channels
        return Cost(parameters, activations=kept * ctx.channels, cache=cache)


class _ShortConv(Module, of=ShortConv):
    def __init__(self, spec: ShortConv, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        bound = spec.width**-0.5
        self.weight = parameter((ctx.channels, 1, spec.width), uniform(-bound, bound))
        self.bias = parameter((ctx.channels,), constant(0.0)) if spec.bias else None
        named = spec.activation in ACTIVATIONS
        self.activation = spec.activation if named else function_of(spec.activation)
        self.width, self.residual = spec.width, spec.residual
        self.path, self.documents = ctx.path, ctx.documents
        self.kernel: Callable[..., Tensor] = ctx.select(
            "short_conv",
            activation=spec.activation if named else "function",
            documents=ctx.documents,
            wide=spec.width > WIDEST,
        )

    def forward(self, x: Tensor, call: Call) -> Tensor:
        # x: [batch, time, channels] or [batch, time, heads, head_dim]
        new, time, more = x.flatten(2), x.shape[1], self.width - 1
        if call.padding is not None:
            new = new.masked_fill(call.padding[..., None], 0)
        read, documents = recent(call, self.path, new, most=more), None
        if self.documents and call.documents is not None:
            documents = recent(call, self.path, call.documents, more, ".documents")
        y = self.kernel(read, self.weight[:, 0], self.bias, documents, self.activation, self.residual, time)
        return y.view_as(x)


Carry.alias("canon", type="short_conv", residual=True)

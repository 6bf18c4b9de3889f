"""A short convolution: each channel mixed with its own last few values."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.language.spec import Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Module
from archlab.arch_dsl.parts.layers import constant, parameter, uniform
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.parts.state import recent


@Carry.register("short_conv")
class ShortConv(Carry):
    """y_t = act(sum over i < width of w_i x_(t-i) + b), channel by channel, with zeros before the first token
    (H3, arXiv:2212.14052, section 3.1; Mamba, arXiv:2312.00752, section 3.4).

    With `residual` x_t + y_t: a Canon layer (arXiv:2512.17351), whose width is 4. w starts uniform within
    1 / sqrt(width), as torch's convolutions do. Where the branch keeps documents apart, so does the convolution.
    Products with w are no products of matrices, and not among the FLOPs.
    """

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
        self.activation = function_of(spec.activation)
        self.width, self.residual = spec.width, spec.residual
        self.path, self.documents = ctx.path, ctx.documents

    def forward(self, x: Tensor, call: Call) -> Tensor:
        # x: [batch, time, channels] or [batch, time, heads, head_dim]
        new, time, more = x.flatten(2), x.shape[1], self.width - 1
        if call.padding is not None:
            new = new.masked_fill(call.padding[..., None], 0)
        # what came before, of which recent gives what decoding holds, and zeros before the first token
        inputs = F.pad(recent(call, self.path, new, most=more), (0, 0, more, 0))[:, -time - more :]
        numbers = None
        if self.documents and call.documents is not None:
            documents = recent(call, self.path, call.documents, more, ".documents")
            numbers = F.pad(documents, (more, 0), value=-1)[:, -time - more :]
        y = inputs[:, more:] * self.weight[:, 0, more]
        for i in range(more):
            before = inputs[:, i : i + time]
            if numbers is not None:
                before = before.masked_fill((numbers[:, i : i + time] != numbers[:, more:])[..., None], 0)
            y = y + before * self.weight[:, 0, i]
        if self.bias is not None:
            y = y + self.bias
        y = self.activation(y.to(x.dtype)).view_as(x)
        return x + y if self.residual else y


Carry.alias("canon", type="short_conv", residual=True)

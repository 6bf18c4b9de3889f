"""Adapters: few parameters that change what a trained branch gives."""

from __future__ import annotations

from torch import Tensor

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Adapter, Module
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.parts.saved_for_backward import kept_of


@Adapter.register("adapter")
class Bottleneck(Adapter):
    """x + W_2 act(W_1 x + b_1) + b_2 through `width` channels: adapters (arXiv:1902.00751, section 2.1, figure 2).

    W_2 starts at zero, so that a trained model starts as it was.
    """

    examples = ({"width": 5}, {"width": 5, "activation": "silu"})

    width: Count
    activation: Activation = "gelu"

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        own, _ = kept_of(self.activation)
        down = Cost.product(tokens, ctx.width, self.width, bias=True).keeping(ctx.elements(tokens))
        up = Cost.product(tokens, self.width, ctx.width, bias=True).keeping((1 + own) * tokens * self.width)
        return Cost.total({"down": down, "up": up})


class _Bottleneck(Module, of=Bottleneck):
    def __init__(self, spec: Bottleneck, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.down = Linear(ctx.width, spec.width, std=ctx.std, bias=True)
        self.up = Linear(spec.width, ctx.width, std=0.0, bias=True)
        self.activation = function_of(spec.activation)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return x + self.up(self.activation(self.down(x)))  # type: ignore[no-any-return]

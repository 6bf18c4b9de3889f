"""A single linear map with an activation, as heads of masked language models have one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule


@Branch.register("dense")
class Dense(Sublayer):
    """act(x W), with a `bias` act(x W + b).

    In the last layer, with `post: layernorm` and `join: {type: weighted, stream: 0}`, which leaves out the stream, it
    is the transform in front of BERT's table (the code of arXiv:1810.04805).
    """

    examples = ({}, {"bias": True, "activation": "relu2"})

    activation: Activation = "gelu"
    bias: bool = False

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        projection = Cost.product(tokens, ctx.d_model, ctx.d_model, self.bias).keeping(self.read(ctx, tokens))
        own, result = kept_of(self.activation)
        taken = bool(self.post) or self.join.type not in ("add", "weighted")  # else nothing else keeps the result
        activation = Cost(activations=(own + (result and not taken)) * tokens * ctx.d_model)
        return Cost.total(self.outer_cost(ctx, tokens) | {"projection": projection, "activation": activation})


class _Dense(SublayerModule, of=Dense):
    def __init__(self, spec: Dense, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.projection = Linear(ctx.d_model, ctx.d_model, std=ctx.std, bias=spec.bias)
        self.activation = function_of(spec.activation)

    def reads(self) -> list[Linear]:
        return [self.projection]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        return self.activation(next(products))

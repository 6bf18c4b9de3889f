"""LAuReL: beside a branch, a residual connection with a learned part of low rank."""

from __future__ import annotations

from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Norm, build_shared, check_part, shared_cost
from archlab.arch_dsl.parts.layers import Linear, writing
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.primitives.norms import RMSNorm


@Branch.register("laurel")
class Laurel(Sublayer):
    """x + norm(x A B) with A `[d_model, rank]` and B `[rank, d_model]`: the learned augmented residual of low rank
    (LAuReL-LR, arXiv:2411.07501) as Gemma 3n has it (transformers' modeling_gemma3n.py, `Gemma3nTextLaurelBlock`).

    There it stands beside attention in a `parallel` group whose `pre` is their norm and whose join is the sum over
    sqrt(2), `{type: weighted, stream: 0.7071067811865476, update: 0.7071067811865476}`. The paper has no norm of x A B,
    and x is the stream, of which there is one copy: an `mlp` of the width `rank` with `activation: identity`.
    """

    examples = ({}, {"rank": 5, "norm": "layernorm"})
    rank: Count = 64
    norm: Norm = RMSNorm()

    def inside(self, ctx: BuildContext) -> BuildContext:
        """The context of the norm of what has low rank, `[batch, time, d_model]`."""
        return ctx.at("norm", held=False, site="norm").at(self.norm.type)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost.total(
            self.outer_cost(ctx, tokens)
            | {
                "input_projection": self.map_cost("input", tokens, ctx.d_model, self.rank, self.read(ctx, tokens)),
                "output_projection": self.map_cost("output", tokens, self.rank, ctx.d_model, tokens * self.rank),
                "norm": shared_cost(self.norm, self.inside(ctx), tokens),
            }
        )

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return super().check(ctx, path) + check_part(self.norm, self.inside(ctx), f"{path}.norm")


class _Laurel(SublayerModule, of=Laurel):
    def __init__(self, spec: Laurel, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.input_projection = Linear(ctx.d_model, spec.rank, std=ctx.std)
        self.output_projection = writing(Linear(spec.rank, ctx.d_model, std=ctx.residual_std))
        self.norm = build_shared(spec.norm, spec.inside(ctx))

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        products = iter(self.products(hidden, [self.input_projection, *self.post.projections()]))
        update = hidden + self.norm(self.output_projection(next(products)), call)
        return self.post(update, call, products)  # type: ignore[no-any-return]

"""Per-layer embeddings: each layer looks tokens up in a narrow table of its own, and gates what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation
from archlab.arch_dsl.language.spec import Count, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Norm, build_shared, check_part, shared_cost
from archlab.arch_dsl.parts.layers import Linear, normal, table, writing
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.primitives.norms import RMSNorm


@Branch.register("per_layer_embedding")
class PerLayerEmbedding(Sublayer):
    """(act(x W_g) * e) W_o with e = (norm(x_0 W_p / sqrt(d_model)) + sqrt(width) E[token]) / sqrt(2), x_0 being what
    enters the first layer and E a table `[vocab, width]` of this layer: per-layer embeddings (Gemma 3n, which has no
    paper: transformers' modeling_gemma3n.py, `project_per_layer_inputs`, and Gemma 4's modeling_gemma4.py).

    There it is the last branch of a block, without a norm at `pre` and with one at `post`, and all layers have one
    `norm`: `{type: rmsnorm, share: stack}`. Tables of all layers are looked up in, and so have no FLOPs. With `rows` a
    table has fewer rows than there are tokens, and all tokens from that one on read row 0, as those of images there.
    """

    examples = ({}, {"width": 6, "activation": "silu", "norm": "layernorm"}, {"rows": 7})
    reads_tokens: ClassVar[bool] = True
    reads_embeddings: ClassVar[bool] = True
    width: Count = 256
    activation: Activation = "gelu_tanh"
    norm: Norm = RMSNorm()
    rows: Count | None = added(default=None)

    def inside(self, ctx: BuildContext) -> BuildContext:
        """The context of the norm of what the embeddings are projected to, `[batch, time, width]`."""
        return ctx.at("norm", width=self.width, held=False, site="norm").at(self.norm.type)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        rows, hidden = (self.rows or ctx.vocab) * self.width, tokens * self.width
        maps = self.map_cost("input", tokens, ctx.d_model, self.width)
        return Cost.total(
            self.outer_cost(ctx, tokens)
            | {
                "gate_projection": maps.keeping(self.read(ctx, tokens)),
                "embedding_projection": maps,  # x_0 is kept by what else reads it
                "norm": shared_cost(self.norm, self.inside(ctx), tokens),
                "table": Cost(parameters=rows, embeddings=rows),
                "activation": Cost(activations=(kept_of(self.activation)[0] + 2) * hidden),
                "output_projection": self.map_cost("output", tokens, self.width, ctx.d_model, hidden),
            }
        )

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.rows is not None and ctx.vocab > 1 and self.rows >= ctx.vocab:
            yield (
                "rows",
                f"must be less than the {ctx.vocab} tokens, found {self.rows}; leave it out for a row for each",
            )

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return super().check(ctx, path) + check_part(self.norm, self.inside(ctx), f"{path}.norm")


class _PerLayerEmbedding(SublayerModule, of=PerLayerEmbedding):
    def __init__(self, spec: PerLayerEmbedding, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.gate_projection = Linear(ctx.d_model, spec.width, std=ctx.std)
        self.embedding_projection = Linear(ctx.d_model, spec.width, std=ctx.std)
        self.norm = build_shared(spec.norm, spec.inside(ctx))
        self.table, self.rows = table((spec.rows or ctx.vocab, spec.width), normal(ctx.std)), spec.rows
        self.activation = function_of(spec.activation)
        self.output_projection = writing(Linear(spec.width, ctx.d_model, std=ctx.residual_std))
        self.projected, self.found = ctx.d_model**-0.5, spec.width**0.5

    def reads(self) -> list[Linear]:
        return [self.gate_projection]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        # projected, found: [batch, time, width]
        projected = self.norm(self.embedding_projection(call.across["embeddings"]) * self.projected, call)
        tokens = call.across["tokens"]
        if self.rows is not None:
            tokens = tokens.where(tokens < self.rows, 0)
        found = nn.functional.embedding(tokens, self.table) * self.found
        given = (projected + found) * 0.5**0.5
        return self.output_projection(self.activation(next(products)) * given)  # type: ignore[no-any-return]

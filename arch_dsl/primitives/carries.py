"""Carries: what another position or another layer holds, mixed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Range, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Module, Norm, place_of
from archlab.arch_dsl.parts.layers import Linear, constant, normal, parameter, table
from archlab.arch_dsl.parts.state import shifted
from archlab.arch_dsl.primitives.norms import RMSNorm


@Carry.register("dual")
class Dual(Carry):
    """x + norm(z), with z the second stream that `residual_dual` joins carry: the end of ResiDual
    (arXiv:2304.14802)."""

    norm: Norm = RMSNorm()

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return self.norm.cost(ctx, tokens)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = self.norm.check(ctx, f"{path}.norm") + super().check(ctx, path)
        if self.norm.share != "none":
            message = "stands once in a model: there is nothing to share"
            found.append(Problem(f"{path}.norm.share", message, self.norm.mark("share")))
        return found

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.site != "final":
            message = "dual ends the second stream of residual_dual joins, and stands at final alone"
            yield "", f"{message}, not at {ctx.site}"


class _Dual(Module, of=Dual):
    def __init__(self, spec: Dual, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.norm = spec.norm.build(ctx.at("norm"))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return x + self.norm(call.across["dual"], call)  # type: ignore[no-any-return]


@Carry.register("shift")
class Shift(Carry):
    """x_t' = a_t x_(t-1) + (1 - a_t) x_t with a_t = sigmoid(w . h_t) per head: key and value shift of the Forgetting
    Transformer (arXiv:2503.02130, eq. 14).

    h is the branch's input; before the first token stands zero, and before that of a document where the mask of the
    branch keeps documents apart.
    """

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        heads = ctx.heads or 1
        shares, before = 2 * tokens * heads, (tokens + 1) * heads * ctx.width
        kept = shares + before + ctx.elements(tokens)
        return Cost.product(tokens, ctx.hidden, heads).keeping(kept, cache=heads * ctx.width)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.heads is None:
            yield "", "shifts queries, keys or values, and this site has none"


class _Shift(Module, of=Shift):
    def __init__(self, spec: Shift, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.projection = Linear(ctx.hidden, ctx.heads or 1, std=ctx.std)
        self.path, self.documents = ctx.path, ctx.documents

    def forward(self, x: Tensor, call: Call, projected: Tensor) -> Tensor:
        # x: [batch, time, heads, head_dim], projected: [batch, time, heads]
        share = projected.sigmoid()[..., None]
        before = shifted(x.flatten(2), call, self.path, self.documents).view_as(x)
        return share * before + (1 - share) * x


@Carry.register("value_residual")
class ValueResidual(Carry):
    """v_l' = a v_l + b v_1 with the values v_1 of the first layer that has it: ResFormer (arXiv:2410.17897, eq. 7).

    a and b are learned per layer and start at 1/2; a `weight` fixes them to 1 - weight and weight.
    """

    by_layer: ClassVar[bool] = True
    weight: float | None = None

    def build(self, ctx: BuildContext) -> nn.Module:
        return (_FirstValue if self.is_first(ctx) else _ValueResidual)(self, ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        if self.is_first(ctx) or self.weight is not None:
            return Cost()
        return Cost(parameters=2, activations=ctx.elements(tokens))

    def is_first(self, ctx: BuildContext) -> bool:
        """Whether no layer before this one holds it."""
        owner: str = ctx.shared.setdefault(f"first {place_of(ctx)}", ctx.path)
        return owner == ctx.path

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.heads is None or ctx.site != "value":
            yield "", "carries values; it stands at value"
        elif ctx.n_layers == 1:
            yield "", "needs a second layer to carry values to"


class _FirstValue(Module):
    def __init__(self, spec: ValueResidual, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.key = place_of(ctx)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        call.across[self.key] = x
        return x


class _ValueResidual(_FirstValue):
    def __init__(self, spec: ValueResidual, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.weight = spec.weight
        if spec.weight is None:
            self.mix = parameter((2,), constant(0.5))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        own, first = self.mix if self.weight is None else (1 - self.weight, self.weight)
        return own * x + first * call.across[self.key]


@Carry.register("value_embedding")
class ValueEmbedding(Carry):
    """v' = a v + b E[token] with a second table of token embeddings E `[vocab, heads head_dim]`: the value embeddings
    of modded-nanogpt (github.com/KellerJordan/modded-nanogpt). a and b are learned numbers that start at 1/2.

    Each layer that has it has a table; `overrides` say which do. With `table_of` n a layer reads the table of layer n,
    an earlier one, by its own a and b. With `share: stack` all have one table, and one a and b.
    """

    reads_tokens: ClassVar[bool] = True
    later: ClassVar[tuple[str, ...]] = ("table_of",)
    table_of: Annotated[int, Range(min=0)] | None = added(default=None)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        rows = 0 if self.table_of is not None else ctx.vocab * ctx.channels
        kept = ctx.elements(tokens) + tokens * ctx.channels
        return Cost(parameters=rows + 2, embeddings=rows, activations=kept)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.heads is None or ctx.site != "value":
            yield "", "embeds tokens as values; it stands at value"
        elif self.table_of is not None and self.share != "none":
            yield "table_of", "is the table of one layer, and with share: stack all layers have one"


class _ValueEmbedding(Module, of=ValueEmbedding):
    def __init__(self, spec: ValueEmbedding, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        own, place = spec.table_of is None, place_of(ctx)
        if own:
            ctx.shared[f"{place} {ctx.depth}"] = table((ctx.vocab, ctx.channels), normal(ctx.std))
        self.table: nn.Parameter = ctx.shared[f"{place} {ctx.depth if own else spec.table_of}"]
        self.own, self.embedded = parameter((1,), constant(0.5)), parameter((1,), constant(0.5))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        found = nn.functional.embedding(call.across["tokens"], self.table).view_as(x)
        return self.own * x + self.embedded * found

"""Heads that predict further tokens while a model is trained, and are dropped afterwards: multi-token prediction.

Evaluation, decoding and exports see the model without them. Each has a block like the last layer's, and the model's own
last norm and table of logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.spec import Family, Positive, Range, walk
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import build_site, site_cost
from archlab.arch_dsl.parts.layers import Linear, writing
from archlab.arch_dsl.primitives.norms import RMSNorm
from archlab.arch_dsl.tree.block import Block, Branches

if TYPE_CHECKING:
    from archlab.arch_dsl.model.stack import Stack

_NORM = (RMSNorm(),)
# More than the stream from layer to layer.
_CARRIES = ("value_residual", "value_embedding", "per_layer_embedding", "residual_dual", "dual")

Apply = Callable[[nn.Module, Tensor, Call], Tensor]
Tokens = Annotated[int, Range(min=2, max=64)]


class Prediction(Family):
    """How further tokens are predicted. `tokens` counts the next one, so that there are `tokens` - 1 heads."""

    noun: ClassVar[str] = "prediction"
    tokens: Tokens
    weight: Positive

    def each(self) -> float:
        """What the loss of each head is multiplied by."""
        raise TypeError(f"{type(self).__name__} weighs nothing")

    def build(self, block: Block, ctx: BuildContext) -> Heads:
        """The heads, `block` being that of the last layer."""
        raise TypeError(f"{type(self).__name__} has no heads")

    def before(self, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
        """What stands before a head's block, over `tokens` tokens."""
        return {}

    def cost(self, stack: Stack, ctx: BuildContext, tokens: int) -> Cost:
        """The heads without their logits: all of it work that only training has."""
        block, found = stack.layers()[-1], {}
        for ahead in range(2, self.tokens + 1):
            place, read = _place(ctx, ahead), max(tokens - ahead + 1, 0)
            before = self.before(place, read)
            parts = {}
            for index, (name, branch) in enumerate(block.items()):
                held = not index and not before  # by the last layer, which reads the same stream
                parts[name] = branch.cost(place.at(name, held=held), read)
            last = site_cost(stack.final, place, "final", read).without_parameters()
            found[str(ahead)] = Cost.total(before | parts | {"final": last})
        return Cost.total(found)

    def check(self, stack: Stack) -> Iterator[Problem]:
        """Why a stack cannot have such heads."""
        for name in ("prompt", "streams", "skips"):
            if getattr(stack, name, None):
                yield Problem("predict", f"stands beside {name}, which further heads do not read", self.mark())
        try:
            last = (*stack.layers()[-1].values(), *stack.final)
        except SpecError:  # in an override, which is told where it stands
            return
        for _, part in walk(last):
            kind: Any = part
            if getattr(part, "share", "none") != "none":
                message = f"has blocks of its own, and layers share their {kind.type}"
                yield Problem("predict", message, self.mark())
            elif (
                getattr(part, "type", "") in _CARRIES
                or getattr(part, "kv", "own") != "own"
                or getattr(part, "value_rank", 0) != 0
            ):
                message = f"has heads that read the stream alone, and {kind.type} carries more"
                yield Problem("predict", message, self.mark())


@Prediction.register("parallel")
class Parallel(Prediction):
    """loss + weight sum_k L_k: token t + k, k = 2 … `tokens`, by a block for each k (arXiv:2404.19737, section 2).

    Each reads the stream before the last layer, which is the block of the next token; one norm and one table of logits
    serve all. The paper takes the weight 1, and as many layers off the trunk as it adds heads.
    """

    tokens: Tokens = 4
    weight: Positive = 1.0

    def each(self) -> float:
        return self.weight

    def build(self, block: Block, ctx: BuildContext) -> Heads:
        return _ParallelHeads(self, block, ctx)


@Prediction.register("sequential")
class Sequential(Prediction):
    """loss + weight mean_k L_k: token t + k, k = 2 … `tokens`, by modules in a row (arXiv:2412.19437, section 2.2).

    h_k = block(W [rmsnorm(h_(k-1)); rmsnorm(embedding of token t + k - 1)]) (eq. 21 and 22), from the stream h_1 after
    the last layer; table of tokens, last norm and logits are the model's (eq. 23 to 25). DeepSeek-V3 has `tokens` 2 and
    the weight 0.3, later 0.1.
    """

    tokens: Tokens = 2
    weight: Positive = 0.3

    def each(self) -> float:
        return self.weight / (self.tokens - 1)

    def build(self, block: Block, ctx: BuildContext) -> Heads:
        return _SequentialHeads(self, block, ctx)

    def before(self, ctx: BuildContext, tokens: int) -> dict[str, Cost]:
        product = Cost.product(tokens, 2 * ctx.d_model, ctx.d_model).keeping(2 * tokens * ctx.d_model)
        kept = ctx.where(held=True)  # both by other norms: that of the model's end, that of its first layer
        norms = {name: site_cost(_NORM, kept, name, tokens) for name in ("hidden", "token")}
        return {**norms, "projection": product}


def _place(ctx: BuildContext, ahead: int) -> BuildContext:
    """Where the block of a head stands: as deep as the last layer."""
    return ctx.at(f"predict.{ahead}", depth=ctx.n_layers - 1)


class Heads(nn.ModuleDict):
    """The heads by the number of the token that each predicts, the next one being 1."""

    def __init__(self, spec: Prediction, block: Block, ctx: BuildContext) -> None:
        places = {str(ahead): _place(ctx, ahead) for ahead in range(2, spec.tokens + 1)}
        super().__init__({name: self.head(block, place) for name, place in places.items()})
        self.weight = spec.each()

    def head(self, block: Block, ctx: BuildContext) -> nn.Module:
        """One of them."""
        return Branches(block, ctx)

    def streams(
        self, read: tuple[Tensor, Tensor], embedded: Tensor, call: Call, apply: Apply
    ) -> Iterator[tuple[int, Tensor, Call]]:
        """The token that each predicts, its stream `[batch, time - token + 1, d_model]`, and the call it stands in.

        `read` are the streams before and after the last layer; `embedded` the embeddings of the tokens; `apply` has a
        block act on a stream, as the stack has its layers.
        """
        raise TypeError(f"{type(self).__name__} reads nothing")


class _ParallelHeads(Heads):
    def streams(
        self, read: tuple[Tensor, Tensor], embedded: Tensor, call: Call, apply: Apply
    ) -> Iterator[tuple[int, Tensor, Call]]:
        before, _ = read
        for name, head in self.items():
            ahead = int(name)
            own = first(call, length := before.shape[1] - ahead + 1)
            if length > 0:
                yield ahead, apply(head, before[:, :length], own), own


class _Module(nn.Module):
    """W [rmsnorm(h); rmsnorm(e)], and the block that reads it."""

    def __init__(self, block: Block, ctx: BuildContext) -> None:
        super().__init__()
        self.hidden, self.token = (build_site(_NORM, ctx, name) for name in ("hidden", "token"))
        self.projection = writing(Linear(2 * ctx.d_model, ctx.d_model, std=ctx.std))
        self.block = Branches(block, ctx)

    def forward(self, stream: Tensor, embedded: Tensor, call: Call) -> Tensor:
        both = [self.hidden(stream, call, iter(())), self.token(embedded, call, iter(()))]
        found: Tensor = self.projection(torch.cat(both, -1))
        return found


class _SequentialHeads(Heads):
    def head(self, block: Block, ctx: BuildContext) -> nn.Module:
        return _Module(block, ctx)

    def streams(
        self, read: tuple[Tensor, Tensor], embedded: Tensor, call: Call, apply: Apply
    ) -> Iterator[tuple[int, Tensor, Call]]:
        _, stream = read
        for name, head in self.items():
            ahead = int(name)
            own = first(call, length := embedded.shape[1] - ahead + 1)
            if length > 0:
                assert isinstance(head, _Module)
                stream = apply(head.block, head(stream[:, :length], embedded[:, ahead - 1 :], own), own)
                yield ahead, stream, own


def first(call: Call, length: int) -> Call:
    """The call of the first so many tokens, in which nothing is carried from earlier layers, and nobody watches."""
    return dataclasses.replace(
        call,
        positions=None if call.positions is None else call.positions[:length],
        documents=None if call.documents is None else call.documents[:, :length],
        padding=None if call.padding is None else call.padding[:, :length],
        across={},
        watch=None,
    )


def wanted(targets: Tensor, ahead: int, documents: Tensor | None) -> Tensor:
    """The targets of the head that predicts token `ahead`, -100 where another document has begun in between."""
    found = targets[:, ahead - 1 :]
    if documents is None:
        return found
    return found.masked_fill(documents[:, ahead - 1 :] != documents[:, : found.shape[1]], -100)

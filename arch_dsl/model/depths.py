"""Mixture of depths: layers that a router applies to some tokens of a sequence, while the others pass by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Positive, Range, Spec, walk
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.primitives.balance import average
from archlab.arch_dsl.primitives.routing import room
from archlab.arch_dsl.tree.block import Block, Branches
from archlab.arch_dsl.tree.overrides import LayersNotation, layers_of
from archlab.kernels.activations import at_least_float32

NAME = "depths"  # of the router among the branches of a layer


class Depths(Spec):
    """x_i + r_i f_i(X) for the tokens of a sequence with the highest r_i = w^T x_i, a share `capacity`, and x_i for the
    others: mixture of depths (arXiv:2404.02258, section 3).

    X are the chosen tokens alone, at their positions of the sequence, and f is what the branches of a layer add to
    them. `layers` says which layers choose. So it is in training, where the choice looks at later tokens. Evaluation
    and decoding choose a token if its own logit is above 0: the router's r_i, or that of a `predictor`, an MLP with so
    many hidden channels which reads x_i without a gradient to it. Training adds `coefficient` times the mean binary
    cross-entropy of these logits, the targets being 1 for the chosen and 0 for the others. The number of chosen tokens
    is rounded up. A call's measures hold `chosen`, the share of tokens with a logit above 0, and in training
    `agreement`, the share of tokens of which the logit tells what the router chose.
    """

    title: ClassVar[str] = "depths"
    capacity: Annotated[float, Range(above=0, below=1)]
    layers: Annotated[str, LayersNotation()] = "1::2"
    predictor: Count | None = None
    coefficient: Positive = 0.01

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping, or from the capacity alone."""
        if not isinstance(node.value, dict):
            node = Node({"capacity": node}, node.mark)
        return parse_record(cls, node, path, problems)

    def taken(self, tokens: int) -> int:
        """How many tokens of a sequence a layer is applied to."""
        return room(tokens, 1, 1, self.capacity)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """What one layer has beside its branches. Kept are the stream, logits and targets, the weights of the chosen,
        and what the branches add to these."""
        rows = self.taken(tokens)
        router = Cost.product(tokens, ctx.d_model, 1)
        parts = {"router": router.keeping(tokens * (ctx.d_model + 2) + rows * (ctx.d_model + 1))}
        if self.predictor:
            hidden = Cost.product(tokens, ctx.d_model, self.predictor, bias=True)
            parts["hidden"] = hidden.keeping(2 * tokens * self.predictor)
            parts["output"] = Cost.product(tokens, self.predictor, 1, bias=True)
        return Cost.total(parts)

    def check(self, blocks: list[Block], others: Iterable[str]) -> Iterator[Problem]:
        """Why a stack of these blocks cannot have it; `others` are keys that it has beside it."""
        chosen = layers_of(self.layers, len(blocks))
        if not chosen:
            yield Problem("depths.layers", f"'{self.layers}' names no layer of {len(blocks)}", self.mark("layers"))
        for name in others:
            yield Problem("depths", f"stands beside {name}, which {_BESIDE[name]}", self.mark())
        told: set[str] = set()
        for depth, block in enumerate(blocks):
            if NAME in block:
                yield Problem(f"block.{NAME}", "is the name of the router; name the branch otherwise", self.mark())
            for path, part in walk(block):
                why = _wrong(part, depth in chosen)
                if why and why not in told:
                    told.add(why)
                    yield Problem("depths", f"{path} {why}", self.mark())


_BESIDE = {
    "loop": "applies a layer several times, and its router tells a loss once",
    "streams": "have no update of a whole layer",
}
_ACROSS = "takes what an earlier layer has of all tokens, and a layer here has the chosen ones"


def _wrong(part: Any, chosen: bool) -> str:
    """Why a part cannot stand in a layer that chooses its tokens (`chosen`), or beside one."""
    kind = getattr(part, "type", "")
    if getattr(part, "kv", "own") != "own" or getattr(part, "value_rank", 0):
        return _ACROSS
    if not chosen:
        return ""
    if kind in ("value_residual", "residual_dual"):
        return f"is {kind}, which {_ACROSS}"
    if kind == "native_sparse":
        return "is native_sparse, which numbers blocks of all tokens"
    if getattr(part, "reads_tokens", False) or getattr(part, "reads_embeddings", False):
        return f"is {kind}, which looks up all tokens, and a layer here has the chosen ones"
    if getattr(part, "kind", "") == "bias":
        return f"is {kind}, a bias of the logits, and chosen tokens have other distances in every sequence"
    if getattr(part, "by_length", False):
        return f"is {kind}, which depends on the length of the sequence"
    if getattr(part, "reads_prefix", False):
        return f"is {kind}, which counts the tokens of a prefix"
    if getattr(part, "share", "none") != "none" and hasattr(part, "join"):
        return "is shared with layers that are applied to all tokens"
    return ""


class _Router(nn.Module):
    """r `[batch, time]` of every token, and the logit by which it is chosen where no later ones are seen."""

    def __init__(self, spec: Depths, ctx: BuildContext) -> None:
        super().__init__()
        width = spec.predictor
        self.router = Linear(ctx.d_model, 1, std=ctx.std)
        self.hidden = Linear(ctx.d_model, width, std=ctx.std, bias=True) if width else None
        self.output = Linear(width, 1, std=ctx.std, bias=True) if width else None

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(stream.device.type, enabled=False):
            x = at_least_float32(stream)
            weights: Tensor = self.router(x).squeeze(-1)
            if self.hidden is None or self.output is None:
                return weights, weights
            logits: Tensor = self.output(F.silu(self.hidden(x.detach()))).squeeze(-1)
        return weights, logits


class ChosenBranches(Branches):
    """The branches of one layer, applied to the tokens that its router chooses."""

    def __init__(self, block: Block, ctx: BuildContext, spec: Depths) -> None:
        super().__init__(block, ctx.where(own_positions=True))
        self.taken, self.coefficient = spec.taken, spec.coefficient
        self.documents = any(getattr(part, "documents", False) for _, part in walk(block))
        self.depths = _Router(spec, ctx.at(NAME))

    def forward(self, stream: Tensor, call: Call) -> Tensor:
        call = call.layer(self.path)
        weights, logits = self.depths(stream)
        own = logits > 0 if call.padding is None else (logits > 0) & ~call.padding
        self.tell(own, call)
        if call.held is not None:
            stream = self.decoded(stream, weights, own, call)
        elif self.training:
            order = self.best(weights, call)
            self.tell_training(own, logits, torch.zeros_like(logits).scatter(1, order, 1.0), call)
            hidden = None if call.padding is None else call.padding.gather(1, order)
            stream = self.applied(stream, weights, order, hidden, call)
        else:
            order = (~own).to(torch.int8).argsort(dim=1, stable=True)  # the chosen first, which see no others
            stream = self.applied(stream, weights, order, ~own.gather(1, order), call)
        if call.watch is not None:
            call.watch.tell("stream", self.path, call.padding, output=stream)
        return stream

    def best(self, weights: Tensor, call: Call) -> Tensor:
        """Which tokens of each sequence `[batch, taken]` have the highest weights, in their order."""
        there = weights if call.padding is None else weights.masked_fill(call.padding, float("-inf"))
        return there.topk(self.taken(weights.shape[1])).indices.sort(-1).values

    def applied(self, stream: Tensor, weights: Tensor, order: Tensor, hidden: Tensor | None, call: Call) -> Tensor:
        """The stream with what the branches add to the tokens `order` `[batch, chosen]`, but those that are `hidden`
        from all others."""
        batch, time = stream.shape[:2]
        inner = dataclasses.replace(
            call,
            positions=call.positions_of(time, stream.device)[order],
            documents=call.documents.gather(1, order) if self.documents and call.documents is not None else None,
            padding=hidden,
        )
        rows = (order + time * torch.arange(batch, device=order.device)[:, None]).flatten()
        flat = stream.flatten(0, 1)
        before = flat.index_select(0, rows).view(batch, -1, stream.shape[-1])
        added = self.weighted(self.through(before, inner) - before, weights.gather(1, order))
        if hidden is not None:
            added = added.masked_fill(hidden[..., None], 0)
        return flat.index_add(0, rows, added.flatten(0, 1).to(flat.dtype)).view_as(stream)

    def decoded(self, stream: Tensor, weights: Tensor, own: Tensor, call: Call) -> Tensor:
        """The same for the tokens that are read next; each sequence holds those of its tokens that were chosen."""
        assert call.held is not None
        positions, rows = call.positions_of(stream.shape[1], stream.device), []
        for row in range(len(stream)):
            at, one = own[row].nonzero().flatten(), slice(row, row + 1)
            inner = dataclasses.replace(
                call,
                positions=positions[at],
                documents=call.documents[one, at] if self.documents and call.documents is not None else None,
                padding=None,
                source=None if call.source is None else call.source[one],
                source_padding=None if call.source_padding is None else call.source_padding[one],
                held=call.held.setdefault(f"{self.path}.{row}", {}),
            )
            before = stream[one, at]
            if len(at):
                added = self.weighted(self.through(before, inner) - before, weights[one, at])
                rows.append(stream[one].index_add(1, at, added.to(stream.dtype)))
            else:
                rows.append(stream[one])
        return torch.cat(rows)

    def through(self, stream: Tensor, call: Call) -> Tensor:
        """What the branches make of chosen tokens."""
        *branches, _ = self.children()  # the last one is the router
        for branch in branches:
            stream = branch(stream, call)
        return stream

    def weighted(self, update: Tensor, weights: Tensor) -> Tensor:
        """The update times each token's weight."""
        return update * weights[..., None].to(update.dtype)

    def tell(self, own: Tensor, call: Call) -> None:
        """How many tokens would be chosen by themselves."""
        call.measures[f"{self.path}.{NAME}.chosen"] = self.mean(own.float(), call)

    def tell_training(self, own: Tensor, logits: Tensor, targets: Tensor, call: Call) -> None:
        """The loss of the logits, and how many tell what the router chose."""
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        call.losses[f"{self.path}.{NAME}"] = self.coefficient * self.mean(losses, call)
        call.measures[f"{self.path}.{NAME}.agreement"] = self.mean((own == (targets > 0)).float(), call)

    def mean(self, values: Tensor, call: Call) -> Tensor:
        """Over all tokens that are no padding, of values `[batch, time]`."""
        kept = None if call.padding is None else ~call.padding
        return average(values.unsqueeze(-1), kept, (0, 1)).sum()

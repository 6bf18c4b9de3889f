"""The lightning indexer: a few small heads choose the keys that each query of attention reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count, Positive
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Norm, Rotary, Scale, Score, build_site, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Itself, Linear, Site
from archlab.arch_dsl.parts.state import padding_of_keys, recent
from archlab.arch_dsl.primitives.balance import average
from archlab.kernels.activations import at_least_float32
from archlab.kernels.attention import CAUSAL, Pattern


@Score.register("lightning_indexer")
class LightningIndexer(Score):
    """s_ij of the `top` keys j with the largest I_ij = sum_h w_ih relu(q_ih . k_j), -inf of others: the lightning
    indexer of DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025, eq. 1-2; arXiv:2512.02556, section 2.1).

    q are `heads` small queries of `head_dim` channels, k one key, w a weight per head, all linear in the branch's
    input, and w divided by sqrt(heads head_dim) as in the authors' code. All heads of attention read the same keys; of
    equal I those that come first. The sites `query` and `key` act on q and k `[batch, time, heads, head_dim]` (a
    rotation of half the channels in DeepSeek, after a layer norm of k). With `queries: latent` q comes from the latent
    of the queries of latent attention, as there.

    The choice has no gradient. What trains the indexer, and nothing else, is `coefficient` times the mean over queries
    of KL(p_i || softmax(I_i)) over the keys that are read, in `losses` of the call (eq. 4). p is what the heads give a
    key on average, by a softmax of their scaled products alone, before caps and biases. Without `top` all keys are
    read and only that loss is added: the dense warm-up of eq. 3, when other parameters are frozen.

    I is computed of all pairs and the choice is a bias of attention, which saves no time here. FLOPs of the model count
    the pairs that are read. Decoding holds k.
    """

    examples = (
        {"heads": 2, "head_dim": 4, "top": 3},
        {"heads": 2, "head_dim": 4},
        {"heads": 2, "head_dim": 4, "top": 3, "query": ["rope"], "key": ["layernorm", "rope"]},
        {"heads": 2, "head_dim": 4, "top": 3, "queries": "latent", "coefficient": 0.5},
    )
    by_layer: ClassVar[bool] = True  # its loss is told of each
    gapless: ClassVar[bool] = True
    hides: ClassVar[bool] = True

    heads: Count
    head_dim: Count
    top: Count | None = None
    queries: Literal["hidden", "latent"] = "hidden"
    query: tuple[Norm | Rotary | Scale, ...] = ()
    key: tuple[Norm | Rotary | Scale, ...] = ()
    coefficient: Positive = 1.0

    def places(self, ctx: BuildContext) -> dict[str, BuildContext]:
        """The contexts of the sites."""
        own = ctx.where(width=self.head_dim, held=False)
        return {"query": own.where(heads=self.heads), "key": own.where(heads=1)}

    def source(self, ctx: BuildContext) -> int:
        """How many channels its queries are made of."""
        return (ctx.query_latent or ctx.hidden) if self.queries == "latent" else ctx.hidden

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        places, width, pairs = self.places(ctx), self.heads * self.head_dim, tokens * tokens
        seen, reads = tokens * (tokens + 1) // 2, 2 * self.heads * (self.head_dim + 1)
        taught = 2 * pairs * (ctx.heads or 1) * ctx.width  # the products of attention, again, for p
        kept = tokens * (width + self.head_dim + self.heads) + pairs * (self.heads + 2) + pairs // 4
        return Cost.total(
            {
                "query_projection": Cost.product(tokens, self.source(ctx), width),
                "key_projection": Cost.product(tokens, ctx.hidden, self.head_dim),
                "weight_projection": Cost.product(tokens, ctx.hidden, self.heads),
                **{name: site_cost(getattr(self, name), places[name], name, tokens) for name in places},
                "index": Cost(flops_matmul=reads * pairs + taught, flops_model=reads * seen, activations=kept),
            }
        )

    def pairs(self, tokens: int) -> int:
        most = min(self.top or tokens, tokens)
        return most * (most + 1) // 2 + (tokens - most) * most

    def per_key(self, ctx: BuildContext) -> int:
        return self.head_dim

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return super().check(ctx, path) + check_sites(self, self.places(ctx), path)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.ahead:
            yield "", "chooses among earlier keys, and the mask reads ahead"
        if self.queries == "latent" and ctx.query_latent is None:
            yield "queries", "come from the latent of queries, and there is none; give query_latent"
        if self.share == "stack":
            yield "share", "lets layers share an indexer, whose loss is told of each; leave it out"


class _LightningIndexer(Module, of=LightningIndexer):
    # B batch, T time, S keys (those that decoding holds, and T), I heads of the indexer, E its head_dim
    query: Site
    key: Site

    def __init__(self, spec: LightningIndexer, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.path, self.window, self.documents = ctx.path, ctx.window, ctx.documents
        self.pattern = CAUSAL if ctx.window is None else Pattern(window=ctx.window)
        self.heads, self.head_dim, self.top = spec.heads, spec.head_dim, spec.top
        self.latent, self.coefficient, self.logit_scale = spec.queries == "latent", spec.coefficient, ctx.logit_scale
        self.scale = (spec.heads * spec.head_dim) ** -0.5
        self.projection = Itself()
        self.query_projection = Linear(spec.source(ctx), spec.heads * spec.head_dim, std=ctx.std)
        self.key_projection = Linear(ctx.hidden, spec.head_dim, std=ctx.std)
        self.weight_projection = Linear(ctx.hidden, spec.heads, std=ctx.std)
        for name, place in spec.places(ctx).items():
            self.add_module(name, build_site(getattr(spec, name), place, name))

    def forward(self, q: Tensor, k: Tensor, call: Call, hidden: Tensor) -> Tensor:
        padding = padding_of_keys(call, self.path, q, k.shape[1], self.window)
        documents = call.documents if self.documents else None
        seen = self.pattern.dense(q.shape[1], k.shape[1], q.device, documents=documents, padding=padding)
        assert seen is not None
        hides = ~seen.expand(len(q), 1, -1, -1)[:, 0]
        index_BTS = self.index(hidden.detach(), call)
        if self.top is not None and self.top < k.shape[1]:
            hides = hides | ~self.chosen(index_BTS.detach().masked_fill(hides, float("-inf")), self.top)
        if call.held is None and torch.is_grad_enabled():
            call.losses[f"{self.path}.loss"] = self.loss(index_BTS, self.attended(q, k, hides), hides, call)
        return torch.zeros_like(hides, dtype=q.dtype).masked_fill(hides, float("-inf"))[:, None]

    def index(self, hidden: Tensor, call: Call) -> Tensor:
        """I `[B, T, S]` of the branch's input `[B, T, width]`."""
        source = call.across["query_latent"].detach() if self.latent else hidden
        q_BTIE = self.query(self.query_projection(source).unflatten(-1, (self.heads, self.head_dim)), call, iter(()))
        k_BT1E = self.key(self.key_projection(hidden)[:, :, None], call, iter(()))
        k_BSE = at_least_float32(recent(call, self.path, k_BT1E[:, :, 0], self.window, ".key"))
        weights_BTI = at_least_float32(self.weight_projection(hidden)) * self.scale
        with torch.autocast(q_BTIE.device.type, enabled=False):
            products = (at_least_float32(q_BTIE).flatten(1, 2) @ k_BSE.mT).relu().unflatten(1, (-1, self.heads))
            return (weights_BTI[:, :, None] @ products)[:, :, 0]  # type: ignore[no-any-return]

    def chosen(self, index: Tensor, top: int) -> Tensor:
        """The `top` largest of each query `[B, T, S]`; of equal ones the first, however many keys follow."""
        best = index.sort(dim=-1, descending=True, stable=True).indices[..., :top]
        return torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True)

    def attended(self, q: Tensor, k: Tensor, hides: Tensor) -> Tensor:
        """p `[B, T, S]`, the mean over heads of what attention gives each key; hidden keys get nothing, and nobody a
        gradient."""
        q, k = q.detach(), k.detach()
        q_BKGTD = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
        logits = q_BKGTD.flatten(2, 3) @ k.permute(0, 2, 3, 1)
        logits = at_least_float32(logits).unflatten(2, (-1, q.shape[1])).flatten(1, 2) * self.logit_scale
        return logits.masked_fill(hides[:, None], float("-inf")).softmax(-1).mean(1)  # type: ignore[no-any-return]

    def loss(self, index: Tensor, probabilities: Tensor, hides: Tensor, call: Call) -> Tensor:
        """The mean of KL(p || softmax(I)) over the queries that are no padding."""
        logs = index.masked_fill(hides, float("-inf")).log_softmax(-1).masked_fill(hides, 0.0)
        apart = (torch.xlogy(probabilities, probabilities) - probabilities * logs).sum(-1, keepdim=True)
        return self.coefficient * average(apart, None if call.padding is None else ~call.padding, (0, 1)).sum()

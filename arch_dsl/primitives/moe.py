"""Mixtures of experts: a feed-forward branch of many experts, of which a router sends each token to a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count, NotNegative, Positive, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.primitives.balance import Balance, average
from archlab.arch_dsl.primitives.branch import SublayerModule
from archlab.arch_dsl.primitives.experts import Experts, SharedExpert, WithExperts
from archlab.arch_dsl.primitives.routing import GROUP_SCORES, in_best_groups, room, with_room
from archlab.kernels.activations import at_least_float32

TINY = 1e-20  # where all sigmoids are 0, as in DeepSeek-V3's code


@Branch.register("moe")
class MoE(WithExperts):
    """sum over the `top_k` best of all `experts` of scale w_e expert_e(x): a sparse mixture (arXiv:1701.06538, eq. 1).

    A linear router scores the experts in float32, by a `softmax` over them or a `sigmoid` each (arXiv:2412.19437,
    eq. 15); w are the scores of the chosen, divided by their sum where `normalize` is on: of a softmax that is the
    softmax over the chosen alone (arXiv:2401.04088, section 2.1). Each expert is a feed-forward of `width` (by default
    that of the dense branch of its kind), (act(x W_g) * f(x W_u)) W_o or act(x W_1) W_2, with f another activation,
    `linear`. `shared` is the width of an expert that every token meets (arXiv:2401.06066, section 3.2; several of them
    are one as wide as all), times sigmoid(x w_s) with `shared_gate` (Qwen2-MoE).

    With `weigh: inputs` it is sum of expert_e(scale w_e x): what an expert reads is weighed, and not what it gives (the
    code of Llama 4, which has no paper).

    With `groups` of equally many experts a token chooses among those of its `group_top_k` best groups alone
    (arXiv:2405.04434, section 2.2.2); the score of a group is that of its best expert (`group_score: max`) or the sum
    of its best two (`top2`, arXiv:2412.19437, section 2.1.2). `capacity` bounds what an expert serves while training:
    the first capacity tokens top_k / experts tokens of each sequence that choose it, rounded up; what later ones asked
    of it is left out (arXiv:2006.16668, section 2.2, a sequence being the group). Evaluation leaves nothing out.

    With `choice: expert` each expert takes the tokens top_k / experts tokens of a sequence that score highest for it,
    rounded up (arXiv:2202.09368, section 3.2), so that loads are even. Whether a token is taken then depends on later
    ones: such a model reads the future, cannot decode, and cannot be trained to predict the next token.

    `balance` evens out the load by a loss or a bias; `z_loss` times the mean of log^2 sum exp(logits) keeps the
    router's logits small (arXiv:2202.08906, eq. 5). A call's measures hold `load` `[experts]`, the shares of the
    assignments, `entropy`, that of the router's choice in nats, and `dropped`, the share of assignments that no expert
    served (with `choice: expert` of tokens that none took).
    """

    ops: ClassVar[tuple[str, ...]] = ("glu", "experts")
    by_layer: ClassVar[bool] = True  # losses and loads are told of each
    order: ClassVar[tuple[str, ...]] = (
        "pre", "post", "join", "experts", "top_k", "width", "expert", "activation", "linear", "bias", "routing",
        "normalize", "scale", "weigh", "router_bias", "choice", "groups", "group_top_k", "group_score", "capacity",
        "shared", "shared_gate", "balance", "z_loss", "share",
    )  # fmt: skip
    examples = (
        {"width": 12},
        {"expert": "mlp", "width": 12, "experts": 4, "bias": True, "routing": "sigmoid", "z_loss": 0.1},
        {"width": 12, "experts": 4, "shared": 20, "shared_gate": True, "bias": True, "balance": {"type": "switch"}},
        {"width": 12, "experts": 4, "top_k": 1, "normalize": False, "router_bias": True, "pre": ["rmsnorm"]},
        {"width": 12, "experts": 12, "top_k": 3, "groups": 3, "group_top_k": 1},
        {"width": 12, "experts": 4, "balance": "bias"},
        {"width": 12, "experts": 4, "capacity": 1.0},
        {"width": 12, "experts": 4, "choice": "expert", "normalize": False},
        {"width": 12, "experts": 4, "weigh": "inputs", "routing": "sigmoid"},
    )

    top_k: Count = 2
    routing: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: Positive = 1.0
    router_bias: bool = False
    weigh: Literal["outputs", "inputs"] = added(default="outputs")
    choice: Literal["token", "expert"] = added(default="token")
    groups: Count = added(default=1)
    group_top_k: Count | None = added(default=None)
    group_score: Literal["max", "top2"] = added(default="max")
    capacity: Positive | None = added(default=None)
    balance: Balance | None = None
    z_loss: NotNegative = 0.0

    @property
    def looks_ahead(self) -> bool:
        """Whether what a token gets depends on later ones."""
        return self.choice == "expert"

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        return found if self.balance is None else found + self.balance.check(ctx, f"{path}.balance")

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.top_k > self.experts:
            yield "top_k", f"{self.top_k} of {self.experts} experts cannot be chosen"
        if self.weigh == "inputs" and self.bias:
            yield "weigh", "of inputs is for experts without biases, which a weight of 0 would leave as they are"
        yield from self._wrong_by_experts() if self.choice == "expert" else self._wrong_by_tokens()
        yield from super().wrong(ctx)

    def _wrong_by_tokens(self) -> Iterator[tuple[str, str]]:
        if self.top_k == 1 and self.normalize:
            yield "normalize", "makes the weight of a single expert 1, so that the router learns nothing; set it false"
        if self.balance is not None and self.top_k >= self.experts:
            yield "balance", f"has nothing to even out: all {self.experts} experts get every token"
        if self.capacity is not None and self.capacity * self.top_k >= self.experts:
            yield "capacity", f"{self.capacity:g} drops nothing: every expert has room for all tokens of a sequence"
        yield from self._wrong_groups()

    def _wrong_by_experts(self) -> Iterator[tuple[str, str]]:
        if self.top_k >= self.experts:
            yield "choice", f"has nothing to choose: all {self.experts} experts get every token"
        if self.normalize:
            yield "normalize", "divides by the sum over what a token chose, and here experts choose; set it false"
        for name, given in (("balance", self.balance is not None), ("capacity", self.capacity is not None)):
            if given:
                yield name, "has nothing to even out: experts that choose get equally many tokens"
        for name in ("groups", "group_top_k", "group_score"):
            if getattr(self, name) != getattr(MoE(), name):
                yield name, "is for tokens that choose their experts, and here experts choose"

    def _wrong_groups(self) -> Iterator[tuple[str, str]]:
        if self.groups == 1:
            for name in ("group_top_k", "group_score"):
                if getattr(self, name) != getattr(MoE(), name):
                    yield name, "is about groups of experts, and there is one; give how many as `groups`"
            return
        size, best = self.experts // self.groups, self.group_top_k
        if self.experts % self.groups:
            yield "groups", f"{self.experts} experts cannot be divided into {self.groups} equal groups"
        elif best is None:
            yield "group_top_k", f"is missing: of how many of the {self.groups} groups may a token choose experts?"
        elif best >= self.groups:
            yield "group_top_k", f"{best} of {self.groups} groups limits nothing"
        elif best >= self.top_k and self.group_score == "max":
            told = f"{best} groups limit nothing: the best {self.top_k} experts are in the best {self.top_k} groups"
            yield "group_top_k", f"{told} (by group_score max)"
        elif best * size < self.top_k:
            yield "group_top_k", f"{best} groups have {best * size} experts, of which {self.top_k} cannot be chosen"
        elif size < GROUP_SCORES[self.group_score]:
            yield "group_score", f"{self.group_score} sums more experts than the {size} of a group"

    def taken(self, tokens: int) -> int:
        """How many tokens of a sequence each expert takes, where experts choose."""
        return room(tokens, self.top_k, self.experts, 1.0)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        rows = self.experts * self.taken(tokens) if self.choice == "expert" else tokens * self.top_k
        parts = {"router": self._router_cost(ctx, tokens, rows)}
        parts |= self.experts_cost(ctx, tokens, rows, self.top_k)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def _router_cost(self, ctx: BuildContext, tokens: int, rows: int) -> Cost:
        """The product; kept are its input, scores, weights, and as integers of two elements each the chosen experts and
        the order of rows, there and back. Where experts choose, the chosen tokens twice, and what is added for them."""
        product = Cost.product(tokens, ctx.d_model, self.experts, self.router_bias)
        scores = self.experts + (self.routing == "sigmoid") + (self.z_loss > 0) * (self.experts + 1)
        if self.choice == "expert":
            numbers = 5 + 2 * bool(self.bias)
            return product.keeping(self.read(ctx, tokens) + tokens * scores + rows * (numbers + ctx.d_model))
        numbers = 2 * self.top_k * (3 + bool(self.bias))
        weights = self.top_k + self.normalize * (self.top_k + 1) + (self.capacity is not None) * self.top_k / 4
        return product.keeping(self.read(ctx, tokens) + round(tokens * (scores + weights + numbers)))


class _MoE(SublayerModule, of=MoE):
    def __init__(self, spec: MoE, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.path, self.top_k, self.scale, self.first = ctx.path, spec.top_k, spec.scale, spec.weigh == "inputs"
        self.routing, self.normalize = spec.routing, spec.normalize
        self.looks_ahead, self.capacity, self.z_loss = spec.looks_ahead, spec.capacity, spec.z_loss
        self.groups, self.group_top_k = spec.groups, spec.group_top_k
        self.group_score = GROUP_SCORES[spec.group_score]
        self.penalty = None if spec.balance is None else spec.balance.penalty
        self.reads_earlier = self.penalty is not None and self.penalty.reads_earlier
        self.router = Linear(ctx.d_model, spec.experts, std=ctx.std, bias=spec.router_bias)
        self.correction = None if spec.balance is None else spec.balance.correction(spec.experts, ctx)
        self.experts = Experts(spec, ctx)
        self.shared = SharedExpert(spec, ctx) if spec.shared else None

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        maps = [*([] if self.shared is None else self.shared.reads()), *self.post.projections()]
        products = iter(self.products(hidden, maps) if maps else [])
        update = self.by_experts(hidden, call) if self.looks_ahead else self.routed(hidden, call)
        if self.shared is not None:
            update = update + self.shared(products)
        return self.post(update, call, products)  # type: ignore[no-any-return]

    def routed(self, hidden: Tensor, call: Call) -> Tensor:
        """The weighted sum of the chosen experts `[batch, time, d_model]`: rows are sorted by expert and back."""
        flat = hidden.flatten(0, 1)
        logits = self.logits(flat)
        scores = logits.softmax(-1) if self.routing == "softmax" else logits.sigmoid()
        weights, experts = self.chosen(scores)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        owner, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(owner, torch.arange(logits.shape[-1], device=owner.device), right=True)
        assigned = torch.zeros_like(scores).scatter(1, experts, 1.0 / self.top_k).unflatten(0, hidden.shape[:2])
        dropped = 1 - ends[-1] / experts.numel()
        if self.capacity is not None and self.training:
            of_sequence = experts.unflatten(0, hidden.shape[:2])
            most = room(hidden.shape[1], self.top_k, logits.shape[-1], self.capacity)
            served = with_room(of_sequence, call.padding, logits.shape[-1], most)
            weights = torch.where(served.flatten(0, 1), weights, 0.0)
            left = 1 - served.to(scores.dtype).mean(-1, keepdim=True)
            dropped = average(left, None if call.padding is None else ~call.padding, (0, 1)).sum()
        self.tell(logits, scores, assigned, dropped, call)
        given, shares = flat.index_select(0, order // self.top_k), self.scale * weights
        if self.first:
            given = given * shares.flatten().index_select(0, order).to(given.dtype).unsqueeze(-1)
        rows = self.experts(given, ends, owner)
        mine = rows.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))
        mixed: Tensor = (mine if self.first else mine * shares.to(mine.dtype).unsqueeze(-1)).sum(1)
        return mixed.view_as(hidden)

    def chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scores `[tokens, top_k]` of the chosen experts, and which these are."""
        if self.correction is None and self.group_top_k is None:
            weights, experts = scores.topk(self.top_k)
            return weights, experts
        ranked = scores.detach()
        if self.correction is not None:
            ranked = self.correction(ranked)
        if self.group_top_k is not None:
            ranked = in_best_groups(ranked, self.groups, self.group_top_k, self.group_score)
        experts = ranked.topk(self.top_k).indices
        return scores.gather(-1, experts), experts

    def by_experts(self, hidden: Tensor, call: Call) -> Tensor:
        """The weighted sum of the experts that took a token `[batch, time, d_model]`."""
        if call.held is not None:
            raise ValueError(f"{self.path}: a choice of tokens by experts looks ahead, and decoding has no later ones")
        batch, time, _ = hidden.shape
        logits = self.logits(hidden)
        count = logits.shape[-1]
        scores = logits.softmax(-1) if self.routing == "softmax" else logits.sigmoid()
        there = scores if call.padding is None else scores.masked_fill(call.padding.unsqueeze(-1), 0.0)
        weights, tokens = there.mT.topk(room(time, self.top_k, count, 1.0))
        assigned = torch.zeros_like(there.mT).scatter(-1, tokens, 1.0 / self.top_k).mT
        left = (assigned.sum(-1, keepdim=True) == 0).to(scores.dtype)
        dropped = average(left, None if call.padding is None else ~call.padding, (0, 1)).sum()
        self.tell(logits.flatten(0, 1), scores.flatten(0, 1), assigned, dropped, call)
        first = time * torch.arange(batch, device=tokens.device)
        places = (tokens + first[:, None, None]).transpose(0, 1).flatten()
        owner = torch.arange(count, device=tokens.device).repeat_interleave(len(places) // count)
        ends = (torch.arange(count, device=tokens.device) + 1) * (len(places) // count)
        flat = hidden.flatten(0, 1)
        given, shares = flat.index_select(0, places), (self.scale * weights.transpose(0, 1).flatten()).unsqueeze(-1)
        rows = self.experts(given * shares.to(given.dtype) if self.first else given, ends, owner)
        mixed: Tensor = rows if self.first else rows * shares.to(rows.dtype)
        mixed = rows.new_zeros(flat.shape).index_add(0, places, mixed)
        return mixed.view_as(hidden)

    def logits(self, flat: Tensor) -> Tensor:
        """The router's logits `[tokens, experts]`, in at least float32 under autocast too."""
        with torch.autocast(flat.device.type, enabled=False):
            logits: Tensor = self.router(at_least_float32(flat))
        return logits

    def tell(self, logits: Tensor, scores: Tensor, assigned: Tensor, dropped: Tensor, call: Call) -> None:
        """Leaves the losses and measures of a routing in the call; `assigned` is `[batch, time, experts]`."""
        shares = scores if self.routing == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)
        shares = shares.unflatten(0, assigned.shape[:2])
        kept = None if call.padding is None else ~call.padding
        load = average(assigned, kept, (0, 1)).detach()
        if self.penalty is not None:
            earlier = call.earlier.get(f"{self.path}.load")
            call.losses[f"{self.path}.balance"] = self.penalty.loss(assigned, shares, kept, earlier)
        if self.correction is not None:
            at = assigned > 0 if kept is None else (assigned > 0) & kept.unsqueeze(-1)
            call.measures[f"{self.path}.assigned"] = at.sum((0, 1))
        if self.z_loss:
            squares = logits.logsumexp(-1, keepdim=True).square().unflatten(0, assigned.shape[:2])
            call.losses[f"{self.path}.z_loss"] = self.z_loss * average(squares, kept, (0, 1)).sum()
        entropy = torch.special.entr(shares.detach()).sum(-1, keepdim=True)
        call.measures[f"{self.path}.load"] = load
        call.measures[f"{self.path}.entropy"] = average(entropy, kept, (0, 1)).sum()
        call.measures[f"{self.path}.dropped"] = dropped

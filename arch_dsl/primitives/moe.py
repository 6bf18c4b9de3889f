"""Mixtures of experts: a feed-forward branch of many experts, of which a router sends each token to a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation, ProjectionNotation, Projections, chosen
from archlab.arch_dsl.language.spec import Count, NotNegative, Positive, Range
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.layers import Linear, constant, normal, parameter
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.primitives.balance import Balance, average
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule
from archlab.arch_dsl.primitives.feedforward import GLU, MLP
from archlab.kernels.activations import ACTIVATIONS, at_least_float32

TINY = 1e-20  # where all sigmoids are 0, as in DeepSeek-V3's code
INPUTS = {"glu": ("gate", "input"), "mlp": ("input",)}


@Branch.register("moe")
class MoE(Sublayer):
    """sum over the `top_k` best of all `experts` of scale w_e expert_e(x): a sparse mixture (arXiv:1701.06538, eq. 1).

    A linear router scores the experts in float32, by a `softmax` over them or a `sigmoid` each (arXiv:2412.19437,
    eq. 15); w are the scores of the chosen, divided by their sum where `normalize` is on: of a softmax that is the
    softmax over the chosen alone (arXiv:2401.04088, section 2.1). No token is dropped. Each expert is a feed-forward
    of `width` (by default that of the dense branch of its kind), (act(x W_g) * f(x W_u)) W_o or act(x W_1) W_2, with
    f another activation, `linear`. `shared` is the width of an expert that every token meets (arXiv:2401.06066,
    section 3.2; several of them are one as wide as all), times sigmoid(x w_s) with `shared_gate` (Qwen2-MoE).

    `balance` is a loss that evens out the load; `z_loss` times the mean of log^2 sum exp(logits) keeps the router's
    logits small (arXiv:2202.08906, eq. 5). A call's measures hold `load` `[experts]`, the shares of the assignments,
    `entropy`, that of the router's choice in nats, and `dropped`, the share of assignments that no expert served.
    """

    ops: ClassVar[tuple[str, ...]] = ("glu", "experts")
    by_layer: ClassVar[bool] = True  # losses and loads are told of each
    examples = (
        {"width": 12},
        {"expert": "mlp", "width": 12, "experts": 4, "bias": True, "routing": "sigmoid", "z_loss": 0.1},
        {"width": 12, "experts": 4, "shared": 20, "shared_gate": True, "bias": True, "balance": {"type": "switch"}},
        {"width": 12, "experts": 4, "top_k": 1, "normalize": False, "router_bias": True, "pre": ["rmsnorm"]},
    )

    experts: Annotated[int, Range(min=2)] = 8
    top_k: Count = 2
    width: Count | None = None
    expert: Literal["glu", "mlp"] = "glu"
    activation: Activation = "silu"
    linear: Activation = "identity"
    bias: Annotated[Projections, ProjectionNotation("gate", "input", "output")] = False
    routing: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: Positive = 1.0
    router_bias: bool = False
    shared: Annotated[int, Range(min=0)] = 0
    shared_gate: bool = False
    balance: Balance | None = None
    z_loss: NotNegative = 0.0

    def resolve(self, ctx: BuildContext) -> Self:
        kind = GLU() if self.expert == "glu" else MLP()
        return self if self.width else self.replace(width=kind.default_width(ctx.d_model))

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.top_k > self.experts:
            yield "top_k", f"{self.top_k} of {self.experts} experts cannot be chosen"
        if self.top_k == 1 and self.normalize:
            yield "normalize", "makes the weight of a single expert 1, so that the router learns nothing; set it false"
        if self.balance is not None and self.top_k >= self.experts:
            yield "balance", f"has nothing to even out: all {self.experts} experts get every token"
        if self.expert == "mlp" and self.linear != "identity":
            yield "linear", "is the second activation of a glu; the experts here are mlp"
        if self.expert == "mlp" and not isinstance(self.bias, bool) and "gate" in self.bias:
            yield "bias", "names `gate`, which an mlp does not have (input, output)"
        if self.shared_gate and not self.shared:
            yield "shared_gate", "gates a shared expert, and there is none; give its width as `shared`"

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        width = self.resolve(ctx).width
        assert width is not None
        rows = tokens * self.top_k
        parts = {"router": self._router_cost(ctx, tokens)}
        for name in INPUTS[self.expert]:
            parts[f"{name}_projections"] = self._map_cost(rows, ctx.d_model, width, name)
        first = f"{INPUTS[self.expert][0]}_projections"
        parts[first] = parts[first].keeping(rows * ctx.d_model)
        parts["activation"] = self._hidden_cost(rows, width)
        output = self._map_cost(rows, width, ctx.d_model, "output")
        parts["output_projections"] = output.keeping(rows * (width + ctx.d_model))
        if self.shared:
            parts["shared"] = self._shared_cost(ctx, tokens)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def _router_cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """The product; kept are its input, scores, weights, and as integers of two elements each the chosen experts and
        the order of rows, there and back."""
        product = Cost.product(tokens, ctx.d_model, self.experts, self.router_bias)
        numbers = 2 * self.top_k * (3 + bool(self.bias))
        weights = self.top_k + self.normalize * (self.top_k + 1)
        scores = self.experts + (self.routing == "sigmoid") + (self.z_loss > 0) * (self.experts + 1)
        return product.keeping(self.read(ctx, tokens) + tokens * (scores + weights + numbers))

    def _map_cost(self, rows: int, inputs: int, outputs: int, name: str) -> Cost:
        """One map of all experts: all parameters, and the work of the rows, each at one expert."""
        one = Cost.product(rows, inputs, outputs, chosen(self.bias, name))
        idle = (self.experts - self.top_k) * one.parameters
        return Cost(self.experts * one.parameters, one.flops_matmul, one.flops_model, idle=idle)

    def _hidden_cost(self, rows: int, width: int) -> Cost:
        own, _ = kept_of(self.activation)
        gated = self.expert == "glu"
        second, _ = kept_of(self.linear)
        return Cost(activations=(own + 2 * gated + second) * rows * width)

    def _shared_cost(self, ctx: BuildContext, tokens: int) -> Cost:
        names = INPUTS[self.expert]
        parts = {f"{name}_projection": self.map_cost(name, tokens, ctx.d_model, self.shared) for name in names}
        parts["activation"] = self._hidden_cost(tokens, self.shared)
        kept = tokens * self.shared
        parts["output_projection"] = self.map_cost("output", tokens, self.shared, ctx.d_model, kept)
        if self.shared_gate:
            parts["gate"] = Cost.product(tokens, ctx.d_model, 1).keeping(tokens * (ctx.d_model + 1))
        return Cost.total(parts)


class _MoE(SublayerModule, of=MoE):
    def __init__(self, spec: MoE, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        assert spec.width is not None
        self.path, self.top_k, self.scale = ctx.path, spec.top_k, spec.scale
        self.routing, self.normalize = spec.routing, spec.normalize
        self.balance, self.z_loss = spec.balance, spec.z_loss
        self.router = Linear(ctx.d_model, spec.experts, std=ctx.std, bias=spec.router_bias)
        self.experts = _Experts(spec, spec.width, ctx)
        self.shared = _Shared(spec, ctx) if spec.shared else None

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        maps = [*([] if self.shared is None else self.shared.reads()), *self.post.projections()]
        products = iter(self.products(hidden, maps) if maps else [])
        update = self.routed(hidden, call)
        if self.shared is not None:
            update = update + self.shared(products)
        return self.post(update, call, products)  # type: ignore[no-any-return]

    def routed(self, hidden: Tensor, call: Call) -> Tensor:
        """The weighted sum of the chosen experts `[batch, time, d_model]`: rows are sorted by expert and back."""
        flat = hidden.flatten(0, 1)
        logits = self.logits(flat)
        scores = logits.softmax(-1) if self.routing == "softmax" else logits.sigmoid()
        weights, experts = scores.topk(self.top_k)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        owner, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(owner, torch.arange(logits.shape[-1], device=owner.device), right=True)
        self.tell(logits, scores, experts, ends, hidden.shape[:2], call)
        rows = self.experts(flat.index_select(0, order // self.top_k), ends, owner)
        mine = rows.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))
        mixed: Tensor = (mine * (self.scale * weights).to(mine.dtype).unsqueeze(-1)).sum(1)
        return mixed.view_as(hidden)

    def logits(self, flat: Tensor) -> Tensor:
        """The router's logits `[tokens, experts]`, in at least float32 under autocast too."""
        with torch.autocast(flat.device.type, enabled=False):
            logits: Tensor = self.router(at_least_float32(flat))
        return logits

    def tell(
        self, logits: Tensor, scores: Tensor, experts: Tensor, ends: Tensor, shape: torch.Size, call: Call
    ) -> None:
        """Leaves the losses and measures of a routing of `shape` `[batch, time]` tokens in the call."""
        shares = scores if self.routing == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)
        assigned = torch.zeros_like(scores).scatter(1, experts, 1.0 / self.top_k).unflatten(0, shape)
        shares = shares.unflatten(0, shape)
        kept = None if call.padding is None else ~call.padding
        load = average(assigned, kept, (0, 1)).detach()
        if self.balance is not None:
            earlier = call.earlier.get(f"{self.path}.load")
            call.losses[f"{self.path}.balance"] = self.balance.loss(assigned, shares, kept, earlier)
        if self.z_loss:
            squares = logits.logsumexp(-1, keepdim=True).square().unflatten(0, shape)
            call.losses[f"{self.path}.z_loss"] = self.z_loss * average(squares, kept, (0, 1)).sum()
        entropy = torch.special.entr(shares.detach()).sum(-1, keepdim=True)
        call.measures[f"{self.path}.load"] = load
        call.measures[f"{self.path}.entropy"] = average(entropy, kept, (0, 1)).sum()
        call.measures[f"{self.path}.dropped"] = 1 - ends[-1] / experts.numel()


class _Hidden(nn.Module):
    """The hidden activations of an expert from the products of its input maps."""

    def __init__(self, spec: MoE, ctx: BuildContext) -> None:
        super().__init__()
        self.gated = spec.expert == "glu"
        self.linear = None if spec.linear == "identity" else function_of(spec.linear)
        named = spec.activation in ACTIVATIONS and self.gated
        self.activation = spec.activation if named else function_of(spec.activation)
        if self.gated:
            self.glu = ctx.select("glu", activation=spec.activation if named else "function")

    def forward(self, products: list[Tensor]) -> Tensor:
        if not self.gated:
            return self.activation(products[0])  # type: ignore[operator]
        gate, value = products
        out: Tensor = self.glu(gate, value if self.linear is None else self.linear(value), self.activation)
        return out


class _Maps(nn.Module):
    """One linear map for each expert: weight `[experts, outputs, inputs]`, bias `[experts, outputs]`."""

    def __init__(self, experts: int, inputs: int, outputs: int, std: float, bias: bool, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = parameter((experts, outputs, inputs), normal(std))
        self.bias = parameter((experts, outputs), constant(0.0)) if bias else None
        if self.bias is not None:
            self.bias.decay = False  # type: ignore[attr-defined]
        self.product = ctx.select("experts")

    def forward(self, rows: Tensor, ends: Tensor, owner: Tensor) -> Tensor:
        out: Tensor = self.product(rows, self.weight, ends)
        return out if self.bias is None else out + self.bias.index_select(0, owner).to(out.dtype)


class _Experts(nn.Module):
    """All experts on rows `[rows, d_model]` sorted by their experts `owner` `[rows]`."""

    def __init__(self, spec: MoE, width: int, ctx: BuildContext) -> None:
        super().__init__()
        self.inputs = INPUTS[spec.expert]
        for name in self.inputs:
            bias = chosen(spec.bias, name)
            maps = _Maps(spec.experts, ctx.d_model, width, ctx.std * ctx.gain, bias, ctx.at(f"{name}_projection"))
            self.add_module(f"{name}_projection", maps)
        self.hidden = _Hidden(spec, ctx)
        bias, place = chosen(spec.bias, "output"), ctx.at("output_projection")
        self.output_projection = _Maps(spec.experts, width, ctx.d_model, ctx.residual_std, bias, place)

    def forward(self, rows: Tensor, ends: Tensor, owner: Tensor) -> Tensor:
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        maps = [self.get_submodule(f"{name}_projection") for name in self.inputs]
        return self.output_projection(self.hidden([item(rows, ends, owner) for item in maps]), ends, owner)  # type: ignore[no-any-return]


class _Shared(nn.Module):
    """The expert that every token meets."""

    def __init__(self, spec: MoE, ctx: BuildContext) -> None:
        super().__init__()
        self.inputs = INPUTS[spec.expert]
        for name in self.inputs:
            linear = Linear(ctx.d_model, spec.shared, std=ctx.std * ctx.gain, bias=chosen(spec.bias, name))
            self.add_module(f"{name}_projection", linear)
        self.hidden = _Hidden(spec, ctx)
        bias = chosen(spec.bias, "output")
        self.output_projection = Linear(spec.shared, ctx.d_model, std=ctx.residual_std, bias=bias)
        self.gate = Linear(ctx.d_model, 1, std=ctx.std) if spec.shared_gate else None

    def reads(self) -> list[Linear]:
        """The maps of the branch's input."""
        maps: list[Linear] = [self.get_submodule(f"{name}_projection") for name in self.inputs]  # type: ignore[misc]
        return maps if self.gate is None else [*maps, self.gate]

    def forward(self, products: Iterator[Tensor]) -> Tensor:
        out: Tensor = self.output_projection(self.hidden([next(products) for _ in self.inputs]))
        return out if self.gate is None else out * next(products).sigmoid()

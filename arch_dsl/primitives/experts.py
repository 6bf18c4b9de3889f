"""Experts: many feed-forwards of one shape, of which each row meets one, and the shared one that all rows meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation, ProjectionNotation, Projections, chosen
from archlab.arch_dsl.language.spec import Count, Range
from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.layers import Linear, constant, normal, parameter, undecayed, writing
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.primitives.branch import Sublayer
from archlab.arch_dsl.primitives.feedforward import GLU, MLP
from archlab.kernels.activations import ACTIVATIONS

INPUTS = {"glu": ("gate", "input"), "mlp": ("input",)}


class WithExperts(Sublayer):
    """A branch with `experts` feed-forwards of `width`, and an expert of width `shared` that every token meets."""

    experts: Annotated[int, Range(min=2)] = 8
    width: Count | None = None
    expert: Literal["glu", "mlp"] = "glu"
    activation: Activation = "silu"
    linear: Activation = "identity"
    bias: Annotated[Projections, ProjectionNotation("gate", "input", "output")] = False
    shared: Annotated[int, Range(min=0)] = 0
    shared_gate: bool = False

    def resolve(self, ctx: BuildContext) -> Self:
        kind = GLU() if self.expert == "glu" else MLP()
        return self if self.width else self.replace(width=kind.default_width(ctx.d_model))

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.expert == "mlp" and self.linear != "identity":
            yield "linear", "is the second activation of a glu; the experts here are mlp"
        if self.expert == "mlp" and not isinstance(self.bias, bool) and "gate" in self.bias:
            yield "bias", "names `gate`, which an mlp does not have (input, output)"
        if self.shared_gate and not self.shared:
            yield "shared_gate", "gates a shared expert, and there is none; give its width as `shared`"

    def experts_cost(self, ctx: BuildContext, tokens: int, rows: int, met: int) -> dict[str, Cost]:
        """That of `rows` rows, each at one expert, and of the shared one; of all experts a token meets `met`."""
        width = self.resolve(ctx).width
        assert width is not None
        parts: dict[str, Cost] = {}
        for name in INPUTS[self.expert]:
            parts[f"{name}_projections"] = self._maps_cost(rows, met, ctx.d_model, width, name)
        first = f"{INPUTS[self.expert][0]}_projections"
        parts[first] = parts[first].keeping(rows * ctx.d_model)
        parts["activation"] = self._hidden_cost(rows, width)
        output = self._maps_cost(rows, met, width, ctx.d_model, "output")
        parts["output_projections"] = output.keeping(rows * (width + ctx.d_model))
        if self.shared:
            parts["shared"] = self._shared_cost(ctx, tokens)
        return parts

    def _maps_cost(self, rows: int, met: int, inputs: int, outputs: int, name: str) -> Cost:
        """One map of all experts: all parameters, and the work of the rows, each at one expert."""
        one = Cost.product(rows, inputs, outputs, chosen(self.bias, name))
        idle = (self.experts - met) * one.parameters
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


class _Hidden(nn.Module):
    """The hidden activations of an expert from the products of its input maps."""

    def __init__(self, spec: WithExperts, ctx: BuildContext) -> None:
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
        self.bias = undecayed((experts, outputs), constant(0.0)) if bias else None
        self.product = ctx.select("experts")

    def forward(self, rows: Tensor, ends: Tensor, owner: Tensor) -> Tensor:
        out: Tensor = self.product(rows, self.weight, ends)
        return out if self.bias is None else out + self.bias.index_select(0, owner).to(out.dtype)


class Experts(nn.Module):
    """All experts on rows `[rows, d_model]` sorted by their experts `owner` `[rows]`."""

    def __init__(self, spec: WithExperts, ctx: BuildContext) -> None:
        super().__init__()
        assert spec.width is not None
        self.inputs = INPUTS[spec.expert]
        for name in self.inputs:
            bias = chosen(spec.bias, name)
            maps = _Maps(spec.experts, ctx.d_model, spec.width, ctx.std * ctx.gain, bias, ctx.at(f"{name}_projection"))
            self.add_module(f"{name}_projection", maps)
        self.hidden = _Hidden(spec, ctx)
        bias, place = chosen(spec.bias, "output"), ctx.at("output_projection")
        self.output_projection = writing(_Maps(spec.experts, spec.width, ctx.d_model, ctx.residual_std, bias, place))

    def forward(self, rows: Tensor, ends: Tensor, owner: Tensor) -> Tensor:
        kind = rows.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        maps = [self.get_submodule(f"{name}_projection") for name in self.inputs]
        return self.output_projection(self.hidden([item(rows, ends, owner) for item in maps]), ends, owner)  # type: ignore[no-any-return]


class SharedExpert(nn.Module):
    """The expert that every token meets."""

    def __init__(self, spec: WithExperts, ctx: BuildContext) -> None:
        super().__init__()
        self.inputs = INPUTS[spec.expert]
        for name in self.inputs:
            linear = Linear(ctx.d_model, spec.shared, std=ctx.std * ctx.gain, bias=chosen(spec.bias, name))
            self.add_module(f"{name}_projection", linear)
        self.hidden = _Hidden(spec, ctx)
        bias = chosen(spec.bias, "output")
        self.output_projection = writing(Linear(spec.shared, ctx.d_model, std=ctx.residual_std, bias=bias))
        self.gate = Linear(ctx.d_model, 1, std=ctx.std) if spec.shared_gate else None

    def reads(self) -> list[Linear]:
        """The maps of the branch's input."""
        maps: list[Linear] = [self.get_submodule(f"{name}_projection") for name in self.inputs]  # type: ignore[misc]
        return maps if self.gate is None else [*maps, self.gate]

    def forward(self, products: Iterator[Tensor]) -> Tensor:
        out: Tensor = self.output_projection(self.hidden([next(products) for _ in self.inputs]))
        return out if self.gate is None else out * next(products).sigmoid()

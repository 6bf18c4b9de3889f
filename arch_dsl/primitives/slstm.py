"""sLSTM: a scalar memory per channel, whose gates read what each head gave for the token before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Gate, Norm, Scale, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Linear, constant, equal_to, parameter
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule, projections_of


@Branch.register("slstm")
class SLSTM(Sublayer):
    """h_t = o_t c_t / n_t per channel, with c_t = f_t c_(t-1) + i_t z_t and n_t = f_t n_(t-1) + i_t. Of W x_t +
    R h_(t-1) + b each has its own: z is the tanh of it, i the exp, f and o the sigmoids. This is the scalar memory of
    xLSTM (arXiv:2405.04517, eq. 8 to 17).

    The channels are d_model in all, and h is the update: there is no output map. R is one matrix per gate and head, so
    that a head's channels are mixed with each other; it starts at 0. b starts at 0, but for the forget gate: in each
    head it falls from 5 to -7, as 5 - 12 s^(0.3 + 1.3 l) with s from 0 to 1 over its channels and l from 0 to 1 over
    the layers, as in its code, where W has one block per head too. `sdpa` acts on each head's h; the paper norms it:
    `sdpa: [groupnorm]`. The memory runs on from document to document.

    Tokens are read one after another, and there is no kernel for it: training is slow on a GPU.
    """

    ops: ClassVar[tuple[str, ...]] = ("slstm",)
    recurrent: ClassVar[bool] = True
    by_layer: ClassVar[bool] = True
    examples = (
        {"heads": 2, "pre": ["rmsnorm"]},
        {"heads": 2, "sdpa": ["groupnorm", "gate"], "pre": ["rmsnorm"], "post": ["gate"]},
    )
    heads: Count
    sdpa: tuple[Norm | Gate | Scale, ...] = ()

    def inside(self, ctx: BuildContext) -> BuildContext:
        """The context of the heads' outputs."""
        return ctx.where(heads=self.heads, width=ctx.d_model // self.heads, held=False)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """Without the FLOPs of the memory itself: its few per channel are no products of matrices."""
        gates = 4 * ctx.d_model
        mixing = gates * (ctx.d_model // self.heads)
        parts = {
            "gates_projection": Cost.product(tokens, ctx.d_model, gates, bias=True).keeping(self.read(ctx, tokens)),
            "recur": Cost(  # gates, states and the first state
                parameters=mixing,
                flops_matmul=2 * tokens * mixing,
                flops_model=2 * tokens * mixing,
                activations=(2 * tokens + 1) * gates,
                cache=gates,
            ),
            "sdpa": site_cost(self.sdpa, self.inside(ctx), "sdpa", tokens),
        }
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        found = super().check(ctx, path)
        return found if ctx.d_model % self.heads else found + check_sites(self, {"sdpa": self.inside(ctx)}, path)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.d_model % self.heads:
            yield "heads", f"{self.heads} heads do not divide d_model {ctx.d_model}"


class _SLSTM(SublayerModule, of=SLSTM):
    # B batch, T time, H heads, D channels of a head

    def __init__(self, spec: SLSTM, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.heads, width = spec.heads, ctx.d_model // spec.heads
        self.gates_projection = Linear(ctx.d_model, 4 * ctx.d_model, std=ctx.std, bias=True)
        self.gates_projection.bias = parameter((4 * ctx.d_model,), equal_to(_biases(spec.heads, width, ctx)))
        self.recurrent = parameter((4, spec.heads, width, width), constant(0.0))
        self.add_sites(spec, {"sdpa": spec.inside(ctx)})
        self.recur = ctx.select("slstm")

    def reads(self) -> list[Linear]:
        return [self.gates_projection, *projections_of(self.sdpa)]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        gates = next(products).unflatten(-1, (4, self.heads, -1))
        if call.padding is not None:
            cell, write, forget, read = gates.unbind(2)
            write = write.masked_fill(call.padding[..., None, None], float("-inf"))
            gates = torch.stack([cell, write, forget, read], 2)
        state = None if call.held is None else call.held.get(self.path)
        h_BTHD, last = self.recur(gates, self.recurrent, state)
        if call.held is not None:
            call.held[self.path] = last
        if call.watch is not None:
            call.watch.tell("heads", self.path, call.padding, output=h_BTHD)
        return self.sdpa(h_BTHD, call, products).flatten(-2)  # type: ignore[no-any-return]


def _biases(heads: int, width: int, ctx: BuildContext) -> Tensor:
    """Of the cell input and of the input, forget and output gates `[4 d_model]`."""
    power = 0.3 + 1.3 * ctx.depth / max(ctx.n_layers - 1, 1)
    share = torch.arange(width, dtype=torch.float64) / max(width - 1, 1)
    biases = torch.zeros(4, heads, width)
    biases[2] = (5 - 12 * share**power).float()
    return biases.flatten()

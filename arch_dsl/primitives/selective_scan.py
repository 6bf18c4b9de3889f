"""The selective scan of Mamba: a state per channel that decays at rates of its own, in steps that tokens choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.notation import ProjectionNotation, Projections
from archlab.arch_dsl.language.spec import Count, Positive, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Carry, Gate, Norm, Scale, check_sites, site_cost
from archlab.arch_dsl.parts.layers import Linear, Site, constant, parameter, steps, undecayed, uniform, writing
from archlab.arch_dsl.primitives.branch import Sublayer, SublayerModule, linear, projections_of
from archlab.kernels.selective_scan import state_class
from archlab.kernels.selective_scan.torch_ops import CHUNK

NAMES = ("value", "output")
FLOPS = 5  # for each element of the state: decay, write (2) and read (2)


@Branch.register("selective_scan")
class SelectiveScan(Sublayer):
    """y_t = <C_t, h_t> with h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t for each channel, then one output map: the
    selective state space model S6 (Mamba, arXiv:2312.00752, eq. 2 and algorithm 2).

    x is a map of the branch's input to `expand` d_model channels, changed by the site `value`. Of it are read C and B
    `[batch, time, state]`, changed by the sites `query` and `key`, and dt = softplus(x W_1 W_2 + b) with W_1 to
    `dt_rank` channels, by default d_model / 16 rounded up. A is -exp of a table `[channels, state]` that starts at
    log 1, log 2, and so on; softplus(b) starts between `dt_min` and `dt_max`, uniform in its logarithm. `skip` adds
    D_c x_t with a learned D that starts at 1. `sdpa` acts on y before the output map, `dt` on x W_1 (norms of it, of B
    and of C in Jamba, arXiv:2403.19887, section 2). The state runs on from document to document.
    """

    ops: ClassVar[tuple[str, ...]] = ("selective_scan",)
    recurrent: ClassVar[bool] = True
    examples = (
        {"pre": ["rmsnorm"]},
        {"pre": ["rmsnorm"], "value": [{"type": "short_conv", "activation": "silu"}], "sdpa": ["gate"]},
        {
            "pre": ["rmsnorm"],
            "skip": True,
            "expand": 1,
            "state": 5,
            "bias": True,
            "key": ["rmsnorm"],
            "dt": ["rmsnorm"],
            "zero": ["output"],
        },
    )
    expand: Count = 2
    state: Count = 16
    dt_rank: Count | None = None
    dt_min: Positive = 1e-3
    dt_max: Positive = 0.1
    skip: bool = False
    bias: Annotated[Projections, ProjectionNotation(*NAMES)] = False
    zero: Annotated[Projections, ProjectionNotation(*NAMES)] = False
    query: tuple[Carry | Gate | Norm | Scale, ...] = ()
    key: tuple[Carry | Gate | Norm | Scale, ...] = ()
    value: tuple[Carry | Gate | Norm | Scale, ...] = ()
    sdpa: tuple[Norm | Gate | Scale, ...] = ()
    dt: tuple[Norm | Scale, ...] = added(default=())

    def resolve(self, ctx: BuildContext) -> Self:
        return self if self.dt_rank else self.replace(dt_rank=-(-ctx.d_model // 16))

    def output_width(self, ctx: BuildContext) -> int | None:
        return self.expand * ctx.d_model

    def places(self, ctx: BuildContext) -> dict[str, BuildContext]:
        """The context of each site inside."""
        inside = ctx.where(heads=None, held=False, documents=False)
        wide, narrow = inside.where(width=self.expand * ctx.d_model), inside.where(width=self.state)
        rank = inside.where(width=self.resolve(ctx).dt_rank)
        return {"query": narrow, "key": narrow, "value": wide, "sdpa": wide, "dt": rank}

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """`flops_matmul` are those of the recurrent form, in which reading a state is a product of a matrix."""
        rank, channels = self.resolve(ctx).dt_rank, self.expand * ctx.d_model
        assert rank is not None
        sites = {name: site_cost(getattr(self, name), place, name, tokens) for name, place in self.places(ctx).items()}
        size = channels * self.state
        parts = {
            "value_projection": self.map_cost("value", tokens, ctx.d_model, channels, self.read(ctx, tokens)),
            "value": sites["value"],
            "query_projection": Cost.product(tokens, channels, self.state).keeping(tokens * channels),
            "query": sites["query"],
            "key_projection": Cost.product(tokens, channels, self.state),
            "key": sites["key"],
            "rank_projection": Cost.product(tokens, channels, rank),
            "dt": sites["dt"],
            "step": Cost.product(tokens, rank, channels, bias=True).keeping(tokens * rank),
            "scan": Cost(
                parameters=size + (channels if self.skip else 0),
                flops_matmul=2 * tokens * size,
                flops_model=FLOPS * tokens * size,
                activations=tokens * (channels + 2 * self.state) + -(-tokens // CHUNK) * size,
                cache=size,
            ),
            "sdpa": sites["sdpa"],
            "output_projection": self.map_cost("output", tokens, channels, ctx.d_model, tokens * channels),
        }
        return Cost.total(self.outer_cost(ctx, tokens) | parts)

    def check(self, ctx: BuildContext, path: str) -> list[Problem]:
        return super().check(ctx, path) + check_sites(self, self.places(ctx), path)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.dt_max < self.dt_min:
            yield "dt_max", f"must be at least dt_min {self.dt_min:g}, found {self.dt_max:g}"


class _SelectiveScan(SublayerModule, of=SelectiveScan):
    dt: Site

    # B batch, T time, C channels, N state
    def __init__(self, spec: SelectiveScan, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        places, channels = spec.places(ctx), spec.expand * ctx.d_model
        assert spec.dt_rank is not None
        self.value_projection = linear(spec, "value", ctx.d_model, channels, ctx.std * ctx.gain)
        self.query_projection = Linear(channels, spec.state, std=ctx.std)
        self.key_projection = Linear(channels, spec.state, std=ctx.std)
        self.rank_projection = Linear(channels, spec.dt_rank, std=ctx.std)
        bound = spec.dt_rank**-0.5
        self.step_weight = parameter((channels, spec.dt_rank), uniform(-bound, bound))
        self.step_bias = parameter((channels,), steps(spec.dt_min, spec.dt_max))
        self.output_projection = writing(linear(spec, "output", channels, ctx.d_model, ctx.residual_std))
        self.log_a = undecayed((channels, spec.state), _count_up)
        self.skip = parameter((channels,), constant(1.0)) if spec.skip else None
        self.add_sites(spec, places)
        self.scan = ctx.select("selective_scan", state=state_class(spec.state))

    def reads(self) -> list[Linear]:
        return [self.value_projection, *projections_of(self.value, self.query, self.key, self.sdpa)]

    def transform(self, products: Iterator[Tensor], call: Call) -> Tensor:
        x_BTC = self.value(next(products), call, products)
        query, key, rank = self.products(x_BTC, [self.query_projection, self.key_projection, self.rank_projection])
        step_BTC = F.linear(self.dt(rank, call, products), self.step_weight, self.step_bias)
        if call.padding is not None:
            step_BTC = step_BTC.masked_fill(call.padding[..., None], float("-inf"))  # a step of length 0
        c_BTN = self.query(query, call, products)
        b_BTN = self.key(key, call, products)
        held = None if call.held is None else call.held.get(self.path)
        y_BTC, last = self.scan(x_BTC, step_BTC, self.log_a, b_BTN, c_BTN, self.skip, held)
        if call.held is not None:
            call.held[self.path] = last
        return self.output_projection(self.sdpa(y_BTC, call, products))  # type: ignore[no-any-return]


def _count_up(value: Tensor, generator: torch.Generator) -> None:
    """log 1, log 2, and so on along the state of each channel (S4D-real, arXiv:2206.11893, section 4.4)."""
    value.fill_(1.0).cumsum_(-1).log_()


# Mamba, arXiv:2312.00752, section 3.4: a short convolution before the scan, a gate after it, and no other branch
Branch.alias(
    "mamba",
    type="selective_scan",
    skip=True,
    value=[{"type": "short_conv", "bias": True, "activation": "silu"}],
    sdpa=[{"type": "gate", "activation": "silu"}],
)

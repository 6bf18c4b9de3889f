"""RWKV-4: time mix, a fading mean over the past, and channel mix, a gated feed-forward; both see the last token too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.language.formula import function_of
from archlab.arch_dsl.language.notation import Activation, ProjectionNotation, Projections
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Branch, Gate, Norm, Scale, site_cost
from archlab.arch_dsl.parts.layers import Initializer, parameter, writing
from archlab.arch_dsl.parts.saved_for_backward import kept_of
from archlab.arch_dsl.parts.state import shifted
from archlab.arch_dsl.primitives.branch import SublayerModule, Widened, linear
from archlab.arch_dsl.primitives.token_shift import between, kernel_of_shifts, share, shifted_size


class _MixModule(SublayerModule):
    """Reads the normed copy and the one before it; the maps of gates read the copy as it is."""

    def __init__(self, spec: Widened, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.add_sites(spec, {"inner": spec.inside(ctx)})
        self.shift = kernel_of_shifts(ctx)

    def mixed(self, hidden: Tensor, before: Tensor | None, products: Iterator[Tensor], call: Call) -> Tensor:
        """The update from the normed copy and the one before it `[batch, time, d_model]`, None with a `shift`."""
        raise TypeError(f"{type(self).__name__} mixes nothing")

    def update(self, stream: Tensor, call: Call) -> Tensor:
        hidden = self.pre(stream, call, iter(()))
        gates = [*self.inner.projections(), *self.post.projections()]
        products = iter(self.products(hidden, gates) if gates else ())
        fused = self.shift is not None and call.held is None and call.padding is None
        before = None if fused else shifted(hidden, call, self.path, what=".shift")
        return self.post(self.mixed(hidden, before, products, call), call, products)  # type: ignore[no-any-return]


TIME_NAMES = ("receptance", "key", "value", "output")


@Branch.register("rwkv4")
class RWKV4(Widened):
    """sigmoid(r_t) wkv_t, then one output map: the time mix of RWKV-4 (arXiv:2305.13048, eq. 11 to 17). wkv is a mean
    of the values so far, those before the newest weighted by exp(k_i - (t - 1 - i) w), the newest by exp(k_t + u).

    Each of r, k and v is a map to `width` channels, by default d_model, of mu x_t + (1 - mu) x_(t-1) with a learned mu.
    The decay w, the bonus u and mu are learned per channel and start as the published models do, which differs with
    depth. Of the maps those named in `zero` start at zero (as published: receptance, key and output). `inner` acts on
    what the output map reads. The mean runs on from document to document.
    """

    ops: ClassVar[tuple[str, ...]] = ("wkv4", "gate", "token_shift")
    recurrent: ClassVar[bool] = True
    examples = ({}, {"width": 12, "inner": ["gate"], "zero": ["output"], "post": ["gate"]})
    zero: Annotated[Projections, ProjectionNotation(*TIME_NAMES)] = False
    inner: tuple[Norm | Gate | Scale, ...] = ()

    def default_width(self, d_model: int) -> int:
        return d_model

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        """Without the FLOPs of wkv, as the paper counts (table 2): its few per channel are no products of matrices."""
        width = self.width or self.default_width(ctx.d_model)
        shift = self.read(ctx, tokens) + shifted_size(ctx.d_model, tokens)
        parts = {"shift": Cost(parameters=3 * ctx.d_model, activations=shift, cache=ctx.d_model)}
        for name in TIME_NAMES[:3]:
            parts[f"{name}_projection"] = self.map_cost(name, tokens, ctx.d_model, width, tokens * ctx.d_model)
        # keys, values, means and weights, the first state; then the open receptance and what it multiplies
        parts["wkv"] = Cost(parameters=2 * width, activations=(6 * tokens + 2) * width, cache=2 * width)
        parts["inner"] = site_cost(self.inner, self.inside(ctx), "inner", tokens)
        parts["output_projection"] = self.map_cost("output", tokens, width, ctx.d_model, tokens * width)
        return Cost.total(self.outer_cost(ctx, tokens) | parts)


class _RWKV4(_MixModule, of=RWKV4):
    # T time, C channels
    def __init__(self, spec: RWKV4, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        width = spec.width or ctx.d_model
        last, left = ctx.depth / max(ctx.n_layers - 1, 1), 1 - ctx.depth / ctx.n_layers
        self.receptance_projection = linear(spec, "receptance", ctx.d_model, width, ctx.std)
        self.key_projection = linear(spec, "key", ctx.d_model, width, ctx.std)
        self.value_projection = linear(spec, "value", ctx.d_model, width, ctx.std * ctx.gain)
        self.output_projection = writing(linear(spec, "output", width, ctx.d_model, ctx.residual_std))
        self.time_mix_receptance = parameter((ctx.d_model,), share(ctx.d_model, left / 2))
        self.time_mix_key = parameter((ctx.d_model,), share(ctx.d_model, left))
        self.time_mix_value = parameter((ctx.d_model,), share(ctx.d_model, left, 0.3 * last))
        self.decay = parameter((width,), _decays(width, 0.7 + 1.3 * last))
        self.bonus = parameter((width,), _zigzag)
        self.wkv = ctx.select("wkv4")
        self.gate = ctx.select("gate", granularity="elementwise", activation="sigmoid", combine="multiply")

    def mixed(self, hidden: Tensor, before: Tensor | None, products: Iterator[Tensor], call: Call) -> Tensor:
        r_TC = self.receptance_projection(between(before, hidden, self.time_mix_receptance, self.shift))
        k_TC = self.key_projection(between(before, hidden, self.time_mix_key, self.shift))
        v_TC = self.value_projection(between(before, hidden, self.time_mix_value, self.shift))
        if call.padding is not None:
            k_TC = k_TC.masked_fill(call.padding[..., None], float("-inf"))  # no weight
        state = None if call.held is None else call.held.get(self.path)
        y_TC, last = self.wkv(k_TC, v_TC, self.decay, self.bonus, state)
        if call.held is not None:
            call.held[self.path] = last
        opened = self.gate(y_TC, r_TC, "sigmoid", "multiply")
        return self.output_projection(self.inner(opened, call, products))  # type: ignore[no-any-return]


CHANNEL_NAMES = ("receptance", "key", "value")


@Branch.register("channel_mix")
class ChannelMix(Widened):
    """sigmoid(r_t) * act(k_t) W_v with r and k maps of mu x_t + (1 - mu) x_(t-1): the channel mix of RWKV-4
    (arXiv:2305.13048, eq. 14, 15 and 18).

    k has `width` channels, by default 4 d_model. mu starts as published; of the maps those named in `zero` start at
    zero (as published: receptance and value). `inner` acts on the hidden activations.
    """

    ops: ClassVar[tuple[str, ...]] = ("gate", "token_shift")
    examples = ({"pre": ["rmsnorm"]}, {"width": 20, "zero": ["value"], "inner": ["rmsnorm"]})
    zero: Annotated[Projections, ProjectionNotation(*CHANNEL_NAMES)] = False
    activation: Activation = "relu2"
    inner: tuple[Norm | Scale, ...] = ()

    def default_width(self, d_model: int) -> int:
        return 4 * d_model

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        width, size = self.width or self.default_width(ctx.d_model), tokens * ctx.d_model
        shift = self.read(ctx, tokens) + shifted_size(ctx.d_model, tokens)
        return Cost.total(
            self.outer_cost(ctx, tokens)
            | {
                "shift": Cost(parameters=2 * ctx.d_model, activations=shift, cache=ctx.d_model),
                "receptance_projection": Cost.product(tokens, ctx.d_model, ctx.d_model).keeping(size),
                "key_projection": Cost.product(tokens, ctx.d_model, width).keeping(size),
                "activation": Cost(activations=kept_of(self.activation)[0] * tokens * width),
                "inner": site_cost(self.inner, self.inside(ctx), "inner", tokens),
                "value_projection": Cost.product(tokens, width, ctx.d_model).keeping(tokens * width),
                "gate": Cost(activations=2 * size),
            }
        )


class _ChannelMix(_MixModule, of=ChannelMix):
    def __init__(self, spec: ChannelMix, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        width = spec.width or 4 * ctx.d_model
        left = 1 - ctx.depth / ctx.n_layers
        self.receptance_projection = linear(spec, "receptance", ctx.d_model, ctx.d_model, ctx.std)
        self.key_projection = linear(spec, "key", ctx.d_model, width, ctx.std * ctx.gain)
        self.value_projection = writing(linear(spec, "value", width, ctx.d_model, ctx.residual_std))
        self.mix_receptance = parameter((ctx.d_model,), share(ctx.d_model, left))
        self.mix_key = parameter((ctx.d_model,), share(ctx.d_model, left))
        self.activation = function_of(spec.activation)
        self.gate = ctx.select("gate", granularity="elementwise", activation="sigmoid", combine="multiply")

    def mixed(self, hidden: Tensor, before: Tensor | None, products: Iterator[Tensor], call: Call) -> Tensor:
        r = self.receptance_projection(between(before, hidden, self.mix_receptance, self.shift))
        k = self.key_projection(between(before, hidden, self.mix_key, self.shift))
        v = self.value_projection(self.inner(self.activation(k), call, products))
        return self.gate(v, r, "sigmoid", "multiply")  # type: ignore[no-any-return]


# Initial values by depth, as in the code of the published models (RWKV-v4); i counts channels


def _decays(width: int, power: float) -> Initializer:
    """log w: from -5 to 3, 8 (i / (width - 1))^power - 5."""
    most = max(width - 1, 1)
    return lambda value, generator: value.fill_(1.0).cumsum_(0).sub_(1).div_(most).pow_(power).mul_(8).sub_(5)


def _zigzag(value: Tensor, generator: torch.Generator) -> None:
    """u: log 0.3, and 0, 1/2 or -1/2 more by turns."""
    value.fill_(1.0).cumsum_(0).remainder_(3).sub_(1).div_(2).add_(math.log(0.3))

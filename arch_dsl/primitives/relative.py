"""Transformer-XL's relative positions: every logit sees the distance through a learned map of its sinusoids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Score
from archlab.arch_dsl.parts.layers import Linear, normal, undecayed
from archlab.arch_dsl.primitives.rope_scaling import frequencies
from archlab.arch_dsl.primitives.rotary import angles


@Score.register("transformer_xl")
class TransformerXL(Score):
    """scale ((q_i + u) . k_j + (q_i + v) . W r_(i-j)) per head with sinusoids r: Transformer-XL (arXiv:1901.02860,
    section 3.3).

    r is d_model wide, as in the sinusoidal encoding; `biases: false` leaves out u and v. Positions must be evenly
    spaced, as those of one stretch of text are.
    """

    examples = ({}, {"biases": False})

    version: ClassVar[int] = 2
    positional: ClassVar[bool] = True
    biases: bool = True

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        pairs, seen = tokens * tokens, tokens * (tokens + 1) // 2
        content = 2 * tokens * ctx.channels if self.biases else 0
        scores = Cost(
            parameters=2 * ctx.channels if self.biases else 0,
            flops_matmul=2 * pairs * ctx.channels + content,
            flops_model=2 * seen * ctx.channels + content,
            activations=(3 if self.biases else 2) * tokens * ctx.channels,
        )
        positions = Cost.product(tokens, ctx.d_model, ctx.channels).keeping(tokens * ctx.d_model)
        return Cost.total({"positions": positions, "scores": scores})

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.ahead:
            yield "", "knows distances into the past alone, and the mask reads ahead"
        elif ctx.d_model % 2:
            yield "", f"sinusoids come in pairs; d_model is {ctx.d_model}, which is odd"


class _TransformerXL(Module, of=TransformerXL):
    # B batch, T time, S keys, H heads, K key/value heads, G heads per key/value head, D head_dim
    def __init__(self, spec: TransformerXL, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        heads = ctx.heads or 1
        self.d_model, self.scale = ctx.d_model, ctx.logit_scale
        self.positions = Linear(ctx.d_model, heads * ctx.width, std=ctx.std)
        self.content_bias: nn.Parameter | None = None
        self.position_bias: nn.Parameter | None = None
        if spec.biases:
            self.content_bias = undecayed((heads, ctx.width), normal(ctx.std))
            self.position_bias = undecayed((heads, ctx.width), normal(ctx.std))

    def forward(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        positions = call.key_positions(call.positions_of(q.shape[1], q.device), k.shape[1])
        distances = (positions - positions[0]).flip(0)  # S-1, …, 1, 0
        turned = angles(distances, frequencies(10_000.0, self.d_model, q.device))
        sinusoids = torch.cat([turned.sin(), turned.cos()], dim=-1).to(q.dtype)
        r_SHD = self.positions(sinusoids).unflatten(-1, (-1, q.shape[-1]))
        shifted = q if self.position_bias is None else q + self.position_bias
        logits = _shift(torch.einsum("bihd,rhd->bhir", shifted * self.scale, r_SHD))
        if self.content_bias is None:
            return logits
        u_KGD = self.content_bias.unflatten(0, (k.shape[2], -1)) * self.scale
        content = torch.einsum("bjkd,kgd->bkgj", k, u_KGD)
        return logits + content.flatten(1, 2)[:, :, None, :]


def _shift(logits: Tensor) -> Tensor:
    """`[B, H, i, S - 1 - distance]` to `[B, H, i, j]` with distance i - j; what stands at j > i has no meaning. The
    last query stands at the last key."""
    batch, heads, length, keys = logits.shape
    padded = nn.functional.pad(logits, (1, 0)).reshape(batch, heads, keys + 1, length)
    return padded[:, :, 1:].reshape(batch, heads, length, keys)

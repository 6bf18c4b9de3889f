"""Token shift: each channel mixed with what it was one token before."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Module
from archlab.arch_dsl.parts.layers import constant, parameter
from archlab.arch_dsl.parts.state import opens_document, shifted


@Carry.register("token_shift")
class TokenShift(Carry):
    """x_t' = mu x_t + (1 - mu) x_(t-1) with a learned mu per channel that starts at `start`: the time shift of RWKV
    (arXiv:2305.13048, eq. 11 to 13).

    Before the first token stands zero, and before that of a document where the branch keeps documents apart.
    """

    ops: ClassVar[tuple[str, ...]] = ("token_shift",)
    start: float = 0.5

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(
            ctx.channels, activations=shifted_size(ctx.channels, tokens) + ctx.elements(tokens), cache=ctx.channels
        )


class _TokenShift(Module, of=TokenShift):
    def __init__(self, spec: TokenShift, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        shape = (ctx.width,) if ctx.heads is None else (ctx.heads, ctx.width)
        self.mix = parameter(shape, constant(spec.start))
        self.mix.decay = False  # type: ignore[attr-defined]  # shares by nature, whatever their shape
        self.path, self.documents = ctx.path, ctx.documents
        kernel = ctx.select("token_shift", starts=ctx.documents)
        self.kernel = kernel if ctx.choices[-1].implementation == "triton" else None

    def forward(self, x: Tensor, call: Call) -> Tensor:
        # x: [batch, time, width] or [batch, time, heads, head_dim]
        if self.kernel is not None and call.held is None:
            mixed: Tensor = self.kernel(x.flatten(2), self.mix.flatten(), self.starts(call))
            return mixed.view_as(x)
        before = shifted(x.flatten(2), call, self.path, self.documents)
        return torch.lerp(before.view_as(x), x, self.mix.to(x.dtype))

    def starts(self, call: Call) -> Tensor | None:
        """Where nothing stands before a token `[batch, time]`: padding, or another document."""
        found = None if call.padding is None else nn.functional.pad(call.padding[:, :-1], (1, 0))
        if not self.documents or call.documents is None:
            return found
        opens = opens_document(call, self.path)
        return opens if found is None else found | opens


def shifted_size(width: int, tokens: int) -> int:
    """The elements of `shifted`, which the backward pass keeps."""
    return (tokens + 1) * width

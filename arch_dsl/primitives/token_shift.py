"""Token shift: each channel mixed with what it was one token before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from archlab.arch_dsl.language.spec import NotNegative, added
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Module
from archlab.arch_dsl.parts.layers import Initializer, constant, undecayed
from archlab.arch_dsl.parts.state import opens_document, shifted


@Carry.register("token_shift")
class TokenShift(Carry):
    """x_t' = mu x_t + (1 - mu) x_(t-1) with a learned mu per channel that starts at `start`: the time shift of RWKV
    (arXiv:2305.13048, eq. 11 to 13).

    Before the first token stands zero, and before that of a document where the branch keeps documents apart. With
    `power` p mu starts at (i / channels)^(left^p) for channel i, with left = 1 - depth / n_layers: what keeps the last
    token is less in deeper layers (RWKV-7's channel mix, arXiv:2503.14456, with p = 4 in its code).
    """

    ops: ClassVar[tuple[str, ...]] = ("token_shift",)
    start: float = 0.5
    power: NotNegative | None = added(default=None)

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if self.power is not None and self.start != 0.5:
            yield "start", "is where every channel starts, and with a power each starts elsewhere"

    def initial(self, ctx: BuildContext) -> Initializer:
        """Where mu starts."""
        if self.power is None:
            return constant(self.start)
        return share(ctx.channels, (1 - ctx.depth / ctx.n_layers) ** self.power)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(
            ctx.channels, activations=shifted_size(ctx.channels, tokens) + ctx.elements(tokens), cache=ctx.channels
        )


class _TokenShift(Module, of=TokenShift):
    def __init__(self, spec: TokenShift, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        shape = (ctx.width,) if ctx.heads is None else (ctx.heads, ctx.width)
        self.mix = undecayed(shape, spec.initial(ctx))
        self.path, self.documents = ctx.path, ctx.documents
        self.kernel = kernel_of_shifts(ctx, ctx.documents)

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


def kernel_of_shifts(ctx: BuildContext, starts: bool = False) -> Callable[..., Tensor] | None:
    """The kernel that shifts and mixes in one pass; None where the step back is better taken once for all mixes."""
    kernel = ctx.select("token_shift", starts=starts)
    return kernel if ctx.choices[-1].implementation == "triton" else None


def between(before: Tensor | None, x: Tensor, share: Tensor, kernel: Callable[..., Tensor] | None) -> Tensor:
    """share x_t + (1 - share) x_(t-1) for x `[batch, time, width]`, of what stands `before` or by the kernel."""
    if before is None:
        assert kernel is not None
        return kernel(x, share)
    return torch.lerp(before, x, share.to(x.dtype))


def share(width: int, power: float, more: float = 0.0) -> Initializer:
    """mu: (i / width)^power + more for channel i."""

    def fill(value: Tensor, generator: torch.Generator) -> None:
        flat = value if len(value.shape) == 1 else value.view(-1)
        filled = flat.fill_(1.0).cumsum_(0).sub_(1).div_(width).pow_(power).add_(more)
        if len(value.shape) > 1:
            filled.view(*value.shape)  # so that its calls, which an export writes down, give all of its shape

    return fill


def shifted_size(width: int, tokens: int) -> int:
    """The elements of `shifted`, which the backward pass keeps."""
    return (tokens + 1) * width

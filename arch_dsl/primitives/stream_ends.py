"""Ends of several residual streams: from the embeddings to streams, and from the streams to what `final` reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from archlab.arch_dsl.parts.context import BuildContext, Cost
from archlab.arch_dsl.parts.layers import Linear, writing
from archlab.arch_dsl.primitives.streams import Streams

SMALLEST = 1e-5  # the mean square that a map's result is taken to have at least


class StreamEnds(nn.Module):
    """One stream `[batch, time, d_model]` to several `[batch, time, n, d_model]`, and back."""

    def __init__(self, spec: Streams, ctx: BuildContext) -> None:
        super().__init__()
        self.n = spec.n
        self.entry = StreamEntry(spec.n, ctx) if spec.entry == "projected" else None
        self.exit = StreamExit(spec.n, ctx) if spec.exit == "projected" else None

    def several(self, stream: Tensor) -> Tensor:
        """The streams as they begin."""
        found: Tensor = stream[:, :, None].repeat(1, 1, self.n, 1) if self.entry is None else self.entry(stream)
        return found

    def one(self, streams: Tensor) -> Tensor:
        """What `final` reads of the streams."""
        found: Tensor = streams.sum(2) if self.exit is None else self.exit(streams)
        return found


class _Maps(nn.Module):
    def __init__(self, n: int, ctx: BuildContext) -> None:
        super().__init__()
        width = ctx.d_model
        self.maps = nn.ModuleList(writing(Linear(width, width, std=ctx.std)) for _ in range(1, n))


class StreamEntry(_Maps):
    """x `[batch, time, d_model]` to streams `[batch, time, n, d_model]`: x, and y |x| / |y| with y = x E_i."""

    def forward(self, stream: Tensor) -> Tensor:
        length = length_of(stream)
        return torch.stack([stream, *(as_long(item(stream), length) for item in self.maps)], 2)


class StreamExit(_Maps):
    """Streams s_i `[batch, time, n, d_model]` to the mean `[batch, time, d_model]` of s_0 and y |s_0| / |y| with
    y = s_i X_i."""

    def forward(self, streams: Tensor) -> Tensor:
        first = streams[:, :, 0]
        length = length_of(first)
        ends = [as_long(item(streams[:, :, index]), length) for index, item in enumerate(self.maps, 1)]
        return torch.stack([first, *ends], 2).mean(2)


def length_of(vector: Tensor) -> Tensor:
    """The length `[..., 1]` of a vector `[..., d_model]`."""
    found: Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return found


def as_long(vector: Tensor, length: Tensor) -> Tensor:
    """A vector `[..., d_model]` scaled to a length `[..., 1]`."""
    least = (SMALLEST * vector.shape[-1]) ** 0.5
    return vector * (length / length_of(vector).clamp(min=least))


def ends_cost(n: int, ctx: BuildContext, tokens: int, read: int) -> Cost:
    """What the maps of either end cost, which keep the `read` streams that they read, and their lengths."""
    width = ctx.d_model
    one = Cost.product(tokens, width, width).keeping(tokens * (width + 3))  # what it makes, its length twice, a ratio
    return one.times(n - 1).keeping(tokens * (read * width + 1))

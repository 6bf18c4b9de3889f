"""Batch i is a pure function of (data, seed, i): every variant sees the same tokens in the same order."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from search.data.tokenizers import Tokens

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]

IGNORE = -100
_WORD = 2**64 - 1


def batch(tokens: Tokens, seed: int, first: int, count: int, context: int) -> Ints:
    """Windows `first` to `first + count`, int64 `[count, context + 1]`: inputs `[:, :-1]`, targets `[:, 1:]`.

    The stream ends with the token it starts with, so it is read as a ring of `len(tokens) - 1` places. An epoch cuts
    the ring at a random place into windows of `context` targets and takes them in random order: every token is a
    target exactly once, but for the fewer than `context` left at the cut, which lies elsewhere in the next epoch.
    The windows go through one epoch after the other. Raises ValueError when the ring is shorter than `context`.
    """
    ring = len(tokens) - 1
    if ring < context:
        raise ValueError(f"a stream of {len(tokens)} tokens has no window of {context} + 1 tokens")
    stream = np.asarray(tokens)
    out = np.empty((count, context + 1), dtype=np.int64)
    for row, start in zip(out, _starts(seed, first, count, context, ring), strict=True):
        head = ring - start
        if head > context:
            row[:] = stream[start : start + context + 1]
        else:
            row[:head] = stream[start:ring]
            row[head:] = stream[: context + 1 - head]
    return out


def windows(tokens: Tokens, context: int) -> tuple[Ints, Ints]:
    """Inputs and targets `[windows, context]` that score every token of the stream but the first exactly once.

    Target `[i, j]` is the token at place `i * context + j + 1`. What the last window lacks is filled with token 0 as
    input and -100 as target, which losses leave out. Raises ValueError for a stream of fewer than two tokens.
    """
    stream = np.asarray(tokens)
    if len(stream) < 2:
        raise ValueError(f"a stream of {len(stream)} tokens has nothing to score")
    count = -(-(len(stream) - 1) // context)
    inputs = np.zeros(count * context, dtype=np.int64)
    targets = np.full(count * context, IGNORE, dtype=np.int64)
    inputs[: len(stream) - 1] = stream[:-1]
    targets[: len(stream) - 1] = stream[1:]
    return inputs.reshape(count, context), targets.reshape(count, context)


def tensors(rows: Ints, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as the pair (inputs, targets) of int64 tensors `[batch, context]` on a device."""
    import torch

    # NumPy copies on one core; for so little, torch's threads would take longer to meet than to copy.
    inputs, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
    return torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)


def _starts(seed: int, first: int, count: int, context: int, ring: int) -> list[int]:
    """Where windows `first` to `first + count` of the endless sequence of epochs begin in the ring."""
    windows = ring // context
    starts: list[int] = []
    while len(starts) < count:
        epoch, place = divmod(first + len(starts), windows)
        cut, order = _epoch(seed, epoch, ring, windows)
        taken = order[place : place + count - len(starts)]
        starts += ((cut + taken * context) % ring).tolist()
    return starts


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, ring: int, windows: int) -> tuple[int, npt.NDArray[np.intp]]:
    """The cut and the order of windows of an epoch. Only the raw Philox stream is used: NumPy promises it for ever."""
    words = np.random.Philox(key=[seed & _WORD, epoch]).random_raw(windows + 1)
    order = np.argsort(words[1:], kind="stable")
    order.setflags(write=False)
    return int(words[0]) % ring, order

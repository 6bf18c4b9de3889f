"""Batch i is a pure function of (data, seed, i): every variant sees the same tokens in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archlab.search.data.checksums import Stream
from archlab.search.data.documents.draws import Bools, Ints
from archlab.search.data.tokenizers.family import Tokens

if TYPE_CHECKING:
    import torch

    from archlab.arch_dsl.parts.context import Call

IGNORE = -100
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Batch:
    """What a model reads of some rows, and what it is asked. `time` and `source_time` are the same for all batches.

    * `tokens`, `targets` int64 `[batch, time]`; a target of -100 is none.
    * `places` int64 `[batch, time]`: which token of the row's text, 0 to context - 1, a target stands for.
    * `prefix` int64 `[batch]`: how many tokens at the start read each other; `padding` bool `[batch, time]`.
    * `source_tokens` int64 and `source_padding` bool `[batch, source_time]` are what an encoder reads;
      `source_targets` int64 what its own loss asks for, -100 where nothing.
    """

    tokens: Ints
    targets: Ints
    places: Ints
    prefix: Ints | None = None
    padding: Bools | None = None
    source_tokens: Ints | None = None
    source_padding: Bools | None = None
    source_targets: Ints | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` alone."""
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        parts: dict[str, Any] = {name: part if part is None else part[start:stop] for name, part in arrays.items()}
        return Batch(**parts)

    def parts(self, size: int) -> Iterator[Batch]:
        """The batch, `size` rows at a time."""
        return (self.rows(start, start + size) for start in range(0, len(self), size))

    @property
    def scored(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORE).sum())

    @property
    def source_scored(self) -> int:
        """How many targets the encoder has."""
        return 0 if self.source_targets is None else int((self.source_targets != IGNORE).sum())

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor, Call]:
        """Tokens and targets on a device, and the call that goes with them. A GPU is not waited for."""
        import torch

        from archlab.arch_dsl.parts.context import Call

        # NumPy copies on one core; for so little, torch's threads would take longer to meet than to copy.
        arrays = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "places"}
        here = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items() if x is not None}
        if torch.device(device).type == "cuda":
            here = {name: x.pin_memory() for name, x in here.items()}
        moved: dict[str, Any] = {name: x.to(device, non_blocking=True) for name, x in here.items()}
        return moved.pop("tokens"), moved.pop("targets"), Call(**moved)


def batch(tokens: Tokens | Stream, seed: int, first: int, count: int, context: int) -> Ints:
    """Windows `first` to `first + count`, int64 `[count, context + 1]`: inputs `[:, :-1]`, targets `[:, 1:]`.

    The stream ends with the token it starts with, so it is read as a ring of `len(tokens) - 1` places. An epoch cuts
    the ring at a random place into windows of `context` targets and takes them in random order: every token is a
    target exactly once, but for the fewer than `context` left at the cut, which lies elsewhere in the next epoch.
    The windows go through one epoch after the other. Raises ValueError when the ring is shorter than `context`.
    """
    ring = len(tokens) - 1
    if ring < context:
        raise ValueError(f"a stream of {len(tokens)} tokens has no window of {context} + 1 tokens")
    out = np.empty((count, context + 1), dtype=np.int64)
    for row, start in zip(out, _starts(seed, first, count, context, ring), strict=True):
        head = ring - start
        if head > context:
            row[:] = tokens[start : start + context + 1]
        else:
            row[:head] = tokens[start:ring]
            row[head:] = tokens[: context + 1 - head]
    return out


def windows(tokens: Tokens | Stream, context: int) -> tuple[Ints, Ints]:
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


def epoch_order(seed: int, epoch: int, count: int) -> npt.NDArray[np.intp]:
    """The random order in which an epoch takes `count` rows."""
    return _epoch(seed, epoch, 1, count)[1]


@lru_cache(maxsize=32)  # an epoch of each domain of a mixture
def _epoch(seed: int, epoch: int, ring: int, windows: int) -> tuple[int, npt.NDArray[np.intp]]:
    """The cut and the order of windows of an epoch. Only the raw Philox stream is used: NumPy promises it for ever."""
    words = np.random.Philox(key=[seed & _WORD, epoch]).random_raw(windows + 1)
    order = np.argsort(words[1:], kind="stable")
    order.setflags(write=False)
    return int(words[0]) % ring, order

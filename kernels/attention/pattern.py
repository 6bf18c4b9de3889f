"""Patterns: which (query, key) pairs attention computes: pair by pair, as a matrix, and as lists of blocks."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` positions that read each other, as in BigBird (arXiv:2007.14062, section 2).

    A block reads the `window` blocks around it, itself among them; half of `globals` blocks at the start of the
    sequence and the rest at its end, which also read everything (for an odd number one more stands at the start); and
    `random` others, for each of `heads` heads, which `seed` draws among all but the last block.
    """

    size: int
    window: int = 3
    globals: int = 2
    random: int = 3
    seed: int = 0
    heads: int = 1

    def cover(self, keys: int) -> bool:
        """Whether a sequence is so short that all is read: at most window + globals + 2 random blocks, as published."""
        return keys <= (self.window + self.globals + 2 * self.random) * self.size

    def table(self, count: int, device: torch.device) -> Tensor:
        """Which of `count` blocks read which `[heads, count, count]`, by rows."""
        index = torch.arange(count, device=device)
        row, column = index[:, None], index
        first, last = (self.globals + 1) // 2, count - self.globals // 2
        settled = (row - column).abs() <= self.window // 2
        settled = settled | (row < first) | (row >= last) | (column < first) | (column >= last)
        # A hash orders the others, so that a draw is a pure function of (seed, head, row, column) on every device.
        mixed = _hash(torch.full((1, 1, 1), self.seed, device=device, dtype=torch.long))
        for part in (torch.arange(self.heads, device=device)[:, None, None], row, column):
            mixed = _hash(mixed + part + 1)
        candidate = ~settled & (column < count - 1)
        order = mixed.masked_fill(~candidate, 2**32).argsort(dim=-1, stable=True).argsort(dim=-1)
        return settled | (candidate & (order < self.random))

    def pairs(self, tokens: int) -> int:
        """How many pairs each head has in a sequence."""
        count = -(-tokens // self.size)
        sizes = torch.full((count,), self.size)
        sizes[-1] = tokens - (count - 1) * self.size
        read = replace(self, heads=1).table(count, sizes.device)[0]
        return int((sizes[:, None] * sizes * read).sum())


def _hash(x: Tensor) -> Tensor:
    """32 bits that depend on all 32 bits of x."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


class Lists(NamedTuple):
    """For every row of blocks the columns that it visits, as int32 lists of one length.

    `blocks` `[P, rows, most]` hold the columns in ascending order, and 0 beyond the `counts` `[P, rows]` of each row. P
    is the number of heads where they differ, else 1.
    """

    blocks: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Pattern:
    """Which keys j a query i may read, by their positions; what is known of every call.

    `order`: `causal` keys up to the query; `full` all keys of its sequence; `cross` all keys, which belong to another
    sequence, and nothing else. Among these, `window` keeps |i - j| < window; `first` beside it also every j < first;
    `stride` beside it also every j that is a multiple of `stride` before i (arXiv:1904.10509, section 4.3, strided);
    `columns` with `stride` instead keeps the stretch of `stride` positions in which i stands, and the last `columns`
    positions of every stretch (fixed; with 0 of them chunks); `blocks` what they read. The last query stands at the
    last key, so that with cached keys the queries are the newest. Keys between the `first` and the window may be
    missing among them.
    """

    order: Literal["causal", "full", "cross"] = "causal"
    window: int | None = None
    stride: int | None = None
    columns: int | None = None
    blocks: Blocks | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "stride", "columns", "first"):
            value, least = getattr(self, name), 0 if name == "columns" else 1
            if value is not None and value < least:
                raise ValueError(f"the {name} of a pattern is at least {least}; received {value}")
        if self.columns is not None and (self.stride is None or self.columns > self.stride):
            raise ValueError(f"columns stand at the end of each stride; received {self.columns=}, {self.stride=}")
        if self.stride is not None and (self.window is None) == (self.columns is None):
            raise ValueError(f"a stride stands beside a window or columns; received {self.window=}, {self.columns=}")
        if self.first is not None and (self.window is None or self.stride is not None or self.order != "causal"):
            raise ValueError(f"the first keys stand beside a causal window alone; received {self}")
        near = (self.window or self.stride) is not None
        if self.order == "cross" and (near or self.blocks is not None):
            raise ValueError(f"cross-attention reads all keys; received {self}")
        if self.blocks is not None and (near or self.order != "full"):
            raise ValueError(f"blocks are full attention's, and stand alone; received {self}")

    def options(self) -> dict[str, bool]:
        """What `kernels.select` is asked for."""
        return {
            "causal": self.order == "causal",
            "window": self.window is not None,
            "strided": self.stride is not None,
            "blocks": self.blocks is not None,
            "first": self.first is not None,
        }

    def allowed(self, i: Tensor, j: Tensor, keys: int) -> Tensor | None:
        """Whether queries i `[T, 1]` read keys j `[S]` of a sequence of `keys`: `[T, S]`, or with blocks
        `[heads, T, S]`; None if all do."""
        if self.blocks is not None:
            if self.blocks.cover(keys):
                return None
            table = self.blocks.table(-(-keys // self.blocks.size), i.device)
            return table[:, (i // self.blocks.size)[:, 0]][:, :, j // self.blocks.size]
        seen = j <= i if self.order == "causal" else None
        if self.columns is not None and self.stride is not None:
            near: Tensor = (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.columns)
            return near if seen is None else seen & near
        if self.window is None:
            return seen
        near = j > i - self.window if self.order == "causal" else (i - j).abs() < self.window
        if self.stride is not None:
            near = near | ((i - j) % self.stride == 0)
        if self.first is not None:
            near = near | (j < self.first)
        return near if seen is None else seen & near

    def dense(
        self, queries: int, keys: int, device: torch.device, prefix: Tensor | None = None,
        documents: Tensor | None = None, padding: Tensor | None = None, rows: slice = slice(None),
    ) -> Tensor | None:  # fmt: skip
        """The visible pairs as booleans that broadcast to `[B, H, T, S]`; None if every pair is visible.

        With `rows` those of these queries alone. The first `prefix` `[B]` positions of a row all read each other.
        `documents` `[B, T]` number the documents: a pair exists only within one. Keys at `padding` `[B, S]` are read by
        nothing but themselves, or by another sequence if they are all that it has to read, as a softmax of nothing is
        none.

        Raises ValueError for documents where queries and keys differ in number.
        """
        i, j = torch.arange(keys - queries, keys, device=device)[rows, None], torch.arange(keys, device=device)
        seen = self.allowed(i, j, keys)
        if prefix is not None and seen is not None:
            seen = seen | ((i < prefix[:, None, None, None]) & (j < prefix[:, None, None, None]))
        if documents is not None:
            if queries != keys:
                raise ValueError(f"documents need as many queries as keys; received {queries} and {keys}")
            together = (documents[:, rows, None] == documents[:, None, :])[:, None]
            seen = together if seen is None else together & seen
        if padding is not None:
            alone = padding.all(-1)[:, None, None, None] if self.order == "cross" else i == j
            heard = ~padding[:, None, None, :] | alone
            seen = heard if seen is None else seen & heard
        return seen

    def pairs(self, queries: int, keys: int) -> int:
        """How many (query, key) pairs exist, for one head of one sequence."""
        if self.order == "cross" or (self.blocks is not None and self.blocks.cover(keys)):
            return queries * keys
        if self.blocks is not None and queries == keys:
            return self.blocks.pairs(keys)
        if self.order == "full" and self == Pattern("full"):
            return queries * keys
        if self.blocks is not None or self.order == "full":
            seen = self.dense(queries, keys, torch.device("cpu"))
            assert seen is not None
            return int(seen.sum()) // (seen.shape[0] if seen.ndim == 3 else 1)
        return sum(map(self._back, range(keys - queries, keys)))

    def _back(self, i: int) -> int:
        """How many keys up to itself query i reads."""
        if self.columns is not None and self.stride is not None:
            inside = i % self.stride + 1
            return inside + i // self.stride * self.columns
        near = min(i + 1, self.window or i + 1)
        if self.stride is None:
            return near + min(self.first or 0, i + 1 - near)
        return near + i // self.stride - (near - 1) // self.stride

    def block_lists(self, queries: int, keys: int, block: int) -> tuple[Lists, Lists]:
        """The blocks of `block` x `block` pairs that hold a visible one, on the CPU: key blocks by query block, and
        query blocks by key block for the gradients of keys. What a call hides is for the kernel to leave out."""
        j = torch.arange(keys)
        visited = []
        for start in range(0, queries, block):  # no more than a row of blocks of the matrix is held
            i = torch.arange(keys - queries + start, keys - queries + min(start + block, queries))[:, None]
            allowed = self.allowed(i, j, keys)
            seen = torch.ones(1, len(i), keys, dtype=torch.bool) if allowed is None else allowed
            row = F.pad(seen.reshape(-1, len(i), keys).any(1), (0, -keys % block))
            visited.append(row.unflatten(-1, (-1, block)).any(-1))
        table = torch.stack(visited, 1)
        return _lists(table), _lists(table.transpose(1, 2))


CAUSAL, FULL, CROSS = Pattern("causal"), Pattern("full"), Pattern("cross")


def _lists(table: Tensor) -> Lists:
    """The lists of a table `[P, rows, columns]`."""
    counts = table.sum(-1)
    most = max(int(counts.max()), 1)
    blocks = table.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    inside = torch.arange(most) < counts[..., None]
    return Lists((blocks * inside).int(), counts.int())

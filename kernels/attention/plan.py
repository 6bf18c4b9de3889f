"""A call of attention as the kernels take it: sizes, rules, biases, what their loops visit, and their launches."""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.attention.backward import delta, keys_backward, queries_backward
from archlab.kernels.attention.forward import forward
from archlab.kernels.attention.inputs import Inputs, factor
from archlab.kernels.attention.pattern import Blocks, Lists, Pattern
from archlab.kernels.attention.tiles import Biases, Rows, Rules, Sizes, Task, Visits
from archlab.kernels.attention.tuning import LIST, tile
from archlab.kernels.launch import power_of_2, side_by_side

LOG2E = 1.4426950408889634


class Launch(NamedTuple):
    """A kernel with all that it is started with, on one axis."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    meta: dict[str, Any]

    def run(self) -> None:
        self.kernel[(self.programs,)](*self.arguments, **self.meta)


class Plan:
    """A call's arguments as the kernels take them."""

    def __init__(self, given: Inputs) -> None:
        q, k, v = given.q, given.k, given.v
        self.q, *others = (side_by_side(x) for x in (q, k, v))
        self.operands = tuple(map(rows, (self.q, *others)))
        self.gate = None if given.gate is None else rows(side_by_side(given.gate))
        (self.batch, heads, queries, width), keys = q.shape, k.shape[2]
        widths = [None if x == max(power_of_2(x), 16) else x for x in (width, v.shape[-1])]
        self.sizes = Sizes(heads, heads // k.shape[1], queries, keys, *widths)
        self.pattern = given.pattern
        self.sinks = None if given.sinks is None else given.sinks.float() * LOG2E
        self.biases = self._biases(given)
        self.documents, self.prefix = given.documents, given.prefix
        self.rules = self._rules(given)
        self.listed = self.pattern.blocks is not None and given.prefix is None and self.rules.table is not None
        self.plain = not self.listed and self.biases.reach is None and all(rule is None for rule in self.rules)
        self.features = {
            "width": max(power_of_2(width), 16), "value_width": max(power_of_2(v.shape[-1]), 16), "bits": 8 * q.itemsize
        }  # fmt: skip
        narrow = given.gate is None or given.gate.shape[-1] == 1
        self.epilogue = {"GATE": 1 if narrow else self.features["value_width"]}

    def _biases(self, given: Inputs) -> Biases:
        sizes, strides, relative = self.sizes, None, given.relative
        if given.bias is not None:
            strides = tuple(given.bias.expand(self.batch, sizes.heads, sizes.queries, sizes.keys).stride())
        if relative is not None:
            relative = (relative.float() * LOG2E).contiguous()
        decay, reach = (None if x is None else (x.float() * LOG2E).contiguous() for x in (given.decay, given.reach))
        return Biases(
            factor(given) * LOG2E, given.softcap * LOG2E if given.softcap else None,
            given.bias, strides,  # type: ignore[arg-type]
            relative, None if relative is None else relative.stride(0) * (relative.shape[0] > 1),
            decay, None if decay is None else decay.stride(0) * (decay.shape[0] > 1),
            reach, None if reach is None else reach.stride(0) * (reach.shape[0] > 1),
        )  # fmt: skip

    def _rules(self, given: Inputs) -> Rules:
        pattern, keys = self.pattern, self.sizes.keys
        prefix, documents, padding = given.prefix, given.documents, given.padding
        if padding is not None and pattern.order == "cross":
            padding = padding & ~padding.all(-1, keepdim=True)
        table = count = stride = block = None
        if pattern.blocks is not None and not pattern.blocks.cover(keys):
            block, count = pattern.blocks.size, -(-keys // pattern.blocks.size)
            table = _table(pattern.blocks, count, self.q.device)
            stride = count * count if len(table) > 1 else 0
        return Rules(
            pattern.window, pattern.stride, pattern.columns,
            None if prefix is None else prefix.int().contiguous(),
            None if documents is None else documents.contiguous(),
            None if padding is None else padding.to(torch.uint8).contiguous(), table, stride, block, count,
        )  # fmt: skip

    def tiles(self, kind: str, learned: bool = False) -> dict[str, Any]:
        """The tile and launch options of one of the kernels."""
        biased = self.biases.softcap is not None or self.biases.relative is not None or self.biases.bias is not None
        crowded = 2 if self.rules.table is not None else int(biased or not self.plain)
        return tile(kind, **self.features, listed=self.listed, learned=learned, crowded=crowded)

    def task(self, meta: dict[str, Any], by_key: bool) -> Task:
        """What programs with such tiles are told."""
        return Task(self.sizes, self.rules, self.biases, self._visits(meta, by_key))

    def _visits(self, meta: dict[str, Any], by_key: bool) -> Visits:
        """What bounds their loops: lists of a pattern's blocks, documents, closed gates."""
        if self.listed:
            lists = _lists(self.pattern, self.sizes.queries, self.sizes.keys, self.q.device)[by_key]
            per_head = int(lists.counts.shape[0] > 1)
            return Visits(None, None, *lists, lists.blocks.shape[-1], per_head)
        size, bounds = (meta["QUERIES"], meta["KEYS"], by_key), None
        if self.documents is not None and self.prefix is None:
            bounds = _document_bounds(self.documents, *size)[:, None]
        if self.biases.reach is not None:
            closed = _within_reach(self.biases.reach, self.biases.decay, *size)
            bounds = closed if bounds is None else _within_both(bounds, closed)
        if bounds is None:
            return Visits(None, None, None, None, None, None)
        bounds = bounds.int().contiguous()
        strides = tuple(bounds.stride(at) if bounds.shape[at] > 1 else 0 for at in (0, 1))
        return Visits(bounds, strides, None, None, None, None)  # type: ignore[arg-type]

    def meta(self, tiles: dict[str, Any]) -> dict[str, Any]:
        """The constants that all kernels have."""
        precision = "ieee" if self.q.dtype == torch.float32 else "tf32"
        own = {"WIDTH": self.features["width"], "VALUE_WIDTH": self.features["value_width"], "PRECISION": precision}
        own["LIST"] = LIST
        return {"ORDER": self.pattern.order, **own, **tiles}


@cache  # for ever: CUDA graphs read the tensors again
def _table(blocks: Blocks, count: int, device: torch.device) -> Tensor:
    return blocks.table(count, device).to(torch.uint8).contiguous()


@cache
def _lists(pattern: Pattern, queries: int, keys: int, device: torch.device) -> list[Lists]:
    """A pattern's lists of tiles, copied to the device once."""
    return [Lists(*(x.contiguous().to(device) for x in own)) for own in pattern.block_lists(queries, keys, LIST)]


# Which positions the tiles of one call reach: the stretch of their documents, and where a forget gate has closed


def _document_bounds(documents: Tensor, queries: int, keys: int, by_key: bool) -> Tensor:
    """For every tile of `queries` (`by_key`: of `keys`) positions the first and one after the last position of tiles
    of the other that may hold one of its documents `[B, T]`: `[B, tiles, 2]`."""
    own, other = (keys, queries) if by_key else (queries, keys)
    low, high = _extremes(documents, own)
    first, last = _extremes(documents, other)
    return _stretch((low[:, :, None] <= last[:, None]) & (first[:, None] <= high[:, :, None]), other)


def _within_reach(reach: Tensor, decay: Tensor, queries: int, keys: int, by_key: bool) -> Tensor:
    """The same by head `[B, H, tiles, 2]` for pairs whose key's decay `[B, H, S]` is within the query's `reach`."""
    ahead = decay.shape[-1] - reach.shape[-1]
    furthest = _of_tiles(reach, queries, torch.amax, -torch.inf)
    lowest = _of_tiles(decay, keys, torch.amin, torch.inf)
    near = furthest[..., :, None] >= lowest[..., None, :]
    return _stretch(near.transpose(-1, -2), queries) + ahead if by_key else _stretch(near, keys)


def _within_both(bounds: Tensor, others: Tensor) -> Tensor:
    """Where two stretches overlap."""
    low, high = torch.maximum(bounds[..., 0], others[..., 0]), torch.minimum(bounds[..., 1], others[..., 1])
    return torch.stack([low, high], -1)


def _of_tiles(c: Tensor, size: int, reduce: Any, rest: float) -> Tensor:
    found: Tensor = reduce(F.pad(c, (0, -c.shape[-1] % size), value=rest).unflatten(-1, (-1, size)), -1)
    return found


def _extremes(documents: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest number in each tile `[B, tiles]`."""
    filled = F.pad(documents[:, None], (0, -documents.shape[-1] % size), mode="replicate")[:, 0]
    tiles = filled.unflatten(-1, (-1, size))
    return tiles.amin(-1), tiles.amax(-1)


def _stretch(reach: Tensor, size: int) -> Tensor:
    """From the first to the last of the tiles of `size` positions that are reached, in positions `[..., 2]`; the whole
    where none is, which no tile of queries with a key can be."""
    count = reach.shape[-1]
    place = torch.arange(count, device=reach.device)
    first = torch.where(reach, place, count).amin(-1)
    last = torch.where(reach, place, -1).amax(-1) + 1
    return torch.stack([first * size, last * size], -1)


# Launches


def rows(x: Tensor) -> Rows:
    return Rows(x, (x.stride(0), x.stride(1), x.stride(2)))


def forward_launch(plan: Plan, out: Tensor, lse: Tensor) -> Launch:
    tiles, sizes = plan.tiles("forward"), plan.sizes
    programs = -(-sizes.queries // tiles["QUERIES"]) * plan.batch * sizes.heads
    arguments = (*plan.operands, plan.sinks, plan.gate, rows(out), lse, plan.task(tiles, by_key=False))
    return Launch(forward, programs, arguments, {"PLAIN": plan.plain, **plan.meta(tiles), **plan.epilogue})


def delta_launch(
    plan: Plan, out: Tensor, dout: Tensor, along: Tensor, passed: Tensor | None, dgate: Tensor | None
) -> Launch:
    """With a gate, what it passes on of dout and its own gradient are written too."""
    programs = -(-plan.sizes.queries // 32) * plan.batch * plan.sizes.heads
    more = (None if x is None else rows(x) for x in (passed, dgate))
    arguments = (rows(out), rows(dout), along, plan.gate, *more, plan.sizes)
    meta = {"ROWS": 32, "VALUE_WIDTH": plan.features["value_width"], **plan.epilogue, **launch.OPTIONS}
    return Launch(delta, programs, arguments, meta)


def keys_launch(
    plan: Plan, dout: Tensor, lse: Tensor, along: Tensor, dk: Tensor, dv: Tensor, dsums: Tensor | None
) -> Launch:
    tiles, sizes = plan.tiles("keys"), plan.sizes
    programs = -(-sizes.keys // tiles["KEYS"]) * plan.batch * (sizes.heads // sizes.groups)
    arguments = (*plan.operands, rows(dout), lse, along, rows(dk), rows(dv), dsums, plan.task(tiles, by_key=True))
    return Launch(keys_backward, programs, arguments, plan.meta(tiles))


def queries_launch(
    plan: Plan, dout: Tensor, lse: Tensor, along: Tensor, dq: Tensor, dbias: Tensor | None, learned: bool
) -> tuple[Launch, Tensor | None]:
    """With the sums by distance that it fills `[B,H,tiles,2 S - 1]`, if a relative bias is `learned`."""
    tiles, sizes = plan.tiles("queries", learned), plan.sizes
    count = -(-sizes.queries // tiles["QUERIES"])
    sums = lse.new_zeros(plan.batch, sizes.heads, count, 2 * sizes.keys - 1) if learned else None
    arguments = (*plan.operands, rows(dout), lse, along, rows(dq), dbias, sums, plan.task(tiles, by_key=False))
    meta = {"PLAIN": plan.plain and not learned, **plan.meta(tiles)}  # two loops with sums take too many registers
    return Launch(queries_backward, count * plan.batch * sizes.heads, arguments, meta), sums

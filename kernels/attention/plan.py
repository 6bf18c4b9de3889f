"""A call of attention as the kernels take it: sizes, rules, biases, what their loops visit, and their launches."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import launch
from kernels.attention.backward import delta, keys_backward, queries_backward
from kernels.attention.forward import forward
from kernels.attention.pattern import BlockLists, Blocks, Pattern
from kernels.attention.spans import document_bounds, pruned_bounds
from kernels.attention.tiles import Biases, Rules, Sizes, Visits
from kernels.attention.tuning import LIST, tile
from kernels.launch import power_of_2

LOG2E = 1.4426950408889634
ORDERS = ("causal", "full", "cross")


class Launch(NamedTuple):
    """A kernel with all that it is started with."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.meta)


def encoded(pattern: Pattern) -> list[int]:
    """A pattern as numbers, as operators take them: 0 for what it has not."""
    blocks = pattern.blocks
    drawn = (0,) * 6 if blocks is None else (
        blocks.size, blocks.window, blocks.globals, blocks.random, blocks.seed, blocks.heads
    )  # fmt: skip
    return [ORDERS.index(pattern.order), pattern.window or 0, pattern.stride or 0, pattern.columns or 0, *drawn]


def _decoded(numbers: list[int]) -> Pattern:
    order, window, stride, columns, *drawn = numbers
    blocks = Blocks(*drawn) if drawn[0] else None
    return Pattern(ORDERS[order], window or None, stride or None, columns or None, blocks)  # type: ignore[arg-type]


class Plan:
    """A call's arguments as the kernels take them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relative: Tensor | None, decay: Tensor | None,
        sinks: Tensor | None, prefix: Tensor | None, documents: Tensor | None, padding: Tensor | None,
        numbers: list[int], scale: float, softcap: float, prune: float,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = (with_rows(x) for x in (q, k, v))
        (self.batch, heads, queries, width), keys = q.shape, k.shape[2]
        widths = [None if x == max(power_of_2(x), 16) else x for x in (width, v.shape[-1])]
        self.sizes = Sizes(heads, heads // k.shape[1], queries, keys, *widths)
        self.pattern, self.scale, self.prune = _decoded(numbers), scale * LOG2E, prune
        self.sinks = None if sinks is None else sinks.float() * LOG2E
        self.biases = self._biases(bias, relative, decay, softcap)
        self.documents, self.prefix = documents, prefix
        self.rules = self._rules(prefix, documents, padding)
        self.listed = self.pattern.blocks is not None and prefix is None and self.rules.table is not None
        self.plain = not self.listed and all(rule is None for rule in self.rules)
        self.features = {
            "width": max(power_of_2(width), 16), "value_width": max(power_of_2(v.shape[-1]), 16), "bits": 8 * q.itemsize
        }  # fmt: skip

    def _biases(self, bias: Tensor | None, relative: Tensor | None, decay: Tensor | None, softcap: float) -> Biases:
        sizes, strides = self.sizes, None
        if bias is not None:
            strides = tuple(bias.expand(self.batch, sizes.heads, sizes.queries, sizes.keys).stride())
        if relative is not None:
            relative = (relative.float() * LOG2E).contiguous()
        if decay is not None:
            decay = (decay.float() * LOG2E).contiguous()
        return Biases(
            softcap * LOG2E if softcap else None, bias, strides,  # type: ignore[arg-type]
            relative, None if relative is None else relative.stride(0) * (relative.shape[0] > 1),
            decay, None if decay is None else decay.stride(0) * (decay.shape[0] > 1),
        )  # fmt: skip

    def _rules(self, prefix: Tensor | None, documents: Tensor | None, padding: Tensor | None) -> Rules:
        pattern, keys = self.pattern, self.sizes.keys
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

    def visits(self, meta: dict[str, Any], by_key: bool) -> Visits:
        """What bounds the loops of programs with such tiles: lists of a pattern's blocks, documents, closed gates."""
        if self.listed:
            lists = _lists(self.pattern, self.sizes.queries, self.sizes.keys, self.q.device)
            visits = lists.by_key if by_key else lists.by_query
            per_head = int(visits.counts.shape[0] > 1)
            return Visits(None, None, visits.blocks, visits.counts, visits.blocks.shape[-1], per_head)
        bounds = None
        if self.documents is not None and self.prefix is None:
            bounds = document_bounds(self.documents, meta["QUERIES"], meta["KEYS"], by_key)[:, None]
        if self.prune:
            closed = pruned_bounds(
                self.q, self.k, self.biases, self.scale, self.prune, meta["QUERIES"], meta["KEYS"], by_key
            )
            bounds = closed if bounds is None else torch.stack(
                [torch.maximum(bounds[..., 0], closed[..., 0]), torch.minimum(bounds[..., 1], closed[..., 1])], -1
            )  # fmt: skip
        if bounds is None:
            return Visits(None, None, None, None, None, None)
        bounds = bounds.int().contiguous()
        strides = bounds.stride(0), bounds.stride(1) if bounds.shape[1] > 1 else 0
        return Visits(bounds, strides, None, None, None, None)

    def meta(self, tiles: dict[str, Any]) -> dict[str, Any]:
        """The constants that all kernels have."""
        precision = "ieee" if self.q.dtype == torch.float32 else "tf32"
        own = {"WIDTH": self.features["width"], "VALUE_WIDTH": self.features["value_width"], "PRECISION": precision}
        own["LIST"] = LIST
        return {"ORDER": self.pattern.order, **own, **tiles}


@lru_cache(maxsize=64)
def _table(blocks: Blocks, count: int, device: torch.device) -> Tensor:
    return blocks.table(count, device).to(torch.uint8).contiguous()


@lru_cache(maxsize=64)
def _lists(pattern: Pattern, queries: int, keys: int, device: torch.device) -> BlockLists:
    """A pattern's lists of tiles, copied to the device once."""
    lists = pattern.block_lists(queries, keys, LIST)
    moved = (
        type(visits)(visits.blocks.contiguous().to(device), visits.counts.contiguous().to(device), visits.full)
        for visits in (lists.by_query, lists.by_key)
    )
    return BlockLists(*moved)


def with_rows(x: Tensor) -> Tensor:
    """x with elements of a row side by side."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def forward_launch(plan: Plan, out: Tensor, lse: Tensor) -> Launch:
    tiles, sizes = plan.tiles("forward"), plan.sizes
    grid = (-(-sizes.queries // tiles["QUERIES"]), plan.batch * sizes.heads)
    arguments = (
        plan.q, plan.k, plan.v, plan.sinks, out, lse, *map(strides, (plan.q, plan.k, plan.v, out)),
        plan.scale, sizes, plan.rules, plan.biases, plan.visits(tiles, by_key=False),
    )  # fmt: skip
    return Launch(forward, grid, arguments, {"PLAIN": plan.plain, **plan.meta(tiles)})


def delta_launch(plan: Plan, out: Tensor, dout: Tensor, along: Tensor) -> Launch:
    grid = (-(-plan.sizes.queries // 32), plan.batch * plan.sizes.heads)
    arguments = (out, dout, along, strides(out), strides(dout), plan.sizes)
    return Launch(delta, grid, arguments, {"ROWS": 32, "VALUE_WIDTH": plan.features["value_width"], **launch.OPTIONS})


def keys_launch(
    plan: Plan, dout: Tensor, lse: Tensor, along: Tensor, dk: Tensor, dv: Tensor, dsums: Tensor | None
) -> Launch:
    tiles, sizes = plan.tiles("keys"), plan.sizes
    grid = (-(-sizes.keys // tiles["KEYS"]), plan.batch * sizes.heads // sizes.groups)
    arguments = (
        plan.q, plan.k, plan.v, dout, lse, along, dk, dv, dsums, *map(strides, (plan.q, plan.k, plan.v, dout, dk, dv)),
        plan.scale, sizes, plan.rules, plan.biases, plan.visits(tiles, by_key=True),
    )  # fmt: skip
    return Launch(keys_backward, grid, arguments, plan.meta(tiles))


def queries_launch(
    plan: Plan, dout: Tensor, lse: Tensor, along: Tensor, dq: Tensor, dbias: Tensor | None, learned: bool
) -> tuple[Launch, Tensor | None]:
    """With the sums by distance that it fills `[B,H,tiles,2 S - 1]`, if a relative bias is `learned`."""
    tiles, sizes = plan.tiles("queries", learned), plan.sizes
    count = -(-sizes.queries // tiles["QUERIES"])
    sums = lse.new_zeros(plan.batch, sizes.heads, count, 2 * sizes.keys - 1) if learned else None
    arguments = (
        plan.q, plan.k, plan.v, dout, lse, along, dq, dbias, sums, *map(strides, (plan.q, plan.k, plan.v, dout, dq)),
        plan.scale, sizes, plan.rules, plan.biases, plan.visits(tiles, by_key=False),
    )  # fmt: skip
    meta = {"PLAIN": plan.plain and not learned, **plan.meta(tiles)}  # two loops with sums take too many registers
    return Launch(queries_backward, (count, plan.batch * sizes.heads), arguments, meta), sums

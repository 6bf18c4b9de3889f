"""The grouped product of experts in Triton: one launch for all experts, whose rows are counted on the device.

Rows are sorted by expert. A program takes a tile of rows of one expert and of outputs; which expert follows from the
ends, as each begins a tile of its own, so that the launch depends on no number that the device knows alone. There are
at most rows / ROWS + experts tiles, and the last may be empty. The gradient of the weights takes a tile of one expert's
matrix and walks over its rows. No sum is shared between programs: the same bits every time.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.custom_op import custom_op
from archlab.kernels.experts.torch_ops import grouped
from archlab.kernels.launch import Build, on_device_of, power_of_2, side_by_side, tuned

interpret.apply()


@triton.jit
def _product(
    x_ptr, w_ptr, ends_ptr, out_ptr, K, N, x_stride, w_expert, w_n, w_k, E,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_r = W_e x_r, a tile of one expert's rows times a tile of outputs."""
    tile = tl.program_id(1)
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + expert, mask=expert < E, other=0).to(tl.int32)
    begin = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0).to(tl.int32)
    tiles = (end - begin + ROWS - 1) // ROWS
    until = tl.cumsum(tiles, 0)
    mine = (tile < until) & (tile >= until - tiles)
    owner = tl.sum(tl.where(mine, expert, 0), 0)
    first = tl.sum(tl.where(mine, begin + (tile - until + tiles) * ROWS, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)  # 0 where no expert has this tile
    if first < last:
        row = first + tl.arange(0, ROWS)
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        x = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        w = w_ptr + owner.to(tl.int64) * w_expert + n.to(tl.int64)[None, :] * w_n + k.to(tl.int64)[:, None] * w_k
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, DEPTH):
            left = K - start
            a = tl.load(x, mask=(row < last)[:, None] & (k < left)[None, :], other=0.0)
            b = tl.load(w, mask=(k < left)[:, None] & (n < N)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            x += DEPTH
            w += DEPTH * w_k
        out = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < last)[:, None] & (n < N)[None, :])


@triton.jit
def _weight(
    dy_ptr, x_ptr, ends_ptr, out_ptr, N, K, dy_stride, x_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW_e = sum_r dy_r x_r^T over the rows of an expert, a tile of the matrix."""
    expert = tl.program_id(2)
    end = tl.load(ends_ptr + expert).to(tl.int32)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int32)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        kept = row < end
        far = row.to(tl.int64)
        a = tl.load(dy_ptr + far[None, :] * dy_stride + n[:, None], mask=kept[None, :] & (n < N)[:, None], other=0.0)
        b = tl.load(x_ptr + far[:, None] * x_stride + k[None, :], mask=kept[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    out = out_ptr + expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _tile(kernel: str, dtype: torch.dtype, inputs: int, outputs: int) -> dict[str, Any]:
    """Of the product (`experts`): rows, outputs, and how much of the inputs at once; of the weights' gradient
    (`experts-weight`): rows at once, outputs and inputs. float32 has no tensor cores."""
    wide = dtype == torch.float32
    default = _TILES[kernel][wide]
    key = {"inputs": power_of_2(inputs), "outputs": power_of_2(outputs), "float32": wide}
    return {**tuned(kernel, key, default), "PRECISION": "ieee" if wide else "tf32"}


_TILES: dict[str, tuple[dict[str, int], dict[str, int]]] = {  # for 16 bits and for float32
    "experts": (
        {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3},
        {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 2},
    ),
    "experts-weight": (
        {"ROWS": 64, "OUTPUTS": 128, "INPUTS": 128, "num_warps": 8, "num_stages": 3},
        {"ROWS": 32, "OUTPUTS": 64, "INPUTS": 64, "num_warps": 4, "num_stages": 2},
    ),
}


@custom_op("experts_triton")
def _experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    (rows, width), (count, outputs, _) = x.shape, weight.shape
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    x, tile = side_by_side(x), _tile("experts", x.dtype, width, outputs)
    grid = triton.cdiv(outputs, tile["COLUMNS"]), triton.cdiv(rows, tile["ROWS"]) + count
    with on_device_of(x):
        _product[grid](
            x, weight, ends, out, width, outputs, x.stride(0), *weight.stride(), count,
            EXPERTS=power_of_2(count), **tile,
        )  # fmt: skip
    return out


@custom_op("experts_triton_weight")
def _experts_weight(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """sum_r dy_r x_r^T over the rows r of each expert: `[experts, outputs, inputs]`."""
    dy, x = side_by_side(dy), side_by_side(x)
    outputs, width, count = dy.shape[1], x.shape[1], ends.shape[0]
    tile = _tile("experts-weight", x.dtype, width, outputs)
    out = x.new_empty(count, outputs, width)
    grid = triton.cdiv(width, tile["INPUTS"]), triton.cdiv(outputs, tile["OUTPUTS"]), count
    with on_device_of(x):
        _weight[grid](dy, x, ends, out, outputs, width, dy.stride(0), x.stride(0), **tile)
    return out


experts = grouped(_experts, _experts_weight)


def builds() -> Iterator[Build]:
    """Both products for few and for many experts, the first with the weights as they are and transposed."""
    index = torch.int64
    for dtype in (torch.bfloat16, torch.float32):
        tile, name = _tile("experts", dtype, 1024, 768), str(dtype)[6:]
        for count in (8, 128):
            for side, strides in (("forward", (1024 * 768, 1024, 1)), ("backward", (1024 * 768, 1, 1024))):
                arguments = (dtype, dtype, index, dtype, 1024, 768, 1024, *strides, count)
                meta = {**tile, "EXPERTS": power_of_2(count)}
                yield Build(f"experts-{side}-{name}-{count}", _product, arguments, meta)
        of_weight = (dtype, dtype, index, dtype, 768, 1024, 768, 1024)
        yield Build(f"experts-weight-{name}", _weight, of_weight, _tile("experts-weight", dtype, 1024, 768))

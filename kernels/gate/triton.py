"""The gate in Triton: one pass forward, one pass backward that recomputes the activation.

Tensors are read as rows `[M, D]` with a stride between rows, so halves of a joint projection need no copy. A program
takes a tile of ROWS x COLUMNS; headwise, the backward walks along the row, because dg is a sum over it.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels.activations import ACTIVATIONS
from archlab.kernels.activations.triton import activate, slope
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gate.reference import Combine
from archlab.kernels.gradients import differentiable
from archlab.kernels.launch import OPTIONS, Build, as_rows, like, on_device_of, power_of_2

TILE = 1024


@triton.jit
def _forward(
    y_ptr, g_ptr, out_ptr, M, D, y_stride, g_stride,
    ACTIVATION: tl.constexpr, MULTIPLY: tl.constexpr, HEADWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < D)
    y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HEADWISE:
        g = tl.load(g_ptr + row * g_stride, mask=row < M, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = activate(g, ACTIVATION)
    out = y * opened if MULTIPLY else y + opened
    tl.store(out_ptr + row * D + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_elementwise(
    dout_ptr, y_ptr, g_ptr, dy_ptr, dg_ptr, M, D, dout_stride, y_stride, g_stride,
    ACTIVATION: tl.constexpr, MULTIPLY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < D)
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = dout
    dopened = dout
    if MULTIPLY:
        y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = dout * activate(g, ACTIVATION)
        dopened = dout * y
    dg = dopened * slope(g, ACTIVATION)
    tl.store(dy_ptr + row * D + column, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    tl.store(dg_ptr + row * D + column, dg.to(dg_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_headwise(
    dout_ptr, y_ptr, g_ptr, dy_ptr, dg_ptr, M, D, dout_stride, y_stride, g_stride,
    ACTIVATION: tl.constexpr, MULTIPLY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    g = tl.load(g_ptr + row * g_stride, mask=row < M, other=0.0).to(tl.float32)
    opened = activate(g, ACTIVATION)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < M) & (column < D)
        dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = dout
        if MULTIPLY:
            y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
            dy = dout * opened
            total += dout * y
        else:
            total += dout
        tl.store(dy_ptr + row * D + column, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    dg = tl.sum(total, 1)[:, None] * slope(g, ACTIVATION)
    tl.store(dg_ptr + row, dg.to(dg_ptr.dtype.element_ty), mask=row < M)


def _tile(width: int) -> dict[str, int]:
    columns = min(power_of_2(width), TILE)
    return {"ROWS": TILE // columns, "COLUMNS": columns, **OPTIONS}


def _grid(rows: int, width: int, tile: dict[str, int], walks_rows: bool = False) -> tuple[int, int]:
    return triton.cdiv(rows, tile["ROWS"]), 1 if walks_rows else triton.cdiv(width, tile["COLUMNS"])


@custom_op("gate")
def _gate(y: Tensor, g: Tensor, activation: str, multiply: bool) -> Tensor:
    out = like(y)
    if y.numel() == 0:
        return out
    ys, gs = as_rows(y), as_rows(g)
    (rows, width), tile = ys.shape, _tile(ys.shape[1])
    with on_device_of(y):
        _forward[_grid(rows, width, tile)](
            ys, gs, out, rows, width, ys.stride(0), gs.stride(0), activation, multiply, g.shape != y.shape, **tile
        )
    return out


_gate.register_fake(lambda y, *_: like(y))


@custom_op("gate_backward")
def _gate_backward(dout: Tensor, y: Tensor, g: Tensor, activation: str, multiply: bool) -> tuple[Tensor, Tensor]:
    dy, dg = like(y), like(g)
    if y.numel() == 0:
        return dy, dg.zero_()
    douts, ys, gs = as_rows(dout), as_rows(y), as_rows(g)
    (rows, width), tile, headwise = ys.shape, _tile(ys.shape[1]), g.shape != y.shape
    kernel = _backward_headwise if headwise else _backward_elementwise
    strides = douts.stride(0), ys.stride(0), gs.stride(0)
    with on_device_of(y):
        kernel[_grid(rows, width, tile, headwise)](
            douts, ys, gs, dy, dg, rows, width, *strides, activation, multiply, **tile
        )
    return dy, dg


_gate_backward.register_fake(lambda dout, y, g, *_: (like(y), like(g)))


differentiable(_gate, _gate_backward, 2)


def gate(y: Tensor, g: Tensor, activation: str, combine: Combine) -> Tensor:
    """y `[..., D]` gated by g of y's shape or `[..., 1]`; raises ValueError for any other shape of g."""
    if g.shape != y.shape and g.shape != (*y.shape[:-1], 1):
        raise ValueError(f"g must have y's shape {tuple(y.shape)} or end in 1 instead; received {tuple(g.shape)}")
    out: Tensor = _gate(y, g, activation, combine == "multiply")
    return out


def glu(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype. Raises ValueError for two shapes."""
    if a.shape != b.shape:
        raise ValueError(f"a and b must have one shape; received {tuple(a.shape)} and {tuple(b.shape)}")
    return gate(b, a, activation, "multiply").to(a.dtype)


def builds() -> Iterator[Build]:
    """Every activation elementwise and headwise, and both ways to combine once: activations are code of their own."""
    dtype = torch.bfloat16
    for name, combine in (*((name, "multiply") for name in ACTIVATIONS), ("silu", "add")):
        for headwise, width, g_stride in ((True, 64, 1), (False, 2048, 2048)):
            label = f"{'headwise' if headwise else 'elementwise'}-{combine}-{name}"
            flags = {"ACTIVATION": name, "MULTIPLY": combine == "multiply", **_tile(width)}
            forward = (*(dtype,) * 3, 4096, width, width, g_stride)
            backward = (*(dtype,) * 5, 4096, width, width, width, g_stride)
            kernel = _backward_headwise if headwise else _backward_elementwise
            if name == "silu":
                yield Build(f"gate-forward-{label}", _forward, forward, flags | {"HEADWISE": headwise})
            yield Build(f"gate-backward-{label}", kernel, backward, flags)

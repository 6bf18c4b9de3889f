"""The norm of each head and the gate on it in Triton: x and g are read once, the result is written once.

What is saved are the inputs: backward reads them and the gradient once, norms x again, and writes both gradients. A
program takes tokens of one head, of any strides, so that heads may have weights of their own; its part of their
gradients stays in registers: parts `[programs, heads, D]`, summed by torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels.activations.triton import activate, slope
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gate import granularity
from archlab.kernels.gate.reference import Combine
from archlab.kernels.gradients import differentiable, float32_of
from archlab.kernels.launch import OPTIONS, Build, like, on_device_of, power_of_2, side_by_side
from archlab.kernels.norms.reference import Kind

PROGRAMS = 1024


@triton.jit
def _normed(x, inside, D, eps, CENTERED: tl.constexpr):
    """x `[ROWS, COLUMNS]` over the root of its mean square, and one over that root `[ROWS, 1]`."""
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, 1)[:, None] / D, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps)
    return x * rstd, rstd


@triton.jit
def _gate(start, column, real, inside, HEADWISE: tl.constexpr):
    """The scores of rows that start at the pointers `start`: `[ROWS, 1]` or `[ROWS, COLUMNS]`."""
    if HEADWISE:
        return tl.load(start, mask=real, other=0.0).to(tl.float32)
    else:
        return tl.load(start + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    x_ptr, g_ptr, w_ptr, b_ptr, out_ptr, M, T, H, D, x_batch, x_time, x_head, g_batch, g_time, g_head, w_head, eps,
    CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr,
    MULTIPLY: tl.constexpr, HEADWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    batch, time, real = row // T, row % T, row < M
    inside = real & (column < D)
    x_start = x_ptr + batch * x_batch + time * x_time + head * x_head
    g_start = g_ptr + batch * g_batch + time * g_time + head * g_head
    out, _ = _normed(tl.load(x_start + column, mask=inside, other=0.0).to(tl.float32), inside, D, eps, CENTERED)
    if WEIGHTED:
        out *= tl.load(w_ptr + head * w_head + column, mask=column < D, other=0.0).to(tl.float32)
    if BIASED:
        out += tl.load(b_ptr + head * w_head + column, mask=column < D, other=0.0).to(tl.float32)
    opened = activate(_gate(g_start, column, real, inside, HEADWISE), ACTIVATION)
    out = out * opened if MULTIPLY else out + opened
    tl.store(out_ptr + (row * H + head) * D + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dout_ptr, x_ptr, g_ptr, w_ptr, b_ptr, dx_ptr, dg_ptr, dw_ptr, db_ptr, M, T, H, D,
    dout_batch, dout_time, dout_head, x_batch, x_time, x_head, g_batch, g_time, g_head, w_head, eps,
    CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr,
    MULTIPLY: tl.constexpr, HEADWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        token = tile + tl.arange(0, ROWS)[:, None]
        row, batch, time = token.to(tl.int64), (token // T).to(tl.int64), (token % T).to(tl.int64)
        real = token < M
        inside = real & (column < D)
        x_start = x_ptr + batch * x_batch + time * x_time + head * x_head
        g_start = g_ptr + batch * g_batch + time * g_time + head * g_head
        dout_start = dout_ptr + batch * dout_batch + time * dout_time + head * dout_head
        x = tl.load(x_start + column, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_start + column, mask=inside, other=0.0).to(tl.float32)
        g = _gate(g_start, column, real, inside, HEADWISE)
        normed, rstd = _normed(x, inside, D, eps, CENTERED)
        dy = dout
        dopened = dout
        if MULTIPLY:
            y = normed
            if WEIGHTED:
                y = y * tl.load(w_ptr + head * w_head + column, mask=column < D, other=0.0).to(tl.float32)
            if BIASED:
                y += tl.load(b_ptr + head * w_head + column, mask=column < D, other=0.0).to(tl.float32)
            dy = dout * activate(g, ACTIVATION)
            dopened = dout * y
        if HEADWISE:
            dg = tl.sum(dopened, 1)[:, None] * slope(g, ACTIVATION)
            tl.store(dg_ptr + row * H + head, dg.to(dg_ptr.dtype.element_ty), mask=real)
        else:
            dg = dopened * slope(g, ACTIVATION)
            tl.store(dg_ptr + (row * H + head) * D + column, dg.to(dg_ptr.dtype.element_ty), mask=inside)
        if BIASED:
            db += dy
        if WEIGHTED:
            dw += dy * normed
            dy *= tl.load(w_ptr + head * w_head + column, mask=column < D, other=0.0).to(tl.float32)
        dx = dy - normed * (tl.sum(dy * normed, 1)[:, None] / D)
        if CENTERED:
            dx -= tl.sum(dy, 1)[:, None] / D
        tl.store(dx_ptr + (row * H + head) * D + column, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    part = (tl.program_id(0).to(tl.int64) * H + head) * D + column
    if WEIGHTED:
        tl.store(dw_ptr + part, tl.sum(dw, 0)[None, :], mask=column < D)
    if BIASED:
        tl.store(db_ptr + part, tl.sum(db, 0)[None, :], mask=column < D)


def _tile(width: int) -> dict[str, int]:
    """Tokens of 1024 elements together, of one head."""
    columns = power_of_2(width)
    return {"ROWS": max(1, 1024 // columns), "COLUMNS": columns, **OPTIONS}


def _factors(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """weight and bias with a common stride between heads; x in the place of those that are missing."""
    given = [t for t in (weight, bias) if t is not None]
    by_head = bool(given) and given[0].ndim == 2
    w, b = (x if t is None else t.contiguous() for t in (weight, bias))
    return w, b, x.shape[-1] if by_head else 0


@custom_op("norm_gate")
def _norm_gate(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, activation: str,
    multiply: bool,
) -> Tensor:  # fmt: skip
    out = like(x)
    if x.numel() == 0:
        return out
    xs, gs, (batch, time, heads, width) = side_by_side(x), side_by_side(g), x.shape
    (w, b, w_head), tile = _factors(xs, weight, bias), _tile(width)
    flags = centered, weight is not None, bias is not None, activation, multiply, g.shape != x.shape
    with on_device_of(x):
        _forward[(triton.cdiv(batch * time, tile["ROWS"]), heads)](
            xs, gs, w, b, out, batch * time, time, heads, width, *xs.stride()[:3], *gs.stride()[:3], w_head, eps,
            *flags, **tile,
        )  # fmt: skip
    return out


_norm_gate.register_fake(lambda x, *_: like(x))


@custom_op("norm_gate_backward")
def _norm_gate_backward(
    dout: Tensor, x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
    activation: str, multiply: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dg, and the gradients of weight and bias in float32, each empty where there is none."""
    dx, dg = like(x), like(g)
    batch, time, heads, width = x.shape
    if x.numel() == 0:
        return dx, dg.zero_(), float32_of(weight, x).zero_(), float32_of(bias, x).zero_()
    douts, xs, gs = side_by_side(dout), side_by_side(x), side_by_side(g)
    (w, b, w_head), tile = _factors(xs, weight, bias), _tile(width)
    programs = min(triton.cdiv(PROGRAMS, heads), triton.cdiv(batch * time, tile["ROWS"]))
    dw, db = (x.new_empty((programs, heads, 0 if t is None else width), dtype=torch.float32) for t in (weight, bias))
    strides = (*douts.stride()[:3], *xs.stride()[:3], *gs.stride()[:3], w_head)
    flags = centered, weight is not None, bias is not None, activation, multiply, g.shape != x.shape
    with on_device_of(x):
        _backward[(programs, heads)](
            douts, xs, gs, w, b, dx, dg, dw, db, batch * time, time, heads, width, *strides, eps, *flags, **tile
        )
    over = (0,) if w_head else (0, 1)
    return dx, dg, dw.sum(over), db.sum(over)


@_norm_gate_backward.register_fake
def _(
    dout: Tensor, x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_head = any(t is not None and t.ndim == 2 for t in (weight, bias))
    empty = (x.shape[2], 0) if by_head else (0,)
    dw, db = (x.new_empty(empty if t is None else t.shape, dtype=torch.float32) for t in (weight, bias))
    return like(x), like(g), dw, db


differentiable(_norm_gate, _norm_gate_backward, 4)


def norm_gate(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, activation: str,
    combine: Combine,
) -> Tensor:  # fmt: skip
    """(norm(x) weight + bias) act(g), or plus act(g), for x `[B, T, H, D]`; the result has x's dtype.

    Raises ValueError for a g that has neither x's shape nor one value per head.
    """
    if x.ndim != 4 or granularity(x, g) == "other":
        found = f"{tuple(x.shape)} and {tuple(g.shape)}"
        raise ValueError(f"x must be [B, T, H, D] and g of its shape or [B, T, H, 1]; received {found}")
    out: Tensor = _norm_gate(x, g, weight, bias, eps, kind == "layer", activation, combine == "multiply")
    return out


def builds() -> Iterator[Build]:
    """Both norms, elementwise and headwise, for heads of 64 to 256."""
    dtype, wide = torch.bfloat16, torch.float32
    for name, width, centered, biased, activation, multiply, headwise in (
        ("rms-elementwise-64", 64, False, False, "silu", True, False),
        ("layer-elementwise-128", 128, True, True, "silu", True, False),
        ("rms-headwise-128", 128, False, False, "sigmoid", True, True),
        ("layer-headwise-add-256", 256, True, True, "sigmoid", False, True),
    ):
        flags = {
            "CENTERED": centered, "WEIGHTED": True, "BIASED": biased, "ACTIVATION": activation,
            "MULTIPLY": multiply, "HEADWISE": headwise, **_tile(width),
        }  # fmt: skip
        heads = 16
        own = 4096 * heads * width, heads * width, width
        gate = (4096 * heads, heads, 1) if headwise else own
        sizes = 16384, 4096, heads, width
        first = (dtype, dtype, wide, wide, dtype, *sizes, *own, *gate, width, 1e-6)
        second = (*(dtype,) * 3, wide, wide, dtype, dtype, wide, wide, *sizes, *own, *own, *gate, width, 1e-6)
        yield Build(f"norm_gate-forward-{name}", _forward, first, flags)
        yield Build(f"norm_gate-backward-{name}", _backward, second, flags)

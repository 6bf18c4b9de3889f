"""RMSNorm in Triton: one pass forward that keeps 1/rms of each row, one pass backward.

A program holds whole rows. In the backward each program walks over its share of the rows and keeps its part of dw in
registers; the parts `[P, D]` are summed by torch, so that the result is the same on every run and every card.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import interpret
from kernels.launch import OPTIONS, Build, as_rows, on_device_of, power_of_2

interpret.apply()
WIDEST = 16384
PROGRAMS = 512


@triton.jit
def _forward(
    x_ptr, w_ptr, out_ptr, rstd_ptr, M, D, x_stride, eps,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < D)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    out = x * rstd
    if WEIGHTED:
        out *= tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dout_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, D, dout_stride, x_stride,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (row < M) & (column < D)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
        normed = x * rstd
        dnormed = dout
        if WEIGHTED:
            dw += dout * normed
            dnormed = dout * tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        along = tl.sum(dnormed * normed, 1)[:, None] / D
        dx = (dnormed - normed * along) * rstd
        tl.store(dx_ptr + row * D + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        total = tl.sum(dw, 0)[None, :]
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * D + column, total, mask=column < D)


def _tile(width: int) -> dict[str, int]:
    """Rows of 2048 elements together, and warps so that a thread holds at most 32 elements of a row."""
    columns = power_of_2(width)
    warps = min(16, max(4, columns // 512))
    return {"ROWS": max(1, 2048 // columns), "COLUMNS": columns, "num_warps": warps, **OPTIONS}


@torch.library.custom_op("archlab::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return out, rstd
    xs = as_rows(x)
    (rows, width), tile = xs.shape, _tile(xs.shape[1])
    w = xs if weight is None else weight.contiguous()
    with on_device_of(x):
        _forward[(triton.cdiv(rows, tile["ROWS"]),)](
            xs, w, out, rstd, rows, width, xs.stride(0), eps, weight is not None, **tile
        )
    return out, rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("archlab::rms_norm_backward", mutates_args=())
def _rms_norm_backward(dout: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx in x's dtype and dw in float32, which is empty without a weight."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    if x.numel() == 0:
        return dx, x.new_zeros(0 if weight is None else width, dtype=torch.float32)
    douts, xs = as_rows(dout), as_rows(x)
    tile = _tile(width)
    programs = min(PROGRAMS, triton.cdiv(xs.shape[0], tile["ROWS"]))
    parts = x.new_empty((programs, 0 if weight is None else width), dtype=torch.float32)
    w = xs if weight is None else weight.contiguous()
    with on_device_of(x):
        _backward[(programs,)](
            douts, xs, w, rstd, dx, parts, xs.shape[0], width, douts.stride(0), xs.stride(0), weight is not None, **tile
        )
    return dx, parts.sum(0)


@_rms_norm_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0 if weight is None else x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, dout: Tensor, drstd: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
    """`drstd` is unused: 1/rms leaves the op only for this function."""
    x, weight, rstd = ctx.saved_tensors
    dx, dw = _rms_norm_backward(dout, x, weight, rstd)
    return dx, None if weight is None else dw.to(weight.dtype), None


_rms_norm.register_autograd(_differentiate, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]`; raises ValueError for D above 16384."""
    if x.shape[-1] > WIDEST:
        raise ValueError(f"a row must fit into one program: at most {WIDEST} wide; received {x.shape[-1]}")
    out: Tensor = _rms_norm(x, weight, eps)[0]
    return out


def builds() -> Iterator[Build]:
    """With and without weight, for the widths of a head and of small to the widest models."""
    dtype, wide = torch.bfloat16, torch.float32
    for weighted in (True, False):
        for width in (64, 1024, 4096, WIDEST):
            meta = {"WEIGHTED": weighted, **_tile(width)}
            name = f"{'weight' if weighted else 'plain'}-{width}"
            yield Build(
                f"rms_norm-forward-{name}", _forward, (dtype, wide, dtype, wide, 4096, width, width, 1e-6), meta
            )
            yield Build(
                f"rms_norm-backward-{name}", _backward,
                (dtype, dtype, wide, wide, dtype, wide, 4096, width, width, width), meta,
            )  # fmt: skip

"""The kernels that the norms share: rows are normed in one pass forward and one backward, after a sum or without one.

A program holds whole rows. Forward, a row is read once and written once, with two numbers about it; with a sum, stream
and update are read, sum and normed are written. Backward, a row, its gradient (and that of the sum) are read once and
the gradient of the input is written once. Each program walks over its share of the rows and keeps its part of the
gradients of weight and bias in registers; the parts `[P, D]` are summed by torch, so that the result is the same on
every run and every card. Where rows of more than 8192 leave no registers for these, torch computes them instead.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.launch import OPTIONS, Build, as_rows, on_device_of, power_of_2

interpret.apply()
WIDEST = 16384
WIDEST_KEPT = 8192
PROGRAMS = 512


@triton.jit
def _forward(
    x_ptr, update_ptr, w_ptr, b_ptr, sum_ptr, out_ptr, mean_ptr, rstd_ptr, M, D, x_stride, update_stride, eps, scale,
    ADDED: tl.constexpr, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < D)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        x = x * scale + tl.load(update_ptr + row * update_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + column, total, mask=inside)
        x = total.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, 1)[:, None] / D
        tl.store(mean_ptr + row, mean, mask=row < M)
        x = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    out = x * rstd
    if WEIGHTED:
        out *= tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    if BIASED:
        out += tl.load(b_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dout_ptr, dsum_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dupdate_ptr, dw_ptr, db_ptr,
    M, D, dout_stride, dsum_stride, x_stride, scale,
    SUMMED: tl.constexpr, APART: tl.constexpr, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (row < M) & (column < D)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
        if CENTERED:
            x = tl.where(inside, x - tl.load(mean_ptr + row, mask=row < M, other=0.0), 0.0)
        normed = x * rstd
        dnormed = dout
        if BIASED and KEPT:
            db += dout
        if WEIGHTED and KEPT:
            dw += dout * normed
        if WEIGHTED:
            dnormed = dout * tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        along = tl.sum(dnormed * normed, 1)[:, None] / D
        dx = dnormed - normed * along
        if CENTERED:
            dx -= tl.sum(dnormed, 1)[:, None] / D
        dx *= rstd
        if SUMMED:
            dx += tl.load(dsum_ptr + row * dsum_stride + column, mask=inside, other=0.0).to(tl.float32)
        if APART:
            tl.store(dupdate_ptr + row * D + column, dx.to(dupdate_ptr.dtype.element_ty), mask=inside)
            dx *= scale
        tl.store(dx_ptr + row * D + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * D + column
    if WEIGHTED and KEPT:
        tl.store(dw_ptr + part, tl.sum(dw, 0)[None, :], mask=column < D)
    if BIASED and KEPT:
        tl.store(db_ptr + part, tl.sum(db, 0)[None, :], mask=column < D)


def _tile(width: int) -> dict[str, int]:
    """Rows of 2048 elements together, and warps so that a thread holds at most 32 elements of a row."""
    columns = power_of_2(width)
    warps = min(16, max(4, columns // 512))
    return {"ROWS": max(1, 2048 // columns), "COLUMNS": columns, "num_warps": warps, **OPTIONS}


def _kept(width: int, centered: bool, summed: bool) -> bool:
    """Whether the gradients of weight and bias fit into registers."""
    return width <= WIDEST_KEPT or not (centered or summed)


class Statistics(NamedTuple):
    """What the backward pass needs of each row, `[...]` in float32; `mean` is empty where rows are not centred."""

    mean: Tensor
    rstd: Tensor


class Gradients(NamedTuple):
    """`update` is None where it equals that of `x`; those of weight and bias are in float32, empty where not asked."""

    x: Tensor
    update: Tensor | None
    weight: Tensor
    bias: Tensor


def statistics(x: Tensor, centered: bool) -> Statistics:
    """Room for the statistics of x `[..., D]`."""
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return Statistics(torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd)


def check_width(x: Tensor) -> None:
    """Raises ValueError for rows that do not fit into one program."""
    if x.shape[-1] > WIDEST:
        raise ValueError(f"a row must fit into one program: at most {WIDEST} wide; received {x.shape[-1]}")


def forward(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Statistics]:
    """scale x + update (empty without an update), its norm, and the statistics of each row, for x `[..., D]`."""
    dtype = x.dtype if update is None else torch.promote_types(x.dtype, update.dtype)
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    total, stats = out.new_empty(0) if update is None else torch.empty_like(out), statistics(x, centered)
    if x.numel() == 0:
        return total, out, stats
    xs = as_rows(x)
    updates = xs if update is None else as_rows(update)
    (rows, width), tile = xs.shape, _tile(xs.shape[1])
    w, b = (xs if t is None else t.contiguous() for t in (weight, bias))
    flags = update is not None, centered, weight is not None, bias is not None
    strides = xs.stride(0), updates.stride(0)
    with on_device_of(x):
        _forward[(triton.cdiv(rows, tile["ROWS"]),)](
            xs, updates, w, b, total, out, stats.mean, stats.rstd, rows, width, *strides, eps, scale, *flags, **tile
        )
    return total, out, stats


def backward(
    dout: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Statistics,
    *,
    biased: bool = False,
    scale: float = 1.0,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> Gradients:
    """The gradients where x `[..., D]` was normed; after a sum, x is the sum and `dtypes` are those of its terms."""
    width, centered = x.shape[-1], stats.mean.numel() > 0
    own, other = dtypes or (x.dtype, x.dtype)
    dx = torch.empty_like(x, dtype=own, memory_format=torch.contiguous_format)
    apart = scale != 1.0 or own != other
    dupdate = torch.empty_like(dx, dtype=other) if apart else None
    lengths = width if weight is not None else 0, width if biased else 0
    if x.numel() == 0:
        return Gradients(dx, dupdate, *(x.new_zeros(n, dtype=torch.float32) for n in lengths))
    douts, xs = as_rows(dout), as_rows(x)
    dsums = douts if dsum is None else as_rows(dsum)
    tile, kept = _tile(width), _kept(width, centered, dsum is not None)
    programs = min(PROGRAMS, triton.cdiv(xs.shape[0], tile["ROWS"]))
    dw, db = (x.new_empty((programs, n), dtype=torch.float32) for n in lengths)
    w = xs if weight is None else weight.contiguous()
    strides = douts.stride(0), dsums.stride(0), xs.stride(0)
    flags = dsum is not None, apart, centered, weight is not None, biased, kept
    with on_device_of(x):
        _backward[(programs,)](
            douts, dsums, xs, w, stats.mean, stats.rstd, dx, dx if dupdate is None else dupdate, dw, db,
            xs.shape[0], width, *strides, scale, *flags, **tile,
        )  # fmt: skip
    if not kept:
        centred = xs.float() - stats.mean.reshape(-1, 1) if centered else xs.float()
        normed = centred * stats.rstd.reshape(-1, 1)
        dw = douts.float() * normed if weight is not None else dw
        db = douts.float() if biased else db
    return Gradients(dx, dupdate, dw.sum(0), db.sum(0))


def builds_of(label: str, flags: Mapping[str, bool], widths: tuple[int, ...], apart: bool = False) -> Iterator[Build]:
    """The kernels of one op with one set of flags, forward and backward."""
    dtype, wide = torch.bfloat16, torch.float32
    for width in widths:
        ahead: dict[str, Any] = {"CENTERED": flags["CENTERED"], "WEIGHTED": flags["WEIGHTED"], **_tile(width)}
        first = (dtype, dtype, wide, wide, dtype, dtype, wide, wide, 4096, width, width, width, 1e-6, 1.0)
        yield Build(
            f"{label}-forward-{width}", _forward, first, ahead | {"ADDED": flags["ADDED"], "BIASED": flags["BIASED"]}
        )
        kept = _kept(width, flags["CENTERED"], flags["ADDED"])
        back = ahead | {"SUMMED": flags["ADDED"], "APART": apart, "BIASED": flags["BIASED"], "KEPT": kept}
        second = (*(dtype,) * 3, wide, wide, wide, dtype, dtype, wide, wide, 4096, width, width, width, width, 1.0)
        yield Build(f"{label}-backward-{width}", _backward, second, back)

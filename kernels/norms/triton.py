"""The norms in Triton: rows are normed in one pass forward and one backward, after a sum or without one.

A program holds whole rows. Forward, a row is read once and written once, with two numbers about it; with a sum, stream
and update are read, sum and normed are written. Backward, a row, its gradient (and that of the sum) are read once and
the gradient of the input is written once. Each program walks over its share of the rows and keeps its part of the
gradients of weight and bias in registers; the parts `[P, D]` are summed by torch, so that the result is the same on
every run and every card. Where rows of more than 8192 leave no registers for these, torch computes them instead.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import gradient_of
from archlab.kernels.launch import OPTIONS, Build, as_rows, like, on_device_of, power_of_2
from archlab.kernels.norms.reference import Kind

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


@custom_op("norm_rows")
def _norm_rows(
    x: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """scale x + update (empty without an update), its norm, and of each row in float32 the mean, empty where rows are
    not centred, and one over the deviation."""
    total, out, mean, rstd = _room(x, update, weight, bias, eps, centered, scale)
    if x.numel() == 0:
        return total, out, mean, rstd
    xs = as_rows(x)
    updates = xs if update is None else as_rows(update)
    (rows, width), tile = xs.shape, _tile(xs.shape[1])
    w, b = (xs if t is None else t.contiguous() for t in (weight, bias))
    flags = update is not None, centered, weight is not None, bias is not None
    strides = xs.stride(0), updates.stride(0)
    with on_device_of(x):
        _forward[(triton.cdiv(rows, tile["ROWS"]),)](
            xs, updates, w, b, total, out, mean, rstd, rows, width, *strides, eps, scale, *flags, **tile
        )
    return total, out, mean, rstd


@_norm_rows.register_fake
def _room(x: Tensor, update: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = like(x, x.dtype if update is None else torch.promote_types(x.dtype, update.dtype))
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if given[3] else rstd.new_empty(0)
    return out.new_empty(0) if update is None else torch.empty_like(out), out, mean, rstd


@custom_op("norm_rows_backward")
def _norm_rows_backward(
    dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, biased: bool,
    scale: float, own: torch.dtype, other: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients where x `[..., D]` was normed; after a sum, x is the sum, of terms of the dtypes `own` and `other`.
    That of the update is empty where it equals that of x; those of weight and bias are in float32, empty where not
    asked."""
    width, centered = x.shape[-1], mean.numel() > 0
    dx, dupdate, *rest = found = _room_backward(dout, dsum, x, weight, mean, rstd, biased, scale, own, other)
    if x.numel() == 0:
        return dx, dupdate, rest[0].zero_(), rest[1].zero_()
    douts, xs = as_rows(dout), as_rows(x)
    dsums = douts if dsum is None else as_rows(dsum)
    tile, kept, apart = _tile(width), _kept(width, centered, dsum is not None), dupdate.numel() > 0
    programs = min(PROGRAMS, triton.cdiv(xs.shape[0], tile["ROWS"]))
    dw, db = (x.new_empty((programs, part.numel()), dtype=torch.float32) for part in found[2:])
    w = xs if weight is None else weight.contiguous()
    strides = douts.stride(0), dsums.stride(0), xs.stride(0)
    flags = dsum is not None, apart, centered, weight is not None, biased, kept
    with on_device_of(x):
        _backward[(programs,)](
            douts, dsums, xs, w, mean, rstd, dx, dupdate if apart else dx, dw, db,
            xs.shape[0], width, *strides, scale, *flags, **tile,
        )  # fmt: skip
    if not kept:
        centred = xs.float() - mean.reshape(-1, 1) if centered else xs.float()
        normed = centred * rstd.reshape(-1, 1)
        dw = douts.float() * normed if weight is not None else dw
        db = douts.float() if biased else db
    return dx, dupdate, dw.sum(0), db.sum(0)


@_norm_rows_backward.register_fake
def _room_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, x, weight, _, _, biased, scale, own, other = given
    dx = like(x, own)
    apart = scale != 1.0 or own != other
    dw, db = (x.new_empty(x.shape[-1] if has else 0, dtype=torch.float32) for has in (weight is not None, biased))
    return dx, torch.empty_like(dx, dtype=other) if apart else dx.new_empty(0), dw, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, update, weight, bias, _, _, ctx.scale = inputs
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.added, ctx.bias = update is not None, None if bias is None else bias.dtype
    ctx.dtypes = [x.dtype, x.dtype if update is None else update.dtype]
    ctx.save_for_backward(total if ctx.added else x, weight, mean, rstd)


def _differentiate(ctx: Any, dtotal: Tensor | None, dout: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    """A sum that nothing else reads has no gradient of its own; the statistics leave the op only for this function."""
    x, weight, mean, rstd = ctx.saved_tensors
    dout = torch.zeros_like(x) if dout is None else dout
    dsum = dtotal if ctx.added else None
    dx, dupdate, dw, db = _norm_rows_backward(
        dout, dsum, x, weight, mean, rstd, ctx.bias is not None, ctx.scale, *ctx.dtypes
    )
    apart = ctx.scale != 1.0 or ctx.dtypes[0] != ctx.dtypes[1]
    other = None if not ctx.added else dupdate if apart else dx
    dbias = None if ctx.bias is None else db.to(ctx.bias)
    return dx, other, gradient_of(weight, dw), dbias, None, None, None


_norm_rows.register_autograd(_differentiate, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]`; raises ValueError for D above 16384."""
    return _normed(x, None, weight, None, eps, False, 1.0)[1]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight, plus bias `[D]`; ValueError for D above 16384."""
    return _normed(x, None, weight, bias, eps, True, 1.0)[1]


def add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """s = scale stream + update `[..., D]`, and norm(s) weight + bias; raises ValueError for two shapes, and for D
    above 16384."""
    if stream.shape != update.shape:
        shapes = f"{tuple(stream.shape)} and {tuple(update.shape)}"
        raise ValueError(f"stream and update must have one shape; received {shapes}")
    return _normed(stream, update, weight, bias, eps, kind == "layer", scale)


def _normed(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if x.shape[-1] > WIDEST:
        raise ValueError(f"a row must fit into one program: at most {WIDEST} wide; received {x.shape[-1]}")
    total, out, _, _ = _norm_rows(x, *rest)
    return total, out


def builds() -> Iterator[Build]:
    """Each norm with what it may have, for the widths of a head and of small to the widest models, and the two
    gradients of a scaled stream."""
    dtype, wide = torch.bfloat16, torch.float32
    for name, added, centered, weighted, biased, widths in (
        ("rms_norm-weight", False, False, True, False, (64, 1024, WIDEST)),
        ("rms_norm-plain", False, False, False, False, (4096,)),
        ("layer_norm-affine", False, True, True, True, (64, WIDEST_KEPT, WIDEST)),
        ("layer_norm-bias_alone", False, True, False, True, (128,)),
        ("layer_norm-bare", False, True, False, False, (1024,)),
        ("add_norm-rms", True, False, True, False, (256, 2048, WIDEST)),
        ("add_norm-layer", True, True, True, True, (1024, WIDEST_KEPT, WIDEST)),
        ("add_norm-layer-scaled-no_bias", True, True, True, False, (4096,)),
    ):
        for width in widths:
            flags = {"CENTERED": centered, "WEIGHTED": weighted, "BIASED": biased, **_tile(width)}
            first = (dtype, dtype, wide, wide, dtype, dtype, wide, wide, 4096, width, width, width, 1e-6, 1.0)
            yield Build(f"{name}-forward-{width}", _forward, first, flags | {"ADDED": added})
            back = {"SUMMED": added, "APART": "scaled" in name, "KEPT": _kept(width, centered, added)}
            second = (*(dtype,) * 3, wide, wide, wide, dtype, dtype, wide, wide, 4096, width, width, width, width, 1.0)
            yield Build(f"{name}-backward-{width}", _backward, second, flags | back)

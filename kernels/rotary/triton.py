"""Rotation and the norm before it in Triton: x is read once and its result written once, forward and backward.

A program takes a tile of tokens of one head, of any strides, so queries need no copy out of a joint projection, nor
gradients out of attention's layout. The two channels of a pair are loaded as two tiles, or with `interleaved` as one
that is split, and the channels that pass unchanged as a third. Backward without a norm is the rotation by the opposite
angles, and reads nothing but the gradient; with one it reads x too, norms it again, and keeps the gradient of the
weight in registers: parts `[programs, heads, D]`, summed by torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import float32_of, gradient_of
from archlab.kernels.launch import OPTIONS, Build, like, on_device_of, power_of_2, side_by_side
from archlab.kernels.rotary.reference import Pairs

interpret.apply()
PROGRAMS = 1024


@triton.jit
def _load(start, first, inside, PAIRED: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Both channels of each pair `[ROWS, PAIRS]` of rows that start at the pointers `start` `[ROWS, 1]`."""
    pair = tl.arange(0, PAIRS)[None, :]
    if PAIRED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(start + column, mask=first & (column < R), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
    else:
        a = tl.load(start + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(start + R // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store(start, a, b, first, inside, PAIRED: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr):
    """Both channels of each pair `[ROWS, PAIRS]` to rows that start at the pointers `start`."""
    if PAIRED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(start + column, tl.interleave(a, b).to(start.dtype.element_ty), mask=first & (column < R))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(start + pair, a.to(start.dtype.element_ty), mask=inside)
        tl.store(start + R // 2 + pair, b.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _forward(
    x_ptr, cos_ptr, sin_ptr, w_ptr, out_ptr, M, T, H, batch_stride, time_stride, head_stride, eps,
    NORMED: tl.constexpr, WEIGHTED: tl.constexpr, BACK: tl.constexpr, PAIRED: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1).to(tl.int64)
    time, real = row % T, row < M
    pair = tl.arange(0, PAIRS)[None, :]
    inside = real & (pair < R // 2)
    start = x_ptr + (row // T) * batch_stride + time * time_stride + head * head_stride
    a, b = _load(start, real, inside, PAIRED, R, ROWS, PAIRS)
    cos = tl.load(cos_ptr + time * (R // 2) + pair, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + time * (R // 2) + pair, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + (row * H + head) * D
    rstd = 1.0
    if NORMED:
        squares = tl.sum(a * a + b * b, 1)[:, None]
    if REST > 0:
        column = R + tl.arange(0, REST)[None, :]
        beyond = real & (column < D)
        rest = tl.load(start + column, mask=beyond, other=0.0).to(tl.float32)
        if NORMED:
            squares += tl.sum(rest * rest, 1)[:, None]
    if NORMED:
        rstd = tl.rsqrt(squares / D + eps)
        a *= rstd
        b *= rstd
        if WEIGHTED:
            wa, wb = _load(w_ptr + row * 0, real, inside, PAIRED, R, ROWS, PAIRS)
            a *= wa
            b *= wb
    if BACK:
        sin = -sin
    _store(out, a * cos - b * sin, a * sin + b * cos, real, inside, PAIRED, R, PAIRS)
    if REST > 0:
        rest *= rstd
        if WEIGHTED:
            rest *= tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        tl.store(out + column, rest.to(out_ptr.dtype.element_ty), mask=beyond)


@triton.jit
def _backward(
    dout_ptr, x_ptr, cos_ptr, sin_ptr, w_ptr, dx_ptr, dw_ptr, M, T, H,
    dout_batch, dout_time, dout_head, x_batch, x_time, x_head, eps,
    WEIGHTED: tl.constexpr, PAIRED: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    dwa = tl.zeros((ROWS, PAIRS), tl.float32)
    dwb = tl.zeros((ROWS, PAIRS), tl.float32)
    if REST > 0:
        column = R + tl.arange(0, REST)[None, :]
        dwr = tl.zeros((ROWS, REST), tl.float32)
    for tile in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = tl.cast(tile, tl.int64) + tl.arange(0, ROWS)[:, None]
        time, real = row % T, row < M
        inside = real & (pair < R // 2)
        x_start = x_ptr + (row // T) * x_batch + time * x_time + head * x_head
        dout_start = dout_ptr + (row // T) * dout_batch + time * dout_time + head * dout_head
        dx_start = dx_ptr + (row * H + head) * D
        a, b = _load(x_start, real, inside, PAIRED, R, ROWS, PAIRS)
        ya, yb = _load(dout_start, real, inside, PAIRED, R, ROWS, PAIRS)
        cos = tl.load(cos_ptr + time * (R // 2) + pair, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + time * (R // 2) + pair, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(a * a + b * b, 1)[:, None]
        if REST > 0:
            beyond = real & (column < D)
            rest = tl.load(x_start + column, mask=beyond, other=0.0).to(tl.float32)
            drest = tl.load(dout_start + column, mask=beyond, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)[:, None]
        rstd = tl.rsqrt(squares / D + eps)
        a *= rstd
        b *= rstd
        da = ya * cos + yb * sin
        db = yb * cos - ya * sin
        if WEIGHTED:
            dwa += da * a
            dwb += db * b
            wa, wb = _load(w_ptr + row * 0, real, inside, PAIRED, R, ROWS, PAIRS)
            da *= wa
            db *= wb
        along = tl.sum(da * a + db * b, 1)[:, None]
        if REST > 0:
            rest *= rstd
            if WEIGHTED:
                dwr += drest * rest
                drest *= tl.load(w_ptr + column, mask=column < D, other=0.0).to(tl.float32)
            along += tl.sum(drest * rest, 1)[:, None]
        along = along / D
        _store(dx_start, (da - a * along) * rstd, (db - b * along) * rstd, real, inside, PAIRED, R, PAIRS)
        if REST > 0:
            tl.store(dx_start + column, ((drest - rest * along) * rstd).to(dx_ptr.dtype.element_ty), mask=beyond)
    if WEIGHTED:
        part = dw_ptr + (tl.program_id(0).to(tl.int64) * H + head) * D + tl.zeros((1, 1), tl.int64)
        first = tl.full((1, 1), 1, tl.int1)
        _store(part, tl.sum(dwa, 0)[None, :], tl.sum(dwb, 0)[None, :], first, pair < R // 2, PAIRED, R, PAIRS)
        if REST > 0:
            tl.store(part + column, tl.sum(dwr, 0)[None, :], mask=column < D)


def _tile(width: int, turned: int) -> dict[str, Any]:
    """Tokens of 2048 elements together, of one head."""
    rest = power_of_2(width - turned) if width > turned else 0
    rows = max(1, 2048 // power_of_2(width))
    return {"D": width, "R": turned, "ROWS": rows, "PAIRS": power_of_2(turned // 2), "REST": rest, **OPTIONS}


@custom_op("rotary")
def _rotary(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float | None, interleaved: bool, back: bool
) -> Tensor:
    """`back` turns by the opposite angles."""
    out = like(x)
    if x.numel() == 0:
        return out
    xs, (batch, time, heads, width) = side_by_side(x), x.shape
    tile = _tile(width, 2 * cos.shape[-1])
    w = xs if weight is None else weight.contiguous()
    flags = eps is not None, weight is not None, back, interleaved
    with on_device_of(x):
        _forward[(triton.cdiv(batch * time, tile["ROWS"]), heads)](
            xs, cos.contiguous(), sin.contiguous(), w, out, batch * time, time, heads, *xs.stride()[:3], eps or 0.0,
            *flags, **tile,
        )  # fmt: skip
    return out


_rotary.register_fake(lambda x, *_: like(x))


@custom_op("rotary_backward")
def _rotary_backward(
    dout: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """dx where x was normed before, and the gradient of the weight in float32, which is empty without one."""
    dx, dw = like(x), float32_of(weight, x)
    if x.numel() == 0:
        return dx, dw.zero_()
    douts, xs, (batch, time, heads, width) = side_by_side(dout), side_by_side(x), x.shape
    tile = _tile(width, 2 * cos.shape[-1])
    programs = min(triton.cdiv(PROGRAMS, heads), triton.cdiv(batch * time, tile["ROWS"]))
    parts = x.new_empty((programs, heads, dw.numel()), dtype=torch.float32)
    w = xs if weight is None else weight.contiguous()
    with on_device_of(x):
        _backward[(programs, heads)](
            douts, xs, cos.contiguous(), sin.contiguous(), w, dx, parts, batch * time, time, heads,
            *douts.stride()[:3], *xs.stride()[:3], eps, weight is not None, interleaved, **tile,
        )  # fmt: skip
    return dx, parts.sum((0, 1))


_rotary_backward.register_fake(lambda dout, x, cos, sin, weight, *_: (like(x), float32_of(weight, x)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, weight, ctx.eps, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(None if ctx.eps is None else x, cos, sin, weight)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin, weight = ctx.saved_tensors
    if x is None:
        dx = _rotary(dout, cos, sin, None, None, ctx.interleaved, not ctx.back)
        return dx, None, None, None, None, None, None
    dx, dw = _rotary_backward(dout, x, cos, sin, weight, ctx.eps, ctx.interleaved)
    return dx, None, None, gradient_of(weight, dw), None, None, None


_rotary.register_autograd(_differentiate, setup_context=_save)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x `[B, T, H, D]`, normed where there is an `eps`, turned by cos and sin `[T, R / 2]`; in the dtype of x.

    Raises ValueError for other numbers of dimensions.
    """
    if x.ndim != 4 or cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != x.shape[1]:
        found = f"{tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(f"x must be [B, T, H, D], cos and sin [T, R / 2]; received {found}")
    out: Tensor = _rotary(x, cos, sin, weight, eps, pairs == "interleaved", False)
    return out


def builds() -> Iterator[Build]:
    """Both pairings, whole and partly, with and without a norm, for heads of 64 and 128; 16 and 256 once."""
    dtype, wide = torch.bfloat16, torch.float32
    for name, width, turned, paired, weighted in (
        ("half-64", 64, 64, False, True),
        ("interleaved-64", 64, 64, True, False),
        ("half-128-partly", 128, 32, False, False),
        ("interleaved-128-partly", 128, 64, True, True),
        ("half-16", 16, 16, False, True),
        ("half-256", 256, 256, False, True),
    ):
        flags = {"WEIGHTED": weighted, "PAIRED": paired, **_tile(width, turned)}
        strides = 4096 * 16 * width, 16 * width, width
        first = (dtype, wide, wide, wide, dtype, 16384, 4096, 16, *strides, 1e-6)
        second = (dtype, dtype, wide, wide, wide, dtype, wide, 16384, 4096, 16, *strides, *strides, 1e-6)
        yield Build(f"rotary-backward-normed-{name}", _backward, second, flags)
        if width in (64, 128):
            yield Build(f"rotary-forward-normed-{name}", _forward, first, flags | {"NORMED": True, "BACK": False})
            plain = flags | {"NORMED": False, "WEIGHTED": False, "BACK": True}
            yield Build(f"rotary-{name}", _forward, first, plain)

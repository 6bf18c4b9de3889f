"""Token shift in Triton: x comes from memory once, the result goes there once, and the token before is read from cache.

Backward reads x and the gradient once, writes the gradient of x once, and keeps its part of the gradient of the mix in
registers while it walks over its share of the tokens: parts `[P, D]`, summed by torch.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable
from archlab.kernels.launch import OPTIONS, Build, like, on_device_of, power_of_2, side_by_side

interpret.apply()
PROGRAMS = 1024
TILE = 2048
WIDTH = 512


@triton.jit
def _forward(
    x_ptr, mix_ptr, starts_ptr, out_ptr, M, T, D, x_batch, x_time,
    STARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    time, inside = row % T, (row < M) & (column < D)
    has = time > 0
    if STARTS:
        has = has & (tl.load(starts_ptr + row, mask=row < M, other=1) == 0)
    start = x_ptr + (row // T) * x_batch + time * x_time + column
    mix = tl.load(mix_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    x = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(start - x_time, mask=inside & has, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + column, (before + mix * (x - before)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dout_ptr, x_ptr, mix_ptr, starts_ptr, dx_ptr, dmix_ptr, M, T, D, dout_batch, dout_time, x_batch, x_time,
    STARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mix = tl.load(mix_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    dmix = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = tl.cast(tile, tl.int64) + tl.arange(0, ROWS)[:, None]
        time, inside = row % T, (row < M) & (column < D)
        has, next_has = time > 0, time < T - 1
        if STARTS:
            has = has & (tl.load(starts_ptr + row, mask=row < M, other=1) == 0)
            next_has = next_has & (tl.load(starts_ptr + row + 1, mask=(row < M) & (time < T - 1), other=1) == 0)
        x_start = x_ptr + (row // T) * x_batch + time * x_time + column
        dout_start = dout_ptr + (row // T) * dout_batch + time * dout_time + column
        x = tl.load(x_start, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(x_start - x_time, mask=inside & has, other=0.0).to(tl.float32)
        dout = tl.load(dout_start, mask=inside, other=0.0).to(tl.float32)
        after = tl.load(dout_start + dout_time, mask=inside & next_has, other=0.0).to(tl.float32)
        dmix += dout * (x - before)
        dx = mix * dout + (1.0 - mix) * after
        tl.store(dx_ptr + row * D + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    part = dmix_ptr + tl.program_id(0).to(tl.int64) * D + column
    tl.store(part, tl.sum(dmix, 0)[None, :], mask=column < D)


def _tile(width: int) -> dict[str, int]:
    columns = min(power_of_2(width), WIDTH)
    return {"ROWS": TILE // columns, "COLUMNS": columns, **OPTIONS}


@custom_op("token_shift")
def _token_shift(x: Tensor, mix: Tensor, starts: Tensor | None) -> Tensor:
    out = like(x)
    if x.numel() == 0:
        return out
    xs, (batch, time, width), tile = side_by_side(x), x.shape, _tile(x.shape[-1])
    opens = xs if starts is None else starts.to(torch.int8).contiguous()
    grid = triton.cdiv(batch * time, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"])
    with on_device_of(x):
        _forward[grid](
            xs, mix.contiguous(), opens, out, batch * time, time, width, *xs.stride()[:2], starts is not None, **tile
        )
    return out


_token_shift.register_fake(lambda x, *_: like(x))


@custom_op("token_shift_backward")
def _token_shift_backward(dout: Tensor, x: Tensor, mix: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx, and the gradient of mix in float32."""
    dx = like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(mix, dtype=torch.float32)
    douts, xs, (batch, time, width), tile = side_by_side(dout), side_by_side(x), x.shape, _tile(x.shape[-1])
    opens = xs if starts is None else starts.to(torch.int8).contiguous()
    across = triton.cdiv(width, tile["COLUMNS"])
    programs = min(triton.cdiv(PROGRAMS, across), triton.cdiv(batch * time, tile["ROWS"]))
    parts = x.new_empty((programs, width), dtype=torch.float32)
    with on_device_of(x):
        _backward[(programs, across)](
            douts, xs, mix.contiguous(), opens, dx, parts, batch * time, time, width,
            *douts.stride()[:2], *xs.stride()[:2], starts is not None, **tile,
        )  # fmt: skip
    return dx, parts.sum(0)


_token_shift_backward.register_fake(lambda dout, x, mix, *_: (like(x), torch.empty_like(mix, dtype=torch.float32)))


differentiable(_token_shift, _token_shift_backward, 3)


def token_shift(x: Tensor, mix: Tensor, starts: Tensor | None = None) -> Tensor:
    """mix x_t + (1 - mix) x_(t-1) for x `[B, T, D]` and mix `[D]`, x_(t-1) zero where `starts` `[B, T]` is not 0.

    Raises ValueError for other numbers of dimensions.
    """
    if x.ndim != 3 or mix.shape != x.shape[2:]:
        raise ValueError(f"x must be [B, T, D] and mix [D]; received {tuple(x.shape)} and {tuple(mix.shape)}")
    out: Tensor = _token_shift(x, mix, starts)
    return out


def builds() -> Iterator[Build]:
    """With and without documents."""
    dtype, wide, width = torch.bfloat16, torch.float32, 2048
    for name, starts in (("plain", False), ("documents", True)):
        flags = {"STARTS": starts, **_tile(width)}
        opens = torch.int8 if starts else dtype
        strides = 4096 * width, width
        first = (dtype, wide, opens, dtype, 16384, 4096, width, *strides)
        yield Build(f"token_shift-forward-{name}", _forward, first, flags)
        second = (dtype, dtype, wide, opens, dtype, wide, 16384, 4096, width, *strides, *strides)
        yield Build(f"token_shift-backward-{name}", _backward, second, flags)

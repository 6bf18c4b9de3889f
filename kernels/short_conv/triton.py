"""The short convolution in Triton: x comes from memory once, the result goes there once, taps are read from cache.

Backward computes what the activation was given anew. Its first pass gives the gradient of that, and of weight and bias
the parts that each program's share of the tokens has, `[P, W, D]` and `[P, D]`, which torch sums. The second pass gives
the gradient of x: the same taps the other way round. Without an activation the first pass writes no gradient.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.activations.triton import activate, slope
from archlab.kernels.custom_op import custom_op
from archlab.kernels.gradients import differentiable
from archlab.kernels.launch import OPTIONS, Build, like, on_device_of, power_of_2, side_by_side
from archlab.kernels.op import check_shapes

interpret.apply()
PROGRAMS = 1024
TILE = 4096  # elements that a program holds, those of all taps
COLUMNS = 64


@triton.jit
def _load_tap(
    x_ptr, documents_ptr, tap, row, column, M, T, S, D, x_batch, x_time,
    BACK: tl.constexpr, DOCUMENTS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """What tap i of each row meets, in float32; tap, row and column broadcast against each other.

    A row is one of the last T of S tokens, and its tap i meets x_(t-W+1+i), of all S. With BACK a row is one of all S,
    and its tap i meets the gradient of y_(t+W-1-i), one of the last T.
    """
    first = S - T
    if BACK:
        batch, own = row // S, row % S
        place = own + (W - 1) - tap
        has = (row < M) & (tap < W) & (place >= first) & (place < S)
        start = x_ptr + batch * x_batch + (place - first) * x_time
    else:
        batch, own = row // T, row % T + first
        place = own - (W - 1) + tap
        has = (row < M) & (tap < W) & (place >= 0)
        start = x_ptr + batch * x_batch + place * x_time
    if DOCUMENTS:
        number = tl.load(documents_ptr + batch * S + own, mask=row < M, other=0)
        has = has & (tl.load(documents_ptr + batch * S + place, mask=has, other=0) == number)
    return tl.load(start + column, mask=has & (column < D), other=0.0).to(tl.float32)


@triton.jit
def _mixed(
    x_ptr, weight_ptr, documents_ptr, row, column, M, T, S, D, x_batch, x_time,
    BACK: tl.constexpr, DOCUMENTS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums over all taps of rows `[ROWS]` and columns `[COLUMNS]`, each with its weight; and what the last met."""
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    met = mixed
    for tap in tl.static_range(W):
        weight = tl.load(weight_ptr + column * W + tap, mask=column < D, other=0.0).to(tl.float32)
        met = _load_tap(
            x_ptr, documents_ptr, tap, row[:, None], column[None, :], M, T, S, D, x_batch, x_time, BACK, DOCUMENTS, W
        )
        mixed += weight[None, :] * met
    return mixed, met


@triton.jit
def _load_bias(bias_ptr, column, D):
    return tl.load(bias_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, documents_ptr, out_ptr, M, T, S, D, x_batch, x_time,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    out, own = _mixed(
        x_ptr, weight_ptr, documents_ptr, row, column, M, T, S, D, x_batch, x_time, False, DOCUMENTS, W, ROWS, COLUMNS
    )
    if BIAS:
        out += _load_bias(bias_ptr, column, D)
    out = activate(out, ACTIVATION)
    if RESIDUAL:
        out += own
    inside = (row[:, None] < M) & (column[None, :] < D)
    tl.store(out_ptr + row[:, None] * D + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_of_sums(
    dout_ptr, x_ptr, weight_ptr, bias_ptr, documents_ptr, dsum_ptr, dweight_ptr, dbias_ptr,
    M, T, S, D, dout_batch, dout_time, x_batch, x_time,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, DOCUMENTS: tl.constexpr,
    W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of what the activation was given, and this program's part of those of weight and bias."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dweight, dbias = tl.zeros((TAPS, ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    tap = tl.arange(0, TAPS)
    for tile in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = tl.cast(tile, tl.int64) + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & (column[None, :] < D)
        place = (row // T * dout_batch + row % T * dout_time)[:, None] + column[None, :]
        dsum = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION != "identity":
            given, _ = _mixed(
                x_ptr, weight_ptr, documents_ptr, row, column, M, T, S, D, x_batch, x_time,
                False, DOCUMENTS, W, ROWS, COLUMNS,
            )  # fmt: skip
            if BIAS:
                given += _load_bias(bias_ptr, column, D)
            dsum *= slope(given, ACTIVATION)
            tl.store(dsum_ptr + row[:, None] * D + column[None, :], dsum.to(dsum_ptr.dtype.element_ty), mask=inside)
        taps = _load_tap(
            x_ptr, documents_ptr, tap[:, None, None], row[None, :, None], column[None, None, :],
            M, T, S, D, x_batch, x_time, False, DOCUMENTS, W,
        )  # fmt: skip
        dweight += dsum[None, :, :] * taps
        dbias += dsum
    program = tl.program_id(0).to(tl.int64)
    part = (program * W + tap[:, None]) * D + column[None, :]
    tl.store(dweight_ptr + part, tl.sum(dweight, 1), mask=(tap[:, None] < W) & (column[None, :] < D))
    if BIAS:
        tl.store(dbias_ptr + program * D + column, tl.sum(dbias, 0), mask=column < D)


@triton.jit
def _backward_of_inputs(
    dsum_ptr, dout_ptr, weight_ptr, documents_ptr, dx_ptr, M, T, S, D, dsum_batch, dsum_time, dout_batch, dout_time,
    RESIDUAL: tl.constexpr, DOCUMENTS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, for rows of all S tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dx, _ = _mixed(
        dsum_ptr, weight_ptr, documents_ptr, row, column, M, T, S, D, dsum_batch, dsum_time,
        True, DOCUMENTS, W, ROWS, COLUMNS,
    )  # fmt: skip
    inside = (row[:, None] < M) & (column[None, :] < D)
    if RESIDUAL:
        time = (row % S - (S - T))[:, None]
        place = (row // S * dout_batch)[:, None] + time * dout_time + column[None, :]
        dx += tl.load(dout_ptr + place, mask=inside & (time >= 0), other=0.0).to(tl.float32)
    tl.store(dx_ptr + row[:, None] * D + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _tile(width: int, channels: int) -> dict[str, int]:
    columns = min(power_of_2(channels), COLUMNS)
    return {"W": width, "ROWS": max(1, TILE // (power_of_2(width) * columns)), "COLUMNS": columns, **OPTIONS}


@custom_op("short_conv")
def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str, residual: bool, time: int
) -> Tensor:
    xs, (batch, length, channels) = side_by_side(x), x.shape
    out = x.new_empty((batch, time, channels))
    if out.numel() == 0:
        return out
    rows, tile = batch * time, _tile(weight.shape[1], channels)
    with on_device_of(x):
        _forward[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(channels, tile["COLUMNS"]))](
            xs, weight.contiguous(), xs if bias is None else bias, xs if documents is None else documents.contiguous(),
            out, rows, time, length, channels, *xs.stride()[:2],
            ACTIVATION=activation, RESIDUAL=residual, BIAS=bias is not None, DOCUMENTS=documents is not None, **tile,
        )  # fmt: skip
    return out


_short_conv.register_fake(lambda x, *rest: x.new_empty((x.shape[0], rest[-1], x.shape[2])))


@custom_op("short_conv_backward")
def _short_conv_backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str,
    residual: bool, time: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of x in its dtype, those of weight and bias in float32; of no bias an empty one."""
    dx, xs, douts, (batch, length, channels) = like(x), side_by_side(x), side_by_side(dout), x.shape
    if dout.numel() == 0:
        none = x.new_zeros(0 if bias is None else channels, dtype=torch.float32)
        return dx.zero_(), torch.zeros_like(weight, dtype=torch.float32), none
    rows, tile = batch * time, _tile(weight.shape[1], channels)
    across = triton.cdiv(channels, tile["COLUMNS"])
    programs = min(triton.cdiv(PROGRAMS, across), triton.cdiv(rows, tile["ROWS"]))
    weights, numbers = weight.contiguous(), xs if documents is None else documents.contiguous()
    dsum = douts if activation == "identity" else x.new_empty((batch, time, channels))
    dweights = x.new_empty((programs, weight.shape[1], channels), dtype=torch.float32)
    dbiases = x.new_empty((programs, 0 if bias is None else channels), dtype=torch.float32)
    with on_device_of(x):
        _backward_of_sums[(programs, across)](
            douts, xs, weights, xs if bias is None else bias, numbers, dsum, dweights, dbiases,
            rows, time, length, channels, *douts.stride()[:2], *xs.stride()[:2],
            ACTIVATION=activation, BIAS=bias is not None, DOCUMENTS=documents is not None,
            TAPS=power_of_2(weight.shape[1]), **tile,
        )  # fmt: skip
        _backward_of_inputs[(triton.cdiv(batch * length, tile["ROWS"]), across)](
            dsum, douts, weights, numbers, dx, batch * length, time, length, channels,
            *dsum.stride()[:2], *douts.stride()[:2],
            RESIDUAL=residual, DOCUMENTS=documents is not None, **tile,
        )  # fmt: skip
    return dx, dweights.sum(0).t().contiguous(), dbiases.sum(0)


_short_conv_backward.register_fake(
    lambda dout, x, weight, bias, *_: (
        like(x),
        like(weight, torch.float32),
        x.new_empty(0 if bias is None else bias.shape, dtype=torch.float32),
    )
)


differentiable(_short_conv, _short_conv_backward, 4)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, documents: Tensor | None = None,
    activation: str = "identity", residual: bool = False, time: int | None = None,
) -> Tensor:  # fmt: skip
    """Arguments and result are the reference's. Raises ValueError for shapes that do not fit."""
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"x must be [B, S, D] and weight [D, W]; received {tuple(x.shape)} and {tuple(weight.shape)}")
    check_shapes("x", x, {"bias": (bias, x.shape[2:]), "documents": (documents, x.shape[:2])})
    out: Tensor = _short_conv(x, weight, bias, documents, activation, residual, x.shape[1] if time is None else time)
    return out


def builds() -> Iterator[Build]:
    """A Mamba's convolution of 2,048 channels, and one with documents and a residual."""
    dtype, wide, width, length = torch.bfloat16, torch.float32, 2048, 4096
    strides = length * width, width
    for name, activation, bias, documents in (("silu", "silu", True, False), ("canon", "identity", False, True)):
        flags = {"DOCUMENTS": documents, **_tile(4, width)}
        kind = {"ACTIVATION": activation, "BIAS": bias}
        numbers, sizes = torch.int64 if documents else dtype, (4 * length, length, length, width)
        first = (dtype, wide, wide if bias else dtype, numbers, dtype, *sizes, *strides)
        yield Build(f"short_conv-forward-{name}", _forward, first, {**flags, **kind, "RESIDUAL": documents})
        second = (dtype, dtype, wide, wide if bias else dtype, numbers, dtype, wide, wide, *sizes, *strides, *strides)
        yield Build(f"short_conv-backward_of_sums-{name}", _backward_of_sums, second, {**flags, **kind, "TAPS": 4})
        third = (dtype, dtype, wide, numbers, dtype, *sizes, *strides, *strides)
        yield Build(
            f"short_conv-backward_of_inputs-{name}", _backward_of_inputs, third, {**flags, "RESIDUAL": documents}
        )

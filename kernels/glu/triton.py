"""The gated linear unit's product in Triton: what is saved are its inputs alone, the activation is computed again.

Forward reads a and b once and writes their product; backward reads both and the gradient once and writes both
gradients. Tensors are rows `[M, D]` with a stride between rows, so the halves of a joint projection need no copy, and
a thread moves 16 bytes at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations.triton import activate, slope
from kernels.launch import OPTIONS, Build, as_rows, on_device_of, power_of_2

TILE = 1024


@triton.jit
def _forward(
    a_ptr, b_ptr, out_ptr, M, D, a_stride, b_stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < D)
    a = tl.load(a_ptr + row * a_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + column, (activate(a, ACTIVATION) * b).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dout_ptr, a_ptr, b_ptr, da_ptr, db_ptr, M, D, dout_stride, a_stride, b_stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < D)
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * a_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=inside, other=0.0).to(tl.float32)
    da, db = dout * b * slope(a, ACTIVATION), dout * activate(a, ACTIVATION)
    tl.store(da_ptr + row * D + column, da.to(da_ptr.dtype.element_ty), mask=inside)
    tl.store(db_ptr + row * D + column, db.to(db_ptr.dtype.element_ty), mask=inside)


def _tile(width: int) -> dict[str, int]:
    columns = min(power_of_2(width), TILE)
    return {"ROWS": TILE // columns, "COLUMNS": columns, **OPTIONS}


def _grid(rows: int, width: int, tile: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"])


@torch.library.custom_op("archlab::glu", mutates_args=())
def _glu(a: Tensor, b: Tensor, activation: str) -> Tensor:
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    if a.numel() == 0:
        return out
    rows, others = as_rows(a), as_rows(b)
    (count, width), tile = rows.shape, _tile(rows.shape[1])
    with on_device_of(a):
        _forward[_grid(count, width, tile)](
            rows, others, out, count, width, rows.stride(0), others.stride(0), activation, **tile
        )
    return out


@_glu.register_fake
def _(a: Tensor, b: Tensor, activation: str) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@torch.library.custom_op("archlab::glu_backward", mutates_args=())
def _glu_backward(dout: Tensor, a: Tensor, b: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    da, db = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b))
    if a.numel() == 0:
        return da, db
    douts, rows, others = as_rows(dout), as_rows(a), as_rows(b)
    (count, width), tile = rows.shape, _tile(rows.shape[1])
    strides = douts.stride(0), rows.stride(0), others.stride(0)
    with on_device_of(a):
        _backward[_grid(count, width, tile)](douts, rows, others, da, db, count, width, *strides, activation, **tile)
    return da, db


@_glu_backward.register_fake
def _(dout: Tensor, a: Tensor, b: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(a, memory_format=torch.contiguous_format),
        torch.empty_like(b, memory_format=torch.contiguous_format),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.activation = inputs
    ctx.save_for_backward(a, b)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
    da, db = _glu_backward(dout, *ctx.saved_tensors, ctx.activation)
    return da, db, None


_glu.register_autograd(_differentiate, setup_context=_save)


def glu(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype. Raises ValueError for two shapes."""
    if a.shape != b.shape:
        raise ValueError(f"a and b must have one shape; received {tuple(a.shape)} and {tuple(b.shape)}")
    out: Tensor = _glu(a, b, activation)
    return out


def builds() -> Iterator[Build]:
    """The activations that such layers have; the gate's builds have all of them."""
    dtype, width = torch.bfloat16, 2048
    yield Build(
        "glu-forward-silu", _forward, (*(dtype,) * 3, 4096, width, width, width), {"ACTIVATION": "silu", **_tile(width)}
    )
    for name in ("silu", "gelu", "gelu_tanh"):
        arguments = (*(dtype,) * 5, 4096, width, width, width, width)
        yield Build(f"glu-backward-{name}", _backward, arguments, {"ACTIVATION": name, **_tile(width)})

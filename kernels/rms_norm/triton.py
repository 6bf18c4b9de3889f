"""RMSNorm in Triton: one pass forward that keeps 1/rms of each row, one pass backward (kernels/norm_rows)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.launch import Build
from archlab.kernels.norm_rows import triton as norm_rows
from archlab.kernels.norm_rows.triton import Statistics


@torch.library.custom_op("archlab::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _, out, stats = norm_rows.forward(x, None, weight, None, eps)
    return out, stats.rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("archlab::rms_norm_backward", mutates_args=())
def _rms_norm_backward(dout: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx in x's dtype and dw in float32, which is empty without a weight."""
    found = norm_rows.backward(dout, None, x, weight, Statistics(rstd.new_empty(0), rstd))
    return found.x, found.weight


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
    norm_rows.check_width(x)
    out: Tensor = _rms_norm(x, weight, eps)[0]
    return out


def builds() -> Iterator[Build]:
    """With and without weight, for the widths of a head and of small to the widest models."""
    flags = {"ADDED": False, "CENTERED": False, "BIASED": False}
    yield from norm_rows.builds_of("rms_norm-weight", flags | {"WEIGHTED": True}, (64, 1024, norm_rows.WIDEST))
    yield from norm_rows.builds_of("rms_norm-plain", flags | {"WEIGHTED": False}, (4096,))

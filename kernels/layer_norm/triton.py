"""Layer norm in Triton: one pass forward that keeps mean and deviation, one pass backward (kernels/norm_rows)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.launch import Build
from archlab.kernels.norm_rows import triton as norm_rows
from archlab.kernels.norm_rows.triton import Statistics


@torch.library.custom_op("archlab::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _, out, stats = norm_rows.forward(x, None, weight, bias, eps, centered=True)
    return out, stats.mean, stats.rstd


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.empty_like(x, memory_format=torch.contiguous_format), *norm_rows.statistics(x, True))


@torch.library.custom_op("archlab::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor | None, biased: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in x's dtype, the gradients of weight and bias in float32, each empty where there is none."""
    found = norm_rows.backward(dout, None, x, weight, Statistics(mean, rstd), biased=biased)
    return found.x, found.weight, found.bias


@_layer_norm_backward.register_fake
def _(
    dout: Tensor, x: Tensor, weight: Tensor | None, biased: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (x.shape[-1] if given else 0 for given in (weight is not None, biased))
    dw, db = (x.new_empty(length, dtype=torch.float32) for length in lengths)
    return torch.empty_like(x, memory_format=torch.contiguous_format), dw, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *output[1:])


def _differentiate(
    ctx: Any, dout: Tensor, dmean: Tensor | None, drstd: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    """`dmean` and `drstd` are unused: the statistics leave the op only for this function."""
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dw, db = _layer_norm_backward(dout, x, weight, ctx.bias is not None, mean, rstd)
    own = None if weight is None else dw.to(weight.dtype)
    return dx, own, None if ctx.bias is None else db.to(ctx.bias), None


_layer_norm.register_autograd(_differentiate, setup_context=_save)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight, plus bias `[D]`; ValueError for D above 16384."""
    norm_rows.check_width(x)
    out: Tensor = _layer_norm(x, weight, bias, eps)[0]
    return out


def builds() -> Iterator[Build]:
    """With weight and bias, with one of them, with neither."""
    flags, widest = {"ADDED": False, "CENTERED": True}, norm_rows.WIDEST
    for name, weighted, biased, widths in (
        ("affine", True, True, (64, norm_rows.WIDEST_KEPT, widest)),
        ("bias_alone", False, True, (128,)),
        ("bare", False, False, (1024,)),
    ):
        yield from norm_rows.builds_of(f"layer_norm-{name}", flags | {"WEIGHTED": weighted, "BIASED": biased}, widths)

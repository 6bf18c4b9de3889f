"""Sum and norm in Triton: stream and update are read once, sum and normed written once (kernels/norm_rows).

Backward reads the sum and the gradients of both outputs once, and writes one gradient that both terms share; two where
their dtypes differ or the stream was scaled.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.add_norm.reference import Kind
from archlab.kernels.launch import Build
from archlab.kernels.norm_rows import triton as norm_rows
from archlab.kernels.norm_rows.triton import Statistics


@torch.library.custom_op("archlab::add_norm", mutates_args=())
def _add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, out, stats = norm_rows.forward(stream, update, weight, bias, eps, centered=centered, scale=scale)
    return total, out, *stats


@_add_norm.register_fake
def _(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(stream.dtype, update.dtype)
    total = torch.empty_like(stream, dtype=dtype, memory_format=torch.contiguous_format)
    return total, torch.empty_like(total), *norm_rows.statistics(stream, centered)


@torch.library.custom_op("archlab::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dtotal: Tensor | None,
    dout: Tensor,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    biased: bool,
    scale: float,
    first: torch.dtype,
    second: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of stream, update (empty where it is that of the stream), weight and bias."""
    found = norm_rows.backward(
        dout, dtotal, total, weight, Statistics(mean, rstd), biased=biased, scale=scale, dtypes=(first, second)
    )
    dupdate = found.x.new_empty(0) if found.update is None else found.update
    return found.x, dupdate, found.weight, found.bias


@_add_norm_backward.register_fake
def _(
    dtotal: Tensor | None,
    dout: Tensor,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    biased: bool,
    scale: float,
    first: torch.dtype,
    second: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dstream = torch.empty_like(total, dtype=first, memory_format=torch.contiguous_format)
    apart = scale != 1.0 or first != second
    dupdate = torch.empty_like(dstream, dtype=second) if apart else dstream.new_empty(0)
    lengths = (total.shape[-1] if given else 0 for given in (weight is not None, biased))
    dw, db = (total.new_empty(length, dtype=torch.float32) for length in lengths)
    return dstream, dupdate, dw, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    stream, update, weight, bias, _, _, ctx.scale = inputs
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.dtypes, ctx.bias = [stream.dtype, update.dtype], None if bias is None else bias.dtype
    ctx.save_for_backward(total, weight, mean, rstd)


def _differentiate(ctx: Any, dtotal: Tensor | None, dout: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    """A sum that nothing else reads has no gradient of its own; the statistics leave the op only for this function."""
    total, weight, mean, rstd = ctx.saved_tensors
    dout = torch.zeros_like(total) if dout is None else dout
    dstream, dupdate, dw, db = _add_norm_backward(
        dtotal, dout, total, weight, mean, rstd, ctx.bias is not None, ctx.scale, *ctx.dtypes
    )
    apart = ctx.scale != 1.0 or ctx.dtypes[0] != ctx.dtypes[1]
    own = None if weight is None else dw.to(weight.dtype)
    bias = None if ctx.bias is None else db.to(ctx.bias)
    return dstream, dupdate if apart else dstream, own, bias, None, None, None


_add_norm.register_autograd(_differentiate, setup_context=_save)


def add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """s = scale stream + update `[..., D]`, and norm(s) weight + bias; raises ValueError for two shapes, and for D
    above 16384."""
    if stream.shape != update.shape:
        shapes = f"{tuple(stream.shape)} and {tuple(update.shape)}"
        raise ValueError(f"stream and update must have one shape; received {shapes}")
    norm_rows.check_width(stream)
    total, out, _, _ = _add_norm(stream, update, weight, bias, eps, kind == "layer", scale)
    return total, out


def builds() -> Iterator[Build]:
    """Both norms with what they usually have, and the two gradients of a scaled stream."""
    widest = norm_rows.WIDEST
    rms = {"ADDED": True, "CENTERED": False, "WEIGHTED": True, "BIASED": False}
    yield from norm_rows.builds_of("add_norm-rms", rms, (256, 2048, widest))
    layer = {"ADDED": True, "CENTERED": True, "WEIGHTED": True, "BIASED": True}
    yield from norm_rows.builds_of("add_norm-layer", layer, (1024, norm_rows.WIDEST_KEPT, widest))
    yield from norm_rows.builds_of("add_norm-layer-scaled-no_bias", layer | {"BIASED": False}, (4096,), apart=True)

"""Sum and norm in Triton: stream and update are read once, sum and normed written once (kernels/norm_rows).

Backward reads the sum and the gradients of both outputs once, and writes one gradient that both terms share; two where
their dtypes differ or the stream was scaled.
"""

from collections.abc import Iterator

from torch import Tensor

from archlab.kernels.add_norm.reference import Kind
from archlab.kernels.launch import Build
from archlab.kernels.norm_rows.triton import WIDEST, WIDEST_KEPT, builds_of, normed


def add_norm(
    stream: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """s = scale stream + update `[..., D]`, and norm(s) weight + bias; raises ValueError for two shapes, and for D
    above 16384."""
    if stream.shape != update.shape:
        shapes = f"{tuple(stream.shape)} and {tuple(update.shape)}"
        raise ValueError(f"stream and update must have one shape; received {shapes}")
    return normed(stream, weight, bias, eps, update, centered=kind == "layer", scale=scale)


def builds() -> Iterator[Build]:
    """Both norms with what they usually have, and the two gradients of a scaled stream."""
    rms = {"ADDED": True, "CENTERED": False, "WEIGHTED": True, "BIASED": False}
    yield from builds_of("add_norm-rms", rms, (256, 2048, WIDEST))
    layer = {"ADDED": True, "CENTERED": True, "WEIGHTED": True, "BIASED": True}
    yield from builds_of("add_norm-layer", layer, (1024, WIDEST_KEPT, WIDEST))
    yield from builds_of("add_norm-layer-scaled-no_bias", layer | {"BIASED": False}, (4096,), apart=True)

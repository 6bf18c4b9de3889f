"""Layer norm in Triton: one pass forward that keeps mean and deviation, one pass backward (kernels/norm_rows)."""

from collections.abc import Iterator

from torch import Tensor

from archlab.kernels.launch import Build
from archlab.kernels.norm_rows.triton import WIDEST, WIDEST_KEPT, builds_of, normed


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` centred and over its deviation, times weight, plus bias `[D]`; ValueError for D above 16384."""
    return normed(x, weight, bias, eps, centered=True)[1]


def builds() -> Iterator[Build]:
    """With weight and bias, with one of them, with neither."""
    flags = {"ADDED": False, "CENTERED": True}
    for name, weighted, biased, widths in (
        ("affine", True, True, (64, WIDEST_KEPT, WIDEST)),
        ("bias_alone", False, True, (128,)),
        ("bare", False, False, (1024,)),
    ):
        yield from builds_of(f"layer_norm-{name}", flags | {"WEIGHTED": weighted, "BIASED": biased}, widths)

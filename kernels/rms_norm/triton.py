"""RMSNorm in Triton: one pass forward that keeps 1/rms of each row, one pass backward (kernels/norm_rows)."""

from collections.abc import Iterator

from torch import Tensor

from archlab.kernels.launch import Build
from archlab.kernels.norm_rows.triton import WIDEST, builds_of, normed


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x `[..., D]` over the root of its mean square, times weight `[D]`; raises ValueError for D above 16384."""
    return normed(x, weight, None, eps)[1]


def builds() -> Iterator[Build]:
    """With and without weight, for the widths of a head and of small to the widest models."""
    flags = {"ADDED": False, "CENTERED": False, "BIASED": False}
    yield from builds_of("rms_norm-weight", flags | {"WEIGHTED": True}, (64, 1024, WIDEST))
    yield from builds_of("rms_norm-plain", flags | {"WEIGHTED": False}, (4096,))

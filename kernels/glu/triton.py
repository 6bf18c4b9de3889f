"""The gated linear unit's product in Triton: the elementwise gate with b gated by a."""

from torch import Tensor

from archlab.kernels.gate import triton as gates


def glu(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """act(a) * b for a and b of one shape `[..., D]`; the result has a's dtype. Raises ValueError for two shapes."""
    if a.shape != b.shape:
        raise ValueError(f"a and b must have one shape; received {tuple(a.shape)} and {tuple(b.shape)}")
    return gates.gate(b, a, activation, "multiply").to(a.dtype)

"""Prints how wrong bfloat16 is in Triton's interpreter, before and after the fix: a program of its own."""

import torch
import triton
import triton.language as tl

from archlab.kernels import interpret


@triton.jit
def _kernel(a_ptr, b_ptr, sum_ptr, largest_ptr, product_ptr, narrowed_ptr, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = row * N + column
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(sum_ptr + at, a + b)
    tl.store(largest_ptr + at, tl.maximum(a, b))
    tl.store(product_ptr + at, tl.dot(a, b))
    tl.store(narrowed_ptr + at, (a.to(tl.float32) * 1.01).to(tl.bfloat16))


def errors() -> list[float]:
    """Largest difference from torch: sum, maximum, matrix product, narrowing from float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    sums, largest, narrowed = (torch.zeros_like(a) for _ in range(3))
    product = torch.zeros(16, 16)
    _kernel[(1,)](a, b, sums, largest, product, narrowed, 16)
    pairs = (
        (sums, a + b),
        (largest, torch.maximum(a, b)),
        (product, a.float() @ b.float()),
        (narrowed, (a.float() * 1.01).bfloat16()),
    )
    return [float((got.float() - want.float()).abs().nan_to_num(1e30).max()) for got, want in pairs]


if __name__ == "__main__":
    print(*errors())
    interpret.apply()
    print(*errors())

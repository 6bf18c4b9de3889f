"""The grouped product as one matrix product per expert, behind an operator, so that a graph need not know its rows.

How many rows an expert has is known only when the model runs: a loop over slices breaks a captured graph.
`torch.nn.functional.grouped_mm` does not, but it refuses widths that are no multiple of 16 bytes and float64, cannot
be captured in float32, and on the CPU takes as long as the loop.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.custom_op import custom_op


@custom_op("experts")
def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[expert].mT, out=out[start:end])
        start = end
    return out


@custom_op("experts_weight")
def _weight_gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """sum_r dy_r x_r^T over the rows r of each expert: `[experts, outputs, inputs]`."""
    out = x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(dy[start:end].mT, x[start:end], out=out[expert])
        start = end
    return out


def grouped(product: Any, weight_gradient: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The op by an operator for the product and one for the gradient of the weights, made differentiable."""
    product.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[1]))
    weight_gradient.register_fake(lambda dy, x, ends: x.new_empty(ends.shape[0], dy.shape[1], x.shape[1]))

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        dx = product(dy, weight.mT, ends) if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(dy, x, ends) if ctx.needs_input_grad[1] else None, None

    product.register_autograd(differentiate, setup_context=save)

    def experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """As the reference, with products in x's dtype, to which the weights are cast. Same bits every time."""
        result: Tensor = product(x, weight.to(x.dtype), ends)
        return result

    return experts


experts = grouped(_product, _weight_gradient)

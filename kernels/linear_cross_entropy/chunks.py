"""The loss from the last stream and the output table in chunks of rows: the memory of one chunk of logits.

With the reduction `sum` gradients are computed with the forward pass, as logits are there (three products in all, as in
arXiv:2410.10989, section 3.2): those of losses + z log^2 Z, which any others are computed anew for. Without a reduction
what comes back is known only in the backward pass, which computes the logits again (four products).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from archlab.kernels.linear_cross_entropy.reference import IGNORED


class Form(NamedTuple):
    """What lies between the product and the loss, and the weight of log^2 Z in the gradient that is expected."""

    scale: float
    softcap: float | None
    z: float = 0.0


class Rows(NamedTuple):
    """How the rows of a chunk are computed; both leave the factor of the scale to `Gradients`.

    `measure(logits, targets, form, gradient)` gives losses and log Z `[n]` of logits `[n, V]`, which it spends: with
    `gradient` they become the gradient of losses + z log^2 Z, 0 in ignored rows. `differentiate(logits, targets, log_z,
    push, pull, form)` leaves push_r softmax(l)_rv - pull_r [v = t_r] in them, times the slope of the softcap.
    """

    measure: Callable[[Tensor, Tensor, Form, bool], tuple[Tensor, Tensor]]
    differentiate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Form], None]


class Inputs(NamedTuple):
    """Tensors of a call: hidden `[N, D]`, table `[V, D]`, targets `[N]`, bias `[V]`."""

    hidden: Tensor
    table: Tensor
    targets: Tensor
    bias: Tensor | None

    @staticmethod
    def of(hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None) -> "Inputs":
        """From those of a call: hidden's dtype is that of the products."""
        return Inputs(hidden, table.to(hidden.dtype), targets, None if bias is None else bias.to(hidden.dtype))

    def chunks(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of about equally many rows, at most `rows`, with their logits, in one buffer."""
        total = self.hidden.shape[0]
        size = -(-total // max(-(-total // rows), 1))
        buffer = self.hidden.new_empty(size, self.table.shape[0])
        for start in range(0, total, size or 1):
            part = self.hidden[start : start + size]
            logits = buffer[: len(part)]
            if self.bias is None:
                torch.mm(part, self.table.mT, out=logits)
            else:
                torch.addmm(self.bias, part, self.table.mT, out=logits)
            yield slice(start, start + len(part)), logits


class Gradients:
    """Gradients that grow chunk by chunk: of the table and the bias in at least float32."""

    def __init__(self, inputs: Inputs, scale: float) -> None:
        self.inputs, self.scale = inputs, scale
        wide = torch.promote_types(inputs.hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(inputs.hidden, memory_format=torch.contiguous_format)
        self.table = inputs.table.new_zeros(inputs.table.shape, dtype=wide)
        self.bias = inputs.table.new_zeros(0 if inputs.bias is None else inputs.table.shape[0], dtype=wide)

    def add(self, place: slice, dlogits: Tensor) -> None:
        """Those of a chunk, from the gradients of its logits."""
        torch.mm(dlogits, self.inputs.table, out=self.hidden[place])
        if self.table.dtype == dlogits.dtype:
            self.table.addmm_(dlogits.mT, self.inputs.hidden[place])
        else:
            self.table.add_(dlogits.mT @ self.inputs.hidden[place])
        if self.inputs.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of hidden, table and bias (empty without one), through the scale."""
        for gradient in (self.hidden, self.table, self.bias) if self.scale != 1 else ():
            gradient.mul_(self.scale)
        return self.hidden, self.table, self.bias


def measured(
    inputs: Inputs, form: Form, rows: int, by: Rows, gradients: Gradients | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log^2 Z (both 0 where ignored) and log Z, all `[N]` in at least float32."""
    dtype = torch.promote_types(inputs.hidden.dtype, torch.float32)
    losses, log_z = (inputs.hidden.new_zeros(inputs.hidden.shape[0], dtype=dtype) for _ in range(2))
    for place, logits in inputs.chunks(rows):
        losses[place], log_z[place] = by.measure(logits, inputs.targets[place], form, gradients is not None)
        if gradients is not None:
            gradients.add(place, logits)
    ignored = inputs.targets == IGNORED
    return losses.masked_fill(ignored, 0), log_z.square().masked_fill(ignored, 0), log_z

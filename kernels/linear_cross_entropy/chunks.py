"""The loss from the last stream and the output table in chunks of rows: the memory of one chunk of logits.

With the reduction `sum` gradients are computed with the forward pass, as logits are there (three products in all, as in
arXiv:2410.10989, section 3.2): those of losses + z log^2 Z. Without a reduction what comes back is known only in the
backward pass, which computes the logits again (four products).

The op stands behind operators of torch, which graphs capture, for whoever computes the rows: `family` is `torch` or
`triton`. Operands come in the dtype that they are to have: autocast is off inside, where it would cast what is summed.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from archlab.kernels.activations import at_least_float32
from archlab.kernels.custom_op import custom_op
from archlab.kernels.linear_cross_entropy.reference import IGNORED

Three = tuple[Tensor, Tensor, Tensor]
MODULES = {"torch": "torch_ops", "triton": "triton"}


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


def run(
    family: str, hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, z: float = 0.0, reduction: str = "none", rows: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the reference, with products in hidden's dtype, or autocast's, and `rows` of logits at a time."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, table, bias))
    if trained and reduction == "sum":
        loss, square, *_ = _sums(hidden, table, targets, bias, scale, softcap, z, rows, family)
        return loss, square
    losses, squares, _ = _rows(hidden, table, targets, bias, scale, softcap, rows, family)
    return (losses, squares) if reduction == "none" else ((losses + z * squares).sum(), squares.sum())


def _by(family: str) -> Rows:
    found: Rows = import_module(f"archlab.kernels.linear_cross_entropy.{MODULES[family]}").ROWS
    return found


@custom_op("linear_cross_entropy")
def _rows(
    hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None,
    scale: float, softcap: float | None, rows: int, family: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses, log^2 Z and log Z, all `[N]`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return measured(Inputs.of(hidden, table, targets, bias), Form(scale, softcap), rows, _by(family), None)


@custom_op("linear_cross_entropy_backward")
def _rows_backward(
    dlosses: Tensor, dsquares: Tensor, hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None,
    log_z: Tensor, scale: float, softcap: float | None, rows: int, family: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, table and bias (empty without one), from logits that are computed again."""
    inputs = Inputs.of(hidden, table, targets, bias)
    scored = targets != IGNORED
    pull = dlosses * scored
    push = pull + 2 * (dsquares * scored) * log_z
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = Gradients(inputs, scale)
        for place, logits in inputs.chunks(rows):
            _by(family).differentiate(
                logits, targets[place], log_z[place], push[place], pull[place], Form(scale, softcap)
            )
            gradients.add(place, logits)
    return _like(gradients.found(), hidden, table, bias)


@custom_op("linear_cross_entropy_sums")
def _sums(
    hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None,
    scale: float, softcap: float | None, z: float, rows: int, family: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums of losses + z log^2 Z and of log^2 Z, and the gradients of the first."""
    with torch.autocast(hidden.device.type, enabled=False):
        inputs = Inputs.of(hidden, table, targets, bias)
        gradients = Gradients(inputs, scale)
        losses, squares, _ = measured(inputs, Form(scale, softcap, z), rows, _by(family), gradients)
    square = squares.sum()
    return losses.sum() + z * square, square, *gradients.found()


def _like(found: Three, hidden: Tensor, table: Tensor, bias: Tensor | None) -> Three:
    """Gradients in the dtypes of what they are of."""
    dhidden, dtable, dbias = found
    return dhidden.to(hidden.dtype), dtable.to(table.dtype), dbias if bias is None else dbias.to(bias.dtype)


def _shapes(hidden: Tensor, table: Tensor, bias: Tensor | None) -> Three:
    none = at_least_float32(hidden).new_empty(0)
    dhidden, dtable = hidden.new_empty(hidden.shape), table.new_empty(table.shape)
    return dhidden, dtable, none if bias is None else bias.new_empty(bias.shape)


@_rows.register_fake
def _(hidden: Tensor, *rest: Any) -> Three:
    row = at_least_float32(hidden).new_empty(hidden.shape[0])
    return row, torch.empty_like(row), torch.empty_like(row)


@_sums.register_fake
def _(hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    row = at_least_float32(hidden).new_empty(hidden.shape[0])
    dhidden, dtable, dbias = _shapes(hidden, table, bias)
    return row.new_empty(()), row.new_empty(()), dhidden, dtable.to(row.dtype), dbias.to(row.dtype)


@_rows_backward.register_fake
def _(
    dlosses: Tensor, dsquares: Tensor, hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None, *rest: Any
) -> Three:  # fmt: skip
    return _shapes(hidden, table, bias)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The tensors, log Z and the numbers."""
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:4], output[2])
    ctx.numbers = inputs[4:]


def _keep_sums(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The gradients that were computed, and the tensors whose dtypes they are to have."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:4], *output[2:])
    ctx.numbers = inputs[4:]


def _differentiate_rows(ctx: Any, dlosses: Tensor, dsquares: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, _rows_backward(dlosses, dsquares, *ctx.saved_tensors, *ctx.numbers))


def _differentiate_sums(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, table, _targets, bias, *found = ctx.saved_tensors
    dhidden, dtable, dbias = (gradient * dloss for gradient in found)
    return _gradients(ctx, _like((dhidden, dtable, dbias), hidden, table, bias))


def _gradients(ctx: Any, found: Three) -> tuple[Tensor | None, ...]:
    dhidden, dtable, dbias = found
    return dhidden, dtable, None, None if ctx.saved_tensors[3] is None else dbias, *[None] * len(ctx.numbers)


_rows.register_autograd(_differentiate_rows, setup_context=_keep_rows)
_sums.register_autograd(_differentiate_sums, setup_context=_keep_sums)

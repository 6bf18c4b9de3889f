"""A call of attention as one record, and as what its operators take."""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from archlab.kernels.attention.pattern import CAUSAL, Blocks, Pattern
from archlab.kernels.attention.reference import added, expected

ORDERS: tuple[Literal["causal", "full", "cross"], ...] = ("causal", "full", "cross")
SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? relative, Tensor? decay, Tensor? reach, Tensor? sinks, "
    "Tensor? gate, Tensor? prefix, Tensor? documents, Tensor? padding, int[] numbers, float scale, float softcap"
)


class Inputs(NamedTuple):
    """The arguments of the reference."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    relative: Tensor | None = None
    decay: Tensor | None = None
    reach: Tensor | None = None
    sinks: Tensor | None = None
    gate: Tensor | None = None
    prefix: Tensor | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    pattern: Pattern = CAUSAL
    scale: float | None = None
    softcap: float | None = None


TENSORS = Inputs._fields.index("pattern")


def checked(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Inputs:
    """The record of a call. Raises ValueError for what the reference refuses."""
    call = Inputs(q, k, v, **given)
    expected(q, k, v, call.pattern, call.relative, call.decay, call.reach, call.gate)
    return call


def factor(call: Inputs) -> float:
    """What products are multiplied with."""
    return float(call.q.shape[-1] ** -0.5) if call.scale is None else call.scale


def biases(call: Inputs) -> Tensor | None:
    """The biases of all pairs, summed, as a tensor that broadcasts to `[B,Hq,T,S]`; None if there are none."""
    return added(call.q, call.k, call.bias, call.relative, call.decay, call.reach)


def seen(call: Inputs, rows: slice = slice(None)) -> Tensor | None:
    """The visible pairs, as `Pattern.dense` has them."""
    queries, keys = call.q.shape[-2], call.k.shape[-2]
    return call.pattern.dense(queries, keys, call.q.device, call.prefix, call.documents, call.padding, rows)


def handed(call: Inputs) -> tuple[Any, ...]:
    """A call as SCHEMA has it: the tensors, the pattern as numbers, the factor and the cap; 0 for what is not there."""
    pattern, blocks = call.pattern, call.pattern.blocks
    drawn = (0,) * 6 if blocks is None else (
        blocks.size, blocks.window, blocks.globals, blocks.random, blocks.seed, blocks.heads
    )  # fmt: skip
    numbers = [ORDERS.index(pattern.order), pattern.window or 0, pattern.stride or 0, pattern.columns or 0, *drawn]
    return *call[:TENSORS], numbers, factor(call), call.softcap or 0.0


def received(*given: Any) -> Inputs:
    """The call that was handed over."""
    *tensors, (order, window, stride, columns, *drawn), scale, softcap = given
    blocks = Blocks(*drawn) if drawn[0] else None
    pattern = Pattern(ORDERS[order], window or None, stride or None, columns if stride and not window else None, blocks)
    return Inputs._make((*tensors, pattern, scale, softcap or None))

"""A call of attention as one record: what its operators take."""

from typing import Any, NamedTuple

from torch import Tensor

from archlab.kernels.attention.pattern import Blocks, Pattern

ORDERS = ("causal", "full", "cross")
SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? relative, Tensor? decay, Tensor? reach, Tensor? sinks, "
    "Tensor? gate, Tensor? prefix, Tensor? documents, Tensor? padding, int[] numbers, float scale, float softcap"
)


class Inputs(NamedTuple):
    """The arguments of the reference as SCHEMA has them: the tensors, the pattern as numbers, the scale, and the cap,
    which is 0 where there is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    relative: Tensor | None
    decay: Tensor | None
    reach: Tensor | None
    sinks: Tensor | None
    gate: Tensor | None
    prefix: Tensor | None
    documents: Tensor | None
    padding: Tensor | None
    numbers: list[int]
    scale: float
    softcap: float


TENSORS = Inputs._fields.index("numbers")


def encoded(pattern: Pattern) -> list[int]:
    """A pattern as numbers: 0 for what it has not."""
    blocks = pattern.blocks
    drawn = (0,) * 6 if blocks is None else (
        blocks.size, blocks.window, blocks.globals, blocks.random, blocks.seed, blocks.heads
    )  # fmt: skip
    return [ORDERS.index(pattern.order), pattern.window or 0, pattern.stride or 0, pattern.columns or 0, *drawn]


def decoded(numbers: list[int]) -> Pattern:
    """The pattern of such numbers."""
    order, window, stride, columns, *drawn = numbers
    blocks = Blocks(*drawn) if drawn[0] else None
    name: Any = ORDERS[order]
    return Pattern(name, window or None, stride or None, columns or None, blocks)

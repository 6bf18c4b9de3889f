"""linear_cross_entropy: the loss from the last stream and the output table, whose logits exist a chunk at a time."""

from typing import Any

from torch import Tensor

from archlab.kernels.launch import in_triton
from archlab.kernels.linear_cross_entropy import reference, torch_ops
from archlab.kernels.op import Case, Implementation, Op, nbytes


def _bytes(hidden: Tensor, table: Tensor, targets: Tensor, **_: Any) -> int:
    """Rows twice as much as they are, as logits are read in the width that they were computed in."""
    return 2 * hidden.shape[0] * table.shape[0] * hidden.element_size() + nbytes(hidden, table, targets)


def _case(name: str, n: int, d: int, v: int, targets: tuple[int, ...], bias: bool = False, **arguments: Any) -> Case:
    shapes: dict[str, tuple[int, ...]] = {"hidden": (n, d), "table": (v, d)}
    given = {"scale": 1.0, "softcap": None, "z": 0.0, "reduction": "none", "rows": 3, **arguments}
    if bias:
        return Case(name, {**shapes, "bias": (v,)}, given, {"targets": targets})
    return Case(name, shapes, {"bias": None, **given}, {"targets": targets})


def _cases() -> tuple[Case, ...]:
    seven, none = (3, -100, 0, 10, 5, 5, -100), reference.IGNORED
    whole: dict[str, Any] = {"bias": True, "scale": 0.7, "softcap": 1.5}
    return (
        _case("loss_rows", 7, 24, 11, seven),
        _case("loss_rows_everything", 7, 24, 11, seven, **whole, z=0.2),
        _case("loss_sum", 7, 24, 11, seven, reduction="sum"),
        _case("loss_sum_bias", 7, 24, 11, seven, bias=True, reduction="sum", rows=7),
        _case("loss_sum_everything", 7, 24, 11, seven, **whole, z=0.2, reduction="sum"),
        _case("loss_one_row", 1, 5, 300, (299,), z=0.1, reduction="sum", rows=100),
        _case("loss_wide", 5, 16, 5000, (0, 4999, 4096, none, 4095), scale=-0.5, z=0.01, reduction="sum"),
        _case("loss_wide_rows", 5, 16, 5000, (0, 4999, 4096, none, 4095), softcap=4.0, rows=2),
    )


LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    reference=reference.linear_cross_entropy,
    implementations={
        "triton": in_triton(
            "linear_cross_entropy",
            "a chunk of logits at a time, whose losses and gradients one kernel computes in place",
        ),
        "torch": Implementation(
            "torch",
            lambda: torch_ops.linear_cross_entropy,
            "a chunk of logits at a time, gradients computed with the forward pass",
        ),
    },
    cases=_cases(),
    options={"bias": (False, True), "softcap": (False, True)},
    ask=lambda bias=None, softcap=None, **_: {"bias": bias is not None, "softcap": softcap is not None},
    # One product, and of each logit an exponential and a sum
    flops=lambda hidden, table, **_: 2 * hidden.shape[0] * table.shape[0] * (table.shape[1] + 1),
    bytes=_bytes,
    domains={"hidden": lambda x: x / x.shape[-1] ** 0.5},
    wide=(0, 1),
)

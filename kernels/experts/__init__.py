"""experts: the grouped product of a mixture of experts, W_e x for the rows that are sent to expert e."""

from torch import Tensor

from archlab.kernels.experts import reference, torch_ops
from archlab.kernels.launch import in_triton
from archlab.kernels.op import Case, Implementation, Op, nbytes


def _bytes(x: Tensor, weight: Tensor, ends: Tensor) -> int:
    """Rows, results, and the weights of all experts."""
    return nbytes(x, weight, ends) + x.shape[0] * weight.shape[1] * x.element_size()


def _case(name: str, inputs: int, outputs: int, *ends: int) -> Case:
    shapes = {"x": (ends[-1], inputs), "weight": (len(ends), outputs, inputs)}
    return Case(name, shapes, {}, {"ends": ends})


EXPERTS = Op(
    name="experts",
    reference=reference.experts,
    implementations={
        "triton": in_triton("experts", "one launch for the rows of all experts, forward and backward"),
        "torch": Implementation(
            "torch", lambda: torch_ops.experts, "one matrix product per expert, an operator to captured graphs"
        ),
    },
    cases=(
        _case("even", 16, 24, 5, 10, 15, 20),
        _case("uneven", 24, 16, 1, 12, 14, 40),
        _case("odd_rows", 13, 7, 3, 4, 11),
        _case("expert_without_rows", 16, 8, 0, 7, 7, 9),
        _case("one_row", 8, 5, 0, 1, 1),
        _case("one_expert", 8, 12, 6),
        _case("width_1", 1, 1, 2, 5),
        _case("many_experts", 12, 20, *range(0, 64, 2), 64, 70),
    ),
    options={},
    ask=lambda **_: {},
    flops=lambda x, weight, **_: 2 * x.numel() * weight.shape[1],  # each row by the one expert that it is sent to
    bytes=_bytes,
)

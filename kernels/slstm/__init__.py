"""slstm: a scalar memory per channel with exponential gates, which read the outputs of the token before."""

import torch
from torch import Tensor

from archlab.kernels.op import Case, Implementation, Op, nbytes
from archlab.kernels.slstm import reference, torch_ops


def _bytes(gates: Tensor, weights: Tensor, state: Tensor | None = None) -> int:
    """Every argument and result once, with states in float32."""
    states = 4 * gates[:, 0].numel() * (1 if state is None else 2)
    return states + nbytes(gates, gates[:, :, 0], weights)


def _case(name: str, length: int = 19, state: bool = True, width: int = 5) -> Case:
    batch, heads = 2, 3
    tensors: dict[str, tuple[int, ...]] = {
        "gates": (batch, length, 4, heads, width),
        "weights": (4, heads, width, width),
    }
    return Case(name, tensors | ({"state": (batch, 4, heads, width)} if state else {}), {})


def _held(x: Tensor) -> Tensor:
    """States as reading leaves them: n is at least 1, h between -1 and 1."""
    return torch.stack([x[:, 0], 1.1 + x[:, 1].square(), x[:, 2].tanh(), x[:, 3]], 1)


SLSTM = Op(
    name="slstm",
    reference=reference.slstm,
    implementations={
        "torch": Implementation("torch", lambda: torch_ops.slstm, "one token after another, gradients written out"),
    },
    cases=(
        _case("mixing"),
        _case("mixing_plain", state=False),
        _case("mixing_length_1", length=1),
        _case("mixing_length_2", length=2, state=False),
        _case("mixing_long", length=67, width=4),
    ),
    options={},
    ask=lambda **_: {},
    # The products with the recurrent weights; and per channel three gates, two sums, a maximum and a quotient
    flops=lambda gates, **_: 2 * gates.numel() * gates.shape[-1] + 6 * gates.numel(),
    bytes=_bytes,
    domains={"weights": lambda x: 0.3 * x, "state": _held},
)

"""Norms, rotations, gates and shifts in Triton: what the table of cases does not say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import DEVICES
from torch import Tensor

from archlab.kernels import OPS

DEVICE = DEVICES[-1].kind


def triton(op: str) -> Callable[..., Any]:
    return OPS[op].implementations["triton"].load()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype).requires_grad_()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer_norm", "add_norm", "rotary", "rotary_normed", "norm_gate", "token_shift",
                                  "short_conv"])  # fmt: skip
def test_ops_keep_the_rules_of_torch_library(name: str) -> None:
    from archlab.kernels.norm_gate import triton as norm_gate
    from archlab.kernels.norms import triton as norms
    from archlab.kernels.rotary import triton as rotary
    from archlab.kernels.short_conv import triton as short_conv
    from archlab.kernels.token_shift import triton as token_shift

    x, weight, heads = normal(2, 5, 24), normal(24), normal(2, 5, 3, 8)
    cos, sin = torch.rand(5, 4, device=DEVICE), torch.rand(5, 4, device=DEVICE)
    op, arguments = {
        "layer_norm": (norms._norm_rows, (x, None, weight, normal(24), 1e-5, True, 1.0)),
        "add_norm": (norms._norm_rows, (x, normal(2, 5, 24), weight, None, 1e-6, False, 0.5)),
        "rotary": (rotary._rotary, (heads, cos, sin, None, None, True, False)),
        "rotary_normed": (rotary._rotary, (heads, cos, sin, normal(8), 1e-6, False, False)),
        "norm_gate": (norm_gate._norm_gate, (heads, normal(2, 5, 3, 1), normal(3, 8), None, 1e-6, True, "silu", True)),
        "token_shift": (token_shift._token_shift, (x, weight, None)),
        "short_conv": (short_conv._short_conv, (x, normal(24, 4), weight, None, "silu", True, 3)),
    }[name]
    torch.library.opcheck(op.op, arguments)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_float32_stream_takes_bfloat16_updates(kind: str) -> None:
    """As under autocast: the stream keeps its precision, each gradient has the dtype of what it is for."""
    inputs = [normal(2, 5, 24), normal(2, 5, 24, dtype=torch.bfloat16), normal(24)]
    found = {}
    for name, call in (("triton", triton("add_norm")), ("reference", OPS["add_norm"].reference)):
        outs = call(*inputs, None, 1e-6, kind, 1.0)
        found[name] = [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), inputs)]
    assert [x.dtype for x in found["triton"]] == [torch.float32] * 3 + [torch.bfloat16, torch.float32]
    for got, want in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(got, want, atol=1e-2 if got.dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_a_sum_with_its_norm_may_go_unused(used: int) -> None:
    inputs = [normal(3, 24), normal(3, 24), normal(24)]
    found = [
        torch.autograd.grad(call(*inputs, None, 1e-6, "rms", 1.0)[used].square().sum(), inputs, allow_unused=True)
        for call in (triton("add_norm"), OPS["add_norm"].reference)
    ]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)


@pytest.mark.parametrize(("op", "kind"), [("layer_norm", ""), ("add_norm", "rms"), ("add_norm", "layer")])
def test_the_widest_rows_leave_the_gradients_of_weights_to_torch(op: str, kind: str) -> None:
    inputs = [normal(2, 8200), *([normal(2, 8200)] if kind else []), normal(8200), normal(8200)]
    rest = (1e-5, kind, 1.0) if kind else (1e-5,)
    found = []
    for call in (triton(op), OPS[op].reference):
        outs = call(*inputs, *rest)
        total = sum(out.square().sum() for out in outs) if kind else outs.square().sum()
        found.append(torch.autograd.grad(total, inputs))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def test_empty_tensors_have_empty_results() -> None:
    x, weight, heads = normal(0, 5, 24), normal(24), normal(0, 5, 3, 8)
    table = torch.ones(5, 4, device=DEVICE)
    outs = [
        triton("layer_norm")(x, weight, weight, 1e-5),
        triton("add_norm")(x, x, weight, None, 1e-5, "rms", 1.0)[1],
        triton("rotary")(heads, table, table, "half", normal(8), 1e-6),
        triton("norm_gate")(heads, heads, normal(8), None, 1e-6, "rms", "silu", "multiply"),
        triton("token_shift")(x, weight),
        triton("short_conv")(x, torch.stack([weight, weight], 1), weight),
        triton("glu")(x, x, "silu"),
    ]
    assert all(out.numel() == 0 for out in outs)
    (dw,) = torch.autograd.grad(outs[0].sum() + outs[1].sum() + outs[4].sum() + outs[5].sum(), weight)
    assert not dw.any()


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("layer_norm", (torch.ones(1, 16385), None, None, 1e-5), "at most 16384 wide; received 16385"),
        ("add_norm", (torch.ones(2, 4), torch.ones(4), None, None, 1e-5, "rms", 1.0), r"one shape; received \(2, 4\)"),
        ("rotary", (torch.ones(2, 3, 4), torch.ones(3, 2), torch.ones(3, 2), "half"), r"\[B, T, H, D\]"),
        ("rotary", (torch.ones(2, 3, 1, 4), torch.ones(2, 2), torch.ones(2, 2), "half"), r"received \(2, 3, 1, 4\)"),
        (
            "norm_gate",
            (torch.ones(2, 3, 1, 4), torch.ones(4), None, None, 1e-5, "rms", "silu", "multiply"),
            r"or \[B, T, H, 1\]; received \(2, 3, 1, 4\) and \(4,\)",
        ),
        ("token_shift", (torch.ones(2, 3, 4), torch.ones(3)), r"mix \[D\]; received \(2, 3, 4\) and \(3,\)"),
        ("short_conv", (torch.ones(2, 3, 4), torch.ones(3, 2)), r"weight \[D, W\]; received \(2, 3, 4\) and \(3, 2\)"),
        ("short_conv", (torch.ones(2, 3, 4), torch.ones(4, 2), torch.ones(3)), r"bias must be .*received \(3,\)"),
    ],
)
def test_shapes_that_are_not_computed_are_refused(op: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton(op)(*arguments)

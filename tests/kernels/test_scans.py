"""The selective scan and WKV: chunks of any size give the formula's numbers, states hand over, nothing looks ahead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab.kernels import OPS

SHARED = {"selective_scan": ("log_a", "d"), "wkv4": ("decay", "bonus")}  # arguments without time
every_op = pytest.mark.parametrize("name", SHARED)
every_way = pytest.mark.parametrize("way", ["reference", "torch"])


def arguments(name: str, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Normal arguments in float64, with a state, ready for gradients."""
    rng = torch.Generator().manual_seed(seed)
    shapes = OPS[name].cases[0].shapes
    shapes = {key: (shape[0], length, *shape[2:]) if _has_time(name, key) else shape for key, shape in shapes.items()}
    return {
        key: torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for key, shape in shapes.items()
    }


def _has_time(name: str, argument: str) -> bool:
    return argument not in (*SHARED[name], "state")


def function(name: str, way: str) -> Callable[..., Any]:
    return OPS[name].reference if way == "reference" else OPS[name].implementations[way].load()


def results(call: Callable[..., Any], given: dict[str, Tensor], **more: Any) -> list[Tensor]:
    """Outputs, last state, and the gradients of all arguments through both."""
    y, state = call(**given, **more)
    weights = [torch.arange(x.numel(), dtype=x.dtype).sin().view(x.shape) for x in (y, state)]
    return [y, state, *torch.autograd.grad([y, state], list(given.values()), weights)]


@every_op
@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 100])
@pytest.mark.parametrize("length", [1, 2, 16, 37])
def test_chunks_of_any_size_give_the_numbers_of_the_formula(name: str, length: int, chunk: int) -> None:
    given = arguments(name, length)
    wanted = results(function(name, "reference"), given)
    for found, want in zip(results(function(name, "torch"), given, chunk=chunk), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@every_op
@every_way
@pytest.mark.parametrize("cut", [1, 16, 22])
def test_a_state_hands_over(name: str, way: str, cut: int) -> None:
    given, call = arguments(name, 23), function(name, way)
    whole = results(call, given)

    def in_two(**both: Tensor) -> tuple[Tensor, Tensor]:
        state = both.pop("state")
        parts = []
        for piece in (slice(0, cut), slice(cut, None)):
            y, state = call(**{k: x[:, piece] if _has_time(name, k) else x for k, x in both.items()}, state=state)
            parts.append(y)
        return torch.cat(parts, 1), state

    for found, want in zip(results(in_two, given), whole, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@every_op
@every_way
def test_no_state_is_that_of_an_empty_past(name: str, way: str) -> None:
    given, call = arguments(name, 9), function(name, way)
    given["state"] = torch.zeros_like(given["state"])
    if name == "wkv4":
        given["state"][:, 1] = -1e30  # the log of no weight
    y, state = call(**given)
    again, last = call(**{key: value for key, value in given.items() if key != "state"})
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(last, state)


@every_op
@every_way
def test_nothing_flows_back_from_the_future(name: str, way: str) -> None:
    given = arguments(name, 21)
    y, _ = function(name, way)(**given)
    timed = [value for key, value in given.items() if _has_time(name, key)]
    for gradient in torch.autograd.grad(y[:, :13].sum(), timed):
        assert not gradient[:, 13:].any() and gradient[:, :13].any()


@every_op
@pytest.mark.parametrize(("way", "length"), [("torch", 50), pytest.param("triton", 13, marks=pytest.mark.slow)])
def test_what_trains_stays_finite_far_out_and_agrees_with_float64(name: str, way: str, length: int) -> None:
    given = {key: (30 * value.detach()).float().requires_grad_() for key, value in arguments(name, length).items()}
    for key in SHARED[name]:
        given[key] = given[key].detach().div(10).requires_grad_()
    wanted = results(function(name, "reference"), {k: x.detach().double().requires_grad_() for k, x in given.items()})
    for found, want in zip(results(function(name, way), given), wanted, strict=True):
        assert found.isfinite().all()
        assert float((found - want).detach().abs().max()) <= 1e-4 * max(float(want.detach().abs().max()), 1.0)


@every_op
def test_torch_ops_keep_the_rules_of_torch_library(name: str) -> None:
    from archlab.kernels.selective_scan import torch_ops as scan
    from archlab.kernels.wkv4 import torch_ops as wkv

    given = {key: value.detach().float().requires_grad_() for key, value in arguments(name, 7).items()}
    given.pop("d", None)
    op, back = {
        "selective_scan": (scan._scan, scan._scan_backward),
        "wkv4": (wkv._wkv, wkv._wkv_backward),
    }[name]
    torch.library.opcheck(op.op, (*given.values(), 4))
    fixed = [value.detach() for value in given.values()]
    outs = op(*fixed, 4)
    kept = [*fixed[:-1], outs[2]] if op is scan._scan else [*fixed, *outs[1:]]
    grads = [torch.randn_like(x) for x in (outs[:2] if op is scan._scan else outs)]
    torch.library.opcheck(back.op, (*grads, *kept, 4))


@pytest.mark.slow
@every_op
def test_triton_hands_a_state_over_and_keeps_the_rules_of_torch_library(name: str) -> None:
    from archlab.kernels.selective_scan import triton as scan
    from archlab.kernels.wkv4 import triton as wkv

    given = {key: value.detach().float().requires_grad_() for key, value in arguments(name, 11).items()}
    call = function(name, "triton")
    whole, last = call(**given)
    first, state = call(**{k: x[:, :5] if _has_time(name, k) else x for k, x in given.items()})
    second, after = call(**{k: x[:, 5:] if _has_time(name, k) else x for k, x in given.items()} | {"state": state})
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(after, last)
    op = {"selective_scan": scan._scan, "wkv4": wkv._wkv}[name]
    torch.library.opcheck(op.op, tuple(given.values()))


def test_triton_refuses_states_that_registers_do_not_hold() -> None:
    x, b = torch.zeros(1, 3, 2), torch.zeros(1, 3, 65)
    with pytest.raises(ValueError, match="at most 64 numbers; received 65"):
        function("selective_scan", "triton")(x, x, torch.zeros(2, 65), b, b)


@every_op
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    given = {key: value.detach() for key, value in arguments(name, 5).items()}
    given["state"] = given["state"][:, :1]
    for way in ("reference", "torch", "triton"):
        with pytest.raises(ValueError, match="state must be"):
            function(name, way)(**given)

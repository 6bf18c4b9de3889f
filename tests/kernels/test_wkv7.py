"""WKV of RWKV-7 in both its forms: against its formula, in pieces, under strong decays, against the delta rule."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels import Device, select
from archlab.kernels.linear_recurrence.reference import linear_recurrence
from archlab.kernels.wkv7.reference import wkv7
from archlab.kernels.wkv7.torch_ops import chunked

Arguments = dict[str, Tensor]


def made(length: int, decays: Callable[[Tensor], Tensor] | None = None) -> Arguments:
    """Sequences of two heads, with a state; all tensors ready for gradients."""
    generator = torch.Generator().manual_seed(length)
    batch, heads, width, values = 2, 2, 8, 6
    drawn: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    keys = (batch, length, heads, width)
    log_decay = -math.exp(-0.5) * drawn(*keys).sigmoid()
    tensors = {
        "r": drawn(*keys),
        "k": drawn(*keys),
        "v": drawn(batch, length, heads, values),
        "log_decay": log_decay if decays is None else decays(log_decay),
        "removal": F.normalize(drawn(*keys), dim=-1),
        "rate": drawn(*keys).sigmoid(),
        "state": drawn(batch, heads, width, values),
    }
    return {name: x.float().double().requires_grad_() for name, x in tensors.items()}


def results(call: Callable[..., tuple[Tensor, Tensor]], given: Arguments, **options: Any) -> list[Tensor]:
    """Outputs, last state, and the gradients of all tensors through both."""
    out, last = call(**given, **options)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, last)]
    return [out, last, *torch.autograd.grad([out, last], list(given.values()), douts)]


def assert_equal(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-9) -> None:
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        error = float((a - b).detach().square().mean().sqrt() / b.detach().square().mean().sqrt())
        assert error < tolerance, f"result {position}: {error:.1e}"


@pytest.mark.parametrize("length", [2, 31, 33, 70])
def test_recurrent_and_chunked_forms_agree(length: int) -> None:
    given = made(length)
    want = results(wkv7, given)
    for chunk in (4, 16, 24, 32):
        assert_equal(results(chunked, given, chunk=chunk), want)


def test_a_state_handed_over_continues_the_sequence() -> None:
    given = made(65)

    def in_pieces(state: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for start, stop in ((0, 40), (40, 41), (41, 65)):
            out, state = chunked(**{name: x[:, start:stop] for name, x in tensors.items()}, state=state)
            outs.append(out)
        return torch.cat(outs, 1), state

    assert_equal(results(in_pieces, given), results(wkv7, given))


def test_nothing_flows_from_the_future() -> None:
    given = made(21)
    out, _ = chunked(**given, chunk=4)
    for gradient in torch.autograd.grad(out[:, 9].sum(), [x for name, x in given.items() if name != "state"]):
        assert gradient[:, :10].any()
        assert not gradient[:, 10:].any()


def _mixed(x: Tensor) -> Tensor:
    """Half of the decays up to exp(-20), half hardly any, and some that forget everything."""
    generator = torch.Generator().manual_seed(0)
    strong, size = (torch.rand(x.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.where(strong < 0.5, -20 * size, -0.01 * size).masked_fill(size > 0.95, -torch.inf)


@pytest.mark.parametrize(
    "decays", [None, lambda x: torch.full_like(x, -20.0), _mixed], ids=["usual", "strong", "mixed"]
)
def test_float32_is_exact_whatever_the_decays(decays: Callable[[Tensor], Tensor] | None) -> None:
    given = made(130, decays)
    narrow = {name: x.detach().float().requires_grad_() for name, x in given.items()}
    assert_equal(results(chunked, narrow), results(wkv7, given), 1e-6)


def test_it_is_the_delta_rule_where_one_key_removes_and_is_written() -> None:
    given = {name: x.detach() for name, x in made(40).items()}
    beta = given["rate"][..., :1]
    rule = {"removal": given["removal"], "rate": beta.expand_as(given["rate"]), "k": beta * given["removal"]}
    decays = torch.zeros_like(given["log_decay"])
    want = linear_recurrence(given["r"], given["removal"], given["v"], None, beta[..., 0], given["state"])
    for call in (wkv7, chunked):
        assert_equal(list(call(**{**given, **rule, "log_decay": decays})), list(want))


def test_autocast_changes_nothing() -> None:
    given = {name: x.detach().bfloat16() for name, x in made(40).items()}
    want = chunked(**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chunked(**given)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_chunks_serve_a_cpu_and_what_triton_does_not_hold() -> None:
    assert select("wkv7", Device("cpu"), torch.float32).call is chunked
    card = Device("cuda", (9, 0))
    assert select("wkv7", card, torch.bfloat16).implementation == "triton"
    wide = select("wkv7", card, torch.bfloat16, wide=True)
    assert wide.call is chunked and "at most 64 channels" in wide.reason
    from archlab.kernels.wkv7.triton import wkv7 as ours

    x = torch.zeros(1, 3, 1, 65)
    with pytest.raises(ValueError, match="at most 64; received 65"):
        ours(x, x, x, x, x, x)


@pytest.mark.slow
def test_triton_gives_the_same_by_a_walk_and_by_stored_states(monkeypatch: pytest.MonkeyPatch) -> None:
    from archlab.kernels.wkv7 import triton

    given = made(35)
    want, narrow = results(wkv7, given), {n: x.detach().float().requires_grad_() for n, x in given.items()}
    for fills in (1, 1000):
        monkeypatch.setattr(triton, "fills", lambda x, fills=fills: fills)
        assert_equal(results(triton.wkv7, narrow), want, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("decays", [lambda x: torch.full_like(x, -20.0), _mixed], ids=["strong", "mixed"])
def test_triton_is_exact_whatever_the_decays(
    decays: Callable[[Tensor], Tensor], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archlab.kernels.wkv7 import triton

    monkeypatch.setattr(triton, "chunk_of", lambda dtype: chunk)
    given = made(70, decays)
    narrow = {name: x.detach().float().requires_grad_() for name, x in given.items()}
    assert_equal(results(triton.wkv7, narrow), results(wkv7, given), 1e-6)


@pytest.mark.slow
def test_triton_keeps_the_rules_of_torch_library() -> None:
    from archlab.kernels.wkv7 import triton

    r, k, v, g, removal, rate, state = (x.detach().float().requires_grad_() for x in made(5).values())
    torch.library.opcheck(triton._wkv7.op, (r, k, v, g, removal, rate, state, True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": (2, 9, 2, 7)}, r"k must be \(2, 9, 2, 8\) beside r .*received \(2, 9, 2, 7\)"),
        ({"v": (2, 9, 3, 6)}, r"v must be \(2, 9, 2, 6\)"),
        ({"rate": (2, 9, 2, 1)}, r"rate must be \(2, 9, 2, 8\)"),
        ({"state": (2, 2, 6, 8)}, r"state must be \(2, 2, 8, 6\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changed: dict[str, tuple[int, ...]], message: str) -> None:
    given = made(9) | {name: torch.zeros(shape) for name, shape in changed.items()}
    for call in (wkv7, chunked):
        with pytest.raises(ValueError, match=message):
            call(**given)

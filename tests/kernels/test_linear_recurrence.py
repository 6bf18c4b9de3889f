"""The linear recurrence in all its forms: against its definition, in pieces, under strong decays, against others."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.kernels import OPS, Case, Device, select
from archlab.kernels.linear_recurrence.reference import linear_recurrence
from archlab.kernels.linear_recurrence.torch_ops import chunked

Arguments = dict[str, Any]
DECAYS = ("none", "constant", "token", "channel")
KINDS = [pytest.param(decay, delta, id=f"{decay}{'-delta' * delta}") for delta in (False, True) for decay in DECAYS]


def made(
    length: int, decay: str, delta: bool, dtype: torch.dtype = torch.float64, groups: int = 2, batch: int = 2
) -> Arguments:
    """Sequences of four heads of values, with a state; all tensors ready for gradients."""
    generator = torch.Generator().manual_seed(length)
    drawn: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    heads, width, values = 4, 8, 6
    shape = {"constant": (heads,), "token": (batch, length, heads), "channel": (batch, length, heads, width)}.get(decay)
    tensors = {
        "q": drawn(batch, length, groups, width),
        "k": F.normalize(drawn(batch, length, groups, width), dim=-1),
        "v": drawn(batch, length, heads, values),
        "log_decay": -drawn(*shape).square().square() / 4 if shape else None,
        "beta": drawn(batch, length, heads).sigmoid() if delta else None,
        "state": drawn(batch, heads, width, values),
    }
    return {"scale": 0.3} | {name: x if x is None else x.to(dtype).requires_grad_() for name, x in tensors.items()}


def results(call: Callable[..., tuple[Tensor, Tensor]], given: Arguments, **options: Any) -> list[Tensor]:
    """Outputs, last state, and the gradients of all tensors through both."""
    out, last = call(**given, **options)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, last)]
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    return [out, last, *torch.autograd.grad([out, last], tensors, douts)]


def assert_equal(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-9) -> None:
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        error = float((a - b).detach().square().mean().sqrt() / b.detach().square().mean().sqrt())
        assert error < tolerance, f"result {position}: {error:.1e}"


@pytest.mark.parametrize("length", [1, 2, 63, 65, 130])
@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_recurrent_and_chunked_forms_agree(decay: str, delta: bool, length: int) -> None:
    given = made(length, decay, delta)
    want = results(linear_recurrence, given)
    assert_equal(results(chunked, given), want)
    for chunk in (16, 32, 48, length):
        assert_equal(results(chunked, given, chunk=chunk), want)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_heads_of_values_share_queries_and_keys_in_groups(decay: str, delta: bool, groups: int) -> None:
    given = made(37, decay, delta, groups=groups)
    repeated = given | {name: given[name].repeat_interleave(4 // groups, 2) for name in "qk"}
    want = linear_recurrence(**repeated)
    for call in (linear_recurrence, chunked):
        assert_equal(list(call(**given)), list(want))


@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_a_state_handed_over_continues_the_sequence(decay: str, delta: bool) -> None:
    given = made(65, decay, delta)

    def in_pieces(**arguments: Any) -> tuple[Tensor, Tensor]:
        outs, state = [], arguments.pop("state")
        for start, stop, call in ((0, 40, chunked), (40, 41, linear_recurrence), (41, 65, chunked)):
            cut = {
                name: x[:, start:stop] if isinstance(x, Tensor) and x.ndim > 1 else x for name, x in arguments.items()
            }
            out, state = call(**cut, state=state)
            outs.append(out)
        return torch.cat(outs, 1), state

    assert_equal(results(in_pieces, given), results(linear_recurrence, given))


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_nothing_flows_from_the_future(decay: str, delta: bool, chunk: int) -> None:
    given = made(21, decay, delta)
    per_token = [x for x in given.values() if isinstance(x, Tensor) and x.shape[:2] == (2, 21)]
    out, _ = chunked(**given, chunk=chunk)
    for gradient in torch.autograd.grad(out[:, 9].sum(), per_token):
        assert gradient[:, :10].any()
        assert not gradient[:, 10:].any()


def _mixed(x: Tensor) -> Tensor:
    """Half of the decays up to exp(-20), half hardly any."""
    generator = torch.Generator().manual_seed(0)
    strong, size = (torch.rand(x.shape, generator=generator) for _ in range(2))
    return torch.where(strong < 0.5, -20 * size, -0.01 * size)


def _with_resets(x: Tensor) -> Tensor:
    return _mixed(x).masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.1, -torch.inf)


@pytest.mark.parametrize("strength", [lambda x: torch.full(x.shape, -20.0), _mixed, _with_resets])
@pytest.mark.parametrize(("decay", "delta"), [kind for kind in KINDS if kind.values[0] in ("token", "channel")])
def test_strong_decays_and_resets_stay_exact_in_float32(
    decay: str, delta: bool, strength: Callable[[Tensor], Tensor]
) -> None:
    given = made(130, decay, delta)
    given["log_decay"] = strength(given["log_decay"]).double().requires_grad_()
    given = {n: x.detach().float().double().requires_grad_() if isinstance(x, Tensor) else x for n, x in given.items()}
    narrow = {n: x.detach().float().requires_grad_() if isinstance(x, Tensor) else x for n, x in given.items()}
    assert_equal(results(chunked, narrow), results(linear_recurrence, given), 1e-5)


def test_a_reset_forgets_all_that_was_before() -> None:
    given = made(40, "token", True)
    reset = given["log_decay"].detach().clone()
    reset[:, 25] = -torch.inf
    late = {name: x[:, 25:] if isinstance(x, Tensor) and name != "state" else x for name, x in given.items()}
    alone, _ = linear_recurrence(**(late | {"state": None, "log_decay": given["log_decay"][:, 25:]}))
    for call in (linear_recurrence, chunked):
        out, _ = call(**(given | {"log_decay": reset}))
        assert torch.allclose(out[:, 25:], alone, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    given = made(40, "channel", True, dtype)
    want = chunked(**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chunked(**given)
    assert [x.dtype for x in got] == [dtype, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("decay", "delta"), [("token", False), ("channel", True)])
def test_the_chunked_form_is_exported(decay: str, delta: bool) -> None:
    given = {name: x.detach() if isinstance(x, Tensor) else x for name, x in made(65, decay, delta).items()}

    class Module(torch.nn.Module):
        def forward(self, given: Arguments) -> tuple[Tensor, Tensor]:
            return chunked(**given)

    exported = torch.export.export(Module(), (given,)).module()
    assert_equal(list(exported(given)), list(chunked(**given)), 1e-12)


def _fla_calls() -> dict[str, Any]:
    """fla-core's plain functions, each as (decay, delta, call of our arguments)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        pytest.importorskip("fla.ops", reason="fla-core is not installed")
        from fla.ops.delta_rule.naive import delta_rule_recurrence
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
        from fla.ops.gla.naive import naive_recurrent_gla
        from fla.ops.kda.naive import naive_recurrent_kda
        from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
        from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    def swapped(*tensors: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2) for x in tensors]

    def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        out, state = delta_rule_recurrence(*swapped(q, k, v, beta), initial_state=given["state"])
        return out.transpose(1, 2), state

    def plain(call: Callable[..., Any], decay: str) -> Callable[..., Any]:
        """With the log decay under its name there."""

        def called(log_decay: Tensor | None, beta: Tensor | None, state: Tensor, **given: Tensor) -> Any:
            given |= {} if log_decay is None else {decay: log_decay}
            given |= {} if beta is None else {"beta": beta}
            return call(**given, initial_state=state, output_final_state=True)

        return called

    return {
        "linear_attn": ("none", False, plain(naive_recurrent_linear_attn, "")),
        "simple_gla": ("token", False, plain(naive_recurrent_simple_gla, "g")),
        "gla": ("channel", False, plain(naive_recurrent_gla, "gk")),
        "delta_rule": ("none", True, delta),
        "gated_delta_rule": ("token", True, plain(naive_recurrent_gated_delta_rule, "g")),
        "kda": ("channel", True, plain(naive_recurrent_kda, "g")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_attn", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda"])
def test_the_plain_functions_of_fla_compute_the_same(name: str) -> None:
    decay, delta, call = _fla_calls()[name]
    given = made(70, decay, delta, torch.float32, groups=4) | {"scale": 8**-0.5}
    theirs = lambda scale, **tensors: call(**tensors)  # noqa: E731
    want = results(theirs, given)
    for ours in (linear_recurrence, chunked):
        assert_equal(results(ours, given), want, 1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": (2, 9, 2, 7)}, r"q and k must be \[B,T,G,Dk\].*received .*\(2, 9, 2, 7\)"),
        ({"v": (2, 9, 3, 6)}, "with G dividing H"),
        ({"log_decay": (2, 9)}, r"log_decay must be \[H\], \[B,T,H\] or \[B,T,H,Dk\], here with H = 4 and Dk = 8"),
        ({"beta": (2, 9, 2)}, r"beta must be \[B,T,H\], here \(2, 9, 4\); received \(2, 9, 2\)"),
        ({"state": (2, 4, 6, 8)}, r"state must be \[B,H,Dk,Dv\], here \(2, 4, 8, 6\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changed: dict[str, tuple[int, ...]], message: str) -> None:
    given = made(9, "token", True) | {name: torch.zeros(shape) for name, shape in changed.items()}
    for call in (linear_recurrence, chunked):
        with pytest.raises(ValueError, match=message):
            call(**given)


KEPT = [
    pytest.param({}, "", id="none"),
    pytest.param({"decay": "token", "keys": 128}, "", id="token"),
    pytest.param({"decay": "constant", "delta": True}, "", id="delta"),
    pytest.param({"decay": "channel", "keys": 128}, "", id="channel"),
    pytest.param({"decay": "channel", "delta": True}, "", id="both"),
    pytest.param({"decay": "token", "keys": 256}, "at most 128 channels", id="wide"),
]


@pytest.mark.parametrize("card", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("options", "objection"), KEPT)
def test_models_get_triton_on_cuda_where_it_serves_and_else_chunks(
    options: dict[str, Any], objection: str, dtype: torch.dtype, card: tuple[int, int]
) -> None:
    cpu = select("linear_recurrence", Device("cpu"), dtype, **options)
    assert cpu.call is chunked and "chunks in parallel" in cpu.reason
    chosen = select("linear_recurrence", Device("cuda", card), dtype, **options)
    assert chosen.implementation == ("torch" if objection else "triton")
    assert objection in chosen.reason
    if objection:
        with pytest.raises(ValueError, match=objection):
            select("linear_recurrence", Device("cuda", card), dtype, force="triton", **options)


def test_wide_keys_of_the_delta_rule_in_float32_get_chunks() -> None:
    asked = {"delta": True, "keys": 128}
    chosen = select("linear_recurrence", Device("cuda", (9, 0)), torch.float32, **asked)
    assert chosen.call is chunked and "do not fit into registers" in chosen.reason
    assert select("linear_recurrence", Device("cuda", (9, 0)), torch.bfloat16, **asked).implementation == "triton"


@pytest.mark.parametrize(("decay", "delta"), [("none", True), pytest.param("token", False, marks=pytest.mark.slow),
                                              pytest.param("channel", False, marks=pytest.mark.slow),
                                              pytest.param("token", True, marks=pytest.mark.slow),
                                              pytest.param("channel", True, marks=pytest.mark.slow)])  # fmt: skip
def test_triton_gives_the_same_by_a_walk_and_by_stored_states(
    decay: str, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archlab.kernels.linear_recurrence import triton

    given = made(70, decay, delta, torch.float32, groups=4, batch=1)
    want = results(linear_recurrence, {n: _doubled(x) for n, x in given.items()})
    outs = []
    for fills in (1, 1000):
        monkeypatch.setattr(triton, "fills", lambda x, fills=fills: fills)
        assert_equal(results(triton.linear_recurrence, given), want, 1e-5)
        with torch.no_grad():
            outs.append(triton.linear_recurrence(**given))
    for walked, stored in zip(*outs, strict=True):
        torch.testing.assert_close(walked, stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "delta", "chunk"), [("token", True, 16), ("channel", False, 32), ("channel", True, 16)]
)
def test_triton_gives_the_same_in_the_chunks_of_other_cards(
    decay: str, delta: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from archlab.kernels.linear_recurrence import triton

    given = made(chunk + 5, decay, delta, torch.float32)
    want = results(linear_recurrence, {n: _doubled(x) for n, x in given.items()})
    monkeypatch.setattr(triton, "_chunk", lambda dtype: chunk)
    assert_equal(results(triton.linear_recurrence, given), want, 1e-5)


def _doubled(x: Any) -> Any:
    return x.detach().double().requires_grad_() if isinstance(x, Tensor) else x


@pytest.mark.slow
@pytest.mark.parametrize("strength", [lambda x: torch.full(x.shape, -20.0), _mixed, _with_resets])
@pytest.mark.parametrize(("decay", "delta"), [("token", False), ("channel", False), ("token", True), ("channel", True)])
def test_triton_is_exact_under_strong_decays_and_resets(
    decay: str, delta: bool, strength: Callable[[Tensor], Tensor]
) -> None:
    from archlab.kernels.linear_recurrence.triton import linear_recurrence as ours

    given = made(70, decay, delta, torch.float32, batch=1)
    given["log_decay"] = strength(given["log_decay"]).float().requires_grad_()
    assert_equal(results(ours, given), results(linear_recurrence, {n: _doubled(x) for n, x in given.items()}), 1e-5)


def test_triton_refuses_what_its_programs_do_not_hold() -> None:
    from archlab.kernels.linear_recurrence.triton import linear_recurrence as ours

    x, wide = torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 160)
    with pytest.raises(ValueError, match="at most 128; received 160"):
        ours(wide, wide, x)


@pytest.mark.slow
def test_triton_keeps_the_rules_of_torch_library() -> None:
    from archlab.kernels.linear_recurrence import triton

    given = {n: x.detach().requires_grad_() for n, x in made(5, "token", True, torch.float32, groups=4).items()
             if isinstance(x, Tensor)}  # fmt: skip
    torch.library.opcheck(triton._recur.op, (*given.values(), 0.3, True))


@pytest.mark.parametrize("case", OPS["linear_recurrence"].cases, ids=lambda case: case.name)
def test_flops_count_the_products_of_the_definition(case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {name: torch.zeros(shape) for name, shape in case.shapes.items()}
    with FlopCounterMode(display=False) as counter:
        linear_recurrence(**tensors, **case.fixed())
    decay = 0 if "log_decay" not in tensors else tensors["v"].numel() * tensors["q"].shape[-1]
    assert OPS["linear_recurrence"].flops(**tensors, **case.fixed()) == counter.get_total_flops() + decay

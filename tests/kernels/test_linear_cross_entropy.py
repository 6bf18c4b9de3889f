"""The loss over chunks of logits, where the table of calls does not reach: gradients that training asks for."""

from typing import Any

import pytest
import torch
from calls import DEVICES
from torch import Tensor

from archlab.kernels import OPS, Case
from archlab.kernels.bench import inputs as made
from archlab.kernels.linear_cross_entropy import chunks, torch_ops
from archlab.kernels.linear_cross_entropy.chunks import Rows

OP = OPS["linear_cross_entropy"]
CASES = {case.name: case for case in OP.cases}
FAMILIES = ("torch", "triton")
DEVICE = DEVICES[-1]


def function(family: str) -> Any:
    return OP.reference if family == "reference" else OP.implementations[family].load()


def trained(family: str, inputs: dict[str, Tensor], case: Case, weight: float) -> list[Tensor]:
    """The sums and the gradients of the first with this weight."""
    loss, square = function(family)(**inputs, **case.fixed(DEVICE.kind))
    return [loss, square, *torch.autograd.grad(weight * loss, list(inputs.values()))]


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b).detach().norm()) <= tolerance * max(float(b.detach().norm()), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["loss_sum_everything", "loss_one_row", "loss_wide"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_computed_with_the_forward_pass_match_float64(
    family: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "triton" and dtype == torch.float64:
        pytest.skip("Triton computes in float32")
    case = CASES[name]
    inputs = made(OP, case, DEVICE, dtype)
    wide = {key: x.detach().double().requires_grad_() for key, x in inputs.items()}
    want = trained("reference", wide, case, 3.0)
    monkeypatch.setattr(chunks, "_rows_backward", None)  # nothing is computed again
    got = trained(family, inputs, case, 3.0)
    assert_near(got, want, 1e-12 if dtype == torch.float64 else OP.tolerances[dtype])


@pytest.mark.parametrize("family", ("reference", *FAMILIES))
@pytest.mark.parametrize("trains", [True, False])
def test_a_sum_has_its_weighted_squares_and_their_gradient(family: str, trains: bool) -> None:
    case = CASES["loss_sum_everything"]
    inputs = made(OP, case, DEVICE, torch.float32)
    wide = {key: x.detach().double().requires_grad_() for key, x in inputs.items()}
    losses, squares = OP.reference(**wide, **{**case.fixed(DEVICE.kind), "reduction": "none"})
    whole = losses.sum() + case.arguments["z"] * squares.sum()
    with torch.set_grad_enabled(trains):
        loss, square = function(family)(**inputs, **case.fixed(DEVICE.kind))
    assert_near([loss, square], [whole, squares.sum()], 1e-5)
    assert loss.requires_grad == trains and not square.requires_grad
    if trains:
        got = torch.autograd.grad(loss, list(inputs.values()))
        assert_near([*got], [*torch.autograd.grad(whole, list(wide.values()))], 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_nothing_but_the_order_of_sums(family: str, reduction: str, rows: int) -> None:
    name = "loss_rows_everything" if reduction == "none" else "loss_sum_everything"
    case = Case(name, CASES[name].shapes, {**CASES[name].arguments, "rows": rows}, CASES[name].integers)
    inputs = made(OP, case, DEVICE, torch.float32)
    wide = {key: x.detach().double().requires_grad_() for key, x in inputs.items()}

    def results(family: str, inputs: dict[str, Tensor]) -> list[Tensor]:
        outs = function(family)(**inputs, **case.fixed(DEVICE.kind))
        return [*outs, *torch.autograd.grad(sum(out.sum() for out in outs), list(inputs.values()))]

    assert_near(results(family, inputs), results("reference", wide), 1e-5)


@pytest.mark.parametrize(
    ("family", "name"), [("torch", "loss_rows"), ("triton", "loss_rows_everything"), ("torch", "loss_sum_everything")]
)
def test_operators_keep_the_rules_of_torch_library(family: str, name: str) -> None:
    case = CASES[name]
    inputs = made(OP, case, DEVICE, torch.float32)
    options = case.fixed(DEVICE.kind)
    tensors = inputs["hidden"], inputs["table"], options["targets"], inputs.get("bias")
    rest = options["scale"], options["softcap"]
    if options["reduction"] == "none":
        torch.library.opcheck(chunks._rows.op, (*tensors, *rest, 3, family))
    else:
        torch.library.opcheck(chunks._sums.op, (*tensors, *rest, options["z"], 3, family))


def test_autocast_multiplies_in_its_dtype_and_sums_in_float32() -> None:
    case = CASES["loss_sum_bias"]
    inputs = made(OP, case, DEVICES[0], torch.float32)
    narrow = {key: x.detach().bfloat16().double().requires_grad_() for key, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = torch_ops.linear_cross_entropy(**inputs, **case.fixed())
    got = torch.autograd.grad(loss, list(inputs.values()))
    want = torch.autograd.grad(OP.reference(**narrow, **case.fixed())[0], list(narrow.values()))
    assert [x.dtype for x in (loss, *got)] == [torch.float32] * 4
    assert_near([*got], [*want], 5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_large_logits_stay_finite_and_infinite_ones_do_not_hide(family: str) -> None:
    hidden = torch.tensor([[3e4, 0.0], [-3e4, 1.0], [0.0, torch.inf]], device=DEVICE.kind, requires_grad=True)
    table = torch.tensor([[1.0, 1.0], [-1.0, 2.0], [0.5, -1.0]], device=DEVICE.kind)
    targets = torch.tensor([0, 0, 1], device=DEVICE.kind)
    losses, _ = function(family)(hidden[:2], table, targets[:2])
    assert losses.tolist() == [0.0, 60002.0 - 1.0]
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    assert gradient[:2].tolist() == [[0.0, 0.0], [-2.0, 1.0]]
    assert function(family)(hidden, table, targets)[0][2].isnan()


def test_targets_outside_the_table_are_no_silent_numbers() -> None:
    hidden, table = (torch.ones(2, 3, device=DEVICE.kind) for _ in range(2))
    for target in (-1, 2, -101):
        targets = torch.tensor([target, 1], device=DEVICE.kind)
        assert function("triton")(hidden, table, targets)[0].isnan().tolist() == [True, False]
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch_ops.linear_cross_entropy(hidden.cpu(), table.cpu(), targets.cpu())


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("family", ("reference", *FAMILIES))
def test_nothing_to_score_gives_zero(family: str, reduction: str) -> None:
    table = torch.ones(4, 3, device=DEVICE.kind, requires_grad=True)
    for hidden, targets in ((torch.ones(0, 3), torch.ones(0)), (torch.ones(2, 3), torch.full((2,), -100))):
        hidden = hidden.to(DEVICE.kind).requires_grad_()
        losses, squares = function(family)(hidden, table, targets.long().to(DEVICE.kind), reduction=reduction, z=0.5)
        dhidden, dtable = torch.autograd.grad((losses + squares).sum(), (hidden, table))
        assert not losses.sum() and not squares.sum() and not dhidden.any() and not dtable.any()


def test_one_buffer_holds_a_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, torch.Size]] = []

    def watched(function: Any) -> Any:
        def call(logits: Tensor, *rest: Any) -> Any:
            seen.append((logits.data_ptr(), logits.shape))
            return function(logits, *rest)

        return call

    monkeypatch.setattr(torch_ops, "ROWS", Rows(*map(watched, torch_ops.ROWS)))
    hidden, table = torch.randn(61, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    for reduction, passes in (("sum", 1), ("none", 2)):
        losses, _ = torch_ops.linear_cross_entropy(hidden, table, torch.arange(61) % 50, reduction=reduction, rows=8)
        losses.sum().backward()
        assert [shape for _, shape in seen] == passes * [*7 * [(8, 50)], (5, 50)]
        assert len({address for address, _ in seen}) <= passes
        seen.clear()

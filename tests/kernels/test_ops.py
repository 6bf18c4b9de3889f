"""All implementations of all ops, on all their cases, against the formula in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calls import DEVICES, IN_MAKE_TEST, Call, calls
from torch import Tensor

from archlab.kernels import ACTIVATIONS, OPS, Case, Op, bench
from archlab.kernels.bench import inputs as made

LAID_OUT = (
    "elementwise_silu", "headwise_multiply", "shared_heads_multiply", "width_1_add", "silu", "odd", "odd_no_weight",
    "heads", "causal_grouped", "bias_per_head", "cached_keys", "everything",
    "channels", "delta_decay", "uneven", "expert_without_rows", "loss_rows", "loss_sum_everything",
    "scan", "wkv", "removing",
    "odd_affine", "added_layer", "turned_normed_partly", "turned_interleaved", "opened_groups", "opened_headwise",
    "shifted_documents",
)  # fmt: skip
COMPILED = (
    "headwise_multiply", "elementwise_gelu", "odd_no_weight", "heads_affine", "added_scaled", "turned_normed",
    "opened", "silu", "shifted", "bias_window", "everything", "documents", "blocks", "channels", "delta_decay",
    "expert_without_rows", "scan_long", "wkv_long", "removing_plain", "mixing_plain",
    "loss_rows_everything", "loss_sum_everything",
)  # fmt: skip
# The formula walks through time, and capturing unrolls the walk.
SHORT = ("decay_length_1", "delta_length_1", "scan_length_1", "wkv_length_2", "removing_length_2", "mixing_length_2")
WALKED = ("selective_scan", "wkv4")  # by Triton, whose operator is one node whatever the length, in its interpreter
WALKS = ("linear_recurrence", "selective_scan", "wkv4", "wkv7", "slstm")


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Inside it `torch.empty` and its kin are filled with NaN, so that an element never written is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def outputs(function: Callable[..., Any], inputs: dict[str, Tensor], case: Case) -> tuple[Tensor, ...]:
    """What an op returns: one tensor, or several, of which those after the first are states."""
    found = function(**inputs, **case.fixed(_device(inputs)))
    return found if isinstance(found, tuple) else (found,)


def results(
    function: Callable[..., Any], inputs: dict[str, Tensor], case: Case, douts: list[Tensor] | None
) -> list[Tensor]:
    """The outputs, and the gradients of all inputs through all of them."""
    outs = outputs(function, inputs, case)
    douts = [torch.ones_like(out) for out in outs] if douts is None else douts
    pairs = [(out, dout.to(out.dtype)) for out, dout in zip(outs, douts, strict=True) if out.requires_grad]
    trained, pushed = zip(*pairs, strict=True)
    return [*outs, *torch.autograd.grad(trained, list(inputs.values()), pushed)]


def truth(op: Op, inputs: dict[str, Tensor], case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The results of the formula in float64, and gradients of the outputs that are exact in `dtype`."""
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    generator = torch.Generator().manual_seed(1)
    shapes = [out.shape for out in outputs(op.reference, wide, case)]
    douts = [torch.randn(shape, generator=generator).to(dtype).to(_device(wide)) for shape in shapes]
    return results(op.reference, wide, case, douts), douts


def _device(inputs: dict[str, Tensor]) -> torch.device:
    return next(iter(inputs.values())).device


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """RMS error relative to the RMS of the truth, which is taken to be at least 1e-3. Some gradients are exactly 0, as
    sums that cancel: of these alone float32 may leave two of its steps at the size of the largest result."""
    largest = max(_rms(b) for b in want)
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        error, size = _rms(a.double() - b.double()), _rms(b)
        left = 2 * torch.finfo(torch.float32).eps * largest if size < 1e-12 * largest else 0.0
        assert error <= max(tolerance * max(size, 1e-3), left), f"result {position}: {error:.1e} of {size:.1e}"


def _rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("call", calls())
def test_outputs_and_gradients_match_float64(call: Call) -> None:
    inputs = call.tensors()
    want, douts = truth(call.op, inputs, call.case, call.dtype)
    if call.is_triton:
        with uninitialised_memory_is_nan():
            got = results(call.function, inputs, call.case, douts)
    else:
        got = results(call.function, inputs, call.case, douts)
    states = range(1, len(got) - len(inputs)) if call.op.wide is None else call.op.wide
    wide = torch.promote_types(call.dtype, torch.float32)
    assert [x.dtype for x in got] == [wide if i in states else call.dtype for i in range(len(got))]
    assert_close(got, want, bench.tolerance(call.op, call.implementation, call.dtype))


def _reversed_strides(x: Tensor) -> Tensor:
    return x.detach().permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def _half_of_a_wider_tensor(x: Tensor) -> Tensor:
    return torch.cat([x.detach(), torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("layout", [_reversed_strides, _half_of_a_wider_tensor])
@pytest.mark.parametrize(
    "call", [p for p in calls((torch.float32,), LAID_OUT) if p.values[0].implementation != "reference"]
)
def test_layout_does_not_change_results(call: Call, layout: Callable[[Tensor], Tensor]) -> None:
    inputs = {name: layout(x).requires_grad_() for name, x in call.tensors().items()}
    want, douts = truth(call.op, inputs, call.case, call.dtype)
    douts = [layout(dout) if dout.ndim else dout for dout in douts]
    assert_close(results(call.function, inputs, call.case, douts), want, call.op.tolerances[call.dtype])


def _captured() -> Iterator[Any]:
    """The first case of each op by each of its implementations; the formula, and the other cases, are slow."""
    seen: set[tuple[str, str, str]] = set()
    for p in calls((torch.float32,)):
        (call,) = p.values
        walks = call.op.name in {"reference": WALKS, "triton": WALKED}.get(call.implementation, ())
        if call.case.name not in (SHORT if walks else COMPILED):
            continue
        kind = (call.op.name, call.implementation, call.device.kind)
        slow = walks or call.implementation == "reference" or kind in seen or pytest.mark.slow in p.marks
        if not slow:
            seen.add(kind)
        yield pytest.param(call, id=p.id, marks=[*p.marks, *([pytest.mark.slow] if slow else [])])


@pytest.mark.parametrize("call", list(_captured()))
def test_compiles_into_one_graph(call: Call) -> None:
    torch.compiler.reset()
    inputs = call.tensors()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    got, want = (results(f, inputs, call.case, None) for f in (compiled, call.function))
    assert_close(got, want, 1e-6)


def _in_order(call: Call) -> bool:
    """Whether one program after the other computes a call, as the interpreter has it, for whole seconds."""
    return call.device.kind == "cpu" and call.op.name in IN_MAKE_TEST


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(*p.values, id=p.id, marks=[*p.marks, *([pytest.mark.slow] if _in_order(*p.values) else [])])
        for p in calls((torch.bfloat16,), LAID_OUT)
        if p.values[0].is_triton
    ],
)
def test_triton_gives_the_same_bits_twice(call: Call) -> None:
    inputs = call.tensors()
    first, second = (results(call.function, inputs, call.case, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("op", "case"), [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS.values() for case in op.cases]
)
def test_reference_has_the_gradients_of_its_formula(op: Op, case: Case) -> None:
    inputs = made(op, case, DEVICES[0], torch.float64)
    function = lambda *tensors: op.reference(**dict(zip(inputs, tensors, strict=True)), **case.fixed())  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("layout", [lambda x: x, _reversed_strides])
@pytest.mark.parametrize("name", ["gate-elementwise", "gate-headwise", "rms_norm", "rms_norm-no_weight"])
def test_triton_ops_keep_the_rules_of_torch_library(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    from archlab.kernels.gate import triton as gate
    from archlab.kernels.norms import triton as norms

    device = DEVICES[-1].kind
    x = layout(torch.randn(3, 5, 24, device=device)).requires_grad_()
    narrow, weight = (torch.randn(*s, device=device, requires_grad=True) for s in ((3, 5, 1), (24,)))
    op, arguments = {
        "gate-elementwise": (gate._gate, (x, layout(torch.randn_like(x)).requires_grad_(), "silu", True)),
        "gate-headwise": (gate._gate, (x, narrow, "sigmoid", True)),
        "rms_norm": (norms._norm_rows, (x, None, weight, None, 1e-6, False, 1.0)),
        "rms_norm-no_weight": (norms._norm_rows, (x, None, None, None, 1e-6, False, 1.0)),
    }[name]
    torch.library.opcheck(op.op, arguments)


@pytest.mark.parametrize("call", calls((torch.bfloat16,), ("headwise_multiply", "elementwise_silu", "silu", "heads")))
def test_float32_and_bfloat16_mix_as_under_autocast(call: Call) -> None:
    inputs = call.tensors()
    _, second = inputs
    inputs[second] = inputs[second].detach().float().requires_grad_()
    want, douts = truth(call.op, inputs, call.case, call.dtype)
    got = results(call.function, inputs, call.case, douts)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_close(got, want, call.op.tolerances[call.dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("implementation", ["reference", "torch", "triton"])
def test_activations_stay_finite_far_out_and_keep_nan(implementation: str, activation: str) -> None:
    op = OPS["gate"]
    function = op.reference if implementation == "reference" else op.implementations[implementation].load()
    g = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, torch.nan]], device=DEVICES[-1].kind, requires_grad=True)
    out = function(torch.ones_like(g), g, activation, "multiply")
    (dg,) = torch.autograd.grad(out.sum(), g)
    assert out[:, :-1].isfinite().all() and dg[:, :-1].isfinite().all()
    assert out[:, -1].isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_triton_takes_empty_tensors(shape: tuple[int, ...]) -> None:
    x, w = torch.ones(shape, device=DEVICES[-1].kind, requires_grad=True), torch.ones(8, requires_grad=True)
    gate, rms_norm = (OPS[name].implementations["triton"].load() for name in ("gate", "rms_norm"))
    out = rms_norm(gate(x, x[..., :1], "silu", "multiply"), w.to(x.device), 1e-6)
    dx, dw = torch.autograd.grad(out.sum(), (x, w))
    assert (out.shape, dx.shape) == (shape, shape)
    assert not dw.any()


def test_triton_refuses_shapes_that_it_does_not_compute() -> None:
    gate, glu, rms_norm = (OPS[name].implementations["triton"].load() for name in ("gate", "glu", "rms_norm"))
    x = torch.ones(2, 3, 4, device=DEVICES[-1].kind)
    with pytest.raises(ValueError, match="y's shape"):
        gate(x, x[:, :1], "silu", "multiply")
    with pytest.raises(ValueError, match="one shape"):
        glu(x, x[..., :1], "silu")
    with pytest.raises(ValueError, match="at most 16384 wide"):
        rms_norm(torch.ones(1, 16385, device=DEVICES[-1].kind), None, 1e-6)


@pytest.mark.parametrize("case", OPS["experts"].cases, ids=lambda case: case.name)
def test_experts_write_all_memory_and_keep_the_rules_of_torch_library(case: Case) -> None:
    from archlab.kernels.experts import torch_ops

    op = OPS["experts"]
    inputs = made(op, case, DEVICES[0], torch.float32)
    want, douts = truth(op, inputs, case, torch.float32)
    with uninitialised_memory_is_nan():
        assert_close(results(torch_ops.experts, inputs, case, douts), want, 1e-5)
    torch.library.opcheck(torch_ops._product.op, (*inputs.values(), case.fixed()["ends"]))


def test_experts_in_one_launch_keep_the_rules_of_torch_library() -> None:
    from archlab.kernels.experts import triton

    case = next(case for case in OPS["experts"].cases if case.name == "expert_without_rows")
    inputs = made(OPS["experts"], case, DEVICES[-1], torch.float32)
    torch.library.opcheck(triton._experts.op, (*inputs.values(), case.fixed(DEVICES[-1].kind)["ends"]))


def test_experts_cast_their_weights_as_under_autocast() -> None:
    op, case = OPS["experts"], OPS["experts"].cases[1]
    inputs = made(op, case, DEVICES[0], torch.bfloat16)
    inputs["weight"] = inputs["weight"].detach().float().requires_grad_()
    want, douts = truth(op, inputs, case, torch.bfloat16)
    for function in (op.reference, op.implementations["torch"].load()):
        got = results(function, inputs, case, douts)
        assert [x.dtype for x in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert_close(got, want, 5e-3)


def test_uninitialised_memory_is_nan_while_triton_is_tested() -> None:
    with uninitialised_memory_is_nan():
        assert torch.empty(3).isnan().all()

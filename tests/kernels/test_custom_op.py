"""An operator by its two ways: straight in eager, as a node of torch.library for whoever traces or transforms it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from archlab.kernels.custom_op import CustomOp, custom_op

RUNS: list[str] = []


@custom_op("test_scaled")
def scaled(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    RUNS.append("scaled")
    return x * factor, x.sum()


@scaled.register_fake
def _(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(())


@custom_op("test_scaled_backward")
def scaled_backward(dout: Tensor, factor: float) -> Tensor:
    return dout * factor


scaled_backward.register_fake(lambda dout, factor: torch.empty_like(dout))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.factor = inputs[1]
    ctx.mark_non_differentiable(output[1])


scaled.register_autograd(
    lambda ctx, dout, _: (scaled_backward(dout, ctx.factor), None),
    setup_context=_save,
)


class Seen(TorchDispatchMode):
    """The names of the operators that the dispatcher was given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_both_ways_give_the_same_bits_and_gradients() -> None:
    found = {}
    for name, call in (("eager", scaled), ("library", scaled.op)):
        x = torch.arange(6.0).requires_grad_()
        out, total = call(x, 3.0)
        assert not total.requires_grad
        (gradient,) = torch.autograd.grad(out.sum(), x)
        found[name] = out, total, gradient
    for eager, library in zip(found["eager"], found["library"], strict=True):
        assert torch.equal(eager, library)


def test_eager_goes_past_the_dispatcher_and_a_mode_sees_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("eager went through torch.library")

    x = torch.ones(3, requires_grad=True)
    with Seen() as seen:
        scaled(x, 2.0)
    assert "archlab.test_scaled.default" in seen.names
    monkeypatch.setattr(scaled, "op", refused)
    scaled(x, 2.0)[0].sum().backward()
    with torch.no_grad():
        scaled(x, 2.0)


def test_shapes_alone_run_nothing() -> None:
    RUNS.clear()
    assert scaled(torch.empty(4, device="meta"), 2.0)[0].shape == (4,)
    assert not RUNS


def test_compiled_it_is_one_node() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch.compiler.reset()
    torch.compile(lambda x: scaled(x, 2.0)[0] + 1, fullgraph=True, backend=backend)(torch.ones(3))
    assert "archlab.test_scaled.default" in graphs[0]


@pytest.mark.parametrize("op", [scaled, scaled_backward])
def test_a_gradient_that_it_does_not_have_is_refused(op: CustomOp) -> None:
    """Of the backward pass, which has none: a second derivative, or gradients of its own inputs."""
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"test_scaled_backward"):
        if op is scaled:
            (first,) = torch.autograd.grad(op(x, 2.0)[0].square().sum(), x, create_graph=True)
        else:
            first = op(x, 2.0)
        first.sum().backward()

"""Operators that torch.compile takes as one node, and that eager calls without torch.library's dispatcher.

Through the dispatcher a call takes 97 µs of the host, straight 31, of one that keeps gradients (`python
benchmarks/calls.py`, an AMD EPYC): more than the kernels of a small model take on a card.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


class CustomOp:
    """A function of tensors, `op` for whoever traces, transforms or checks it, itself for an eager call.

    Both run the same code: `op` adds what a trace needs, which are shapes without values.
    """

    def __init__(self, op: Any, run: Callable[..., Any]) -> None:
        self.op = op
        self._run = run
        self._function: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """What the function returns, without its values: dtype, shape and strides."""
        self.op.register_fake(fake)
        return fake

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """The gradients of the arguments from those of the outputs, as torch.library.register_autograd has it."""
        self.op.register_autograd(backward, setup_context=setup_context)
        run = self._run

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                output = run(*arguments)
                setup_context(ctx, arguments, output)
                return output

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return backward(ctx, *gradients)

        self._function = Function

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _watched():
            return self.op(*arguments)
        tracked = False
        for x in arguments:
            if isinstance(x, Tensor):
                if type(x) not in _PLAIN or x.is_meta:
                    return self.op(*arguments)
                tracked = tracked or x.requires_grad
        if not tracked or not torch.is_grad_enabled():
            return self._run(*arguments)
        # Without gradients of its own it must say so where they are asked for, as `op` does.
        return self.op(*arguments) if self._function is None else self._function.apply(*arguments)


def custom_op(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], CustomOp]:
    """Makes a function an operator `archlab::name`, which changes none of its arguments and returns none of them."""

    def wrap(run: Callable[..., Any]) -> CustomOp:
        op = torch.library.custom_op(f"archlab::{name}", run, mutates_args=(), schema=schema)
        return CustomOp(op, run)

    return wrap


def _watched() -> bool:
    """Whether a mode looks at every call (counters of FLOPs, fake tensors), or functorch or forward mode changes it."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0

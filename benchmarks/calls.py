"""What a call of an operator takes of the host: straight, as eager models call it, and through torch.library.

    python benchmarks/calls.py    # processor time; on a GPU the host's time for launching, at a size that is nothing

Above 1: ours is faster. The operator is the RMSNorm of `kernels/norms` on a GPU, and a stand-in of the same arguments
that only allocates its results where Triton does not run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.custom_op import CustomOp, custom_op


@custom_op("benchmark_rows")
def rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@custom_op("benchmark_rows_backward")
def rows_backward(dout: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dout), torch.empty_like(x[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0])


rows.register_fake(lambda x, weight, eps: (torch.empty_like(x), x.new_empty(x.shape[:-1])))
rows_backward.register_fake(lambda dout, x: (torch.empty_like(dout), torch.empty_like(x[0])))
rows.register_autograd(lambda ctx, dout, _: (*rows_backward(dout, *ctx.saved_tensors), None), setup_context=_save)


def operator() -> tuple[CustomOp, tuple[Any, ...], int]:
    """An operator, its arguments, and which of its results has the gradient."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = (torch.randn(*shape, device=device).requires_grad_() for shape in ((64, 768), (768,)))
    if device == "cpu":
        return rows, (x, weight, 1e-6), 0
    from archlab.kernels.norms.triton import _norm_rows

    return _norm_rows, (x, None, weight, None, 1e-6, False, 1.0), 1


def microseconds(call: Callable[[], object], calls: int = 1000) -> float:
    """Of one call, by processor time."""
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls * 1e6


def main() -> None:
    torch.set_num_threads(1)
    op, arguments, place = operator()
    ones = torch.ones_like(arguments[0])

    def both(call: Callable[..., Any]) -> None:
        torch.autograd.grad(call(*arguments)[place], arguments[0], ones)

    passes: dict[str, Callable[[Callable[..., Any]], object]] = {
        "forward": lambda call: call(*arguments),
        "forward and backward": both,
    }
    for name, run in passes.items():
        took: dict[str, list[float]] = {"straight": [], "torch.library": []}
        for _ in range(7):
            for way, call in (("straight", op), ("torch.library", op.op)):
                took[way].append(microseconds(partial(run, call)))
        straight, library = (statistics.median(each) for each in took.values())
        print(f"{name}: {straight:.0f} us, torch.library {library:.0f} us, ratio {library / straight:.2f}")


if __name__ == "__main__":
    main()

"""Attention in Triton: biases and masks are computed tile by tile, gradients without atomics.

The gradient of a relative bias leaves the kernel as one row of sums by distance per tile of queries, that of a forget
gate as sums over queries, that of sinks from each query's total: torch sums them, in the same order on every run.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import interpret
from kernels.attention import plan as planned
from kernels.attention.builds import builds
from kernels.attention.pattern import CAUSAL, Pattern
from kernels.attention.plan import Plan, encoded, with_rows
from kernels.attention.reference import expected
from kernels.attention.tuning import widest
from kernels.launch import capability, on_device_of

__all__ = ["attention", "builds"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    pattern: Pattern = CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: Tensor | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    relative: Tensor | None = None,
    decay: Tensor | None = None,
    prune: float | None = None,
) -> Tensor:
    """Shapes and meaning as in the reference; `prune` leaves out tiles of keys that a forget gate has closed.

    Raises ValueError for heads wider than 256, and for what the reference refuses.
    """
    expected(q, k, pattern, bias, relative, decay, prune)
    most = 256 if interpret.active() else widest(capability(), 8 * q.itemsize)
    if max(q.shape[-1], v.shape[-1]) > most:
        raise ValueError(f"a head is at most {most} wide here; received {q.shape[-1]} and values of {v.shape[-1]}")
    if documents is not None and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"documents need as many queries as keys; received {q.shape[-2]} and {k.shape[-2]}")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    given = bias, relative, decay, sinks, prefix, documents, padding
    numbers = encoded(pattern), factor, softcap or 0.0, prune or 0.0
    out: Tensor = _attention(q, k.to(q.dtype), v.to(q.dtype), *given, *numbers)[0]
    return out


def _like(x: Tensor, width: int) -> Tensor:
    """Uninitialised `[B,H,T,width]` whose heads lie side by side at each position, as the maps around attention do."""
    batch, heads, length = x.shape[:3]
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


@torch.library.custom_op("archlab::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relative: Tensor | None, decay: Tensor | None,
    sinks: Tensor | None, prefix: Tensor | None, documents: Tensor | None, padding: Tensor | None,
    numbers: list[int], scale: float, softcap: float, prune: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the logarithm in base 2 of each query's total `[B,H,T]`."""
    plan = Plan(q, k, v, bias, relative, decay, sinks, prefix, documents, padding, numbers, scale, softcap, prune)
    out = _like(q, v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with on_device_of(q):
        planned.forward_launch(plan, out, lse).run()
    return out, lse


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relative: Tensor | None, decay: Tensor | None,
    sinks: Tensor | None, prefix: Tensor | None, documents: Tensor | None, padding: Tensor | None,
    numbers: list[int], scale: float, softcap: float, prune: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _like(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("archlab::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, learned: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    relative: Tensor | None, decay: Tensor | None, sinks: Tensor | None, prefix: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, numbers: list[int], scale: float, softcap: float, prune: float,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, and of bias (if `biased`), relative (if `learned`), decay and sinks, the latter empty where
    they are not there."""
    plan = Plan(q, k, v, bias, relative, decay, sinks, prefix, documents, padding, numbers, scale, softcap, prune)
    square = (plan.batch, plan.sizes.heads, plan.sizes.queries, plan.sizes.keys)
    dout = with_rows(dout)
    dq, dk, dv = (_like(x, x.shape[-1]) for x in (q, k, v))
    along = torch.empty_like(lse)
    dsums = None if decay is None else lse.new_empty(plan.batch, plan.sizes.heads, plan.sizes.keys)
    dbias = torch.zeros(square, dtype=bias.dtype, device=q.device) if biased and bias is not None else None
    with on_device_of(q):
        planned.delta_launch(plan, out, dout, along).run()
        planned.keys_launch(plan, dout, lse, along, dk, dv, dsums).run()
        of_queries, sums = planned.queries_launch(plan, dout, lse, along, dq, dbias, learned)
        of_queries.run()
    return dq, dk, dv, *_of_biases(plan, bias, relative, decay, sinks, dbias, sums, dsums, lse, along)


def _of_biases(
    plan: Plan, bias: Tensor | None, relative: Tensor | None, decay: Tensor | None, sinks: Tensor | None,
    dbias: Tensor | None, sums: Tensor | None, dsums: Tensor | None, lse: Tensor, along: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums that the kernels leave to torch. A sink takes p = exp(sink) / total of each query, and -p delta of its
    gradient; the sums of ds over keys are p delta then."""
    taken = None if plan.sinks is None else (plan.sinks[:, None] - lse).exp2() * along
    found = [lse.new_empty(0) for _ in range(4)]
    if dbias is not None and bias is not None:
        found[0] = dbias.float().sum_to_size(bias.shape).to(bias.dtype)
    if sums is not None and relative is not None:
        found[1] = sums.sum((0, 2)).sum_to_size(relative.shape).to(relative.dtype)
    if dsums is not None and decay is not None:
        if taken is not None:
            dsums[..., plan.sizes.keys - plan.sizes.queries :] += taken
        found[2] = dsums.sum_to_size(decay.shape).to(decay.dtype)
    if taken is not None and sinks is not None:
        found[3] = -taken.sum((0, 2)).to(sinks.dtype)
    return found[0], found[1], found[2], found[3]


@_attention_backward.register_fake
def _(
    dout: Tensor, out: Tensor, lse: Tensor, learned: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    relative: Tensor | None, decay: Tensor | None, sinks: Tensor | None, prefix: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, numbers: list[int], scale: float, softcap: float, prune: float,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def own(x: Tensor | None, asked: bool = True) -> Tensor:
        shape, dtype = (0,) if x is None or not asked else x.shape, lse.dtype if x is None or not asked else x.dtype
        return lse.new_empty(shape, dtype=dtype)

    dq, dk, dv = (_like(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv, own(bias, biased), own(relative, learned), own(decay), own(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs[:10])
    ctx.numbers = inputs[10:]


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """`dlse` is unused: the totals leave the op only for this function."""
    out, lse, *given = ctx.saved_tensors
    learned = given[4] is not None and ctx.needs_input_grad[4]
    biased = given[3] is not None and ctx.needs_input_grad[3]
    grads = _attention_backward(dout, out, lse, learned, *given, *ctx.numbers, biased)
    asked = (True, True, True, biased, learned, given[5] is not None, given[6] is not None)
    found = [grad if wanted else None for grad, wanted in zip(grads, asked, strict=True)]
    return *found, *(None,) * 7


_attention.register_autograd(_differentiate, setup_context=_save)

"""Attention in Triton: biases and masks are computed tile by tile, gradients without atomics.

The gradient of a relative bias leaves the kernel as one row of sums by distance per tile of queries, that of a forget
gate as sums over queries, that of sinks from each query's total: torch sums them, in the same order on every run.
"""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels import interpret
from archlab.kernels.attention import plan as planned
from archlab.kernels.attention.builds import builds
from archlab.kernels.attention.inputs import SCHEMA, TENSORS, Inputs, checked, handed, received
from archlab.kernels.attention.plan import Plan
from archlab.kernels.attention.tuning import widest
from archlab.kernels.custom_op import custom_op
from archlab.kernels.launch import capability, on_device_of, side_by_side

__all__ = ["attention", "builds"]

# Beside a sink much cancels in dp - delta, and in half precision delta has the rounding of weights and output. Many
# queries average it out: up to so many are computed in float32.
FEW = 16
LEARNED = ("q", "k", "v", "bias", "relative", "decay", "sinks", "gate")


def attention(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Arguments as in the reference; tiles of keys that are beyond the reach of a forget gate are left out.

    Raises ValueError for heads wider than 256, for first keys beside a window, and for what the reference refuses.
    """
    call = checked(q, k, v, **given)
    if call.pattern.first is not None:
        raise ValueError(f"tiles hold the keys of a window side by side, without first ones; received {call.pattern}")
    most = 256 if interpret.active() else widest(capability(), 8 * q.itemsize)
    if max(q.shape[-1], v.shape[-1]) > most:
        raise ValueError(f"a head is at most {most} wide here; received {q.shape[-1]} and values of {v.shape[-1]}")
    if call.documents is not None and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"documents need as many queries as keys; received {q.shape[-2]} and {k.shape[-2]}")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    dtype = q.dtype
    if call.sinks is not None and q.shape[-2] <= FEW and torch.is_grad_enabled():
        q, k, v = q.float(), k.float(), v.float()
    out: Tensor = _attention(*handed(call._replace(q=q, k=k.to(q.dtype), v=v.to(q.dtype))))[0]
    return out.to(dtype)


def _like(x: Tensor, width: int) -> Tensor:
    """Uninitialised `[B,H,T,width]` whose heads lie side by side at each position, as the maps around attention do."""
    batch, heads, length = x.shape[:3]
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


@custom_op("attention", schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def _attention(*given: Any) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm in base 2 of each query's total `[B,H,T]`."""
    plan = Plan(received(*given))
    out, lse = _results(*given)
    with on_device_of(plan.q):
        planned.forward_launch(plan, out, lse).run()
    return out, lse


@_attention.register_fake
def _results(*given: Any) -> tuple[Tensor, Tensor]:
    call = received(*given)
    return _like(call.q, call.v.shape[-1]), call.q.new_empty(call.q.shape[:3], dtype=torch.float32)


_GRADS = ", ".join(["Tensor"] * len(LEARNED))


@custom_op(
    "attention_backward",
    schema=f"(Tensor dout, Tensor out, Tensor lse, bool biased, bool learned, {SCHEMA}) -> ({_GRADS})",
)
def _attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, biased: bool, learned: bool, *given: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, and of bias (if `biased`), relative (if `learned`), decay, sinks and gate, empty where they
    are not there."""
    call = received(*given)
    plan = Plan(call)
    dout = side_by_side(dout)
    dq, dk, dv = (_like(x, x.shape[-1]) for x in (call.q, call.k, call.v))
    along = torch.empty_like(lse)
    dsums = None if call.decay is None else lse.new_empty(plan.batch, plan.sizes.heads, plan.sizes.keys)
    square = (plan.batch, plan.sizes.heads, plan.sizes.queries, plan.sizes.keys)
    dbias = torch.zeros(square, dtype=call.bias.dtype, device=dout.device) if biased and call.bias is not None else None
    dgate = None if call.gate is None else _like(call.gate, call.gate.shape[-1])
    passed = None if dgate is None else torch.empty_like(dout)
    with on_device_of(plan.q):
        planned.delta_launch(plan, out, dout, along, passed, dgate).run()
        dout = dout if passed is None else passed
        planned.keys_launch(plan, dout, lse, along, dk, dv, dsums).run()
        of_queries, sums = planned.queries_launch(plan, dout, lse, along, dq, dbias, learned)
        of_queries.run()
    gates = lse.new_empty(0) if dgate is None else dgate
    return dq, dk, dv, *_of_biases(plan, call, dbias, sums, dsums, lse, along), gates


def _of_biases(
    plan: Plan, call: Inputs, dbias: Tensor | None, sums: Tensor | None, dsums: Tensor | None, lse: Tensor,
    along: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums that the kernels leave to torch. A sink takes p = exp(sink) / total of each query, and -p delta of its
    gradient; the sums of ds over keys are p delta then."""
    taken = None if plan.sinks is None else (plan.sinks[:, None] - lse).exp2() * along
    found = [lse.new_empty(0) for _ in range(4)]
    if dbias is not None and call.bias is not None:
        found[0] = dbias.float().sum_to_size(call.bias.shape).to(call.bias.dtype)
    if sums is not None and call.relative is not None:
        found[1] = sums.sum((0, 2)).sum_to_size(call.relative.shape).to(call.relative.dtype)
    if dsums is not None and call.decay is not None:
        if taken is not None:
            dsums[..., plan.sizes.keys - plan.sizes.queries :] += taken
        found[2] = dsums.sum_to_size(call.decay.shape).to(call.decay.dtype)
    if taken is not None and call.sinks is not None:
        found[3] = -taken.sum((0, 2)).to(call.sinks.dtype)
    return found[0], found[1], found[2], found[3]


@_attention_backward.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, biased: bool, learned: bool, *given: Any) -> tuple[Tensor, ...]:
    call = received(*given)

    def own(x: Tensor | None, asked: bool = True) -> Tensor:
        return lse.new_empty(0) if x is None or not asked else x.new_empty(x.shape)

    dq, dk, dv = (_like(x, x.shape[-1]) for x in (call.q, call.k, call.v))
    dgate = lse.new_empty(0) if call.gate is None else _like(call.gate, call.gate.shape[-1])
    return dq, dk, dv, own(call.bias, biased), own(call.relative, learned), own(call.decay), own(call.sinks), dgate


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs[:TENSORS])
    ctx.numbers = inputs[TENSORS:]


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """`dlse` is unused: the totals leave the op only for this function."""
    out, lse, *given = ctx.saved_tensors
    asked = dict(zip(Inputs._fields, ctx.needs_input_grad, strict=True))
    found = _attention_backward(dout, out, lse, asked["bias"], asked["relative"], *given, *ctx.numbers)
    grads = dict(zip(LEARNED, found, strict=True))
    return tuple(grads.get(name) if wanted else None for name, wanted in asked.items())


_attention.register_autograd(_differentiate, setup_context=_save)

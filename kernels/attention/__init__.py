"""attention: softmax(scale q k^T + bias) v with grouped heads, causal masks and windows."""

from typing import Any

import torch
from torch import Tensor

from kernels.attention import reference, torch_ops
from kernels.op import Ask, Case, Implementation, Op


def _ask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> dict[str, Any]:
    return {"causal": causal, "bias": bias is not None, "window": window is not None}


def _slower_than_sdpa(ask: Ask) -> str | None:
    if ask.device.kind == "cpu" and ask.dtype == torch.bfloat16:
        return None
    return "slower than SDPA but for bfloat16 on the CPU"


def _imprecise_on_cpu(ask: Ask) -> str | None:
    if ask.device.kind == "cpu" and ask.dtype == torch.bfloat16:
        return "its bfloat16 gradients on the CPU are off by more than 5e-3"
    return None


def _pairs(q: Tensor, k: Tensor, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs are visible, for one head of one sequence."""
    queries, keys = q.shape[-2], k.shape[-2]
    if not causal:
        return queries * keys
    return sum(min(i, window or i) for i in range(keys - queries + 1, keys + 1))


def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> int:
    """The two products over visible pairs; the softmax is not counted."""
    return 2 * q.shape[0] * q.shape[1] * _pairs(q, k, causal, window) * (q.shape[-1] + v.shape[-1])


def _bytes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> int:
    out = q.numel() // q.shape[-1] * v.shape[-1] * q.element_size()
    return out + sum(x.numel() * x.element_size() for x in (q, k, v, bias) if x is not None)


def _case(name: str, arguments: dict[str, Any], length: int = 19, heads: int = 4, **shapes: tuple[int, ...]) -> Case:
    tensors = {"q": (2, heads, length, 8), "k": (2, 2, length, 8), "v": (2, 2, length, 8)} | shapes
    return Case(name, tensors, arguments)


def _cases() -> tuple[Case, ...]:
    causal, full = {"causal": True}, {"causal": False}
    return (
        _case("causal", causal, heads=2),
        _case("causal_grouped", causal),
        _case("causal_scale", {"causal": True, "scale": 0.3}),
        _case("full", full),
        _case("window", {"causal": True, "window": 5}),
        _case("window_beyond_length", {"causal": True, "window": 50}),
        _case("bias_per_head", causal, bias=(4, 19, 19)),
        _case("bias_shared", causal, bias=(1, 19, 19)),
        _case("bias_broadcast", full, bias=(1, 1, 19, 19)),
        _case("bias_window", {"causal": True, "window": 5}, bias=(4, 19, 19)),
        _case("length_1", causal, length=1),
        _case("wide_values", causal, v=(2, 2, 19, 12)),
        _case("cached_keys", causal, q=(2, 4, 3, 8)),
        _case("cross", full, q=(2, 4, 7, 8)),
        _case("long", causal, length=130),
    )


ATTENTION = Op(
    name="attention",
    version=1,
    reference=reference.attention,
    implementations={
        "torch_plain": Implementation(
            "torch",
            lambda: torch_ops.plain,
            "plain products: for bfloat16 on the CPU up to 3 times faster than SDPA, about as fast at 1024 keys",
            declines=_slower_than_sdpa,
        ),
        "torch": Implementation(
            "torch", lambda: torch_ops.sdpa, "torch's scaled_dot_product_attention", _imprecise_on_cpu
        ),
    },
    cases=_cases(),
    options={"causal": (True, False), "bias": (False, True), "window": (False, True)},
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
)

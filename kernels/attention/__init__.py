"""attention: softmax(scale q k^T + bias) v with grouped heads, masks, capped logits and sinks."""

from typing import Any

import torch
from torch import Tensor

from archlab.kernels import launch
from archlab.kernels.attention import listed, reference, torch_ops
from archlab.kernels.attention.cases import CASES, running_sum
from archlab.kernels.attention.pattern import CAUSAL, CROSS, FULL, Blocks, Pattern
from archlab.kernels.attention.probabilities import Weights, probabilities
from archlab.kernels.op import Ask, Implementation, Op, nbytes

__all__ = ["ATTENTION", "CAUSAL", "CROSS", "FULL", "Blocks", "Pattern", "Weights", "probabilities"]

OPTIONAL = (
    "bias", "softcap", "sinks", "prefix", "documents", "padding", "relative", "decay", "reach", "gate"
)  # fmt: skip
WIDEST = 256


def _ask(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = CAUSAL, **given: Any) -> dict[str, Any]:
    wide = max(q.shape[-1], v.shape[-1])
    found = {name: given.get(name) is not None for name in OPTIONAL}
    return pattern.options() | found | {"wide": wide > WIDEST, "beyond_128": wide > 128}


def _cannot_in_triton(ask: Ask) -> str | None:
    if ask.options["wide"]:
        return launch.unsupported(ask) or f"heads wider than {WIDEST}"
    if ask.options["first"]:
        return launch.unsupported(ask) or "reads the keys of a window side by side, and not the first ones beside it"
    if ask.options["beyond_128"] and ask.dtype != torch.float32 and (ask.device.capability or launch.OLDEST) >= (9, 0):
        return "the gradients of 64 rows, the least of sm_90's products, spill with half-precision heads beyond 128"
    return launch.unsupported(ask)


def _leaves_to_sdpa(ask: Ask) -> str | None:
    """SDPA knows plain causal and full attention by itself, and takes a bias that is a matrix already."""
    if _beyond_sdpa(ask):
        return launch.slow(ask)
    if ask.options["bias"]:
        return "SDPA takes a bias that is a matrix already"
    more = ("window", "strided", "blocks", "prefix", "documents", "relative", "decay")
    return launch.slow(ask) or (None if any(map(ask.options.get, more)) else "plain attention is SDPA's")


def _beyond_sdpa(ask: Ask) -> str | None:
    if ask.options["softcap"] or ask.options["sinks"]:
        return "SDPA knows no softcap and no sinks"
    return None


def _cannot_by_rows(ask: Ask) -> str | None:
    if not ask.options["causal"] or ask.options["prefix"]:
        return "some queries at a time read nothing ahead"
    if ask.options["documents"]:
        return "some queries at a time keep no documents apart"
    if ask.options["first"]:
        return "some queries at a time read keys side by side, and not the first ones beside a window"
    return _cannot_in_products(ask)


def _slower_by_rows(ask: Ask) -> str | None:
    if ask.device.kind != "cpu" or ask.dtype == torch.float16:
        return "some queries at a time are for the caches of a CPU"
    if ask.options["bias"] and ask.dtype == torch.bfloat16:
        return "a bias that is a matrix already is added faster at once in bfloat16"
    more = ("window", "strided", "bias", "relative", "decay", "sinks")
    return None if any(map(ask.options.get, more)) else "plain attention has no mask or bias to gain by"


def _cannot_by_blocks(ask: Ask) -> str | None:
    if not ask.options["blocks"]:
        return "has lists of blocks alone"
    more = ("prefix", "documents", "bias", "relative", "decay", "softcap", "sinks")
    return "has no biases, caps, sinks and documents" if any(map(ask.options.get, more)) else None


def _slower_by_blocks(ask: Ask) -> str | None:
    return None if ask.device.kind == "cpu" and ask.dtype != torch.float16 else "copies blocks for the caches of a CPU"


def _cannot_in_products(ask: Ask) -> str | None:
    if ask.options["sinks"] and ask.dtype == torch.bfloat16:
        return "its bfloat16 gradients of sinks are off by more than 5e-3"
    return None


def _slower_than_sdpa(ask: Ask) -> str | None:
    if _beyond_sdpa(ask):
        return None
    if ask.device.kind == "cpu":
        apart = ask.options["documents"] or ask.options["blocks"] or ask.options["causal"]
        if ask.dtype == torch.bfloat16 or (ask.options["relative"] and not apart):
            return None
    return "slower than SDPA but on the CPU for bfloat16, and for a bias by distance of all pairs"


def _cannot_in_sdpa(ask: Ask) -> str | None:
    if ask.device.kind == "cpu" and ask.dtype == torch.bfloat16:
        return "its bfloat16 gradients on the CPU are off by more than 5e-3"
    return _beyond_sdpa(ask)


def _flops(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = CAUSAL, **given: Any) -> int:
    """The two products over the pairs of the pattern, whatever the call hides or adds; the softmax is not counted."""
    return 2 * q.shape[0] * q.shape[1] * pattern.pairs(q.shape[-2], k.shape[-2]) * (q.shape[-1] + v.shape[-1])


def _bytes(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> int:
    out = q.numel() // q.shape[-1] * v.shape[-1] * q.element_size()
    return out + nbytes(q, k, v, *(x for x in given.values() if isinstance(x, Tensor)))


ATTENTION = Op(
    name="attention",
    reference=reference.attention,
    implementations={
        "triton": launch.in_triton(
            "attention",
            "tile by tile, biases and masks included: no matrix of all pairs in memory beside a learned bias's own",
            _cannot_in_triton,
            _leaves_to_sdpa,
        ),
        "torch_rows": Implementation(
            "torch",
            lambda: torch_ops.by_rows,
            "plain products of 128 to 256 queries at a time with the keys that they reach, so about half of the square "
            "or what the window holds: 1.2 to 3 times as fast as SDPA with a mask from 512 tokens on",
            _cannot_by_rows,
            _slower_by_rows,
        ),
        "torch_blocks": Implementation(
            "torch",
            lambda: listed.by_blocks,
            "products of each block with the blocks that it reads: 1.3 to 4 times as fast as SDPA with a mask",
            _cannot_by_blocks,
            _slower_by_blocks,
        ),
        "torch_plain": Implementation(
            "torch",
            lambda: torch_ops.plain,
            "plain products: on the CPU for bfloat16 up to 3 times faster than SDPA, about as fast at 1024 keys",
            _cannot_in_products,
            _slower_than_sdpa,
        ),
        "torch": Implementation(
            "torch", lambda: torch_ops.sdpa, "torch's scaled_dot_product_attention", _cannot_in_sdpa
        ),
    },
    cases=CASES,
    options={"causal": (True, False)}
    | dict.fromkeys(("window", "strided", "blocks", "first", *OPTIONAL, "wide", "beyond_128"), (False, True)),
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
    domains={"decay": running_sum},
)

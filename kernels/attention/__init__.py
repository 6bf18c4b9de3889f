"""attention: softmax(scale q k^T + bias) v with grouped heads, masks, capped logits and sinks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.attention import reference, torch_ops
from kernels.attention.pattern import CAUSAL, CROSS, FULL, BlockLists, Blocks, Pattern, Visits
from kernels.attention.probabilities import Weights, probabilities
from kernels.op import Ask, Call, Case, Implementation, Op

__all__ = [
    "ATTENTION",
    "CAUSAL",
    "CROSS",
    "FULL",
    "BlockLists",
    "Blocks",
    "Pattern",
    "Visits",
    "Weights",
    "probabilities",
]

OPTIONAL = ("bias", "softcap", "sinks", "prefix", "documents", "padding", "relative", "decay")
WIDEST = 256


def _ask(
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
) -> dict[str, Any]:
    given = (bias, softcap, sinks, prefix, documents, padding, relative, decay)
    found = {name: value is not None for name, value in zip(OPTIONAL, given, strict=True)}
    wide = max(q.shape[-1], v.shape[-1])
    return pattern.options() | found | {"wide": wide > WIDEST, "beyond_128": wide > 128}


def _load_triton() -> Call:
    from kernels.attention.triton import attention

    return attention


def _cannot_in_triton(ask: Ask) -> str | None:
    if ask.options["wide"]:
        return launch.unsupported(ask) or f"heads wider than {WIDEST}"
    if ask.options["beyond_128"] and ask.dtype != torch.float32 and (ask.device.capability or launch.OLDEST) >= (9, 0):
        return "sm_90's products have 64 rows, too many for the registers with heads wider than 128 in half precision"
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
    return _cannot_in_products(ask)


def _slower_by_rows(ask: Ask) -> str | None:
    if ask.device.kind != "cpu" or ask.dtype == torch.float16:
        return "some queries at a time are for the caches of a CPU"
    if ask.options["bias"] and ask.dtype == torch.bfloat16:
        return "a bias that is a matrix already is added faster at once in bfloat16"
    more = ("window", "strided", "bias", "relative", "decay", "sinks")
    return None if any(map(ask.options.get, more)) else "plain attention has no mask or bias to gain by"


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


def _flops(
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
) -> int:
    """The two products over the pairs of the pattern, whatever the call hides or adds; the softmax is not counted."""
    return 2 * q.shape[0] * q.shape[1] * pattern.pairs(q.shape[-2], k.shape[-2]) * (q.shape[-1] + v.shape[-1])


def _bytes(
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
) -> int:
    out = q.numel() // q.shape[-1] * v.shape[-1] * q.element_size()
    given = (q, k, v, bias, sinks, prefix, documents, padding, relative, decay)
    return out + sum(x.numel() * x.element_size() for x in given if x is not None)


def _running_sum(x: Tensor) -> Tensor:
    """Of the logarithms of a forget gate: it falls from key to key."""
    return (x.sigmoid() * 0.5).log().cumsum(-1) / 4


def _case(name: str, arguments: Mapping[str, Any], length: int = 19, heads: int = 4, **given: Any) -> Case:
    tensors = {"q": (2, heads, length, 8), "k": (2, 2, length, 8), "v": (2, 2, length, 8)}
    integers = given.pop("integers", {})
    return Case(name, tensors | given, arguments, integers)


def _cases() -> tuple[Case, ...]:
    causal, full, cross = ({"pattern": pattern} for pattern in (CAUSAL, FULL, CROSS))
    window, around = {"pattern": Pattern(window=5)}, {"pattern": Pattern("full", window=5)}
    strided, fixed = {"pattern": Pattern(window=3, stride=4)}, {"pattern": Pattern(stride=5, columns=2)}
    blocks = {"pattern": Pattern("full", blocks=Blocks(2, random=1, seed=3, heads=4))}
    capped = {**causal, "softcap": 1.5}
    apart = {"documents": ((0,) * 7 + (1,) * 12, (4,) * 3 + (2,) * 5 + (4,) * 11)}
    prefix = {"prefix": (4, 9)}
    padded = {"padding": ((False,) * 17 + (True,) * 2, (True,) * 3 + (False,) * 16)}
    alone = {"padding": ((True,) * 19, (False,) * 19)}
    both: dict[str, Any] = {"bias": (4, 19, 19), "sinks": (4,)}
    return (
        _case("causal", causal, heads=2),
        _case("causal_grouped", causal),
        _case("causal_scale", {**causal, "scale": 0.3}),
        _case("full", full),
        _case("window", window),
        _case("window_beyond_length", {"pattern": Pattern(window=50)}),
        _case("window_around", around),
        _case("strided", strided),
        _case("fixed", fixed),
        _case("blocks", blocks),
        _case("blocks_beyond_length", {"pattern": Pattern("full", blocks=Blocks(8, heads=4))}),
        _case("bias_per_head", causal, bias=(4, 19, 19)),
        _case("bias_shared", causal, bias=(1, 19, 19)),
        _case("bias_broadcast", full, bias=(1, 1, 19, 19)),
        _case("bias_window", window, bias=(4, 19, 19)),
        _case("bias_blocks", blocks, bias=(4, 19, 19)),
        _case("length_1", causal, length=1),
        _case("wide_values", causal, v=(2, 2, 19, 12)),
        _case("cached_keys", causal, q=(2, 4, 3, 8)),
        _case("cached_keys_window", window, q=(2, 4, 3, 8)),
        _case("cached_keys_strided", strided, q=(2, 4, 3, 8)),
        _case("cross", cross, q=(2, 4, 7, 8)),
        _case("cross_padding", cross, q=(2, 4, 7, 8), integers=padded),
        _case("cross_padding_alone", cross, q=(2, 4, 7, 8), integers=alone),
        _case("long", causal, length=130),
        _case("softcap", capped),
        _case("softcap_full_scale", {**full, "softcap": 0.5, "scale": 0.3}),
        _case("softcap_bias", capped, bias=(4, 19, 19)),
        _case("softcap_window", {**window, "softcap": 1.5}, heads=2),
        _case("sinks", causal, sinks=(4,)),
        _case("sinks_full", full, sinks=(4,)),
        _case("sinks_bias_window", window, bias=(1, 19, 19), sinks=(4,)),
        _case("sinks_length_1", cross, q=(2, 4, 7, 8), k=(2, 2, 1, 8), v=(2, 2, 1, 8), sinks=(4,)),
        _case("prefix", causal, integers=prefix),
        _case("prefix_window", window, integers=prefix),
        _case("padding", causal, integers=padded),
        _case("padding_full", full, integers=padded),
        _case("padding_blocks", blocks, integers=padded),
        _case("documents", causal, integers=apart),
        _case("documents_full", full, integers=apart),
        _case("documents_bias", causal, integers=apart, bias=(4, 19, 19)),
        _case("documents_window", window, integers=apart, heads=2),
        _case("documents_prefix_padding", causal, integers={**apart, **prefix, **padded}),
        _case("everything", {**window, "softcap": 1.5}, integers=apart, **both),
        _case("relative", causal, relative=(4, 37)),
        _case("relative_full", full, relative=(4, 37)),
        _case("relative_shared_window_sinks", window, relative=(1, 37), sinks=(4,)),
        _case("relative_cached_softcap", capped, q=(2, 4, 3, 8), relative=(4, 37)),
        _case("decay", causal, decay=(2, 4, 19)),
        _case("decay_shared_sinks_window", window, decay=(1, 4, 19), sinks=(4,)),
        _case("decay_cached", causal, q=(2, 4, 3, 8), decay=(2, 4, 19)),
        _case("decay_relative_bias", causal, decay=(2, 4, 19), relative=(4, 37), bias=(4, 19, 19)),
        _case("decay_documents_padding", causal, integers={**apart, **padded}, decay=(2, 4, 19)),
    )


ATTENTION = Op(
    name="attention",
    version=1,
    reference=reference.attention,
    implementations={
        "triton": Implementation(
            "triton",
            _load_triton,
            "tile by tile, biases and masks included: no matrix of all pairs in memory beside a learned bias's own",
            _cannot_in_triton,
            _leaves_to_sdpa,
            launch.missing,
        ),
        "torch_rows": Implementation(
            "torch",
            lambda: torch_ops.by_rows,
            "plain products of 128 to 256 queries at a time with the keys that they reach, so about half of the square "
            "or what the window holds: 1.2 to 3 times as fast as SDPA with a mask from 512 tokens on",
            _cannot_by_rows,
            _slower_by_rows,
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
    cases=_cases(),
    options={"causal": (True, False)}
    | dict.fromkeys(("window", "strided", "blocks", *OPTIONAL, "wide", "beyond_128"), (False, True)),
    ask=_ask,
    flops=_flops,
    bytes=_bytes,
    domains={"decay": _running_sum},
)

"""The calls of attention that every implementation is checked on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from archlab.kernels.attention.pattern import CAUSAL, CROSS, FULL, Blocks, Pattern
from archlab.kernels.op import Case


def running_sum(x: Tensor) -> Tensor:
    """Of the logarithms of a forget gate: it falls from key to key."""
    return (x.sigmoid() * 0.5).log().cumsum(-1) / 4


def _case(name: str, arguments: Mapping[str, Any], length: int = 19, heads: int = 4, **given: Any) -> Case:
    tensors = {"q": (2, heads, length, 8), "k": (2, 2, length, 8), "v": (2, 2, length, 8)}
    integers = given.pop("integers", {})
    return Case(name, tensors | given, arguments, integers)


_CAUSAL, _FULL, _CROSS = ({"pattern": pattern} for pattern in (CAUSAL, FULL, CROSS))
_WINDOW, _AROUND = {"pattern": Pattern(window=5)}, {"pattern": Pattern("full", window=5)}
_FIRST = {"pattern": Pattern(window=5, first=3)}
_STRIDED, _FIXED = {"pattern": Pattern(window=3, stride=4)}, {"pattern": Pattern(stride=5, columns=2)}
_BLOCKS = {"pattern": Pattern("full", blocks=Blocks(2, random=1, seed=3, heads=4))}
_BEYOND = {"pattern": Pattern("full", blocks=Blocks(8, heads=4))}
_CAPPED = {**_CAUSAL, "softcap": 1.5}
_APART = {"documents": ((0,) * 7 + (1,) * 12, (4,) * 3 + (2,) * 5 + (4,) * 11)}
_PREFIX = {"prefix": (4, 9)}
_PADDED = {"padding": ((False,) * 17 + (True,) * 2, (True,) * 3 + (False,) * 16)}
_ALONE = {"padding": ((True,) * 19, (False,) * 19)}
_REACH = torch.linspace(1, 4, 4)[:, None] - 0.36 * torch.arange(19.0)  # of the decays that are drawn, 3 to 13 keys
_REACHED = {**_CAUSAL, "reach": _REACH[None]}
_LAST_REACHED = {**_CAUSAL, "reach": _REACH[None, :, 16:]}

_MASKS = (
    _case("causal", _CAUSAL, heads=2),
    _case("causal_grouped", _CAUSAL),
    _case("causal_scale", {**_CAUSAL, "scale": 0.3}),
    _case("full", _FULL),
    _case("window", _WINDOW),
    _case("window_beyond_length", {"pattern": Pattern(window=50)}),
    _case("window_around", _AROUND),
    _case("window_first", _FIRST),
    _case("window_first_wide_values", _FIRST, v=(2, 2, 19, 12)),
    _case("strided", _STRIDED),
    _case("fixed", _FIXED),
    _case("chunked", {"pattern": Pattern(stride=5, columns=0)}),
    _case("blocks", _BLOCKS),
    _case("blocks_even", _BLOCKS, length=24),
    _case("blocks_beyond_length", _BEYOND),
    _case("length_1", _CAUSAL, length=1),
    _case("wide_values", _CAUSAL, v=(2, 2, 19, 12)),
    _case("cached_keys", _CAUSAL, q=(2, 4, 3, 8)),
    _case("cached_keys_window", _WINDOW, q=(2, 4, 3, 8)),
    _case("cached_keys_window_first", _FIRST, q=(2, 4, 3, 8)),
    _case("cached_keys_strided", _STRIDED, q=(2, 4, 3, 8)),
    _case("cross", _CROSS, q=(2, 4, 7, 8)),
    _case("cross_padding", _CROSS, q=(2, 4, 7, 8), integers=_PADDED),
    _case("cross_padding_alone", _CROSS, q=(2, 4, 7, 8), integers=_ALONE),
    _case("long", _CAUSAL, length=130),
    _case("prefix", _CAUSAL, integers=_PREFIX),
    _case("prefix_window", _WINDOW, integers=_PREFIX),
    _case("padding", _CAUSAL, integers=_PADDED),
    _case("padding_window_first", _FIRST, integers=_PADDED),
    _case("padding_full", _FULL, integers=_PADDED),
    _case("padding_blocks", _BLOCKS, integers=_PADDED),
    _case("documents", _CAUSAL, integers=_APART),
    _case("documents_full", _FULL, integers=_APART),
    _case("documents_window", _WINDOW, integers=_APART, heads=2),
    _case("documents_prefix_padding", _CAUSAL, integers={**_APART, **_PREFIX, **_PADDED}),
)
_LOGITS = (
    _case("bias_per_head", _CAUSAL, bias=(4, 19, 19)),
    _case("bias_shared", _CAUSAL, bias=(1, 19, 19)),
    _case("bias_broadcast", _FULL, bias=(1, 1, 19, 19)),
    _case("bias_window", _WINDOW, bias=(4, 19, 19)),
    _case("bias_blocks", _BLOCKS, bias=(4, 19, 19)),
    _case("softcap", _CAPPED),
    _case("softcap_full_scale", {**_FULL, "softcap": 0.5, "scale": 0.3}),
    _case("softcap_bias", _CAPPED, bias=(4, 19, 19)),
    _case("softcap_window", {**_WINDOW, "softcap": 1.5}, heads=2),
    _case("sinks", _CAUSAL, sinks=(4,)),
    _case("sinks_full", _FULL, sinks=(4,)),
    _case("sinks_bias_window", _WINDOW, bias=(1, 19, 19), sinks=(4,)),
    _case("sinks_length_1", _CROSS, q=(2, 4, 7, 8), k=(2, 2, 1, 8), v=(2, 2, 1, 8), sinks=(4,)),
    _case("sinks_one_query", _CAUSAL, q=(2, 4, 1, 8), sinks=(4,)),
    _case("sinks_one_query_one_key", _CAUSAL, length=1, sinks=(4,)),
    _case("documents_bias", _CAUSAL, integers=_APART, bias=(4, 19, 19)),
    _case("everything", {**_WINDOW, "softcap": 1.5}, integers=_APART, bias=(4, 19, 19), sinks=(4,)),
    _case("relative", _CAUSAL, relative=(4, 37)),
    _case("relative_full", _FULL, relative=(4, 37)),
    _case("relative_shared_window_sinks", _WINDOW, relative=(1, 37), sinks=(4,)),
    _case("relative_cached_softcap", _CAPPED, q=(2, 4, 3, 8), relative=(4, 37)),
    _case("decay", _CAUSAL, decay=(2, 4, 19)),
    _case("decay_shared_sinks_window", _WINDOW, decay=(1, 4, 19), sinks=(4,)),
    _case("decay_cached", _CAUSAL, q=(2, 4, 3, 8), decay=(2, 4, 19)),
    _case("decay_relative_bias", _CAUSAL, decay=(2, 4, 19), relative=(4, 37), bias=(4, 19, 19)),
    _case("decay_documents_padding", _CAUSAL, integers={**_APART, **_PADDED}, decay=(2, 4, 19)),
    _case("reach", _REACHED, decay=(2, 4, 19)),
    _case("reach_cached_sinks", _LAST_REACHED, q=(2, 4, 3, 8), decay=(1, 4, 19), sinks=(4,)),
    _case("reach_documents", _REACHED, integers=_APART, decay=(2, 4, 19), relative=(4, 37)),
)
_OUTPUTS = (
    _case("gate", _CAUSAL, gate=(2, 4, 19, 8)),
    _case("gate_headwise", _WINDOW, gate=(2, 4, 19, 1)),
    _case("gate_wide_values_decay_sinks", _CAUSAL, v=(2, 2, 19, 12), gate=(2, 4, 19, 12), decay=(2, 4, 19), sinks=(4,)),
)
CASES = _MASKS + _LOGITS + _OUTPUTS

"""What is compiled ahead of time of the attention kernels: what forget gates, T5 and GPT-OSS ask for."""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.attention.pattern import CAUSAL, Pattern
from kernels.attention.plan import Launch, Plan, delta_launch, encoded, forward_launch, keys_launch, queries_launch
from kernels.launch import Build

LENGTH = 256
WINDOW = Pattern(window=128)
FEATURES: dict[str, tuple[Pattern, tuple[str, ...]]] = {
    "decay": (CAUSAL, ("decay",)),
    "relative-learned": (CAUSAL, ("relative", "learned")),
    "window-sinks": (WINDOW, ("sinks",)),
}


def builds() -> Iterator[Build]:
    """Heads of 128 in bfloat16."""
    for name in FEATURES:
        yield from _of(name, 128, torch.bfloat16)


def _of(name: str, width: int, dtype: torch.dtype) -> Iterator[Build]:
    """The launches of a call, forward and backward."""
    pattern, features = FEATURES[name]
    q = torch.empty(1, LENGTH, 4, width, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, LENGTH, 2, width, dtype=dtype).transpose(1, 2)
    along = torch.empty(q.shape[:3])
    shapes: dict[str, Any] = {
        "bias": torch.empty(4, LENGTH, LENGTH, dtype=dtype), "relative": torch.empty(4, 2 * LENGTH - 1),
        "decay": torch.empty(1, 4, LENGTH), "sinks": torch.empty(4), "prefix": torch.zeros(1, dtype=torch.long),
        "documents": torch.zeros(1, LENGTH, dtype=torch.long), "padding": torch.zeros(1, LENGTH, dtype=torch.bool),
    }  # fmt: skip
    given: Any = [tensor if what in features else None for what, tensor in shapes.items()]
    cap = 30.0 if "softcap" in features else 0.0
    arguments: list[Any] = [q, k, k, *given, encoded(pattern), 0.1, cap, 0.0]
    plan = Plan(*arguments)
    dbias = torch.empty(1, 4, LENGTH, LENGTH, dtype=dtype) if "biased" in features else None
    launches: dict[str, Launch] = {"forward": forward_launch(plan, q, along)}
    if name == "decay":
        launches["delta"] = delta_launch(plan, q, q, along)
    launches["keys"] = keys_launch(plan, q, along, along, k, k, along if "decay" in features else None)
    launches["queries"] = queries_launch(plan, q, along, along, q, dbias, "learned" in features)[0]
    for kind, one in launches.items():
        label = f"attention-{kind}-{name}-{width}" + ("-float32" if dtype == torch.float32 else "")
        yield Build(label, one.kernel, one.arguments, one.meta)

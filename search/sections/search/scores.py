"""What a proposal of a search scored: its costs against limits, its goals as a sampler sees them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def excess(limits: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """The logarithm of cost over limit by constraint: above 0 where it is broken, 0.69 at twice the limit."""
    return {name: math.log(max(known[name], 1e-9) / limit) for name, limit in limits.items() if name in known}


def told(goals: Iterable[str], known: Mapping[str, float | None]) -> tuple[float | None, ...]:
    """What a sampler sees of each goal: natural logarithms, so that a factor counts the same everywhere; None: unknown.

    `known` has the validation loss, which is the logarithm of perplexity. Of whole numbers 0 counts as 1.
    """
    found: list[float | None] = []
    for goal in goals:
        value = known.get("loss" if goal == "perplexity" else goal)
        if value is None or not math.isfinite(value):
            found.append(None)
        elif goal == "perplexity":
            found.append(value)
        else:
            found.append(math.log(max(value, 1e-9 if goal == "step_time" else 1.0)))
    return tuple(found)


def measured(result: Mapping[str, Any] | None, tokens_per_step: int) -> dict[str, float | None]:
    """What a complete trial told: its validation loss in nats per token, seconds of a step, bytes."""
    result = result or {}
    rate = result.get("tokens_per_s")
    return {
        "loss": (result.get("validation") or {}).get("loss"),
        "step_time": tokens_per_step / rate if rate else None,
        "peak_memory": result.get("peak_memory_bytes"),
    }

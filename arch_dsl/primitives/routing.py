"""Which experts a token may have: those of the best groups, and those that have room left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP_SCORES = {"max": 1, "top2": 2}  # how many of a group's best scores are summed


def in_best_groups(scores: Tensor, groups: int, best: int, summed: int) -> Tensor:
    """Scores `[tokens, experts]`, -inf outside the `best` of all groups: those whose `summed` best scores sum to most.

    Groups are equally many experts one after another.
    """
    grouped = scores.unflatten(-1, (groups, -1))
    chosen = grouped.topk(summed).values.sum(-1).topk(best).indices
    open_groups = torch.zeros_like(grouped[..., 0]).scatter(-1, chosen, 1.0)
    found: Tensor = grouped.masked_fill(open_groups.unsqueeze(-1) == 0, float("-inf")).flatten(-2)
    return found


def room(tokens: int, top_k: int, experts: int, capacity: float) -> int:
    """How many of a sequence's tokens an expert serves: `capacity` times what it would get of an even load."""
    return math.ceil(capacity * tokens * top_k / experts)


def with_room(chosen: Tensor, padding: Tensor | None, experts: int, most: int) -> Tensor:
    """Which assignments `[batch, time, top_k]` are among the first `most` tokens of a sequence at their expert."""
    at = torch.zeros((*chosen.shape[:2], experts), dtype=torch.int64, device=chosen.device).scatter(-1, chosen, 1)
    if padding is not None:
        at = at.masked_fill(padding.unsqueeze(-1), 0)
    return at.cumsum(1).gather(-1, chosen) <= most

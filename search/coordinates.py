"""The coordinate check: whether what passes a model's sites keeps its size when the model grows wider.

Yang et al., arXiv:2203.03466, appendix D.1: a few steps of training at several widths. In a correct parametrisation of
width transfer no coordinate's size grows with the width; in the standard one it does, from the first steps on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import arch_dsl
from arch_dsl.context import Call
from arch_dsl.watching import Sight, Watch

if TYPE_CHECKING:
    from arch_dsl.model import Model
    from search.optimizers import Optimizer

STEPS, BATCH, TIME = 8, 4, 32
RATE = 0.02  # at the base, so that a few steps tell; a smaller one hides what grows
SEEDS = 3
GROWS = 0.3  # power of the width from which on a size counts as growing
_KINDS = frozenset({"stream", "update", "site", "heads", "attention"})


@dataclass(frozen=True)
class Coordinates:
    """By site the power of the width with which coordinates grow, the largest first."""

    powers: dict[str, float]
    widths: tuple[int, ...]

    @property
    def growing(self) -> dict[str, float]:
        """The sites whose coordinates grow."""
        return {site: power for site, power in self.powers.items() if power > GROWS}


def coordinates(models: Sequence[tuple[Model, Optimizer]]) -> Coordinates:
    """Of resolved models of one depth at several widths, each with its optimizer, on random tokens.

    Two sizes count, mean |x_0| at the start and mean |x_t - x_0| after a few steps, averaged over seeds: a site's power
    of d_model is the larger one of theirs.
    """
    sizes = [_sizes(model, optimizer) for model, optimizer in models]
    widths = tuple(model.d_model for model, _ in models)
    powers = {
        site: max(_power(widths, [each[site][kind] for each in sizes]) for kind in range(2))
        for site in sizes[0]
        if all(site in each for each in sizes)
    }
    return Coordinates(dict(sorted(powers.items(), key=lambda item: -item[1])), widths)


def _power(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Of sizes ~ width^power; none of what is 0, as maps that start at 0 make it."""
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0]) if min(sizes) > 0 else 0.0


def _sizes(model: Model, optimizer: Optimizer) -> dict[str, tuple[float, float]]:
    """The sizes at each site, averaged over the seeds."""
    found = [_trained(model, optimizer, seed) for seed in range(SEEDS)]
    return {site: tuple(np.mean([each[site] for each in found], 0).tolist()) for site in found[0]}


def _trained(model: Model, optimizer: Optimizer, seed: int) -> dict[str, tuple[float, float]]:
    """The mean |x_0| and |x_t - x_0| at each site, t being a few steps on one random batch."""
    module = arch_dsl.compile(model, backend="reference", seed=seed)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.vocab or 1, (BATCH, TIME + 1), generator=draw)
    update = optimizer.build(module.named_parameters(), RATE)
    for group in update.param_groups:
        group["lr"] = RATE * group.get("lr_factor", 1.0)
    before = _seen(module, tokens[:, :-1])
    for _ in range(STEPS):
        update.zero_grad()
        module.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        update.step()
    after = _seen(module, tokens[:, :-1])
    return {site: (float(x.abs().mean()), float((after[site] - x).abs().mean())) for site, x in before.items()}


def _seen(module: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What passes the sites, and the logits of attention and of tokens."""
    found: dict[str, torch.Tensor] = {}

    def see(sight: Sight) -> None:
        place = f"{sight.stack}.{sight.path}" if sight.stack else sight.path
        site = f"{sight.kind} {place} [layer {sight.layer}]" if sight.layer is not None else f"{sight.kind} {place}"
        if sight.kind != "attention":
            found[site] = sight.tensors["output"].detach().clone()
            return
        query, key = sight.tensors["query"], sight.tensors["key"]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        found[site] = (query @ key.transpose(-1, -2) * sight.tensors["given"].get("scale", 1.0)).detach()

    with torch.no_grad():
        found["logits"] = module(tokens, Call(watch=Watch(_KINDS, see)))
    return found

"""The coordinate check: whether what passes a model's sites keeps its size when the model grows wider.

Yang et al., arXiv:2203.03466, appendix D.1: a few steps of training at several widths. In a correct parametrisation of
width transfer no coordinate's size grows with the width; in the standard one it does, from the first steps on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import t as student

from archlab import arch_dsl
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.watching import Sight, Watch

if TYPE_CHECKING:
    from archlab.arch_dsl.model.model import Model
    from archlab.search.recipe.optimizers import Optimizer

STEPS, BATCH, TIME = 8, 4, 32
RATE = 0.02  # at the base, so that a few steps tell; a smaller one hides what grows
SEEDS = 5
GROWS = 0.4  # power of the width beyond which a size counts as growing; what is scaled wrongly has 0.5 or more
LEVEL = 0.95
_KINDS = frozenset({"stream", "update", "site", "heads", "attention"})


@dataclass(frozen=True)
class Coordinates:
    """By site the power of the width with which coordinates grow, the largest first, and what it is at least."""

    powers: dict[str, float]
    least: dict[str, float]
    widths: tuple[int, ...]

    @property
    def growing(self) -> dict[str, float]:
        """The sites whose coordinates grow, by more than the seeds scatter."""
        return {site: power for site, power in self.powers.items() if self.least[site] > GROWS}


def coordinates(models: Sequence[tuple[Model, Optimizer]]) -> Coordinates:
    """Of resolved models of one depth at several widths, each with its optimizer, on random tokens.

    Two sizes count, mean |x_0| at the start and mean |x_t - x_0| after a few steps. A site's power of d_model is the
    mean over seeds, at least the lower end of a one-sided t interval at 95%, of that size whose end is the larger one.
    """
    sizes = [[_trained(model, optimizer, seed) for seed in range(SEEDS)] for model, optimizer in models]
    widths = tuple(model.d_model for model, _ in models)
    found = {
        site: max(_power(widths, [[each[site][kind] for each in seeds] for seeds in sizes]) for kind in range(2))
        for site in sizes[0][0]
        if all(site in seeds[0] for seeds in sizes)
    }
    order = sorted(found, key=lambda site: -found[site][1])
    return Coordinates({site: found[site][1] for site in order}, {site: found[site][0] for site in order}, widths)


def _power(widths: Sequence[int], sizes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of sizes ~ width^power by width and seed: what it is at least, and its mean. 0 where they are 0, as maps that
    start at 0 make them."""
    if np.min(sizes) <= 0:
        return 0.0, 0.0
    each = np.polyfit(np.log(widths), np.log(sizes), 1)[0]  # of every seed
    half = float(student.ppf(LEVEL, len(each) - 1)) * float(each.std(ddof=1)) / math.sqrt(len(each))
    return float(each.mean()) - half, float(each.mean())


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

"""The smallest difference that a plan can resolve, from the noise that its store knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archlab.search.sections.seeds.noise import Noise, known_noise, noise_key
from archlab.search.sections.seeds.spec import most
from archlab.search.store.store import Store

if TYPE_CHECKING:
    from archlab.search.planning.plan import Plan


@dataclass(frozen=True)
class Resolution:
    """The smallest difference that a plan's intervals can leave zero out for: with `seeds`, those that its budget
    allows; `factor` times the seed noise of one trial (None: there is no interval), which is `difference` nats/token
    where the noise is known."""

    seeds: int
    df: int
    factor: float | None
    difference: float | None
    noise: Noise | None

    def __str__(self) -> str:
        """A sentence for a plan."""
        seeds = f"{self.seeds} seed{'s' if self.seeds != 1 else ''}"
        if self.factor is None:
            few = f"{seeds}: too few for an interval"
            return few if self.seeds else "nothing: the budget has no trial of every variant"
        if self.noise is None or self.difference is None:
            return (
                f"{seeds} resolve differences of {self.factor:.2g} times the noise of one trial's seed, which no study "
                f"of this store has told yet at this scale and data; this one will, on {self.df} degrees of freedom"
            )
        count = len(self.noise.studies)
        return (
            f"{seeds} resolve {self.difference:.2g} nats/token; from {self.noise.trials} trials of {count} "
            f"stud{'ies' if count > 1 else 'y'} at this scale and data (a trial's seed: "
            f"{math.sqrt(self.noise.variance):.2g}, on {self.noise.df} degrees of freedom)"
        )


def resolution(planned: Plan, store: Store | None) -> Resolution | None:
    """What a plan can resolve with the seeds that its budget allows; None where it compares nothing in pairs.

    With sequential seeds it is the half-width at the most seeds. Where a grid has several scales, the first variant's.
    """
    from archlab.search.statistics.contrast import MINIMUM_SEEDS, simultaneous_critical
    from archlab.search.statistics.dunnett import dunnett_critical
    from archlab.search.statistics.moderated import expected_df
    from archlab.search.statistics.sequential import TUNED_AT, always_valid_critical

    variants = planned.variants
    groups = {variant.batches for variant in variants}
    comparisons = sum(variant.name != variant.baseline for variant in variants)
    if not comparisons or len(groups) >= len(variants):
        return None
    seeds = _affordable(planned)
    rows = len(variants) - len(groups)
    noise = known_noise(store, noise_key(variants[0].record())) if store else None
    fixed = isinstance(planned.study.seeds, int)
    if seeds < (MINIMUM_SEEDS if fixed else 2):
        critical = math.inf
    elif fixed:
        critical = dunnett_critical(comparisons, expected_df(len(variants), len(groups), seeds))
    else:
        critical = always_valid_critical(seeds, rows * (seeds - 1), rows * (TUNED_AT - 1), comparisons)
    df, factor = rows * max(seeds - 1, 0), critical * math.sqrt(2 / max(seeds, 1))
    if noise is None or not math.isfinite(critical):
        return Resolution(seeds, df, factor if math.isfinite(factor) else None, None, noise)
    parts = 2 * noise.variance / seeds, noise.documents
    both = float(simultaneous_critical(*parts, critical, 10_000 if noise.documents else 0, comparisons))
    return Resolution(seeds, df, factor, both * math.sqrt(sum(parts)), noise)


def _affordable(planned: Plan) -> int:
    """The seeds of every variant that the budget allows, at most those that the study asks for."""
    budget, asked = planned.study.budget, most(planned.study.seeds)
    trials = [limit for limit in (budget.trials,) if limit is not None]
    if budget.tokens is not None:
        left = max(budget.tokens - sum(each.recipe.all_tokens for each in planned.beside), 0)
        trials.append(len(planned.beside) + left // planned.variants[0].recipe.all_tokens)
    over = max(planned.trials - min(trials), 0) if trials else 0
    return max(asked - -(-over // len(planned.variants)), 0)

"""The noise floor: what finished studies tell of the seed noise at a scale and on data, and what a plan can resolve."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from search.seeding import with_documents
from search.seeds import most
from search.selection import select, with_baselines
from search.store import Store
from search.trial import canonical_json

if TYPE_CHECKING:  # what needs scipy is imported where it is used: most commands ask for none of it
    from search.losses import Layout
    from search.planning import Plan

KIND = "noise"
TUNE_SD = "tune_sd"  # the study's decisions of this name: the noise that its tuning goes by
_KEYS = 1000  # of trials, the lowest: enough to tell whether studies share some
_READ = 8  # variants whose documents are read: all of them would take long in a study of thousands


@dataclass(frozen=True)
class Noise:
    """The variance of one trial around its variant and its seed, on `df` degrees of freedom, and that of the documents
    of a difference (0: unknown), in (nats/token)^2; from so many trials of these studies."""

    variance: float
    df: int
    documents: float
    trials: int
    studies: tuple[str, ...]


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


def noise_key(variant: dict[str, Any]) -> str:
    """Equal for variants of one scale on the same batches: data, tokens, context, batch, objective and rounded size.

    Parameters are rounded to the octave. `variant` is one of a study's record.
    """
    said = [variant["batches"], round(math.log2(max(variant["parameters"], 1)))]
    return hashlib.sha256(canonical_json(said).encode()).hexdigest()[:32]


def remember_noise(store: Store, study: str) -> None:
    """Keeps what a study's finished trials tell of the noise; a study that ran before replaces what it told then."""
    from search.losses import lay_out

    record = with_baselines(store.study(study))
    if any("batches" not in variant for variant in record["variants"]):
        return
    selections = select(record, store.study_trials(study))
    layout = lay_out(record, [with_documents(s) if i < _READ else s for i, s in enumerate(selections)])
    if layout.unit != "nats/token":
        return
    groups: dict[str, list[int]] = {}
    for row, variant in enumerate(record["variants"]):
        groups.setdefault(noise_key(variant), []).append(row)
    for key, rows in groups.items():
        told = _told(layout, rows)
        if told is not None:
            store.amend(KIND, key, study, told)


def _told(layout: Layout, rows: list[int]) -> dict[str, Any] | None:
    """What rows with equal batches tell, each trial once; None where they tell nothing of the seeds' noise."""
    from search.statistics import unbalanced_residual_variance

    losses, seen = layout.losses[rows].copy(), set[str]()
    for row, keys in zip(losses, layout.keys[rows], strict=True):
        row[[key is not None and key in seen for key in keys]] = np.nan
        seen.update(key for key in keys if key is not None)
    variance, df = unbalanced_residual_variance(losses)
    if variance is None:
        return None
    documents = [found[0] for row in rows if (found := layout.documents[row]) is not None and found[1] > 0]
    mean = float(np.mean(documents)) if documents else None
    return {"variance": variance, "df": df, "documents": mean, "trials": len(seen), "keys": sorted(seen)[:_KEYS]}


def known_noise(store: Store, key: str) -> Noise | None:
    """What the store's studies tell together; of studies that share trials, the one that tells most."""
    told = store.recall(KIND, key) or {}
    used, squares, df, trials = set[str](), 0.0, 0, 0
    studies: list[str] = []
    documents: list[float] = []
    for name, each in sorted(told.items(), key=lambda item: (-item[1]["df"], item[0])):
        if used.isdisjoint(each["keys"]):
            used.update(each["keys"])
            squares, df = squares + each["variance"] * each["df"], df + each["df"]
            trials += each["trials"]
            studies.append(name)
            documents += [] if each["documents"] is None else [each["documents"]]
    mean = float(np.mean(documents)) if documents else 0.0
    return Noise(squares / df, df, mean, trials, tuple(studies)) if df else None


def resolution(planned: Plan, store: Store | None) -> Resolution | None:
    """What a plan can resolve with the seeds that its budget allows; None where it compares nothing in pairs.

    With sequential seeds it is the half-width at the most seeds. Where a grid has several scales, the first variant's.
    """
    from search.contrast import MINIMUM_SEEDS, simultaneous_critical
    from search.dunnett import dunnett_critical
    from search.sequential import TUNED_AT, always_valid_critical

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
        critical = dunnett_critical(comparisons, rows * (seeds - 1))
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
        left = max(budget.tokens - _probe_tokens(planned), 0)
        trials.append(len(planned.probes) + left // planned.variants[0].recipe.all_tokens)
    over = max(planned.trials - min(trials), 0) if trials else 0
    return max(asked - -(-over // len(planned.variants)), 0)


def hear(planned: Plan, store: Store, decide: bool = False) -> None:
    """Tells a plan's tuning the seeds' noise at each variant's scale, as far as the store's studies had told it when
    the study first ran: decided once, so that what it tells itself meanwhile changes nothing.

    It is 0 for a study that had tuned before that, and where the budget has no trial of each variant to spare.
    """
    tuner, study = planned.tuner, planned.study.study
    if tuner is None:
        return
    tuner.noise = lambda _: 0.0
    spare, known = _spares(planned), dict[str, float]()
    fresh = not any(row["role"] == "tune" for row in store.study_trials(study))

    def told(key: str) -> float:
        noise = known_noise(store, key) if fresh and spare else None
        return math.sqrt(noise.variance) if noise else 0.0

    keys = {variant.name: noise_key(variant.record()) for variant in planned.variants}
    for key in dict.fromkeys(keys.values()):
        name = f"{TUNE_SD} {key}"
        found = store.decide(study, name, partial(told, key)) if decide else store.decided(study, name)
        known[key] = told(key) if found is None else float(found)
    tuner.noise = lambda variant: known.get(keys.get(variant.name, ""), 0.0)
    planned.forget()


def _spares(planned: Plan) -> bool:
    """Whether a trial more of every variant is within the budget."""
    budget, trials = planned.study.budget, planned.trials + len(planned.variants)
    mean = sum(variant.recipe.all_tokens for variant in planned.variants) / len(planned.variants)
    tokens = _probe_tokens(planned) + mean * (trials - len(planned.probes))
    return trials <= (budget.trials or math.inf) and tokens <= (budget.tokens or math.inf)


def _probe_tokens(planned: Plan) -> int:
    """The tokens of what a screen trains before all else."""
    return sum(probe.recipe.all_tokens for probe in planned.probes.values())

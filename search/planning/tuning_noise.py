"""The seeds' noise that a plan's tuning goes by, decided when the study first runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from archlab.search.sections.seeds.noise import known_noise, noise_key
from archlab.search.store.store import Store
from archlab.search.variants.variant import Variant

TUNE_SD = "tune_sd"  # the study's decisions of this name: the noise that its tuning goes by


def tuning_noise(
    study: str, variants: Iterable[Variant], spare: bool, store: Store | None, decide: bool = False
) -> Callable[[Variant], float]:
    """The seeds' noise of a variant at its scale, in nats/token, as far as the store's studies had
    told it when the study first ran: decided once, so that what it tells itself meanwhile changes nothing.

    It is infinite where none had told it: any two values may be as good as each other. It is 0 for a study that had
    tuned before that, and without `spare`: a budget for one more trial of each variant.
    """
    if store is None:
        return lambda _: math.inf if spare else 0.0
    fresh = not any(row["role"] == "tune" for row in store.study_trials(study))
    known = dict[str, float]()

    def told(key: str) -> float:
        if not (fresh and spare):
            return 0.0
        noise = known_noise(store, key)
        return math.sqrt(noise.variance) if noise else math.inf

    keys = {variant.name: noise_key(variant.record()) for variant in variants}
    for key in dict.fromkeys(keys.values()):
        name = f"{TUNE_SD} {key}"
        found = store.decide(study, name, partial(told, key)) if decide else store.decided(study, name)
        known[key] = told(key) if found is None else float(found)
    return lambda variant: known.get(keys.get(variant.name, ""), 0.0)

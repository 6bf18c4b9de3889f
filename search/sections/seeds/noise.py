"""The noise floor: what finished studies tell of the seed noise at a scale and on data, and what a plan can resolve."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.results.selection import with_baselines
from archlab.search.sections.rooms import select
from archlab.search.sections.seeds.decide import with_documents
from archlab.search.store.store import Store
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:  # what needs scipy is imported where it is used: most commands ask for none of it
    from archlab.search.results.losses import Layout

KIND = "noise"
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


def noise_key(variant: dict[str, Any]) -> str:
    """Equal for variants of one scale on the same batches: data, tokens, context, batch, objective and rounded size.

    Parameters are rounded to the octave. `variant` is one of a study's record.
    """
    said = [variant["batches"], round(math.log2(max(variant["parameters"], 1)))]
    return hashlib.sha256(canonical_json(said).encode()).hexdigest()[:32]


def remember_noise(store: Store, study: str) -> None:
    """Keeps what a study's finished trials tell of the noise; a study that ran before replaces what it told then."""
    from archlab.search.results.losses import lay_out

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
    from archlab.search.statistics.intervals import unbalanced_residual_variance

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

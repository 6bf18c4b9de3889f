"""The losses of a study as its intervals need them: a row per variant, a column per seed, documents beside them."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from archlab.search.results.comparable import is_one_tokenizer, lossy_of, tested_on
from archlab.search.results.selection import Selection
from archlab.search.statistics.contrast import Floats, document_variance
from archlab.search.statistics.intervals import Keys
from archlab.search.utils.untrusted import NoRegularFile, open_regular


@dataclass(frozen=True)
class Layout:
    """The losses [variant, seed] that enter the analysis, in `unit`, their trials' keys, the row that each is compared
    with (itself: none), and what stands for its batches: rows with equal ones pair. `seeds` names the columns."""

    losses: Floats
    keys: Keys
    bases: list[int]
    batches: Sequence[Hashable]
    unit: str
    documents: list[tuple[float, int] | None]
    undocumented: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


class DamagedDocuments(ValueError):
    """A file of per-document losses that can't be read; the message names it."""


def read_documents(folder: Path) -> dict[str, Any] | None:
    """The losses of a trial's test documents; None where it has none. Raises DamagedDocuments."""
    path = folder / "test_documents.npz"
    try:
        with open_regular(path, follow=True) as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in ("nll", "tokens", "bytes", *(["domain"] if "domain" in file else []))}
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, zlib.error, NoRegularFile, KeyError, EOFError, ValueError) as error:
        raise DamagedDocuments(f"{path} is damaged ({error}); remove it, and the comparison does without it") from error


def lay_out(record: dict[str, Any], selections: list[Selection], unit: str | None = None) -> Layout:
    """Losses of variants without a diverged seed, in the `unit` of another layout or in their own: across tokenizers
    bits per byte compare, unless one is lossy; across tests nothing does."""
    variants = record["variants"]
    seeds = sorted({*record["seeds"], *(seed for s in selections for seed in s.reported)})
    names = [selection.variant for selection in selections]
    texts = [tested_on(record, variant) for variant in variants]
    asked = [names.index(variant["baseline"]) for variant in variants]
    told = [(text, lossy_of(variant)) for text, variant in zip(texts, variants, strict=True)]
    bases = [base if told[base] == told[row] else row for row, base in enumerate(asked)]
    one_tokenizer = all(is_one_tokenizer([selections[row], selections[base]]) for row, base in enumerate(bases))
    unit = unit or ("nats/token" if one_tokenizer else "bits/byte")
    losses = np.full((len(selections), len(seeds)), np.nan)
    keys = np.full(losses.shape, None, object)
    places = {seed: place for place, seed in enumerate(seeds)}
    for row, selection in enumerate(selections):
        for seed, trial in selection.complete.items() if not selection.has_no_mean else ():
            losses[row, places[seed]] = trial["result"]["test"][_MEASURE[unit]]
            keys[row, places[seed]] = trial["key"]
    documents: list[tuple[float, int] | None] = []
    undocumented = []
    for row, (selection, base) in enumerate(zip(selections, bases, strict=True)):
        common = np.isfinite(losses[row]) & np.isfinite(losses[base])
        shared = [seed for seed, both in zip(seeds, common, strict=True) if both]
        found = pair_documents(selection, selections[base], shared, unit) if row != base and shared else None
        if row != base and shared and found is None:
            undocumented.append(selection.variant)
        documents.append(found)
    paired = record.get("paired", True)  # of a record whose variants don't tell their batches
    seen = [variant.get("batches") or ("" if paired else f"of {variant['name']}") for variant in variants]
    batches = [*zip(seen, texts, strict=True)]
    return Layout(losses, keys, bases, batches, unit, documents, undocumented, seeds)


_MEASURE = {"nats/token": "loss", "bits/byte": "bits_per_byte"}


def pair_documents(ours: Selection, base: Selection, seeds: list[int], unit: str) -> tuple[float, int] | None:
    """The document variance of a difference over `seeds`; None when a trial has no documents."""
    scale, size = (1.0, "tokens") if unit == "nats/token" else (1 / math.log(2), "bytes")
    sides = []
    for selection in (ours, base):
        known = (selection.reported[seed].get("documents") for seed in seeds)
        found = [documents for documents in known if documents is not None]
        if len(found) < len(seeds) or len({len(documents["nll"]) for documents in found}) > 1:
            return None
        sides.append(np.mean([np.asarray(d["nll"], np.float64) * scale for d in found], axis=0))
        sides.append(np.mean([np.asarray(d[size], np.float64) for d in found], axis=0))
    return document_variance(*sides)

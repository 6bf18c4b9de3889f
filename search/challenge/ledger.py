"""The ledger of a study: who was champion, which challengers were tried against whom, and what came of it.

The store remembers it, whole after every verdict. A baseline with another model, text or recipe begins another ledger:
nothing that was tried before says anything of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.store.store import Store, StoreRefused
from archlab.search.utils.canonical import canonical_json
from archlab.search.utils.names import ROUND, with_ending

if TYPE_CHECKING:
    from archlab.search.statistics.contrast import Floats

KIND = "challenge"
KEPT = "better"
IMPOSSIBLE = "impossible"
LOWER, NOT_LOWER = "lower", "not lower"  # with one seed, where several are confirmed together
Losses = list[float | None]


@dataclass(frozen=True)
class Entry:
    """One challenger and its verdict: better (it is the champion from then on), worse, equivalent, hopeless (more
    seeds would not make it better), undecided (no more seeds), diverged, failed, or impossible on top of the champion
    that it met, for a `reason`. Where several are confirmed together, lower or not lower with one seed; what confirms
    them is an entry of its own, whose `parts` are their names.

    `changes` are a list of component names and mappings of paths, `against` the champion's name. `difference` is the
    mean paired validation loss in nats per token, `half_width` that of its interval at `level`; `test` the difference
    on the test set, which is looked at when a challenger is kept and never before. `near` names earlier ones that
    change the same. `trials` were trained for it. `why` is what the proposer said of it. `one_seed` says that it was
    looked at with one seed alone, which is no test: whatever it came to, it had no chance to be kept.
    """

    number: int
    name: str
    changes: list[Any]
    against: str
    verdict: str
    seeds: int
    level: float
    difference: float | None = None
    half_width: float | None = None
    test: float | None = None
    near: list[str] = field(default_factory=list)
    trials: int = 0
    reason: str = ""
    why: str = ""
    parts: list[str] = field(default_factory=list)
    one_seed: bool = False

    @classmethod
    def of(cls, told: dict[str, Any]) -> Entry:
        """What the store kept of one."""
        told = {"one_seed": told["verdict"] in (LOWER, NOT_LOWER), **told}
        return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})


@dataclass
class Ledger:
    """`rows` has the validation losses of every variant by seed, under the identity of its trials; `base` is that of
    the study's baseline, which is called `first`. `after` are the rounds of the study's earlier ledgers."""

    study: str
    first: str
    base: str
    rows: dict[str, Losses] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    after: int = 0

    @classmethod
    def of(cls, study: str, base: str, told: dict[str, Any]) -> Ledger:
        """What the store kept of one."""
        entries = [Entry.of(entry) for entry in told["entries"]]
        return cls(study, told["first"], base, told["rows"], entries, told.get("after", 0))

    def round(self, number: int) -> str:
        """What the store calls the study of the entry with this number."""
        return round_of(self.study, self.after + number)

    @property
    def kept(self) -> list[Entry]:
        """The champions after the baseline, in order."""
        return [entry for entry in self.entries if entry.verdict == KEPT]

    @property
    def champion(self) -> str:
        """The newest of them, else the study's baseline."""
        return self.kept[-1].name if self.kept else self.first

    @property
    def candidate(self) -> list[Entry]:
        """Those that were lower with one seed, each on top of the one before, and are to be confirmed together."""
        last = max((each.number for each in self.entries if each.parts or each.verdict == KEPT), default=0)
        return [each for each in self.entries[last:] if each.verdict == LOWER]

    def stands(self, entry: Entry) -> bool:
        """Whether its changes are in the champion, by itself or as a part, or wait in the candidate."""
        if entry.verdict != LOWER:
            return entry.verdict == KEPT
        settled = next((each for each in self.entries[entry.number :] if each.parts or each.verdict == KEPT), None)
        return settled is None or (settled.verdict == KEPT and entry.name in settled.parts)

    @property
    def tests(self) -> int:
        """How many had a chance to be kept."""
        return sum(not each.one_seed and each.verdict != IMPOSSIBLE for each in self.entries)

    @property
    def chosen_by(self) -> int:
        """How many of the first seeds have chosen what is tested, so that they say nothing of it any more."""
        return int(any(each.one_seed for each in self.entries))

    def tried(self, changes: list[Any]) -> Entry | None:
        """The newest entry of the same changes."""
        text = canonical_json(changes)
        return next((entry for entry in reversed(self.entries) if canonical_json(entry.changes) == text), None)

    def near(self, changes: list[Any]) -> list[str]:
        """Up to three earlier challengers that change something which these changes change too, the newest first."""
        mine = {*paths_of(changes)}
        close = [entry for entry in reversed(self.entries) if mine & {*paths_of(entry.changes)}]
        return [f"{entry.name} ({entry.verdict})" for entry in close[:3]]

    def table(self, first: str, second: str) -> tuple[Floats, int, int]:
        """The losses [variant, seed] of all rows, and the places of two of them."""
        names = [*self.rows]
        width = max(map(len, self.rows.values()))
        table = np.full((len(names), width), np.nan)
        for place, losses in enumerate(self.rows.values()):
            table[place, : len(losses)] = [math.nan if value is None else value for value in losses]
        return table, names.index(first), names.index(second)

    def told(self) -> dict[str, Any]:
        """As JSON."""
        entries = [asdict(entry) for entry in self.entries]
        candidate = [entry.name for entry in self.candidate]
        looks = len(self.kept)
        return {
            "study": self.study,
            "champion": self.champion,
            "candidate": candidate,
            "test_looks": looks,
            "entries": entries,
        }

    def add(self, identity: str, losses: Losses) -> None:
        """Takes a variant's losses, unless more of them are known."""
        if len(losses) >= len(self.rows.get(identity, ())):
            self.rows[identity] = losses


def paths_of(changes: list[Any]) -> Iterator[str]:
    """The paths and components that changes name."""
    for each in changes:
        yield from [each] if isinstance(each, str) else each


def recall(store: Store, study: str, first: str, base: str) -> Ledger:
    """The ledger of a study, whose baseline is called `first` and trains `base`; an empty one where there is none.
    Raises StoreRefused for a damaged one."""
    key = _key(study, base)
    told = store.recall(KIND, key)
    if told is not None:
        return Ledger.of(study, base, told)
    if key in store.names([KIND]).get(KIND, {}):
        raise StoreRefused(f"the ledger of '{study}' is damaged; `archlab check` says how, and `--repair` removes it")
    others = [each for each in _all(store) if each.study == study]
    return Ledger(study, first, base, after=max((1 + each.after + len(each.entries) for each in others), default=0))


def remember(store: Store, ledger: Ledger) -> None:
    """Keeps it as it is now."""
    entries = [asdict(entry) for entry in ledger.entries]
    told = {"first": ledger.first, "rows": ledger.rows, "entries": entries, "after": ledger.after}
    store.remember(KIND, _key(ledger.study, ledger.base), told)


def ledgers(store: Store) -> dict[str, Ledger]:
    """The newest ledger of each study that has one, but for damaged ones."""
    return {each.study: each for each in _all(store)}


def _all(store: Store) -> Iterator[Ledger]:
    """Every ledger but damaged ones, the newest last."""
    kept, times = store.recall_all([KIND]).get(KIND, {}), store.names([KIND]).get(KIND, {})
    for key in sorted(kept, key=lambda each: times[each]):
        study, base = json.loads(key)
        yield Ledger.of(study, base, kept[key])


def round_of(study: str, number: int | str) -> str:
    """What the store calls the study of a challenger and its champion."""
    return with_ending(study, f"{ROUND}{number}")


def _key(study: str, base: str) -> str:
    return canonical_json([study, base])


def digest(keys: Mapping[str, str]) -> str:
    """Of what a variant trains under each recipe."""
    return hashlib.sha256(canonical_json(dict(keys)).encode()).hexdigest()[:16]

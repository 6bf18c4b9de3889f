"""Deletes a study of a store: its record, its decisions, and the trials that no other study wants."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from archlab.search.running.garbage import DELETED, size_of
from archlab.search.store import findings, notes
from archlab.search.store.lock import StudyLock, in_use
from archlab.search.store.store import Store, StoreError


@dataclass(frozen=True)
class Deletion:
    """What goes with a study: the keys of its own trials, of which `complete` have a result, the seconds that these
    trained and the bytes of their folders; and how many trials `stay`, as other studies want them too."""

    study: str
    keys: tuple[str, ...]
    complete: int
    train_s: float
    size: int
    stay: int


def found(store: Store, study: str) -> Deletion:
    """What deleting a study would remove. Changes nothing. Raises StoreRefused for an unknown study."""
    store.study(study)
    rows = {row["key"]: row for gone in (False, True) for row in store.study_trials(study, orphaned=gone)}
    shared = store.wanted_elsewhere(study, rows)
    own = {key: row for key, row in rows.items() if key not in shared}
    ended = [row for row in own.values() if row["state"] == "complete"]
    seconds = sum(float((row["result"] or {}).get("train_s") or 0.0) for row in own.values())
    size = sum(size_of(Path(row["folder"])) for row in own.values())
    return Deletion(study, tuple(own), len(ended), seconds, size, len(shared))


def delete(store: Store, study: str) -> Deletion:
    """Deletes a study and its own trials; what trackers have of it stays there.

    The table comes first, in one transaction, then the folders: out of the way, then removed, so that `gc` finds what
    a kill leaves. Raises StudyLocked while the study runs, StoreError while another run of the store may be about to
    want its trials, StoreRefused for an unknown study.
    """
    with StudyLock(store.root, study), in_use(store.root, alone=True) as alone:
        if not alone:
            raise StoreError("a run of this store is under way, which may want the same trials: wait for its end")
        going = found(store, study)
        about = [*findings.places_of(study, going.keys), *notes.places_of(study, going.keys)]
        store.forget_study(study, going.keys, about)
        away = store.root / DELETED
        for key in going.keys:
            if (folder := store.trial_folder(key)).exists():
                away.mkdir(mode=0o700, exist_ok=True)
                os.replace(folder, away / key)
        if away.exists():
            shutil.rmtree(away)
    return going

"""Deletes a study of a store: its record, its decisions, and the trials that no other study has."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from archlab.search.store import findings, notes
from archlab.search.store.lock import StudyLock, in_use
from archlab.search.store.rows import is_key
from archlab.search.store.store import Store, StoreError
from archlab.search.utils.files import lock_file, read_json, size_of, write_whole

DELETED = "deleted"
"""Where in a store the trials of a deleted study lie until they are removed, and the list of those still to come."""


@dataclass(frozen=True)
class Going:
    """A trial that goes: its state, and the bytes of its folder."""

    key: str
    state: str
    folder: str
    size: int


@dataclass(frozen=True)
class Deletion:
    """What goes with a study: its rows of the trial table, its events and decisions, and the `trials` that are its own.

    Of these `complete` have a result, and all took `train_s` seconds and `size` bytes. So many trials `stay`, as other
    studies have them too.
    """

    study: str
    rows: int
    events: int
    decisions: int
    trials: tuple[Going, ...]
    complete: int
    train_s: float
    size: int
    stay: int

    @property
    def keys(self) -> list[str]:
        """Those of the trials that go."""
        return [each.key for each in self.trials]


def found(store: Store, study: str) -> Deletion:
    """What deleting a study would remove. Changes nothing. Raises StoreRefused for an unknown study."""
    store.study(study)
    rows = {row["key"]: row for gone in (False, True) for row in store.study_trials(study, orphaned=gone)}
    shared = store.wanted_elsewhere(study, rows)
    own = [row for key, row in rows.items() if key not in shared]
    going = tuple(Going(row["key"], row["state"], row["folder"], size_of(Path(row["folder"]))) for row in own)
    return Deletion(
        study,
        **store.extent(study, [each.key for each in going]),
        trials=going,
        complete=sum(each.state == "complete" for each in going),
        train_s=sum(float((row["result"] or {}).get("train_s") or 0.0) for row in own),
        size=sum(each.size for each in going),
        stay=len(shared),
    )


def delete(store: Store, study: str) -> Deletion:
    """Deletes a study and its own trials; what trackers have of it stays there.

    The table comes first, in one transaction, then the folders. A list of these is written before, by which `finish`
    finds what a kill leaves: a folder that is on no list stays, whatever the table says. Raises StudyLocked while the
    study runs, StoreError while a trial of it is written to or another run of the store may be about to want its
    trials, StoreRefused for an unknown study.
    """
    store.study(study)  # whose name is one, from here on
    with StudyLock(store.root, study), in_use(store.root, alone=True) as alone:
        if not alone:
            raise StoreError("a run of this store is under way, which may want the same trials: wait for its end")
        going = found(store, study)
        _refuse_written(going)
        finish(store)  # an earlier deletion of the same trials
        (store.root / DELETED).mkdir(mode=0o700, exist_ok=True)
        write_whole(_list_of(store, study), json.dumps({"keys": going.keys}))
        about = [*findings.places_of(study, going.keys), *notes.places_of(study, going.keys)]
        store.forget_study(study, going.keys, about)
        finish(store)
    return going


def left_over(store: Store) -> list[Path]:
    """What deletions that were killed have left: lists, and folders of trials that are no longer in the table."""
    away = store.root / DELETED
    return [*(away.iterdir() if away.is_dir() else ()), *(folder for _, folder in _still_there(store))]


def finish(store: Store) -> None:
    """Removes the folders of deleted trials, while no run of the store is under way: first all out of the way, as a
    part of a folder must never be taken for a trial, then each."""
    away = store.root / DELETED
    for key, folder in [*_still_there(store)]:
        if (away / key).exists():
            shutil.rmtree(away / key)
        os.replace(folder, away / key)
    for path in away.glob("*.json"):
        path.unlink()
    if away.exists():
        shutil.rmtree(away)


def _list_of(store: Store, study: str) -> Path:
    return store.root / DELETED / f"{study}.json"


def _still_there(store: Store) -> Iterator[tuple[str, Path]]:
    """Key and folder of the listed trials that the table no longer has."""
    for path in sorted((store.root / DELETED).glob("*.json")):
        found = (read_json(path) or {}).get("keys")
        keys = [key for key in found if is_key(key)] if isinstance(found, list) else []
        known = store.known(keys)
        yield from ((key, folder) for key in keys if key not in known and (folder := store.trial_folder(key)).exists())


def _refuse_written(going: Deletion) -> None:
    """Raises StoreError where a process that its driver left behind still writes to a trial."""
    for each in going.trials:
        if not Path(each.folder).is_dir():
            continue
        with lock_file(Path(each.folder) / "writer.lock") as take:
            if not take():
                told = "a process still trains it; wait until that has ended, or end it"
                raise StoreError(f"trial {each.key[:12]} of '{going.study}': {told}; nothing was removed")

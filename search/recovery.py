"""What a driver that died left running: results are committed, everything else is planned again."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from search.budget import attempt_spent
from search.lock import StudyLock, StudyLocked
from search.store import Store
from search.worker import read_result


def settle(store: Store, study: str, gpus: Callable[[], float], but: Container[str] = ()) -> list[str]:
    """Under that study's lock its running rows run no more, but for those that who has the lock runs himself.

    Each had so many GPUs. Returns the keys with a result.
    """
    done = []
    for orphan in store.orphans(study):
        key, attempt = orphan["key"], orphan["attempt"]
        if key in but:
            continue
        result = read_result(orphan["folder"])
        spent = attempt_spent(orphan["folder"], attempt, gpus())
        if result is not None:
            store.finish(key, attempt, result["state"], result, result.get("reason"), spent)
            done.append(key)
        else:
            store.release(key, attempt, "its driver ended", spent)
    return done


def take_over(store: Store, studies: Iterable[str], gpus: Callable[[], float]) -> list[str]:
    """Frees the rows of those studies whose driver is dead: nobody else would. Returns the keys that had a result."""
    done = []
    for study in studies:
        try:
            with StudyLock(store.root, study):
                done += settle(store, study, gpus)
        except StudyLocked:
            continue
    return done

"""What a driver that died left running: results are committed, everything else is planned again."""

from __future__ import annotations

from collections.abc import Container, Iterable

from archlab.search.sections.budget.spec import attempt_spent
from archlab.search.store.lock import StudyLock, StudyLocked
from archlab.search.store.store import Store
from archlab.search.trial.outcome_files import read_result


def settle(store: Store, study: str, but: Container[str] = ()) -> list[str]:
    """Under that study's lock its running rows run no more, but for those that who has the lock runs himself.

    What they took is the study's, on the GPUs that they were started with. Returns the keys with a result.
    """
    done = []
    for orphan in store.orphans(study):
        key, attempt = orphan["key"], orphan["attempt"]
        if key in but:
            continue
        result = read_result(orphan["folder"])
        spent = attempt_spent(orphan["folder"], attempt, _gpus(store, study, key, attempt))
        if result is not None:
            store.finish(key, attempt, result["state"], result, result.get("reason"), spent)
            done.append(key)
        else:
            store.release(key, attempt, "its driver ended", spent)
    return done


def _gpus(store: Store, study: str, key: str, attempt: int) -> float:
    started = [each for each in store.events(study, key) if (each["kind"], each["attempt"]) == ("running", attempt)]
    return float(started[-1]["detail"].get("gpus", 0.0)) if started else 0.0


def take_over(store: Store, studies: Iterable[str]) -> list[str]:
    """Frees the rows of those studies whose driver is dead: nobody else would. Returns the keys that had a result."""
    done = []
    for study in studies:
        try:
            with StudyLock(store.root, study):
                done += settle(store, study)
        except StudyLocked:
            continue
    return done

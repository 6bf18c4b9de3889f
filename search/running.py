"""Runs a study: plans it, locks it, trains what is missing, and leaves everything in the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from arch_dsl.identity import dump
from search.driver import drive
from search.executor import Executor, InlineExecutor
from search.lock import StudyLock
from search.planning import Plan, plan
from search.prune import Pruner
from search.seek import Seeker
from search.stop import Summary
from search.store import Store
from search.study import Study, load_study
from search.track import Shipper
from search.watch import validation_history

ENTRY = "search.train:train"
STORE = ".archlab"

Events = Callable[[dict[str, Any]], None]


def store_root(given: str | Path | None = None) -> Path:
    """The store folder: as given, else ARCHLAB_STORE, else `.archlab` here."""
    return Path(given or os.environ.get("ARCHLAB_STORE") or STORE)


def make_executor(kind: Literal["ray", "inline"], root: Path, *, cpus: int = 1, address: str | None = None) -> Executor:
    """What trains the trials: Ray, each trial in a pinned process of its own, or this very process."""
    if kind == "inline":
        return InlineExecutor(ENTRY, root / "data")
    from search.ray_executor import RayExecutor

    return RayExecutor(ENTRY, root / "data", cpus=cpus, address=address)


def run(
    study: Study | str | Path,
    store: str | Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    executor: Literal["ray", "inline"] = "ray",
    address: str | None = None,
    on_event: Events | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    track: bool = True,
) -> Summary:
    """Trains what is missing of a study and returns how it ended; after an interruption the same call goes on.

    Raises SpecError for a study that cannot mean anything, StudyLocked while another process runs it, StoreError for
    a store that cannot be used, ResourcesError for more than the machine has.
    """
    if not isinstance(study, Study):
        study = load_study(study, overrides)
    root = store_root(store).absolute()
    with Store.open(root) as opened, StudyLock(root, study.study) as lock:
        workers = make_executor(executor, root, cpus=study.resources.cpus, address=address)
        try:
            workers.start()
            planned = plan(study, root / "data")
            if on_plan:
                on_plan(planned)
            return _drive(planned, opened, workers, lock, on_event, track)
        finally:
            workers.close()


def _drive(
    planned: Plan, store: Store, workers: Executor, lock: StudyLock, on_event: Events | None, track: bool
) -> Summary:
    study = planned.study
    next_rows = planned.rows
    if study.search and study.space:
        next_rows = Seeker(planned, store, workers.slots).rows
    store.save_study(study.study, planned.record(), _text(study))
    return drive(
        store,
        study.study,
        next_rows,
        workers,
        shipper=Shipper(store.root, study.study) if track else None,
        on_event=on_event,
        budget_wall_s=study.budget.wall.seconds if study.budget.wall else None,
        budget_trials=study.budget.trials,
        should_prune=_pruning(study.prune, planned, store) if study.prune else None,
        lock=lock,
    )


def _text(study: Study) -> str:
    """The study as it was written; its model alone where it was made in Python."""
    return study.file.read_text() if study.file and study.file.exists() else dump(study.model)


def _pruning(pruner: Pruner, planned: Plan, store: Store) -> Callable[[str, int, list[tuple[int, float]]], bool]:
    """Compares a trial's validation losses with those of the study's other trials at the same step."""
    steps = planned.variants[0].recipe.steps

    def should_prune(key: str, step: int, history: list[tuple[int, float]]) -> bool:
        rows = store.study_trials(planned.study.study)
        if not any(row["key"] == key and row["role"] in ("tune", "search") for row in rows):
            return False  # repeats are what the table reports: they are never pruned
        others = {row["key"]: Path(row["folder"]) for row in rows if row["key"] != key and row["role"] != "repeat"}
        return pruner.should_prune(history, [validation_history(folder) for folder in others.values()], steps)

    return should_prune

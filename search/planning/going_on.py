"""Which of a plan's trials go on from shorter ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.shared_beginnings import FOLDER, fitting
from archlab.search.trial import checkpoint

if TYPE_CHECKING:
    from archlab.search.planning.plan import Plan
    from archlab.search.store.store import Store


@dataclass(frozen=True)
class GoingOn:
    """How many trials can go on from shorter ones, the last step from which one does, and how many are new."""

    trials: int
    step: int
    new: int

    def __str__(self) -> str:
        goes = (
            f"{self.trials} trials go on from shorter ones" if self.trials > 1 else "1 trial goes on from a shorter one"
        )
        new = "1 is new" if self.new == 1 else f"{self.new} are new"
        return f"{goes} (at most to step {self.step:,}, on machines alike); {new}"


def going_on(planned: Plan, store: Store) -> GoingOn | None:
    """Which of a plan's trials that have not begun can go on from shorter ones; None when none can."""
    root = store.root / FOLDER
    if planned.study.keep.log2 or not root.is_dir():
        return None
    rows = {row.trial.key: row for row in planned.rows(store.study_trials(planned.study.study))}
    known = store.known(rows)
    folders = {key: store.trial_folder(key) for key in known}
    begun = {key for key, folder in folders.items() if folder.is_dir() and checkpoint.steps_in(folder)}
    begun |= {key for key, each in known.items() if each["state"] != "planned"}
    fresh = [row for key, row in rows.items() if key not in begun]
    ways = [fitting(root, row.trial, load_recipe(row.trial.recipe)) for row in fresh if row.until is None]
    steps = [found[0][0] for found in ways if found]
    return GoingOn(len(steps), max(steps), len(fresh) - len(steps)) if steps else None

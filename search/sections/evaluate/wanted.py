"""What of `evaluate:` a finished trial lacks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from archlab.search.evaluation.measures import About, Measure
from archlab.search.sections.rooms import select
from archlab.search.store.findings import measured
from archlab.search.store.store import Store
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json

_NAMED = 5  # trials that a sentence names


@dataclass(frozen=True)
class Wanted:
    """A trial that finished with `step`, and those of the measures that are not known of it. `why` it cannot be
    evaluated, if so."""

    key: str
    variant: str
    seed: int
    data: str
    step: int
    measures: tuple[Measure, ...]
    why: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant} seed {self.seed}"


def without_weights(missing: Sequence[Wanted]) -> list[str]:
    """Of which trials something is missing that cannot be measured any more, in a sentence, if of any."""
    lost = [each.name for each in missing if each.why is not None]
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    told = f"not measured, as their weights are not kept any more: {', '.join(lost[:_NAMED])}{more}"
    return [f"{told}; they are never trained anew for it"] if lost else []


def standing(record: dict[str, Any], trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The finished trials that stand in the table of a study, each once: those that are measured."""
    chosen = (trial for selection in select(record, trials) for trial in selection.complete.values())
    return list({trial["key"]: trial for trial in chosen}.values())


def wanted(
    store: Store, measures: Iterable[Measure], trials: Iterable[dict[str, Any]], again: bool = False
) -> list[Wanted]:
    """What is missing of these measures, by trial, or with `again` all of it, but for what means nothing there."""
    evaluated = [measure for measure in measures if not measure.in_result]
    if not evaluated:
        return []
    rows, found = list(trials), []
    keys = [row["key"] for row in rows]
    known, ended = measured(store, keys), store.known(keys)
    for row in rows:
        trial = Trial.from_json(store.spec(row["key"]))
        data = last_data(trial)
        have = {} if again else known.get(row["key"], {})
        mine = [measure for measure in evaluated if measure.digest(data) not in have]
        if not mine:
            continue
        about = about_of(trial, store.root / "data")
        if mine := [measure for measure in mine if not measure.refusal(about)]:
            step = ended[row["key"]]["result"]["step"]
            why = None if has_weights(store.trial_folder(row["key"]), step) else "its weights are not kept any more"
            found.append(Wanted(row["key"], row["variant"], row["seed"], data, step, tuple(mine), why))
    return found


def has_weights(folder: Path, step: int) -> bool:
    """Whether a trial that finished with `step` still has its final weights."""
    return checkpoint.path_of(folder, step).exists()


def last_data(trial: Trial) -> str:
    """The identity of the data that a trial was tested on: that of its last stage."""
    own = [stage["prepared"] for stage in trial.recipe.get("stages", ()) if stage.get("prepared")]
    return own[-1] if own else trial.data


def about_of(trial: Trial, data_root: Path) -> About:
    """What a trial ended as, read once for all seeds."""
    return _about(canonical_json([trial.model, trial.recipe, trial.data]), data_root)


@lru_cache(maxsize=64)
def _about(text: str, data_root: Path) -> About:
    model, recipe, data = json.loads(text)
    return About.of(Trial(model, recipe, data, 0), data_root)

"""Records finished trials in Optuna's study of the same name: its plots, importances and dashboard serve all studies.

A study that searches belongs to its proposer, which tells its own trials; what such a study
repeats at its best is recorded here as `<study>/repeats`, where it cannot mislead the sampler. The probes of a screen,
whose losses are of another recipe, are no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.trackers.acknowledged import Shipped, Spool
from archlab.search.trackers.database import close_optuna, has_optuna, open_optuna
from archlab.search.trackers.tracked import Tracked, span_s, validation_history
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    import optuna

TARGET = "optuna"
_OTHERS = ("search",), ("screen",)  # roles of trials that the proposer tells, or whose losses mean something else


class OptunaSink:
    """One Optuna trial per trial and end: a failed one that completes later has both ends on record."""

    name = "Optuna"

    def __init__(self, store_root: Path, study: str, spool: Spool) -> None:
        self._root, self._name, self._spool = store_root, study, spool

    def pending(self, trials: Sequence[Tracked]) -> int:
        """How many ends are not recorded yet."""
        return len(self._unrecorded(trials))

    def ship(self, trials: Sequence[Tracked]) -> None:
        """Records what ended since. Raises what Optuna raises; the next call goes on from there."""
        if self._unrecorded(trials):
            storage = open_optuna(self._root)
            try:
                self._record(storage, trials)
            finally:
                close_optuna(storage)

    def _unrecorded(self, trials: Sequence[Tracked]) -> list[Tracked]:
        if not has_optuna(self._root):
            self._spool.forget(TARGET)
        told = self._spool.all(TARGET, self._name)
        return [
            trial
            for trial in trials
            if trial.finished and trial.roles not in _OTHERS and told.get(trial.key, Shipped()).told != trial.state
        ]

    def _record(self, storage: optuna.storages.RDBStorage, trials: Sequence[Tracked]) -> None:
        distributions = _distributions(trials)
        study = self._study(storage, any("search" in trial.roles for trial in trials), _shape(distributions))
        present = {(t.user_attrs.get("key"), t.user_attrs.get("state")) for t in study.get_trials(deepcopy=False)}
        for trial in trials:
            if trial.finished and trial.roles not in _OTHERS:
                if (trial.key, trial.state) not in present:
                    study.add_trial(_frozen(trial, distributions))
                self._spool.put(TARGET, self._name, trial.key, Shipped(told=trial.state))

    def _study(self, storage: optuna.storages.RDBStorage, searches: bool, shape: str) -> optuna.Study:
        """Ours, with parameters of this shape. Optuna fixes their kinds for good: with new ones it is written anew."""
        import optuna

        names = {each.study_name: each for each in optuna.get_all_study_summaries(storage)}
        proposed = self._name in names and "space" in names[self._name].user_attrs
        name = f"{self._name}/repeats" if searches or proposed else self._name
        if name in names and names[name].user_attrs.get("distributions") != shape:
            self._spool.forget(TARGET, self._name)
            optuna.delete_study(study_name=name, storage=storage)
        study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
        study.set_user_attr("distributions", shape)
        return study


def _params(trial: Tracked) -> dict[str, Any]:
    """Variant, learning rate, seed, and the settings of the row by their paths."""
    settings = {name: value for name, value in trial.settings.items() if name != "lr"}
    plain = {
        name: value if value is None or isinstance(value, str | int | float) else canonical_json(value)
        for name, value in settings.items()
    }
    return {"variant": trial.variant, "lr": trial.lr, "seed": trial.seed, **plain}


def _distributions(trials: Sequence[Tracked]) -> dict[str, optuna.distributions.BaseDistribution]:
    """From all the study's trials, finished or not, so that it does not change while they finish."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    columns: dict[str, list[Any]] = {}
    for trial in trials:
        if trial.roles not in _OTHERS:
            for name, value in _params(trial).items():
                columns.setdefault(name, []).append(value)
    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for name, values in columns.items():
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if name == "seed":
            found[name] = IntDistribution(min(values), max(values))
        elif numbers:
            found[name] = FloatDistribution(min(values), max(values), log=name == "lr" and min(values) > 0)
        else:
            choices = {canonical_json(value): value for value in values}
            found[name] = CategoricalDistribution([choices[text] for text in sorted(choices)])
    return found


def _shape(distributions: dict[str, optuna.distributions.BaseDistribution]) -> str:
    """What Optuna holds fixed about them: kinds and choices, not the limits of numbers."""
    return canonical_json(
        {name: [type(each).__name__, list(getattr(each, "choices", ()))] for name, each in distributions.items()}
    )


def _frozen(
    trial: Tracked, distributions: dict[str, optuna.distributions.BaseDistribution]
) -> optuna.trial.FrozenTrial:
    """A trial that ended. Its value is the validation loss; one that is not finite is no value, and a failure."""
    from optuna.trial import TrialState, create_trial

    params = _params(trial)
    validation = (trial.result or {}).get("validation") or {}
    loss = validation.get("loss")
    complete = trial.state == "complete" and loss is not None and math.isfinite(loss)
    state = TrialState.PRUNED if trial.state == "pruned" else TrialState.COMPLETE if complete else TrialState.FAIL
    attributes = {
        "key": trial.key,
        "state": trial.state,
        "roles": list(trial.roles),
        "reason": trial.reason,
        "reused": trial.reused,
        "test": (trial.result or {}).get("test"),
    }
    frozen = create_trial(
        state=state,
        value=loss if complete else None,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs=attributes,
        intermediate_values=validation_history(trial.metrics),
    )
    span = span_s(trial.metrics)
    if span is not None:
        frozen.datetime_start, frozen.datetime_complete = (_local(second) for second in span)
    return frozen


def _local(second: float) -> datetime:
    """Optuna keeps times without a zone, in local time."""
    return datetime.fromtimestamp(second, UTC).astimezone().replace(tzinfo=None)

"""Proposes the trials of a search by Optuna's ask and tell; one that was killed proposes what it would have.

Sampling happens on a copy of the study in memory; the study in `optuna.db` only ever receives whole proposals. So a
kill leaves no half-made one, and the next process draws the same values: a proposal is a function of (seed, its
number, what had been told before), reproducible as long as one is asked for and told at a time.

Who writes what: an Optuna study that searches belongs to its Proposer, which tells its own trials. The sink
(`search/sinks/optuna_sink.py`) leaves it alone and records that study's repeats as `<study>/repeats`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arch_dsl.errors import Problem, SpecError
from search.sinks.database import open_optuna
from search.space import Axis, Choice, Integers, Space
from search.trial import canonical_json

if TYPE_CHECKING:
    import optuna

Sampler = Literal["tpe", "random"]
State = Literal["complete", "pruned", "failed", "diverged"]


class Proposer:
    """The search of one study. Open it under the study's lock: two at a time would number their proposals alike.

    `given` has the base's values of the paths in `space.needs`. `stored` has the values of those proposals that the
    trial table knows, by number: what `optuna.db` lacks of them is written anew, and the others that were never told
    are handed out again by `ask`, under their old numbers. `base` is a digest of what the proposals change.
    Raises SpecError when the study began with another space or base.
    """

    def __init__(
        self,
        store_root: Path,
        study_name: str,
        space: Space,
        sampler: Sampler = "tpe",
        seed: int = 0,
        *,
        given: Mapping[str, Any] | None = None,
        stored: Mapping[int, Mapping[str, Any]] | None = None,
        base: str = "",
    ) -> None:
        import optuna

        self._space, self._sampler, self._seed = space, sampler, seed
        self._given = dict(given or {})
        missing = [
            Problem(f"space.{path}.when", f"'{asked}' has no value here and is no axis", axis.mark("when"))
            for path, axis in space.axes.items()
            for asked in (axis.when.paths if axis.when else ())
            if asked not in {*space.axes, *self._given}
        ]
        if missing:
            raise SpecError(missing)
        storage = open_optuna(store_root)
        self._kept = optuna.create_study(
            storage=storage, study_name=study_name, direction="minimize", load_if_exists=True
        )
        stored = stored or {}
        self._check(study_name, base, stored.values())
        trials = self._kept.get_trials()
        self._live = optuna.create_study(direction="minimize")
        self._live.add_trials(trials)
        for number in range(len(trials), max(stored, default=-1) + 1):
            self._draw(number, stored.get(number))
        self._finished = {trial.number for trial in trials if trial.state.is_finished()}
        self._again = [number for number in self.waiting() if number not in stored]

    def ask(self) -> tuple[int, dict[str, Any]]:
        """The number of the next proposal and its {path: value}; an axis whose condition does not hold is left out."""
        if self._again:
            number = self._again.pop(0)
            return number, self.proposals()[number]
        number = len(self._live.get_trials(deepcopy=False))
        return number, self._draw(number)

    def tell(self, number: int, value: float | None, state: State = "complete") -> None:
        """How a proposal ended; `value` is the validation loss. Told twice, the first stands.

        Only a complete trial with a finite loss teaches the sampler its value. A diverged or failed one counts as
        failed, and a pruned one as pruned.
        """
        from optuna.trial import TrialState

        if number in self._finished:
            return
        complete = state == "complete" and value is not None and math.isfinite(value)
        kind = TrialState.PRUNED if state == "pruned" else TrialState.COMPLETE if complete else TrialState.FAIL
        for study in (self._kept, self._live):
            study.tell(number, value if complete else None, state=kind)
        self._finished.add(number)

    def proposals(self) -> dict[int, dict[str, Any]]:
        """Every proposal so far by its number, told or not."""
        return {
            trial.number: {
                path: _decode(self._space.axes[path], trial.params[path])
                for path, _ in self._space.ordered()
                if path in trial.params
            }
            for trial in self._live.get_trials(deepcopy=False)
        }

    def waiting(self) -> list[int]:
        """The numbers of the proposals that were not told."""
        return sorted(self.proposals().keys() - self._finished)

    def _draw(self, number: int, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values of a new proposal, the next one: drawn by the sampler, or `known` from the trial table."""
        self._live.sampler = _sampler(self._sampler, self._seed, number)
        if known is not None:
            axes = self._space.axes
            self._live.enqueue_trial({path: _encode(axes[path], value) for path, value in known.items()})
        trial = self._live.ask()
        values: dict[str, Any] = {}
        for path, axis in self._space.ordered():
            if self._space.active(path, values, self._given):
                values[path] = _suggest(trial, path, axis)
        self._kept.add_trial(self._live.get_trials()[number])
        return values

    def _check(self, study: str, base: str, stored: Iterable[Mapping[str, Any]]) -> None:
        """A study keeps the space and the base it began with: losses of two cannot be modelled together."""
        now = canonical_json(self._space.plain())
        before, base_before = (self._kept.user_attrs.get(name) for name in ("space", "base"))
        if before is None and self._kept.get_trials(deepcopy=False):
            raise SpecError.of("study", f"'{study}' was run without a search before; give the search a new name")
        strange = not all(fits(self._space, values) for values in stored)
        if before not in (None, now) or strange:
            spelled = f", {before}" if before not in (None, now) else ""
            message = f"the search '{study}' began with another space{spelled}; give the study a new name"
            raise SpecError.of("space", message, self._space.mark())
        if base_before not in (None, base):
            message = f"the search '{study}' began with another model or recipe; give the study a new name"
            raise SpecError.of("search", message)
        self._kept.set_user_attr("space", now)
        self._kept.set_user_attr("base", base)


def fits(space: Space, values: Mapping[str, Any]) -> bool:
    """Whether the space could have proposed these values."""
    return all(path in space.axes and space.axes[path].holds(value) for path, value in values.items())


def _sampler(kind: Sampler, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """A fresh sampler for each proposal, with every argument that Optuna leaves open: their defaults change."""
    import optuna

    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    drawn = int.from_bytes(digest[:4], "big")
    if kind == "random":
        return optuna.samplers.RandomSampler(seed=drawn)
    return optuna.samplers.TPESampler(
        n_startup_trials=10,
        n_ei_candidates=24,
        multivariate=True,
        group=False,
        constant_liar=True,
        seed=drawn,
    )


def _suggest(trial: optuna.Trial, path: str, axis: Axis) -> Any:
    if isinstance(axis, Choice):
        return _decode(axis, trial.suggest_categorical(path, _categories(axis)))
    if isinstance(axis, Integers):
        return trial.suggest_int(path, axis.low, axis.high, step=axis.step, log=axis.log)
    return trial.suggest_float(path, axis.low, axis.high, log=axis.log)


def _categories(axis: Choice) -> list[str | int | float | bool | None]:
    """The choices as Optuna takes them: as they are when they are all words or all integers, else as JSON texts."""
    for kind in (str, int):
        if all(type(value) is kind for value in axis.values):
            return list(axis.values)
    return [canonical_json(value) for value in axis.values]


def _encode(axis: Axis, value: Any) -> Any:
    if not isinstance(axis, Choice):
        return value
    return _categories(axis)[[canonical_json(each) for each in axis.values].index(canonical_json(value))]


def _decode(axis: Axis, value: Any) -> Any:
    return axis.values[_categories(axis).index(value)] if isinstance(axis, Choice) else value

"""Proposes the trials of a search by Optuna's ask and tell; one that was killed proposes what it would have.

Sampling happens on a study in memory, which every run makes anew from what the trial table knows: a proposal is a
function of (seed, its number, what had been told before), reproducible as long as one is asked for and told at a time.
The study in `optuna.db` is a copy, for its plots and dashboard: nothing is read from it but what it began with.

Who writes what: an Optuna study that searches belongs to its Proposer, which records its own trials. The sink
(`search/trackers/optuna_sink.py`) leaves it alone and records that study's repeats as `<study>/repeats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.sections.search.axes import Choice, Integers
from archlab.search.sections.search.by_effects import Told
from archlab.search.sections.search.optuna_values import categories, decoded, encoded
from archlab.search.sections.search.points import Points
from archlab.search.sections.search.samplers import EffectsSampler, Sampler, seed_of
from archlab.search.sections.search.space import Space
from archlab.search.trackers.database import open_optuna
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    import optuna

State = Literal["complete", "pruned", "failed", "diverged", "refused"]


@dataclass(frozen=True)
class Ending:
    """How a proposal ended, as a sampler sees it.

    `values` are those of the goals, None where one is not known; `excess` is above 0 for each constraint that is
    broken; `history` the (step, validation loss) of a pruned trial. A refused one was not trained.
    """

    state: State
    values: tuple[float | None, ...] = ()
    excess: Mapping[str, float] = field(default_factory=dict)
    history: tuple[tuple[int, float], ...] = ()
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether all of its values are known and finite."""
        known = [value is not None and math.isfinite(value) for value in self.values]
        return self.state == "complete" and bool(known) and all(known)

    @property
    def known(self) -> list[float]:
        """The values that are known."""
        return [value for value in self.values if value is not None]

    @property
    def broken(self) -> float:
        """By how much it breaks its constraints, taken together."""
        return sum(value for value in self.excess.values() if value > 0)


@dataclass(frozen=True)
class Known:
    """The values of a proposal, and how it ended if it has."""

    values: Mapping[str, Any]
    ending: Ending | None = None


class Proposer:
    """The search of one study. Open it under the study's lock: two at a time would number their proposals alike.

    `given` has the base's values of the paths in `space.needs`. `known` has the proposals that the trial table knows,
    by number; those between that it does not know are drawn again and handed out by `ask` first. `goals` says how many
    values are told, `worst` what an untrained proposal counts as before anything was trained. `base` is a digest of
    what the proposals change. `starts` are points to begin with, for samplers that do. Without a `store_root` there is
    no copy. Raises SpecError when the study began with another space or base.
    """

    def __init__(
        self,
        store_root: Path | None,
        study_name: str,
        space: Space,
        sampler: Sampler | None = None,
        seed: int = 0,
        *,
        goals: int = 1,
        given: Mapping[str, Any] | None = None,
        known: Mapping[int, Known] | None = None,
        base: str = "",
        worst: float = 0.0,
        starts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._sampler, self._seed = space, sampler or EffectsSampler(), seed
        self._given, self._worst = dict(given or {}), worst
        missing = [
            Problem(f"space.{path}.when", f"'{asked}' has no value here and is no axis", axis.mark("when"))
            for path, axis in space.axes.items()
            for asked in (axis.when.paths if axis.when else ())
            if asked not in {*space.axes, *self._given}
        ]
        if missing:
            raise SpecError(missing)
        known = known or {}
        self._copy = None if store_root is None else _Copy(store_root, study_name, goals)
        if self._copy:
            self._copy.check(space, base, (each.values for each in known.values()))
        self._live = optuna.create_study(directions=["minimize"] * goals)
        self._asked: list[optuna.Trial] = []
        self._values: list[dict[str, Any]] = []  # of each proposal
        self._points = Points(space, self._given)
        self._starts = [self._points.completed(values) for values in starts]
        self._endings: dict[int, Ending] = {}
        for number in range(max(known, default=-1) + 1):
            each = known.get(number)
            self._draw(each.values if each else None)
            if each and each.ending:
                self._told(number, each.ending)
        self._again = [number for number in range(len(self._asked)) if number not in known]
        if self._copy:
            self._copy.bring_up(self._live, self._endings, afresh=True)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """The number of the next proposal and its {path: value}; an axis whose condition does not hold is left out."""
        if self._again:
            number = self._again.pop(0)
            return number, self.proposals()[number]
        return len(self._asked), self._draw()

    def tell(self, number: int, ending: Ending) -> None:
        """How a proposal ended. Told twice, the first stands.

        A complete trial with finite values teaches the sampler these; a pruned one, with one goal, its last loss. One
        that breaks a constraint counts as worse than all that were trained, where its values are not known. Others
        teach nothing.
        """
        if number not in self._endings:
            self._told(number, ending)
            if self._copy:
                self._copy.bring_up(self._live, self._endings)

    def ranked(self, losses: Mapping[int, float]) -> list[int]:
        """The numbers of proposals with these losses, the best first, as the sampler sees them."""
        return self._sampler.ranked(self._points, self.proposals(), losses)

    def proposals(self) -> dict[int, dict[str, Any]]:
        """Every proposal so far by its number, told or not."""
        order = [path for path, _ in self._space.ordered()]
        return {
            trial.number: {
                path: decoded(self._space.axes[path], trial.params[path]) for path in order if path in trial.params
            }
            for trial in self._live.get_trials(deepcopy=False)
        }

    def waiting(self) -> list[int]:
        """The numbers of the proposals that were not told."""
        return [number for number in range(len(self._asked)) if number not in self._endings]

    def _draw(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values of a new proposal, the next one: drawn by the sampler, or `known` from the trial table."""
        number_seed = seed_of(self._seed, len(self._asked))
        self._live.sampler = self._sampler.build(number_seed)
        if known is None:
            known = self._sampler.proposal(self._points, self._history(), self._starts, number_seed)
        if known is not None:
            axes = self._space.axes
            self._live.enqueue_trial({path: encoded(axes[path], value) for path, value in known.items()})
        trial = self._live.ask()
        if known is None or self._sampler.stateful:
            _sample(trial)  # for what is known it is asked for its notes alone
        values: dict[str, Any] = {}
        for path, axis in self._space.ordered():
            if self._space.active(path, values, self._given):
                if isinstance(axis, Choice):
                    values[path] = decoded(axis, trial.suggest_categorical(path, categories(axis)))
                elif isinstance(axis, Integers):
                    values[path] = trial.suggest_int(path, axis.low, axis.high, step=axis.step, log=axis.log)
                else:
                    values[path] = trial.suggest_float(path, axis.low, axis.high, step=axis.step, log=axis.log)
        self._asked.append(trial)
        self._values.append(values)
        return values

    def _history(self) -> list[Told]:
        """What a sampler of ours is told: every proposal so far, and how it ended."""
        found = []
        for number, values in enumerate(self._values):
            ending = self._endings.get(number)
            losses = tuple(ending.known) if ending and ending.complete else None
            if ending and ending.state == "pruned" and len(self._live.directions) == 1:
                last = [loss for _, loss in ending.history if math.isfinite(loss)][-1:]
                losses = tuple(last) or None
            found.append(Told(values, losses, ending.excess if ending else {}, ending is not None))
        return found

    def _told(self, number: int, ending: Ending) -> None:
        from optuna.trial import TrialState

        trial, goals = self._asked[number], len(self._live.directions)
        self._endings[number] = ending
        values, state = ending.known, TrialState.COMPLETE
        if ending.broken and not ending.complete:
            before = [each.values for each in self._endings.values() if each.complete]
            known = [*ending.values, *[None] * goals][:goals]
            worst = [max((row[at] or 0.0 for row in before), default=self._worst) for at in range(goals)]
            values = [end + ending.broken if value is None else value for value, end in zip(known, worst, strict=True)]
        elif not ending.complete:
            state = TrialState.PRUNED if ending.state == "pruned" and goals == 1 else TrialState.FAIL
        if state is not TrialState.FAIL:
            for name, value in ending.excess.items() if self._sampler.constraints else ():
                trial.set_constraint(name, value)
        if state is TrialState.PRUNED:
            for step, loss in ending.history:
                if math.isfinite(loss):
                    trial.report(loss, step)
        self._live.tell(trial, values if state is TrialState.COMPLETE else None, state=state)


class _Copy:
    """The search in `optuna.db`: finished proposals in the order of their numbers, written anew where it differs."""

    def __init__(self, store_root: Path, name: str, goals: int) -> None:
        self._storage, self._name, self._goals = open_optuna(store_root), name, goals
        self._study = self._created()

    def _created(self) -> optuna.Study:
        import optuna

        known = {each.study_name: each for each in optuna.get_all_study_summaries(self._storage)}
        attributes = dict(known[self._name].user_attrs) if self._name in known else {}
        if self._name in known and len(known[self._name].directions) != self._goals:
            optuna.delete_study(study_name=self._name, storage=self._storage)
        directions: list[Literal["minimize", "maximize"] | optuna.study.StudyDirection] = ["minimize"] * self._goals
        study = optuna.create_study(
            storage=self._storage, study_name=self._name, directions=directions, load_if_exists=True
        )
        for name in ("space", "base"):
            if name in attributes and name not in study.user_attrs:
                study.set_user_attr(name, attributes[name])
        return study

    def check(self, space: Space, base: str, stored: Iterable[Mapping[str, Any]]) -> None:
        """A study keeps the space and the base it began with: losses of two cannot be modelled together."""
        study, now = self._name, canonical_json(space.plain())
        before, base_before = (self._study.user_attrs.get(name) for name in ("space", "base"))
        if before is None and self._study.get_trials(deepcopy=False):
            raise SpecError.of("study", f"'{study}' was run without a search before; give the search a new name")
        strange = not all(fits(space, values) for values in stored)
        if before not in (None, now) or strange:
            spelled = f", {before}" if before not in (None, now) else ""
            message = f"the search '{study}' began with another space{spelled}; give the study a new name"
            raise SpecError.of("space", message, space.mark())
        if base_before not in (None, base):
            message = f"the search '{study}' began with another model or recipe; give the study a new name"
            raise SpecError.of("search", message)
        self._study.set_user_attr("space", now)
        self._study.set_user_attr("base", base)

    def bring_up(self, live: optuna.Study, endings: Mapping[int, Ending], afresh: bool = False) -> None:
        """Appends what ended and has no proposal before it that has not."""
        import optuna

        there = self._study.get_trials(deepcopy=False)
        trials = live.get_trials(deepcopy=False)
        ready = next((number for number in range(len(trials)) if number not in endings), len(trials))
        first = 0 if afresh else len(there)
        wanted = [_frozen(trials[number], endings[number]) for number in range(first, ready)]
        facts = [[(t.params, t.state, t.values) for t in each] for each in (there, wanted[: len(there)])]
        if afresh and facts[0] != facts[1]:
            attributes = self._study.user_attrs
            optuna.delete_study(study_name=self._name, storage=self._storage)
            self._study, there = self._created(), []
            for name, value in attributes.items():
                self._study.set_user_attr(name, value)
        self._study.add_trials(wanted[len(there) - first :])


def _frozen(trial: optuna.trial.FrozenTrial, ending: Ending) -> optuna.trial.FrozenTrial:
    """A proposal as it is recorded: one that was refused has no values, whatever the sampler was told."""
    from optuna.trial import TrialState, create_trial

    pruned = ending.state == "pruned"
    attributes = {"number": trial.number, "state": ending.state, **({"reason": ending.reason} if ending.reason else {})}
    return create_trial(
        state=TrialState.COMPLETE if ending.complete else TrialState.PRUNED if pruned else TrialState.FAIL,
        values=ending.known if ending.complete else None,
        params=dict(trial.params),
        distributions=dict(trial.distributions),
        intermediate_values={step: loss for step, loss in ending.history if math.isfinite(loss)},
        constraints=dict(ending.excess),
        user_attrs=attributes,
    )


def fits(space: Space, values: Mapping[str, Any]) -> bool:
    """Whether the space could have proposed these values."""
    return all(path in space.axes and space.axes[path].holds(value) for path, value in values.items())


def _sample(trial: optuna.Trial) -> None:
    """Lets the sampler draw all axes at once, on one thread, where a Gaussian process has the same bits each time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _ = trial.relative_params
    finally:
        torch.set_num_threads(threads)

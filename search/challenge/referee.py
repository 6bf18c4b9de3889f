"""Holds challengers against a champion, one after the other, each until its seeds have decided.

A challenger is the champion with a patch, matched as the study says, trained on the same batches under each of the
study's recipes. After each seed the mean paired difference of the validation losses is judged with an interval that
holds at every number of seeds. Who is better at the level that e-LOND leaves (archlab.search.statistics.online) becomes
the champion. Trials are those of ordinary studies, so that nothing is trained twice, and the same call goes on after an
interruption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.challenge.budget import Allowance, Limits, missing
from archlab.search.challenge.changes import Idea, composed, patch_of, plain
from archlab.search.challenge.judge import Seen, judge
from archlab.search.challenge.ledger import KEPT, Entry, Ledger, recall, remember, round_of
from archlab.search.challenge.rounds import Round, first_of, mean_losses, refuse
from archlab.search.executors.resources import Room
from archlab.search.planning.plan import Plan
from archlab.search.results.selection import Selection
from archlab.search.running.ending import EXIT_BUDGET, EXIT_FAILED, Summary
from archlab.search.running.run import RunOptions, make_executor, quiet, run_with
from archlab.search.statistics.online import level
from archlab.search.store.addresses import store_root
from archlab.search.store.lock import StudyLock, in_use
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.utils.quantities import Duration
from archlab.search.variants.asks import Events
from archlab.search.variants.patches import Patch

FEWEST = 1  # seeds before the first look, which may show that there is no hope


@dataclass(frozen=True)
class Rules:
    """How a stream is judged: the seeds that a challenger gets at most, the half-width of equivalence in nats per
    token, the share of false ones among those kept, and whether what lost to an earlier champion is tried again.

    `trials`, `core_seconds` and `disk` (bytes of the store) are the most that this call may take; with `of_life` the
    most that all ledgers of the study in this store may take together (archlab.search.challenge.budget).
    """

    seeds: int = 8
    margin: float | None = None
    false_keeps: float = 0.1
    trials: int | None = None
    again: bool = False
    core_seconds: float | None = None
    disk: int | None = None
    of_life: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1 or not 0 < self.false_keeps < 1 or (self.margin is not None and self.margin <= 0):
            raise ValueError(f"needs a seed or more, a share below 1 and a margin above 0; received {self}")

    @property
    def limits(self) -> Limits:
        """What may be taken."""
        return Limits(self.trials, self.core_seconds, self.disk, self.of_life)


@dataclass(frozen=True)
class Outcome:
    """How a call ended: the ledger as it is now, the entries that these challengers have in it (None: not decided),
    and how the last run of trials ended, None where nothing was to be run."""

    ledger: Ledger
    entries: dict[str, Entry | None]
    summary: Summary | None = None


def challenge(
    study: Study | str | Path,
    challengers: Mapping[str, Any],
    store: str | Path | None = None,
    *,
    rules: Rules = Rules(),
    overrides: Mapping[str, Any] | None = None,
    executor: Literal["ray", "inline"] = "ray",
    address: str | None = None,
    on_event: Events | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    on_entry: Callable[[Entry, bool], None] | None = None,
    allow_plugins: bool = False,
    command: str = "",
) -> Outcome:
    """Tries `challengers` (name to changes, as under `variants:`, or to an `Idea`) in order, and returns what came of
    it.

    The study's baseline is the first champion. `on_entry` is told each verdict, and whether it was known before.
    Raises what `run` does, and SpecError for a challenger that is none.
    """
    if not isinstance(study, Study):
        study = load_study(study, overrides, allow_plugins, store)
    refuse(study)
    root = store_root(store).absolute()
    ideas = {name: each if isinstance(each, Idea) else Idea(each) for name, each in challengers.items()}
    patches = {name: patch_of(each.changes, f"challengers.{name}") for name, each in ideas.items()}
    with Store.open(root) as opened, in_use(root), StudyLock(root, round_of(study.study, "ledger")):
        workers = make_executor(executor, root, resources=study.resources, address=address)
        try:
            options = RunOptions(quiet(on_event), on_plan, False, False, executor == "ray" and address is None, command)
            tell = on_entry or (lambda _entry, _known: None)
            at_once = _at_once(study, rules, executor, address)
            referee = Referee(
                study, opened, rules, tell, lambda each: run_with(workers, each, opened, options), at_once
            )
            referee.check(patches)
            referee.why = {name: each.why for name, each in ideas.items()}
            return referee.try_all(patches)
        finally:
            workers.close()


def _at_once(study: Study, rules: Rules, executor: str, address: str | None) -> int | None:
    """How many trials run side by side at most, where that matters and is known."""
    if executor == "inline":
        return 1
    return study.resources.slots([Room.here()]) if rules.core_seconds is not None and address is None else None


class _Stopped(Exception):
    """A round did not come to its end."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary


def never(_study: Study) -> Summary:
    """What trains for a referee that only looks."""
    raise AssertionError("this referee trains nothing")


class Referee:
    """A stream of challengers at work. `at_once` is how many trials run side by side at most, None where that is not
    known. Without `run` it only looks: `known`, `check`, `round` and `allowance` train nothing."""

    def __init__(
        self,
        study: Study,
        store: Store,
        rules: Rules,
        tell: Callable[[Entry, bool], None] = lambda _entry, _known: None,
        run: Callable[[Study], Summary] = never,
        at_once: int | None = None,
    ) -> None:
        self.study, self.store, self.rules, self.tell, self.run = study, store, rules, tell, run
        self.first = first_of(study)
        alone = Round.of(study, store, "ledger", {self.first: study.variants[self.first]}, FEWEST)
        self.ledger: Ledger = recall(store, study.study, self.first, alone.identity(self.first))
        self.patches = {self.first: study.variants[self.first]}
        for entry in self.ledger.kept:
            patch = patch_of(entry.changes, f"ledger.{entry.number}")
            self.patches[entry.name] = composed(self.patches[self.champion], patch)
        self.before, self.trained = len(self.ledger.entries), 0
        self.why: dict[str, str] = {}
        self.allowance = Allowance(rules.limits, store, study.study, study.resources, at_once)
        self.summary: Summary | None = None

    @property
    def champion(self) -> str:
        """The newest of the champions."""
        return [*self.patches][-1]

    @property
    def level(self) -> float:
        """The chance of error that keeping the next challenger may take."""
        return level(len(self.ledger.entries) + 1, len(self.ledger.kept), self.rules.false_keeps)

    def known(self, patch: Patch) -> Entry | None:
        """The newest entry of the same changes: what was tried is not tried again, unless it is wanted against another
        champion than it met."""
        found = self.ledger.tried(plain(patch))
        if found is None or not self.rules.again or found.verdict == KEPT or found.against == self.champion:
            return found
        return None

    def check(self, patches: Mapping[str, Patch]) -> None:
        """Raises SpecError with everything that is wrong with any challenger, while the champion stays who it is."""
        problems: list[Problem] = []
        for name, patch in patches.items():
            if self.known(patch):
                continue
            try:
                self.round(name, patch, FEWEST)
            except SpecError as error:
                problems += error.problems
        if problems:
            raise SpecError(problems)

    def round(self, name: str, patch: Patch, seeds: int) -> Round:
        """The next round, with this challenger. Raises SpecError."""
        if name in self.patches:
            raise SpecError.of(f"challengers.{name}", "is the name of a champion; call the challenger otherwise")
        rows = {self.first: self.patches[self.first], self.champion: self.patches[self.champion]}
        rows[name] = composed(self.patches[self.champion], patch)
        return Round.of(self.study, self.store, str(len(self.ledger.entries) + 1), rows, seeds)

    def standing(self) -> Round:
        """The champion beside the baseline, without a challenger."""
        rows = {name: self.patches[name] for name in (self.first, self.champion)}
        return Round.of(self.study, self.store, "ledger", rows, FEWEST)

    def try_all(self, patches: Mapping[str, Patch]) -> Outcome:
        """All challengers in order, until one is not decided."""
        entries: dict[str, Entry | None] = dict.fromkeys(patches)
        try:
            for name, patch in patches.items():
                entries[name] = entry = self.known(patch) or self.try_one(name, patch)
                self.tell(entry, entry.number <= self.before)
        except _Stopped as stopped:
            return Outcome(self.ledger, entries, stopped.summary)
        return Outcome(self.ledger, entries, self.summary)

    def try_one(self, name: str, patch: Patch) -> Entry:
        """Seeds until there is a verdict, which the ledger takes. Raises _Stopped."""
        for seeds in range(FEWEST, self.rules.seeds + 1):
            try:
                made = self.round(name, patch, seeds)
            except SpecError as error:  # it fitted the champion that there was when the stream began
                return self.enter(name, patch, "impossible", reason="; ".join(each.message for each in error.problems))
            self.train(made)
            found = made.selections(self.store)
            if lost := self.lost(made, found):
                return self.enter(name, patch, lost, made)
            for row, selections in found.items():
                self.ledger.add(made.identity(row), mean_losses(selections, seeds, "validation"))
            table = self.ledger.table(made.identity(name), made.identity(self.champion))
            seen = judge(*table, self.level, self.rules.seeds)
            verdict = seen.verdict(self.rules.margin) if seen else None
            if verdict or seeds == self.rules.seeds:
                return self.enter(name, patch, verdict or "undecided", made, seen)
        raise AssertionError("a challenger has at least one seed")

    def train(self, made: Round) -> None:
        """What the round still lacks. Raises _Stopped where that is too much, or something kept it from its end."""
        keys = missing(made.planned, self.store)
        if refused := self.allowance.refuses(made.planned, keys, self.trained):
            raise _Stopped(Summary(EXIT_BUDGET, {}, refused))
        seconds = self.allowance.wall_s(len(keys))
        self.summary = self.run(made.study if seconds is None else _within(made.study, seconds))
        self.trained += len(keys)
        if self.summary.exit_code == EXIT_BUDGET and seconds is not None:
            limit, spent = self.rules.core_seconds, self.allowance.spent().core_seconds
            message = f"{self.summary.message} ({spent:.0f} of {limit:g} core-seconds are spent)"
            raise _Stopped(Summary(EXIT_BUDGET, self.summary.counts, message))
        if self.summary.exit_code not in (0, EXIT_FAILED):
            raise _Stopped(self.summary)

    def lost(self, made: Round, found: Mapping[str, list[Selection]]) -> str | None:
        """What the challenger came to in the place of a loss. Raises _Stopped if another row has none."""
        for row, selections in found.items():
            if all(len(each.complete) == made.seeds for each in selections):
                continue
            state = "diverged" if any(each.diverged for each in selections) else "failed"
            if row == made.challenger:
                return state
            message = f"a trial of '{row}' in {made.study.study} {state}; nothing can be held against it"
            raise _Stopped(Summary(EXIT_FAILED, {}, message))
        return None

    def enter(
        self,
        name: str,
        patch: Patch,
        verdict: str,
        made: Round | None = None,
        seen: Seen | None = None,
        reason: str = "",
    ) -> Entry:
        """Takes a verdict into the ledger, and the challenger for the champion where it is better."""
        changes, kept = plain(patch), composed(self.patches[self.champion], patch)
        entry = Entry(
            number=len(self.ledger.entries) + 1,
            name=name,
            changes=changes,
            against=self.champion,
            verdict=verdict,
            seeds=made.seeds if made else 0,
            level=self.level,
            difference=seen.difference if seen else None,
            half_width=seen.shown(verdict) if seen else None,
            test=self.tested(made) if made and verdict == KEPT else None,
            near=self.ledger.near(changes),
            trials=made.trained(self.store) if made else 0,
            reason=reason,
            why=self.why.get(name, ""),
        )
        self.ledger.entries.append(entry)
        remember(self.store, self.ledger)
        if verdict == KEPT:
            self.patches[name] = kept
        return entry

    def tested(self, made: Round) -> float:
        """The mean difference to the champion on the test set."""
        found = made.selections(self.store)
        ours, theirs = (mean_losses(found[row], made.seeds, "test") for row in (made.challenger, made.champion))
        return float(np.mean([a - b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]))


def _within(study: Study, seconds: float) -> Study:
    """The study, whose run ends after so many seconds."""
    wall = study.budget.wall.seconds if study.budget.wall else math.inf
    return study.replace(budget=study.budget.replace(wall=Duration(min(wall, seconds))))

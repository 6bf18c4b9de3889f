"""Holds challengers against a champion, one after the other, each until its seeds have decided.

A challenger is the champion with a patch, matched as the study says, trained on the same batches under each of the
study's recipes. After each seed the mean paired difference of the validation losses is judged with an interval that
holds at every number of seeds. Who is better at the level that e-LOND leaves (archlab.search.statistics.online) becomes
the champion. Trials are those of ordinary studies, so that nothing is trained twice, and the same call goes on after an
interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.challenge.changes import composed, patch_of, plain
from archlab.search.challenge.judge import Seen, judge
from archlab.search.challenge.ledger import KEPT, Entry, Ledger, recall, remember, round_of
from archlab.search.challenge.rounds import Round, first_of, mean_losses, refuse
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
from archlab.search.variants.asks import Events
from archlab.search.variants.patches import Patch

FEWEST = 1  # seeds before the first look, which may show that there is no hope


@dataclass(frozen=True)
class Rules:
    """How a stream is judged: the seeds that a challenger gets at most, the half-width of equivalence in nats per
    token, the share of false ones among those kept, the trials that may be trained in all, and whether what lost to an
    earlier champion is tried again."""

    seeds: int = 8
    margin: float | None = None
    false_keeps: float = 0.1
    trials: int | None = None
    again: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1 or not 0 < self.false_keeps < 1 or (self.margin is not None and self.margin <= 0):
            raise ValueError(f"needs a seed or more, a share below 1 and a margin above 0; received {self}")


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
    """Tries `challengers` (name to changes, as under `variants:`) in order, and returns what came of it.

    The study's baseline is the first champion. `on_entry` is told each verdict, and whether it was known before.
    Raises what `run` does, and SpecError for a challenger that is none.
    """
    if not isinstance(study, Study):
        study = load_study(study, overrides, allow_plugins, store)
    refuse(study)
    root = store_root(store).absolute()
    patches = {name: patch_of(changes, f"challengers.{name}") for name, changes in challengers.items()}
    with Store.open(root) as opened, in_use(root), StudyLock(root, round_of(study.study, "ledger")):
        workers = make_executor(executor, root, resources=study.resources, address=address)
        try:
            options = RunOptions(quiet(on_event), on_plan, False, False, executor == "ray" and address is None, command)
            tell = on_entry or (lambda _entry, _known: None)
            referee = _Referee(study, opened, rules, tell, lambda each: run_with(workers, each, opened, options))
            referee.check(patches)
            return referee.try_all(patches)
        finally:
            workers.close()


class _Stopped(Exception):
    """A round did not come to its end."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary


class _Referee:
    """A stream of challengers at work."""

    def __init__(
        self,
        study: Study,
        store: Store,
        rules: Rules,
        tell: Callable[[Entry, bool], None],
        run: Callable[[Study], Summary],
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
        left = made.left(self.store)
        if self.rules.trials is not None and self.trained + left > self.rules.trials:
            message = f"the next look takes {left} trials, of {self.rules.trials - self.trained} that are left"
            raise _Stopped(Summary(EXIT_BUDGET, {}, message))
        self.summary = self.run(made.study)
        self.trained += left
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

"""Holds challengers against a champion, one after the other, each until its seeds have decided.

A challenger is the champion with a patch, matched as the study says, trained on the same batches under each of the
study's recipes. After each seed the mean paired difference of the validation losses is judged with an interval that
holds at every number of seeds. Who is better at the level that e-LOND leaves (archlab.search.statistics.online) becomes
the champion. Trials are those of ordinary studies, so that nothing is trained twice, and the same call goes on after an
interruption.

With `together` above 1 a challenger is trained with one seed, on top of those that were lower before it. So many of
these are then held against the champion as one, with other seeds than the one that has chosen them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.challenge.budget import missing
from archlab.search.challenge.changes import Idea, composed, patch_of, plain
from archlab.search.challenge.judge import Seen, judge
from archlab.search.challenge.ledger import IMPOSSIBLE, KEPT, LOWER, NOT_LOWER, Entry, Ledger, remember, round_of
from archlab.search.challenge.rounds import Round, mean_losses, refuse
from archlab.search.challenge.rules import DEFAULT, FEWEST, Rules
from archlab.search.challenge.standing import Standing, patch_in
from archlab.search.executors.resources import Room
from archlab.search.planning.plan import Plan
from archlab.search.results.selection import Selection
from archlab.search.running.ending import EXIT_BUDGET, EXIT_FAILED, Summary
from archlab.search.running.run import RunOptions, make_executor, quiet, run_with
from archlab.search.store.addresses import store_root
from archlab.search.store.lock import StudyLock, in_use
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.utils.quantities import Duration
from archlab.search.variants.asks import Events
from archlab.search.variants.patches import Patch


@dataclass(frozen=True)
class Outcome:
    """How a call ended: the ledger as it is now, the entries that these challengers have in it (None: not decided),
    how the last run of trials ended, None where nothing was to be run, and what stopped the call before its end."""

    ledger: Ledger
    entries: dict[str, Entry | None]
    summary: Summary | None = None
    stopped: Summary | None = None


def challenge(
    study: Study | str | Path,
    challengers: Mapping[str, Any],
    store: str | Path | None = None,
    *,
    rules: Rules = DEFAULT,
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


class Referee(Standing):
    """A stream of challengers at work: `run` trains what a study lacks, `tell` hears each verdict."""

    def __init__(
        self,
        study: Study,
        store: Store,
        rules: Rules,
        tell: Callable[[Entry, bool], None],
        run: Callable[[Study], Summary],
        at_once: int | None = None,
    ) -> None:
        super().__init__(study, store, rules, at_once)
        self.tell, self.run = tell, run
        self.before, self.trained = len(self.ledger.entries), 0
        self.why: dict[str, str] = {}
        self.summary: Summary | None = None

    def try_all(self, patches: Mapping[str, Patch]) -> Outcome:
        """All challengers in order, until one is not decided."""
        entries: dict[str, Entry | None] = dict.fromkeys(patches)
        try:
            for name, patch in patches.items():
                if self.known(patch) is None:
                    self.confirm(self.rules.together)
                entries[name] = entry = self.known(patch) or self.try_one(name, patch)
                self.tell(entry, entry.number <= self.before)
            if self.rules.confirm or self.rules.together > 1:
                self.confirm(1 if self.rules.confirm else self.rules.together)
        except _Stopped as stopped:
            return Outcome(self.ledger, entries, stopped.summary, stopped.summary)
        return Outcome(self.ledger, entries, self.summary)

    def confirm(self, parts: int) -> None:
        """Holds the candidate against the champion, where it has so many parts. Raises _Stopped."""
        names, changes = [*self.candidate], Patch((), ())
        if len(names) < parts or not names:
            return
        for entry in self.ledger.candidate:
            changes = composed(changes, patch_in(entry))
        taken = {each.name for each in self.ledger.entries}
        name = next(name for number in count(1) if (name := f"together {number}") not in taken)
        champion = self.champion, self.patches[self.champion]
        self.tell(self.decide(name, changes, champion, names), False)

    def try_one(self, name: str, patch: Patch) -> Entry:
        """A verdict, which the ledger takes: by one seed where several are confirmed together. Raises _Stopped."""
        if self.rules.together == 1:
            return self.decide(name, patch, self.opponent)
        try:
            made = self.round(name, patch, FEWEST)
        except SpecError as error:
            return self.impossible(name, patch, error)
        if lost := self.played(made):
            return self.enter(name, patch, lost, made)
        mine, theirs = (self.ledger.rows[made.identity(row)][0] for row in (made.challenger, made.champion))
        assert mine is not None and theirs is not None, "a round that was played has losses"
        seen = Seen(1, mine - theirs, math.nan, math.inf, math.inf, math.inf)
        return self.enter(name, patch, LOWER if mine < theirs else NOT_LOWER, made, seen)

    def decide(self, name: str, patch: Patch, against: tuple[str, Patch], parts: Sequence[str] = ()) -> Entry:
        """Seeds until there is a verdict, which the ledger takes. Raises _Stopped."""
        chosen_by = self.ledger.chosen_by
        most = chosen_by + self.rules.seeds
        for seeds in range(chosen_by + FEWEST, most + 1):
            try:
                made = self.round(name, patch, seeds, against)
            except SpecError as error:  # it fitted the champion that there was when the stream began
                return self.impossible(name, patch, error, parts)
            if lost := self.played(made):
                return self.enter(name, patch, lost, made, parts=parts)
            losses, mine, theirs = self.ledger.table(made.identity(name), made.identity(made.champion))
            seen = judge(losses[:, chosen_by:], mine, theirs, self.level, self.rules.seeds)
            verdict = seen.verdict(self.rules.margin) if seen else None
            if verdict or seeds == most:
                return self.enter(name, patch, verdict or "undecided", made, seen, parts=parts)
        raise AssertionError("a challenger has at least one seed")

    def played(self, made: Round) -> str | None:
        """Trains what a round lacks, and takes its losses; what the challenger came to in the place of one. Raises
        _Stopped."""
        self.train(made)
        found = made.selections(self.store)
        if lost := self.lost(made, found):
            return lost
        for row, selections in found.items():
            self.ledger.add(made.identity(row), mean_losses(selections, made.seeds, "validation"))
        return None

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

    def impossible(self, name: str, patch: Patch, error: SpecError, parts: Sequence[str] = ()) -> Entry:
        """Takes a challenger into the ledger that does not go with the champion."""
        reason = "; ".join(each.message for each in error.problems)
        return self.enter(name, patch, IMPOSSIBLE, reason=reason, parts=parts)

    def enter(
        self,
        name: str,
        patch: Patch,
        verdict: str,
        made: Round | None = None,
        seen: Seen | None = None,
        reason: str = "",
        parts: Sequence[str] = (),
    ) -> Entry:
        """Takes a verdict into the ledger, and the challenger for the champion where it is better."""
        changes, kept = plain(patch), composed(self.patches[self.champion], patch)
        entry = Entry(
            number=len(self.ledger.entries) + 1,
            name=name,
            changes=changes,
            against=made.champion if made else self.champion if parts else self.opponent[0],
            verdict=verdict,
            seeds=seen.seeds if seen else made.seeds if made else 0,
            level=self.level,
            difference=seen.difference if seen else None,
            half_width=seen.shown(verdict) if seen else None,
            test=self.tested(made) if made and verdict == KEPT else None,
            near=self.ledger.near(changes),
            trials=made.trained(self.store) if made else 0,
            reason=reason,
            why=self.why.get(name, ""),
            parts=[*parts],
            one_seed=self.rules.together > 1 and not parts,
        )
        self.ledger.entries.append(entry)
        remember(self.store, self.ledger)
        if verdict == KEPT:
            self.patches[name] = kept
        return entry

    def tested(self, made: Round) -> float:
        """The mean difference to the champion on the test set."""
        found, skipped = made.selections(self.store), self.ledger.chosen_by
        ours, theirs = (
            mean_losses(found[row], made.seeds, "test")[skipped:] for row in (made.challenger, made.champion)
        )
        return float(np.mean([a - b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]))


def _within(study: Study, seconds: float) -> Study:
    """The study, whose run ends after so many seconds."""
    wall = study.budget.wall.seconds if study.budget.wall else math.inf
    return study.replace(budget=study.budget.replace(wall=Duration(min(wall, seconds))))

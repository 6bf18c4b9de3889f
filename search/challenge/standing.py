"""What is known of a stream of challengers before the next one is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.challenge.budget import Allowance
from archlab.search.challenge.changes import composed, patch_of, plain
from archlab.search.challenge.ledger import Entry, Ledger, recall
from archlab.search.challenge.rounds import Round, first_of
from archlab.search.challenge.rules import FEWEST, Rules
from archlab.search.statistics.online import level
from archlab.search.store.store import Store
from archlab.search.study.study import Study
from archlab.search.variants.mistakes import no_name
from archlab.search.variants.patches import Patch

TOGETHER = re.compile(r"together \d+")  # what several are called that are confirmed as one


class Standing:
    """The ledger of a study as it is now, and what a challenger would meet. `at_once` is how many trials run side by
    side at most, None where that is not known."""

    def __init__(
        self,
        study: Study,
        store: Store,
        rules: Rules,
        at_once: int | None = None,
    ) -> None:
        self.study, self.store, self.rules = study, store, rules
        self.first = first_of(study)
        alone = Round.of(study, store, "ledger", {self.first: study.variants[self.first]}, FEWEST)
        self.ledger: Ledger = recall(store, study.study, self.first, alone.identity(self.first))
        self.patches = {self.first: study.variants[self.first]}
        for entry in self.ledger.kept:
            self.patches[entry.name] = composed(self.patches[self.champion], patch_in(entry))
        self.allowance = Allowance(rules.limits, store, study.study, study.resources, at_once)

    @property
    def champion(self) -> str:
        """The newest of the champions."""
        return [*self.patches][-1]

    @property
    def candidate(self) -> dict[str, Patch]:
        """What is to be confirmed together, each on top of those before it; empty where none is."""
        found, patch = dict[str, Patch](), self.patches[self.champion]
        for entry in self.ledger.candidate:
            patch = found[entry.name] = composed(patch, patch_in(entry))
        return found

    @property
    def opponent(self) -> tuple[str, Patch]:
        """Whom the next challenger meets: the champion, or the last of the candidate's parts."""
        parts = self.candidate if self.rules.together > 1 else {}
        return [*self.patches.items(), *parts.items()][-1]

    @property
    def level(self) -> float:
        """The chance of error that keeping the next challenger may take."""
        return level(self.ledger.tests + 1, len(self.ledger.kept), self.rules.false_keeps)

    @property
    def seeds_of_looks(self) -> tuple[int, int]:
        """With how many seeds the next challenger is trained for its first look, and at most."""
        if self.rules.together > 1:
            return FEWEST, FEWEST
        return self.ledger.chosen_by + FEWEST, self.ledger.chosen_by + self.rules.seeds

    def known(self, patch: Patch) -> Entry | None:
        """The newest entry of the same changes: what was tried is not tried again, unless it is wanted against another
        champion than it met, or was looked at with one seed alone and gets all now."""
        found = self.ledger.tried(plain(patch))
        if found is None or self.ledger.stands(found):
            return found
        if found.one_seed and self.rules.together == 1:
            return None
        return found if not self.rules.again or found.against == self.opponent[0] else None

    def check(self, patches: Mapping[str, Patch]) -> None:
        """Raises SpecError with everything that is wrong with any challenger. One that does not go with the champion of
        now, but with the first, is no mistake: it ends as `impossible` in its turn."""
        problems: list[Problem] = []
        for name, patch in patches.items():
            if self.known(patch):
                continue
            mark = next((setting.mark for setting in patch.settings), None)
            if message := no_name(name) or _reserved(name):
                problems.append(Problem("challengers", message, mark))
                continue
            try:
                self.round(name, patch, FEWEST)
            except SpecError as error:
                if self.opponent[0] == self.first or not self._fits_the_first(name, patch):
                    problems += (replace(each, mark=each.mark or mark) for each in error.problems)
        if problems:
            raise SpecError(problems)

    def _fits_the_first(self, name: str, patch: Patch) -> bool:
        try:
            self.round(name, patch, FEWEST, (self.first, self.patches[self.first]))
        except SpecError:
            return False
        return True

    def round(self, name: str, patch: Patch, seeds: int, against: tuple[str, Patch] | None = None) -> Round:
        """The next round, with this challenger. Raises SpecError."""
        if name in self.patches or name in self.candidate:
            who = "a champion" if name in self.patches else "what waits to be confirmed"
            raise SpecError.of(f"challengers.{name}", f"is the name of {who}; call the challenger otherwise")
        opponent, before = against or self.opponent
        rows = {self.first: self.patches[self.first], opponent: before, name: composed(before, patch)}
        number = self.ledger.after + len(self.ledger.entries) + 1
        return Round.of(self.study, self.store, str(number), rows, seeds)

    def alone(self) -> Round:
        """Whom the next challenger meets beside the baseline, without a challenger."""
        name, patch = self.opponent
        return Round.of(self.study, self.store, "ledger", {self.first: self.patches[self.first], name: patch}, FEWEST)


def _reserved(name: str) -> str:
    return f"'{name}' is what confirmed challengers are called; choose another name" if TOGETHER.fullmatch(name) else ""


def patch_in(entry: Entry) -> Patch:
    """What an entry of the ledger changes."""
    return patch_of(entry.changes, f"ledger.{entry.number}")

"""A search in progress: turns Optuna's proposals into rows of the trial table, and the best one into a variant."""

from __future__ import annotations

import dataclasses
from typing import Any

from arch_dsl.errors import SpecError
from arch_dsl.patch import Setting
from arch_dsl.source import Node
from search.planning import Plan, Variant
from search.propose import Proposer, State
from search.selection import loss
from search.store import TERMINAL, Row, Store
from search.study import Asked

FOUND = "found"


class Seeker:
    """Keeps as many proposals under way as there are slots, until the study's number of trials is reached."""

    def __init__(self, plan: Plan, store: Store, slots: int) -> None:
        assert plan.study.search is not None and plan.study.space is not None
        self.plan, self.store, self.slots = plan, store, slots
        self.search = plan.study.search
        rows = [row for row in store.study_trials(plan.study.study) if row["role"] == "search"]
        self.proposer = Proposer(
            store.root,
            plan.study.study,
            plan.study.space,
            self.search.sampler,
            self.search.seed,
            given={path: plan.builder.given(path) for path in plan.study.space.needs},
            stored=[row["settings"]["number"] for row in rows],
        )
        self.variants: dict[int, Variant] = {}
        self.refused: set[int] = set()

    def rows(self, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials that should exist: the study's variants, the proposals so far, new ones, the best one repeated."""
        done = {row["settings"]["number"]: row for row in trials if row["role"] == "search"}
        for number, row in done.items():
            if row["state"] in TERMINAL:
                self.proposer.tell(number, loss(row, "validation"), _state(row))
        proposals = {number: self._row(number, values) for number, values in self.proposer.proposals().items()}
        open_slots = self.slots - len(self.proposer.waiting())
        while open_slots > 0 and len(proposals) < self.search.trials:
            number, values = self.proposer.ask()
            proposals[number] = self._row(number, values)
            open_slots -= proposals[number] is not None
        wanted = [row for row in proposals.values() if row]
        if len(proposals) >= self.search.trials and all(
            number in done and done[number]["state"] in TERMINAL for number, row in proposals.items() if row
        ):
            self._adopt(done)
        return [*wanted, *self.plan.rows(trials)]

    def _row(self, number: int, values: dict[str, Any]) -> Row | None:
        """The row of a proposal; None where it makes no sense, which counts as failed and is noted once."""
        if number in self.refused:
            return None
        try:
            variant = self.variants.get(number) or self._variant(number, values)
        except SpecError as error:
            self.refused.add(number)
            if number in self.proposer.waiting():
                self.store.add_event("refused", self.plan.study.study, message=str(error), values=values)
            self.proposer.tell(number, None, "failed")
            return None
        self.variants[number] = variant
        seed = self.plan.seeds[0]
        settings = {"number": number, "lr": variant.recipe.lr, **values}
        return Row(variant.trial(seed), variant.name, "search", settings, seed)

    def _variant(self, number: int, values: dict[str, Any]) -> Variant:
        settings = tuple(Setting(path, Node.of(value), "the search") for path, value in values.items())
        asked = Asked(f"search-{number:04d}", f"search-{number:04d}", "", settings)
        return self.plan.builder.variant(asked, self._target())

    def _target(self) -> int | None:
        match = self.plan.study.match
        return next((v.parameters for v in self.plan.variants if match and v.name == match.parameters), None)

    def _adopt(self, done: dict[int, dict[str, Any]]) -> None:
        """Makes the proposal with the lowest validation loss a variant of the study, to be repeated with all seeds."""
        losses = [(value, number) for number, row in done.items() if (value := loss(row, "validation")) is not None]
        if not losses or any(variant.name == FOUND for variant in self.plan.variants):
            return
        best = self.variants[min(losses)[1]]
        self.plan.variants.append(dataclasses.replace(best, name=FOUND))
        self.store.save_study(self.plan.study.study, self.plan.record(), self.store.study_yaml(self.plan.study.study))


def _state(row: dict[str, Any]) -> State:
    state: State = row["state"]
    return state

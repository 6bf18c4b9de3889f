"""A search in progress: turns Optuna's proposals into rows of the trial table, and the best one into a variant."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

from arch_dsl.errors import SpecError
from arch_dsl.identity import canonical
from arch_dsl.model import resolve
from arch_dsl.patch import Setting
from arch_dsl.source import Node
from search.objectives.checks import positions
from search.planning import Plan, Variant
from search.propose import Proposer, State, fits
from search.selection import loss
from search.store import TERMINAL, Row, Store
from search.study import Asked
from search.trial import canonical_json

FOUND = "found"


class Seeker:
    """Keeps as many proposals under way as there are slots, until the study's number of trials is reached."""

    def __init__(self, plan: Plan, store: Store, slots: int) -> None:
        assert plan.study.search is not None and plan.study.space is not None
        self.plan, self.store, self.slots = plan, store, slots
        self.search = plan.study.search
        self.variants: dict[int, Variant] = {}
        self.refused: set[int] = set()
        self.noted: set[int] = set()
        self.proposer = Proposer(
            store.root,
            plan.study.study,
            plan.study.space,
            self.search.sampler,
            self.search.seed,
            given={path: plan.builder.given(path) for path in plan.study.space.needs},
            stored=self._stored(),
            base=self._base(),
        )

    def rows(self, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials that should exist: the study's variants, the proposals so far, new ones, the best one repeated."""
        proposals = {number: self._row(number, values) for number, values in self.proposer.proposals().items()}
        keys = {number: row.trial.key for number, row in proposals.items() if row}
        done = {number: row for number, row in _searched(trials) if row["key"] == keys.get(number)}
        for number, row in done.items():
            if row["state"] in TERMINAL:
                self.proposer.tell(number, loss(row, "validation"), _state(row))
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
            if number in self.proposer.waiting() and number not in self.noted:
                self.store.add_event("refused", self.plan.study.study, message=str(error), values=values, number=number)
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

    def _stored(self) -> dict[int, dict[str, Any]]:
        """The values of the proposals that the trial table and its events know, so that `optuna.db` is but a copy.

        A row whose key is not that of its values now comes from another model or recipe: it is no proposal of ours.
        """
        study, seed = self.plan.study, self.plan.seeds[0]
        assert study.space is not None
        found: dict[int, dict[str, Any]] = {}
        order = [path for path, _ in study.space.ordered()]
        for event in self.store.events(study.study):
            number, values = event["detail"].get("number"), event["detail"].get("values", {})
            if event["kind"] == "refused" and number is not None and fits(study.space, values):
                self.noted.add(number)
                found[number] = values
        for number, row in _searched(self.store.study_trials(study.study)):
            paths = [*order, *(path for path in row["settings"] if path not in (*order, "number", "lr"))]
            values = {path: row["settings"][path] for path in paths if path in row["settings"]}
            try:
                variant = self._variant(number, values)
            except SpecError:
                continue
            if variant.trial(seed).key == row["key"]:
                found[number] = values
        return found

    def _base(self) -> str:
        """A digest of what the proposals change: model, data, recipe (but for a drawn rate), what is matched."""
        study, builder = self.plan.study, self.plan.builder
        assert study.space is not None
        dataset = builder.dataset(study.train)
        needed = positions(study.train, study.model)
        model = resolve(study.model, vocab=study.train.vocab(dataset.vocab), max_positions=needed)
        rate = study.space.axes.get("train.lr")
        left_out = {"data", "tokenizer", *(["lr"] if rate and not rate.when else [])}
        recipe = {name: value for name, value in canonical(study.train).items() if name not in left_out}
        target = self._target()
        matched = study.match.goal(target.size, target.trial(0).key) if study.match and target else None
        facts = [canonical(model), dataset.identity, recipe, matched]
        return hashlib.sha256(canonical_json(facts).encode()).hexdigest()

    def _target(self) -> Variant | None:
        match = self.plan.study.match
        return next((v for v in self.plan.variants if match and v.name == match.to), None)

    def _adopt(self, done: dict[int, dict[str, Any]]) -> None:
        """Makes the proposal with the lowest validation loss a variant of the study, to be repeated with all seeds.

        If it is one of the study's variants already, an event says so: a table needs each once.
        """
        losses = [(value, number) for number, row in done.items() if (value := loss(row, "validation")) is not None]
        if not losses or any(variant.name == FOUND for variant in self.plan.variants):
            return
        number = min(losses)[1]
        best, rate = self.variants[number], next(iter(self.plan.rates), None)
        seed, study = self.plan.seeds[0], self.plan.study.study
        for variant in self.plan.variants:
            if variant.trial(seed, rate).key == best.trial(seed, rate).key:
                detail: dict[str, Any] = {
                    "message": f"the best proposal, {number}, is the variant '{variant.name}'",
                    "variant": variant.name,
                    "number": number,
                }
                if not any(event["kind"] == FOUND and event["detail"] == detail for event in self.store.events(study)):
                    self.store.add_event(FOUND, study, **detail)
                return
        self.plan.variants.append(dataclasses.replace(best, name=FOUND))
        self.store.save_study(study, self.plan.record(), self.store.study_yaml(study))


def _searched(trials: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of proposals with their numbers."""
    return ((row["settings"]["number"], row) for row in trials if row["role"] == "search")


def _state(row: dict[str, Any]) -> State:
    state: State = row["state"]
    return state

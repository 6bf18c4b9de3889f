"""A search in progress: turns Optuna's proposals into rows of the trial table, and the best ones into variants."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.model.model import Model, resolve
from archlab.arch_dsl.patching.patch import apply
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.recipe.fits import positions
from archlab.search.results.selection import loss
from archlab.search.sections.search.axes import Components
from archlab.search.sections.search.frames import excess, measured, told
from archlab.search.sections.search.judged import Judged, exceeded, none_can_be_trained
from archlab.search.sections.search.known_points import decided
from archlab.search.sections.search.optuna_values import importances
from archlab.search.sections.search.promotion import DECISION, Standing, climb, promoting_of
from archlab.search.sections.search.proposer import Ending, Known, Proposer, fits
from archlab.search.sections.search.samplers import FOUND, EffectsSampler, Goals
from archlab.search.sections.search.space import Space, component_of
from archlab.search.statistics.pareto import spanning
from archlab.search.store.store import TERMINAL, Row, Store
from archlab.search.training.step_times import measure, step_time_key
from archlab.search.trial.metrics import validation_history
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.asked import Asked, Rung
from archlab.search.variants.asks import Events, Planned
from archlab.search.variants.memory import memory_bytes
from archlab.search.variants.patches import spelt
from archlab.search.variants.variant import Variant


class Seeker:
    """Keeps as many proposals under way as there are slots, until the study's number of trials is reached.

    All that it knows it takes from the trial table and from the specs; what a run stored is judged again by the next.
    """

    def __init__(
        self, search: Goals, space: Space, plan: Planned, store: Store, slots: int, tell: Events = lambda _: None
    ) -> None:
        self.search, self.space = search, space
        self.plan, self.store, self.slots, self.tell = plan, store, slots, tell
        part = promoting_of(plan)
        self.rungs = part.rungs if part else ()
        self.seed = self.rungs[0].seeds[0] if self.rungs else plan.seeds[0]
        self.standing: list[Standing] = []  # of the rungs that began
        self.found: dict[int, str] = {}  # of what became a variant, or is one
        self.limits = self.search.constraints.values()
        self.switches = [(path, axis) for path, axis in space.axes.items() if isinstance(axis, Components)]
        self.judged: dict[int, Judged] = {}
        self.noted: set[int] = set()  # refusals that have an event
        self.adopted = False
        self.losses: dict[int, float] = {}  # of the complete ones, on validation
        self.base = self._base()
        self.proposer = Proposer(
            store.root,
            plan.study.study,
            self.space,
            self.search.sampler,
            self.search.seed,
            goals=len(self.search.minimize),
            given={path: plan.builder.given(path) for path in self.space.needs},
            known=self._known(),
            base=self.base,
            worst=math.log(plan.builder.data(plan.study.train).vocab),  # the loss of who knows nothing
            starts=self._starts(),
        )
        self._record()

    def rows(self, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials that should exist: the study's variants, the proposals so far, new ones, the best repeated.

        Raises SpecError where no proposal that may be drawn can be trained.
        """
        proposals = {number: self._row(number, values) for number, values in self.proposer.proposals().items()}
        before = len(proposals), len(self.proposer.waiting())
        keys = {number: row.trial.key for number, row in proposals.items() if row}
        done = {number: row for number, row in _searched(trials) if row["key"] == keys.get(number)}
        for number, row in done.items():
            if row["state"] in TERMINAL:
                self.proposer.tell(number, self._ending(number, row))
        while len(self.proposer.waiting()) < self.slots and self._asks(len(proposals)):
            number, values = self.proposer.ask()
            proposals[number] = self._row(number, values)
        if (len(proposals), len(self.proposer.waiting())) != before:
            self._record()
            self._save()
        if not self._asks(len(proposals)) and (why := none_can_be_trained([*self.judged.values()])):
            if all(each.broken for each in self.judged.values()):
                raise SpecError.of("search.constraints", why, self.search.mark("constraints"))
            raise SpecError.of("space", why, self.plan.study.mark("space"))
        wanted = [row for row in proposals.values() if row]
        ended = all(number in done and done[number]["state"] in TERMINAL for number, row in proposals.items() if row)
        over = ended and not self._asks(len(proposals))
        if self.rungs:
            wanted += self._promote(done if over else None, trials)
        elif over:
            self._adopt(self._spanning(self._complete(done)))
        return [*wanted, *self.plan.rows(trials)]

    def _asks(self, proposals: int) -> bool:
        """Whether there are to be more proposals: those that break a constraint are no trials, but are bounded too."""
        trials = sum(not judged.broken for judged in self.judged.values())
        return trials < self.search.trials and proposals < self.search.most

    def _row(self, number: int, values: dict[str, Any]) -> Row | None:
        """The row of a proposal; None where it is refused, which is noted once."""
        judged = self._judge(number, values)
        if judged.reason:
            if number not in self.noted:
                self.noted.add(number)
                told: dict[str, Any] = {"values": values, "number": number, "excess": judged.excess}
                self.store.add_event("refused", self.plan.study.study, message=judged.reason, **told)
            self.proposer.tell(number, self._refusal(judged))
            return None
        assert judged.variant is not None
        settings = {"number": number, "lr": judged.variant.recipe.lr, **values}
        return Row(judged.variant.trial(self.seed), judged.variant.name, "search", settings, self.seed)

    def _judge(self, number: int, values: dict[str, Any]) -> Judged:
        """Whether a proposal makes sense and keeps to its constraints; the time of a step is asked last."""
        if number not in self.judged:
            try:
                scaled = tuple(self._scaled(number, values))
            except SpecError as error:
                self.judged[number] = Judged(reason=str(error))
                return self.judged[number]
            variant = scaled[0]
            known: dict[str, float] = {"parameters": variant.parameters, **variant.figures}
            known["memory"] = memory_bytes(variant)
            if "step_time" in self.limits and not any(each > 0 for each in excess(self.limits, known).values()):
                known["step_time"] = self._step_time(variant)
            over = excess(self.limits, known)
            self.judged[number] = Judged(scaled, known, over, exceeded(known, self.limits, over))
        return self.judged[number]

    def _refusal(self, judged: Judged) -> Ending:
        values = told(self.search.minimize, {**judged.costs, "step_time": None}) if judged.broken else ()
        return Ending("refused", values, judged.excess, reason=judged.reason)

    def _ending(self, number: int, row: dict[str, Any]) -> Ending:
        """How a proposal that was trained has ended."""
        if (value := loss(row, "validation")) is not None:
            self.losses[number] = value
        judged = self.judged[number]
        known = {**judged.costs, **measured(row["result"], judged.tokens_per_step)}
        history = tuple(validation_history(Path(row["folder"]))) if row["state"] == "pruned" else ()
        return Ending(row["state"], told(self.search.minimize, known), judged.excess, history, row["reason"] or "")

    def _scaled(self, number: int, values: dict[str, Any]) -> Iterator[Variant]:
        """The variant of a proposal, of a search that promotes as each rung trains it. Raises SpecError."""
        components = self.plan.study.components
        settings = [each for path, value in values.items() for each in self.space.settings(path, value, components)]
        chosen = {component_of(path, values.get(path, "off")) for path, _ in self.switches}
        used = {name: name in chosen for name in self._named()}
        name = f"search-{number:04d}"
        asked = Asked(name, name, "", tuple(settings), used)
        for rung in self.rungs:
            yield self.plan.builder.variant(dataclasses.replace(asked, rung=rung.scale), rung.target)
        if not self.rungs:
            yield self.plan.builder.variant(asked, self._target())

    def _step_time(self, variant: Variant) -> float:
        """Seconds of one optimizer step, measured once for each model and recipe in a store."""
        resources = self.plan.study.resources
        key = step_time_key(variant.timed, resources.cpus, str(resources.parallel))
        known = self.store.recall("step_time", key)
        if known is None:
            found = measure(variant.timed, variant.timed, resources.cpus)
            known = {"seconds": found["seconds"], "fingerprint": found["fingerprint"]}
            self.store.remember("step_time", key, known)
        return float(known["seconds"])

    def _known(self) -> dict[int, Known]:
        """The proposals that the trial table and its events know, so that `optuna.db` is but a copy.

        A row whose key is not that of its values now comes from another model or recipe: it is no proposal of ours.
        One that was refused and is not any more, as a constraint was loosened, is one that waits.
        """
        study, seed = self.plan.study.study, self.seed
        found: dict[int, Known] = {}
        order = [path for path, _ in self.space.ordered()]
        for event in self.store.events(study):
            number, values = event["detail"].get("number"), event["detail"].get("values", {})
            if event["kind"] == "refused" and number is not None and fits(self.space, values):
                self.noted.add(number)
                judged = self._judge(number, values)
                found[number] = Known(values, self._refusal(judged) if judged.reason else None)
        for number, row in _searched(self.store.study_trials(study)):
            paths = [*order, *(path for path in row["settings"] if path not in (*order, "number", "lr"))]
            values = {path: row["settings"][path] for path in paths if path in row["settings"]}
            if not fits(self.space, values):
                found[number] = Known(values)
                continue
            judged = self._judge(number, values)
            if judged.variant is None or judged.variant.trial(seed).key != row["key"]:
                del self.judged[number]
                continue
            if judged.reason and row["state"] == "complete":  # a constraint that came later: trained is trained
                judged = self.judged[number] = dataclasses.replace(judged, reason="")
            ending = self._ending(number, row) if row["state"] in TERMINAL else None
            found[number] = Known(values, self._refusal(judged) if judged.reason else ending)
        return found

    def _starts(self) -> list[dict[str, Any]]:
        """What a sampler begins with that asks for what is known."""
        if not isinstance(self.search.sampler, EffectsSampler):
            return []
        return decided(self.plan, self.store, self._resolved(self.plan.study.model), self.search.sampler.known)

    def _base(self) -> str:
        """A digest of what the proposals change: model, data, recipe (but for a drawn rate), what is matched."""
        study, builder = self.plan.study, self.plan.builder
        scale = self.rungs[0].scale if self.rungs else None
        train, sized = builder.recipe((), scale), scale.settings if scale else ()
        model = apply(study.model, [s for s in sized if not s.path.startswith("train.")]) if sized else study.model
        dataset, model = builder.data(train), self._resolved(model, scale)
        rate = self.space.axes.get("train.lr")
        left_out = {"data", "tokenizer", *(["lr"] if rate and not rate.when else [])}
        recipe = {name: value for name, value in builder.settle(train).told().items() if name not in left_out}
        target = self.rungs[0].target if self.rungs else self._target()
        matched = study.match.goal(target.size, target.trial(0).key) if study.match and target else None
        facts = [canonical(model), dataset.identity, recipe, matched]
        return hashlib.sha256(canonical_json(facts).encode()).hexdigest()

    def _resolved(self, model: Model, scale: Rung | None = None) -> Model:
        """A model that says all that its recipe, data and defaults say of it."""
        train = self.plan.builder.recipe((), scale)
        vocab = train.vocab(self.plan.builder.data(train).vocab)
        return resolve(model, vocab=vocab, max_positions=positions(train, model))

    def _target(self) -> Variant | None:
        match = self.plan.study.match
        return next((v for v in self.plan.variants if match and v.name == match.to), None)

    def _record(self) -> None:
        """Tells the study's record what is searched and what each proposal costs."""
        search = self.search
        known = self.proposer.proposals()
        losses = [(known[number], each) for number, each in sorted(self.losses.items())]
        self.plan.searched = {
            "sampler": search.sampler.type,
            "minimize": list(search.minimize),
            "constraints": self.limits,
            "trials": search.trials,
            "most": search.most,
            "space": self.space.plain(),
            "components": {name: spelt(self.plan.study.components[name].settings) for name in self._named()},
            "base": self.base,
            "importances": importances(self.space, losses),
            **({"promote": self._rungs()} if self.rungs else {}),
            "proposals": [{"number": number, **judged.record()} for number, judged in sorted(self.judged.items())],
        }

    def _rungs(self) -> list[dict[str, Any]]:
        """What the record keeps of the rungs; of the last one also what was found."""
        begun = {each.rung.number: each.record() for each in self.standing}
        told = [begun.get(rung.number) or rung.record() for rung in self.rungs]
        told[-1]["found"] = {str(number): name for number, name in self.found.items()}
        return told

    def _named(self) -> list[str]:
        """The components that a proposal may have."""
        values = ((path, value) for path, axis in self.switches for value in axis.values)
        return [name for path, value in values if (name := component_of(path, value))]

    def _save(self) -> None:
        study = self.plan.study.study
        self.store.save_study(study, self.plan.record(), self.store.study_yaml(study))

    def _complete(self, done: dict[int, dict[str, Any]]) -> dict[int, tuple[float, ...]]:
        """What is known of all goals of the proposals that ended with a result and keep to the constraints."""
        ended = {number: self._ending(number, row) for number, row in done.items() if not self.judged[number].broken}
        return {number: tuple(v or 0.0 for v in end.values) for number, end in sorted(ended.items()) if end.complete}

    def _promote(self, done: dict[int, dict[str, Any]] | None, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials of the rungs by now, given the proposals once all have ended; the last ones become variants."""
        candidates = None if done is None else {number: self.judged[number].scaled for number in self._complete(done)}
        decide = partial(self.store.decide, self.plan.study.study)
        rows, standing = climb(self.rungs, candidates, trials, decide, self.proposer.ranked)
        before = [(each.entered, each.chosen) for each in self.standing]
        if [(each.entered, each.chosen) for each in standing] != before:
            known = sum(each.chosen is not None for each in self.standing)
            self.standing = standing
            decided = [each for each in standing if each.chosen is not None]
            if len(decided) == len(self.rungs):
                self._adopt([*(decided[-1].chosen or ())])
            self._record()
            self._save()
            if told := [str(each) for each in decided[known:]]:
                self.tell({"event": self.search.key, "messages": told})
        return rows

    def _spanning(self, points: dict[int, tuple[float, ...]]) -> list[int]:
        """The best proposals: with one goal that is the first in the sampler's order, with several those of the Pareto
        front that span most of it."""
        if not points:
            return []
        if len(self.search.minimize) == 1:
            losses = {number: value for number, (value,) in points.items()}
            digest = hashlib.sha256(canonical_json(sorted(losses.items())).encode()).hexdigest()[:16]
            decide = partial(self.store.decide, self.plan.study.study, f"{DECISION} found {digest}")
            return [*decide(lambda: self.proposer.ranked(losses)[:1])]
        numbers, places = list(points), list(points.values())
        reference = tuple(max(column) for column in zip(*places, strict=True))
        best = [numbers[index] for index in spanning(places, reference, self.search.found)]
        return sorted(best, key=lambda number: (points[number], number))

    def _adopt(self, best: list[int]) -> None:
        """Makes these proposals variants of the study, to be repeated with all seeds.

        One that is a variant of the study already has an event that says so: a table needs each once.
        """
        if self.adopted:
            return
        self.adopted = True
        fresh = [self._adopted(number, name) for number, name in zip(best, self.search.names, strict=False)]
        if any(fresh):
            self._save()

    def _adopted(self, number: int, name: str) -> bool:
        """Whether a proposal became a new variant."""
        seed, study, best = self.plan.seeds[0], self.plan.study.study, self.judged[number].scaled[-1]
        self.found[number] = name
        for variant in self.plan.variants:
            if variant.trial(seed).key == best.trial(seed).key:
                self.found[number] = variant.name
                front = "a proposal of the last rung" if self.rungs else "a proposal of the front"
                which = "the best proposal" if name == FOUND else front
                message = f"{which}, {number}, is the variant '{variant.name}'"
                detail: dict[str, Any] = {"message": message, "variant": variant.name, "number": number}
                if not any(event["kind"] == FOUND and event["detail"] == detail for event in self.store.events(study)):
                    self.store.add_event(FOUND, study, **detail)
                return False
        self.plan.variants.append(dataclasses.replace(best, name=name, row=name))
        return True


def _searched(trials: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of proposals with their numbers."""
    return ((row["settings"]["number"], row) for row in trials if row["role"] == "search")

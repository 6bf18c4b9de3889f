"""A cheap recipe that tells which variants to train: the `screen:` section of a study, and its work in a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Range
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.search.formatting.numbers import count
from archlab.search.sections.screen import decide
from archlab.search.store.roles import ROLE
from archlab.search.store.store import Row, Store
from archlab.search.variants.asks import Builds, Events, NextRows, Planned, Question
from archlab.search.variants.mistakes import Mistakes
from archlab.search.variants.patches import Changes
from archlab.search.variants.section import Made, Part, Section
from archlab.search.variants.variant import Variant


class Screen(Section):
    """Trains every variant by a cheap recipe first, `train` changed in these paths, and most of the worst no further.

    `keep` is the share of the variants that go on, rounded up. `calibrate` variants go on whatever their probes say,
    all baselines among them, the others drawn by name; of those that the probes would leave out `audit` go on too,
    rounded up. Where Spearman's rho of the probes' validation losses and the variants' own is below `correlation`, over
    the first of these or over all that went on, the rule is off and every variant is trained.
    """

    key = "screen"
    title: ClassVar[str] = "screen"
    train: Changes
    keep: Annotated[float, Range(above=0, below=1)] = 0.5
    calibrate: Annotated[int, Range(min=4)] = 6
    audit: Annotated[float, Range(min=0, below=1)] = 0.25
    correlation: Annotated[float, Range(min=0, below=1)] = 0.5

    def problems(self, study: Question) -> Iterable[Problem]:
        """It ranks variants that are all known, once each."""
        reasons = {
            "search": "a search proposes its variants one after another",
            "ladder": "a ladder trains each of them at several sizes",
        }
        for section, what in reasons.items():
            if getattr(study, section) is not None:
                message = f"ranks all variants before they are trained, and {what}; leave one of the two out"
                yield Problem("screen", message, study.mark("screen"))
        try:
            apply(study.train, self.train.settings)
        except SpecError as error:
            yield from (replace(each, path=f"screen.train.{each.path}") for each in error.problems)

    def part(self, builds: Builds, variants: list[Variant], made: Made) -> Part:
        """The probes: each variant, at the widths that matching found, under its recipe as the screen changes it.

        Raises SpecError with everything that is wrong with any of them.
        """
        study = builds.study
        if len(variants) < self.calibrate + decide.SPARE:
            most, least = len(variants) - decide.SPARE, 4 + decide.SPARE
            way = f"write calibrate: {most}" if most >= 4 else f"a screen needs at least {least}"
            message = f"must leave at least {decide.SPARE} of the {len(variants)} variants to choose from, found "
            raise SpecError.of("screen.calibrate", f"{message}{self.calibrate}; {way}", self.mark("calibrate"))
        changes = self.train.settings
        over = [replace(setting, path=f"train.{setting.path}") for setting in changes]
        said = {setting.path.split(".")[0] for setting in changes}
        if "data" in said and "objective" not in said and apply(study.train, changes).data.holds_answers:
            over.append(Setting("train.objective", Node.of("answers"), "the screen"))  # unless it says otherwise
        wrong, probes = Mistakes(len(variants)), dict[str, Variant]()
        for variant in variants:
            asked, _ = made[variant.name]
            widths = tuple(Setting(path, Node.of(width), "match") for path, width in variant.matched.items())
            try:
                asked = replace(asked, settings=(*asked.settings, *widths), over=tuple(over))
                probes[variant.name] = builds.variant(asked, None)
            except SpecError as error:
                wrong.add((_of_screen(study, each) for each in error.problems), variant.name)
        if problems := [*wrong.problems()]:
            raise SpecError(problems)
        keys = {name: probe.trial(0).key for name, probe in probes.items()}
        if all(keys[variant.name] == variant.trial(0).key for variant in variants):
            message = "changes nothing: each probe is the variant's own trial"
            raise SpecError.of("screen.train", message, self.mark("train"))
        if len(set(keys.values())) == 1:
            message = "undoes all in which the variants differ: their probes are one trial"
            raise SpecError.of("screen.train", message, self.mark("train"))
        return Screening({name: replace(probe, name=f"{name} (probe)") for name, probe in probes.items()})

    def record(self, planned: Planned) -> dict[str, Any]:
        """Its fields; the variants have their probes, and the rows tell the rest."""
        numbers = {name: getattr(self, name) for name in ("keep", "calibrate", "audit", "correlation")}
        return {"train": {setting.path: setting.node.plain() for setting in self.train.settings}, **numbers}

    @classmethod
    def edited(cls, before: Any, now: Any) -> Iterable[str]:
        """What another screen does to trials that are there."""
        if before and not now:
            yield "there was a screen, now every variant is trained"
        elif before and before != now:
            yield f"the screen has another {', '.join(name for name in before if before[name] != now.get(name))}"
        elif now and not before:
            yield "there is a screen now: what it leaves out is no part of the table any more"

    def lines(self, planned: Planned) -> Iterable[str]:
        """What its probes take and may save, and what they have said so far."""
        part, record = screening(planned), planned.record()
        probe = part.variants[planned.variants[0].name]
        every, most = decide.tokens_of(record, part.variants), decide.most_left_out(record)
        largest = sum(sorted(decide.tokens_of(record, [name]) for name in part.variants)[len(part.variants) - most :])
        yield (
            f"before that a screen: {len(part.variants)} probes of {count(probe.recipe.all_tokens)} tokens of "
            f"{probe.dataset.record()['source']}, {count(decide.probe_tokens(record))} in all; it may leave out up "
            f"to {most} of {len(planned.variants)} variants, and save up to {count(largest)} of {count(every)} tokens"
        )
        if part.found is not None and part.found.probes:
            yield from decide.sentences(record, part.found)

    def run_rows(self, next_rows: NextRows, planned: Planned, store: Store, slots: int, tell: Events) -> NextRows:
        """Those of the plan; what the screen decides is told, and how many trials there are then."""
        name, told = planned.study.study, ""

        def telling(trials: list[dict[str, Any]]) -> Sequence[Row]:
            nonlocal told
            rows, found = next_rows(trials), screening(planned).found
            if found is not None and found.state != told:
                told, record = found.state, {**store.study(name), "trials": planned.trials}
                store.save_study(name, record, store.study_yaml(name))
                said = {"messages": list(decide.sentences(record, found)), "left_out": len(found.left_out)}
                tell({"event": "screen", "state": told, **said, "trials": planned.trials})
            return rows

        return telling


class Screening(Part):
    """The probes of a plan, and what they have decided."""

    role = ROLE

    def __init__(self, probes: dict[str, Variant]) -> None:
        self.variants = probes
        self.found: decide.Screened | None = None  # once it has looked

    def look(self, record: dict[str, Any], trials: list[dict[str, Any]]) -> None:
        self.found = decide.screened(record, trials)
        self.left_out = self.found.left_out

    def wants(self, variant: str) -> bool:
        return self.found is None or variant in self.found.wanted

    def arranged(self, rows: list[Row]) -> list[Row]:
        """First seeds first while it looks at these."""
        if self.found is None or self.found.state in decide.DECIDED:
            return rows
        return sorted(rows, key=lambda row: row.seed if row.role == "repeat" else -1)

    def record(self, variant: str) -> dict[str, Any]:
        probe = self.variants[variant]  # a screen has one of all
        return {"probe": {"tokens": probe.recipe.all_tokens, "flops_per_token": probe.flops_per_token}}


def screening(planned: Planned) -> Screening:
    """The screen of a plan that has one."""
    return next(part for part in planned.parts if isinstance(part, Screening))


def _of_screen(study: Question, problem: Problem) -> Problem:
    """A problem at the path where a reader can mend it."""
    mark = problem.mark or study.mark("screen")
    if problem.path.partition(".")[0] == "train":
        return replace(problem, path=f"screen.{problem.path}", mark=mark)
    return replace(problem, message=f"{problem.message}, as the screen trains it", mark=mark)

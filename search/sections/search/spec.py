"""The `search:` section of a study, and its work in a plan and in a run."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem
from archlab.search.sections.search.points import Points
from archlab.search.sections.search.promotion import (
    flops_of,
    promoting,
    promoting_of,
    rung_lines,
    trials_of_rungs,
)
from archlab.search.sections.search.promotion_spec import problems_of
from archlab.search.sections.search.rows import Seeker
from archlab.search.sections.search.samplers import Goals
from archlab.search.sections.search.space import Space
from archlab.search.store.store import Store
from archlab.search.variants.asks import Builds, Events, NextRows, Planned, Question
from archlab.search.variants.section import Made, Part
from archlab.search.variants.variant import Variant

_REASONS = {
    "objective": "losses of different objectives do not compare; make them variants",
    "tokenizer": "perplexities of different tokenizers do not compare; make them variants",
    "data": "losses on different texts do not compare; make them variants",
}
_RUNG = ("tokens", "parameters", "keep", "seeds")  # what a record has of a rung before anything reached it


class Search(Goals):
    """A sampler proposes `trials` variants from `space:`; the best by validation is run with all seeds.

    With several goals there is no best one: of the Pareto front, `keep` trials that span most of it are repeated.
    At most `proposals` are drawn, ten per trial without it: those that break a constraint are among them. With
    `promote` the best are trained for longer, larger and with more seeds, rung by rung, before one is the best.
    """

    key = "search"
    title: ClassVar[str] = "search"

    def problems(self, study: Question) -> Iterable[Problem]:
        space = study.space
        if not isinstance(space, Space):
            yield Problem("search", "needs `space:` beside it", study.mark("search"))
            return
        mark = self.mark("minimize") or self.mark()
        if "perplexity" not in self.minimize:
            yield Problem("search.minimize", "must hold perplexity: without it nothing needs to be trained", mark)
        for goal in {goal for goal in self.minimize if self.minimize.count(goal) > 1}:
            yield Problem("search.minimize", f"holds {goal} twice", mark)
        if self.proposals is not None and self.proposals < self.trials:
            message = f"must be at least the number of trials, {self.trials}, found {self.proposals}"
            yield Problem("search.proposals", message, self.mark("proposals"))
        yield from space.component_problems(study.components)
        if complaint := self.sampler.complaint(space, len(self.minimize), self.trials):
            yield Problem("search.sampler", complaint, self.mark("sampler") or self.mark())
        yield from problems_of(self.promote, self.trials, len(self.minimize), self.mark("promote"), study)
        if study.prune and len(self.minimize) > 1:
            told = "ends trials by their loss alone, and would end the cheap ones of a front; leave one of the two out"
            yield Problem("prune", told, study.mark("prune"))
        for path in space.axes:
            head, *rest = path.split(".")
            if head == "train" and rest and rest[0] in _REASONS:
                yield Problem(f"space.{path}", _REASONS[rest[0]], space.mark(path) or study.mark("space"))

    def proposed(self, seeds: int) -> int:
        """The trials, those of the rungs, and the repeats of what is found."""
        if self.promote:
            return sum(trials_of_rungs(self.promote, self.trials)) + self.found * seeds
        return self.trials + self.found * (seeds - 1)

    def worth(self, planned: Planned) -> float:
        if not (part := promoting_of(planned)):
            return super().worth(planned)
        mean = fmean(map(flops_of, planned.variants))
        takes = zip(part.rungs, trials_of_rungs(self.promote or (), self.trials), strict=True)
        rungs = sum(many * flops_of(rung.baseline) / mean for rung, many in takes)
        return rungs + self.found * len(planned.seeds)

    def part(self, builds: Builds, variants: list[Variant], made: Made) -> Part | None:
        return promoting(self.promote, builds, made) if self.promote else None

    def lines(self, planned: Planned) -> Iterable[str]:
        if part := promoting_of(planned):
            yield from rung_lines(part, trials_of_rungs(self.promote or (), self.trials), self.found, planned)
        space = planned.study.space
        if isinstance(space, Space) and not space.needs and (points := Points(space, {}).all(self.trials - 1)):
            told = f"the space has {len(points)} point{'s' * (len(points) > 1)}"
            yield f"{told}: the other {self.trials - len(points)} proposals repeat them, and train nothing"

    def record(self, planned: Planned) -> dict[str, Any]:
        return planned.searched

    @classmethod
    def edited(cls, before: Any, now: Any) -> Iterable[str]:
        """What another question does to what was proposed."""
        for part in ("minimize", "space"):
            was, become = ((each or {}).get(part) for each in (before, now))
            if was and become and was != become:
                told = "what it proposed before is told to the sampler as far as it fits"
                yield f"the search had another `{part}`: {told}"
        was, become = (
            [[each[name] for name in _RUNG] for each in (one or {}).get("promote") or ()] for one in (before, now)
        )
        if before and now and was != become:
            yield "the search promotes by other rungs: who goes on is decided anew where a rung has other trials"

    def run_rows(self, next_rows: NextRows, planned: Planned, store: Store, slots: int, tell: Events) -> NextRows:
        """The study's variants, and proposals as results come in."""
        assert isinstance(planned.study.space, Space)
        return Seeker(self, planned.study.space, planned, store, slots, tell).rows

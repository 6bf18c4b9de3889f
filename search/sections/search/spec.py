"""What a search minimizes and what its proposals may cost: the `search:` section of a study."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.spec import Count, Spec, fields_of
from archlab.search.sections.search.samplers import Sampler, TpeSampler
from archlab.search.utils.quantities import Duration, Memory

Goal = Literal[
    "perplexity",
    "parameters",
    "active_parameters",
    "flops_per_token",
    "cache_bytes_per_token",
    "step_time",
    "peak_memory",
]
_MOST = 10  # proposals per trial, where a study says nothing


class Limits(Spec):
    """What a proposal may cost at most. One that costs more is not trained, and no trial is counted for it.

    `memory` is an estimate of what training keeps in one process; `step_time` is measured, once for each model. The
    others follow from the model alone.
    """

    title: ClassVar[str] = "constraints"
    parameters: Count | None = None
    active_parameters: Count | None = None
    flops_per_token: Count | None = None
    cache_bytes_per_token: Count | None = None
    memory: Memory | None = None
    step_time: Duration | None = None

    def values(self) -> dict[str, float]:
        """The limits that are set: numbers, bytes, seconds."""
        given = {name: getattr(self, name) for name in fields_of(type(self)) if getattr(self, name) is not None}
        units = {Memory: "bytes", Duration: "seconds"}
        return {name: float(getattr(value, units.get(type(value), "real"))) for name, value in given.items()}


class Search(Spec):
    """Optuna proposes `trials` variants from `space:`; the best by validation is run with all seeds.

    With several goals there is no best one: of the Pareto front, `keep` trials that span most of it are repeated.
    At most `proposals` are drawn, ten per trial without it: those that break a constraint are among them.
    """

    title: ClassVar[str] = "search"
    sampler: Sampler = TpeSampler()
    trials: Count
    minimize: tuple[Goal, ...] = ("perplexity",)
    constraints: Limits = Limits()
    proposals: Count | None = None
    keep: Count = 3
    seed: int = 0

    @property
    def most(self) -> int:
        """How many proposals are drawn at most."""
        return self.proposals or _MOST * self.trials

    @property
    def found(self) -> int:
        """How many proposals become variants at most."""
        return 1 if len(self.minimize) == 1 else self.keep

    def problems(self) -> Iterator[Problem]:
        """What its fields get wrong together."""
        mark = self.mark("minimize") or self.mark()
        if "perplexity" not in self.minimize:
            yield Problem("search.minimize", "must hold perplexity: without it nothing needs to be trained", mark)
        for goal in {goal for goal in self.minimize if self.minimize.count(goal) > 1}:
            yield Problem("search.minimize", f"holds {goal} twice", mark)
        if self.proposals is not None and self.proposals < self.trials:
            message = f"must be at least the number of trials, {self.trials}, found {self.proposals}"
            yield Problem("search.proposals", message, self.mark("proposals"))


def study_problems(study: Any) -> Iterator[Problem]:
    """What is wrong with the search of a study beside its other sections."""
    search, space = study.search, study.space
    yield from search.problems()
    yield from space.component_problems(study.components)
    complaint = search.sampler.complaint(space, len(search.minimize), search.trials)
    if complaint:
        yield Problem("search.sampler", complaint, search.mark("sampler") or search.mark())
    if study.prune and len(search.minimize) > 1:
        message = "ends trials by their loss alone, and would end the cheap ones of a front; leave one of the two out"
        yield Problem("prune", message, study.mark("prune"))
    reasons = {
        "objective": "losses of different objectives do not compare; make them variants",
        "tokenizer": "perplexities of different tokenizers do not compare; make them variants",
        "data": "losses on different texts do not compare; make them variants",
    }
    for path in space.axes:
        head, *rest = path.split(".")
        if head == "train" and rest and rest[0] in reasons:
            yield Problem(f"space.{path}", reasons[rest[0]], space.mark(path) or study.mark("space"))

"""What a search minimizes and what its proposals may cost."""

from __future__ import annotations

from typing import ClassVar, Literal

from archlab.arch_dsl.language.spec import Count, Spec, fields_of
from archlab.search.sections.search.samplers import Sampler, TpeSampler
from archlab.search.utils.quantities import Duration, Memory
from archlab.search.variants.section import Section

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


class Goals(Section):
    """What is proposed, and what for."""

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

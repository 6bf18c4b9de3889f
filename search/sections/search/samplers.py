"""How a search proposes and what for: samplers by name, Optuna's and ours, goals, and what a proposal may cost.

Every argument of a sampler that changes proposals is said here: what Optuna leaves open changes from one release to the
next. A sampler is made anew for each proposal, with a seed of its own, so that a proposal depends on what was told
before and on nothing else.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from archlab.arch_dsl.language.spec import Count, Family, Range, Spec, fields_of
from archlab.search.sections.search.axes import Choice
from archlab.search.sections.search.by_effects import Told, propose, ranked
from archlab.search.sections.search.points import Points, Values
from archlab.search.sections.search.promotion import by_loss
from archlab.search.sections.search.promotion_spec import Promotion
from archlab.search.sections.search.space import Space
from archlab.search.utils.quantities import Duration, Memory
from archlab.search.variants.section import Section

if TYPE_CHECKING:
    import optuna

Population = Annotated[int, Range(min=2)]
Goal = Literal[
    "perplexity",
    "parameters",
    "active_parameters",
    "flops_per_token",
    "cache_bytes_per_token",
    "step_time",
    "peak_memory",
]
FOUND = "found"
_MOST = 10  # proposals per trial, where a study says nothing


class Sampler(Family):
    """Draws the values of a proposal from those of earlier ones and how they ended."""

    noun = "sampler"
    # Whether it keeps notes beside the trials (generations, a covariance): who goes on has to repeat its steps.
    stateful: ClassVar[bool] = False
    constraints: ClassVar[bool] = True  # whether it is told by how much they are broken

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        """Optuna's sampler."""
        raise NotImplementedError

    def proposal(self, points: Points, history: Sequence[Told], starts: Sequence[Values], seed: int) -> Any:
        """The values of the next proposal, of a sampler of ours; None where Optuna's draws them."""
        return None

    def ranked(self, points: Points, values: Mapping[int, Values], losses: Mapping[int, float]) -> list[int]:
        """The numbers of trials with these values and losses, the best first."""
        return by_loss(losses)

    def complaint(self, space: Space, goals: int, trials: int) -> str | None:
        """Why it cannot search this space for so many goals in so many trials; None if it can."""
        return None


@Sampler.register("random")
class RandomSampler(Sampler):
    """Each axis by itself, evenly, without looking at results: what the others have to beat."""

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        return optuna.samplers.RandomSampler(seed=seed)


@Sampler.register("effects")
class EffectsSampler(RandomSampler):
    """The lowest loss by a model of what each axis and each pair of them is worth, and in one of three proposals the
    highest expected improvement: a Gaussian process with an additive kernel (arXiv:1112.4394) and noise.

    It begins with the base and with what published models have of the space, `known` of them at most, and with
    `startup` points of which these say least. It proposes no point twice while there are others. The best trial is
    the one that the model believes to be best.
    """

    known: Count = 2
    startup: Count = 2

    def proposal(self, points: Points, history: Sequence[Told], starts: Sequence[Values], seed: int) -> Any:
        return propose(points, history, starts, self.startup, np.random.default_rng(seed))

    def ranked(self, points: Points, values: Mapping[int, Values], losses: Mapping[int, float]) -> list[int]:
        return ranked(points, values, losses)


@Sampler.register("tpe")
class TpeSampler(Sampler):
    """Tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011), all axes at once (arXiv:1807.01774).

    The first `startup` proposals are random; then the best of `candidates` drawn from the density of good trials over
    that of the others. Running trials count as bad ones, so that parallel proposals differ.
    """

    startup: Count = 10
    candidates: Count = 24

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        return optuna.samplers.TPESampler(
            n_startup_trials=self.startup,
            n_ei_candidates=self.candidates,
            multivariate=True,
            group=False,
            constant_liar=True,
            seed=seed,
        )


@Sampler.register("gp")
class GpSampler(Sampler):
    """Gaussian process with a Matérn 5/2 kernel, expected improvement (of the hypervolume where there are two goals).

    The first `startup` proposals are random. For few and expensive trials: with a hundred of them a proposal takes
    seconds. An axis under a condition is drawn at random.
    """

    startup: Count = 10

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        return optuna.samplers.GPSampler(
            seed=seed,
            independent_sampler=optuna.samplers.RandomSampler(seed=seed),
            n_startup_trials=self.startup,
            deterministic_objective=False,
            warn_independent_sampling=False,
        )

    def complaint(self, space: Space, goals: int, trials: int) -> str | None:
        return _idle_start(self.startup, trials, "random proposals")


class _Evolution(Sampler):
    """Generations of `population` trials. The first one is random; later ones cross and change the best so far."""

    stateful: ClassVar[bool] = True
    population: Population = 20
    crossover: Annotated[float, Range(min=0, max=1)] = 0.9
    swap: Annotated[float, Range(min=0, max=1)] = 0.5

    def complaint(self, space: Space, goals: int, trials: int) -> str | None:
        return _idle_start(self.population, trials, "the first population")

    def arguments(self, seed: int) -> dict[str, Any]:
        """What all of Optuna's take."""
        import optuna

        return {
            "population_size": self.population,
            "mutation_prob": None,
            "crossover": optuna.samplers.nsgaii.UniformCrossover(self.swap),
            "crossover_prob": self.crossover,
            "swapping_prob": self.swap,
            "seed": seed,
        }


@Sampler.register("nsga2")
class Nsga2Sampler(_Evolution):
    """Non-dominated sorting with crowding distance (Deb et al., IEEE TEVC 6(2), 2002) in generations of `population`.

    A child has two parents with the probability `crossover`, and takes each axis from the second one with `swap`; one
    axis is drawn anew on average.
    """

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        return optuna.samplers.NSGAIISampler(**self.arguments(seed))


@Sampler.register("nsga3")
class Nsga3Sampler(_Evolution):
    """Non-dominated sorting with reference points (Deb and Jain, IEEE TEVC 18(4), 2014), for three goals and more.

    As `nsga2`, but the directions of an even grid keep the front wide: `divisions` of them along each goal.
    """

    divisions: Count = 3

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        with warnings.catch_warnings():  # Optuna calls its interface experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.NSGAIIISampler(dividing_parameter=self.divisions, **self.arguments(seed))


@Sampler.register("cmaes")
class CmaEsSampler(Sampler):
    """Covariance matrix adaptation (arXiv:1604.00772) over numbers; `population` null: 4 + 3 ln(axes).

    The first trial is random, the first generation spreads from the middle of the space with a sixth of its width.
    """

    stateful: ClassVar[bool] = True
    constraints: ClassVar[bool] = False
    population: Population | None = None

    def build(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        return optuna.samplers.CmaEsSampler(
            n_startup_trials=1,
            independent_sampler=optuna.samplers.RandomSampler(seed=seed),
            warn_independent_sampling=False,
            seed=seed,
            consider_pruned_trials=False,
            popsize=self.population,
            use_separable_cma=False,
            with_margin=False,
            lr_adapt=False,
        )

    def complaint(self, space: Space, goals: int, trials: int) -> str | None:
        if goals > 1:
            return "cmaes minimizes one goal; take nsga2, tpe or gp for several"
        choices = [path for path, axis in space.axes.items() if isinstance(axis, Choice)]
        if choices:
            return f"cmaes takes axes of numbers alone, and {choices[0]} is one of choices; take tpe or gp"
        conditional = [path for path, axis in space.axes.items() if axis.when]
        if conditional:
            return f"cmaes takes no conditions, and {conditional[0]} has one; take tpe"
        if len(space.axes) < 2:
            return "cmaes needs at least two axes; take tpe or gp"
        return None


def _idle_start(startup: int, trials: int, what: str) -> str | None:
    """That a search would be over before a sampler begins to learn."""
    return None if startup < trials else f"the search has {trials} trials, and {what} alone would be {startup}"


def seed_of(seed: int, number: int) -> int:
    """The seed of the sampler of one proposal."""
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


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

    sampler: Sampler = EffectsSampler()
    trials: Count
    minimize: tuple[Goal, ...] = ("perplexity",)
    constraints: Limits = Limits()
    proposals: Count | None = None
    keep: Count = 3
    seed: int = 0
    promote: tuple[Promotion, ...] | None = None

    @property
    def most(self) -> int:
        """How many proposals are drawn at most."""
        return self.proposals or _MOST * self.trials

    @property
    def found(self) -> int:
        """How many proposals become variants at most."""
        if self.promote:
            return self.promote[-1].keep
        return 1 if len(self.minimize) == 1 else self.keep

    @property
    def names(self) -> list[str]:
        """What the proposals are called that become variants."""
        if len(self.minimize) == 1 and self.found == 1:
            return [FOUND]
        return [f"{FOUND}-{index}" for index in range(1, self.found + 1)]

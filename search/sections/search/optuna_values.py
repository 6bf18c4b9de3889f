"""Values of axes as Optuna writes them down, and what its importances say of an axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archlab.search.sections.search.axes import Axis, Choice, Integers
from archlab.search.sections.search.space import Space
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    import optuna

FEWEST = 20  # complete trials that importances are told of
_BEST = 0.25  # of the trials: what importances are about, five of twenty


def importances(space: Space, trials: Iterable[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """How much each axis has to do with being among the best quarter of (values, validation loss); {} of too few.

    PED-ANOVA (arXiv:2304.10255), for axes under a condition as in arXiv:2601.20800; shares that sum to 1. About this
    sample: a sampler that looks at results draws some regions more often than others.
    """
    found = list(trials)
    if len(found) < FEWEST:
        return {}
    import optuna

    study = optuna.create_study(direction="minimize")
    study.add_trials(
        optuna.trial.create_trial(
            value=loss,
            params={path: encoded(space.axes[path], value) for path, value in values.items()},
            distributions={path: distribution(space.axes[path]) for path in values},
        )
        for values, loss in found
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(
        target_quantile=_BEST, region_quantile=1.0, evaluate_on_local=True
    )
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    """An axis as Optuna writes it down."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, Choice):
        return CategoricalDistribution(categories(axis))
    if isinstance(axis, Integers):
        return IntDistribution(axis.low, axis.high, log=axis.log, step=axis.step)
    return FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)


def categories(axis: Choice) -> Sequence[str | int | float | bool | None]:
    """The choices as Optuna takes them: as they are when they are all words or all integers, else as JSON texts."""
    for kind in (str, int):
        if all(type(value) is kind for value in axis.values):
            return list(axis.values)
    return [canonical_json(value) for value in axis.values]


def encoded(axis: Axis, value: Any) -> Any:
    """A value of an axis as Optuna writes it down."""
    if not isinstance(axis, Choice):
        return value
    return categories(axis)[[canonical_json(each) for each in axis.values].index(canonical_json(value))]


def decoded(axis: Axis, value: Any) -> Any:
    """The value of an axis that Optuna wrote down."""
    return axis.values[categories(axis).index(value)] if isinstance(axis, Choice) else value

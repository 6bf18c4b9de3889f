"""Which axes of a search mattered among the trials that it made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from archlab.search.sections.search.proposer import distribution, encode
from archlab.search.sections.search.space import Space

FEWEST = 20  # complete trials
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
            params={path: encode(space.axes[path], value) for path, value in values.items()},
            distributions={path: distribution(space.axes[path]) for path in values},
        )
        for values, loss in found
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(
        target_quantile=_BEST, region_quantile=1.0, evaluate_on_local=True
    )
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))

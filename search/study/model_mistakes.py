"""What is wrong with the models of a study whose file has other mistakes, so that all are told at once."""

from __future__ import annotations

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.study.asked import asked_variants
from archlab.search.study.changes import changed
from archlab.search.study.study import Study
from archlab.search.variants.mistakes import Mistakes


def model_mistakes(study: Study) -> list[Problem]:
    """What is wrong with the models of a study's variants, found without their data."""
    asked = asked_variants(study)
    mistakes = Mistakes(len(asked))
    for item in asked:
        if item.impossible != "refuse":
            continue  # left out or repaired when the study is planned
        of_model = [setting for setting in item.settings if not setting.path.startswith("train.")]
        try:
            model, _ = changed(study, of_model, item.rung)
        except SpecError as error:
            mistakes.add(error.problems, item.name)
            continue
        mistakes.add(model.replace(max_positions=model.max_positions or 1).check(), item.name)  # the recipe's, later
    return list(mistakes.problems())

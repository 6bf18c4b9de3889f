"""What `evaluate: exits` says, against models that read their tokens so."""

from __future__ import annotations

from typing import Any

import pytest

from archlab import arch_dsl
from archlab.arch_dsl.model.model import kept
from archlab.search.data.dataset import Dataset
from archlab.search.evaluation.family import About
from archlab.search.evaluation.measures.exits import Exits
from archlab.search.training.held_out import evaluate
from tests.search.evaluation.test_measures import CONTEXT, about, dataset, subject  # noqa: F401

TURNS = 3


def with_loop(dataset: Dataset, loop: Any, **recipe: Any) -> About:  # noqa: F811
    found = about(dataset, **recipe)
    return About(arch_dsl.resolve(arch_dsl.patch(found.model, {"loop": loop})), found.recipe, dataset)


@pytest.mark.parametrize("objective", ["causal", "prefix"])
def test_losses_are_those_of_models_that_read_so(dataset: Dataset, objective: str) -> None:  # noqa: F811
    whole = with_loop(dataset, {"turns": TURNS, "exit": 0.1}, objective=objective)
    asked = subject(whole, scale=20.0)
    asked.weights["loop.exit.gate.weight"] *= 4.0
    found = Exits(thresholds=(0.4, 0.6)).compute(asked)
    grid, told = (found.grids[f"{name}_by_exit_0.4_0.6"] for name in ("loss", "turn"))
    assert told.rows == grid.rows == ["turn 1", "turn 2", "turn 3", "0.4", "0.6"]
    changes: list[Any] = [None, {"loop.turns": 2}, {}, {"loop.exit.threshold": 0.4}, {"loop.exit.threshold": 0.6}]
    for change, (loss,), row in zip(changes, grid.values, grid.rows, strict=True):
        spec = arch_dsl.patch(whole.model, {"loop": None} if change is None else change)
        module = arch_dsl.compile(spec if "threshold" in str(change) else kept(spec))
        module.load_state_dict({name: asked.weights[name] for name in module.state_dict()})
        recipe = whole.recipe
        table, _ = evaluate(module, dataset, "test", CONTEXT, recipe.micro_batch, objective=recipe.objective)
        assert loss == pytest.approx(table["loss"], rel=1e-6), row
    turns = [turn for (turn,) in told.values]
    assert turns[:3] == [1, 2, 3] and 1 < turns[3] < turns[4] < 3  # type: ignore[operator]
    assert 1 < found.values["exit_turn_0.4_0.6"] < TURNS


def test_a_model_without_an_exit_has_none(dataset: Dataset) -> None:  # noqa: F811
    assert Exits().refusal(about(dataset)) == "its model has no loop with an exit"
    assert Exits().refusal(with_loop(dataset, 2)) == "its model has no loop with an exit"
    assert Exits().refusal(with_loop(dataset, {"turns": 2, "exit": 0.1})) is None

"""What a store keeps beside trials is told from other JSON, by the names that the rest of search gives it."""

from __future__ import annotations

from typing import Any

import pytest

from archlab.search.planning import auto_settings, tuning_noise
from archlab.search.running import smoke
from archlab.search.sections.prune import decide
from archlab.search.sections.search import known_points
from archlab.search.sections.seeds import noise
from archlab.search.store.kept import fault_of

TOLD = {"variance": 1.0, "df": 9, "documents": None, "trials": 12, "keys": ["ab"]}
RIGHT: list[tuple[str, str, str, Any]] = [
    ("decision", "s", auto_settings.DECISION, vars(auto_settings.PLAIN)),
    ("decision", "s", smoke.DECISION, 4),
    ("decision", "s", f"{tuning_noise.TUNE_SD} key", float("inf")),
    ("decision", "s", f"{decide.SEED_SD} key", 0),
    ("decision", "s", known_points.DECISION, [{"block.norm.placement": "pre", "train.lr": 1e-3}]),
    ("memory", "step_time", "key", {"seconds": 0.5, "fingerprint": {}}),
    ("memory", noise.KIND, "key", {"s": TOLD, "t": {**TOLD, "documents": 0.1}}),
]


@pytest.mark.parametrize(("table", "place", "name", "value"), RIGHT)
def test_what_a_run_keeps_is_right_and_anything_else_is_not(table: str, place: str, name: str, value: Any) -> None:
    assert fault_of(table, place, name, value) is None
    wrong = ["x", [1], {}, True] if not isinstance(value, dict) else ["x", [1], {"s": {"df": 9}}, 1.5]
    assert all(fault_of(table, place, name, each) for each in wrong)


def test_other_names_may_hold_any_json() -> None:
    assert fault_of("decision", "s", "rung 1", [1]) is None
    assert fault_of("memory", "note", "key", "text") is None

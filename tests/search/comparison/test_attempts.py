"""What the events of a study say of its attempts, and what trials look like beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from archlab.search.comparison.attempts import attempts_frame
from archlab.search.comparison.side_by_side import side_by_side


def event(time: float, kind: str, key: str | None, attempt: int | None = 1) -> dict[str, Any]:
    """As the store tells it."""
    return {"id": 1, "time": time, "study": "s", "key": key, "attempt": attempt, "kind": kind, "detail": {}}


EVENTS = [
    event(0, "running", "a"),
    event(1, "running", "b"),
    event(2, "prune", "b"),  # a decision, no end
    event(3, "complete", "a"),
    event(3, "refused", None, None),
    event(4, "running", "c"),
    event(5, "planned", "b"),
    event(7, "running", "b", 2),
    event(8, "failed", "c"),
]


@pytest.mark.parametrize(("running", "ended", "end"), [(True, "running", 20.0), (False, "interrupted", 8.0)])
def test_attempts_have_their_ends_and_their_places(running: bool, ended: str, end: float) -> None:
    frame = attempts_frame(EVENTS, now=20.0, running=running)
    assert [tuple(row) for row in frame.itertuples(index=False)] == [
        ("a", 1, 0.0, 3.0, "complete", 0),
        ("b", 1, 1.0, 5.0, "planned", 1),
        ("c", 1, 4.0, 8.0, "failed", 0),
        ("b", 2, 7.0, end, ended, 1),
    ]


def test_an_attempt_whose_end_nobody_told_ends_where_the_next_begins() -> None:
    frame = attempts_frame([event(0, "running", "a"), event(9, "running", "a", 2)], now=10.0, running=True)
    assert list(frame["ended"]) == ["interrupted", "running"] and list(frame["end"]) == [9.0, 10.0]


def test_an_attempt_that_was_superseded_does_not_end_the_one_that_took_its_place() -> None:
    told = [event(0, "running", "a"), event(4, "running", "a", 2), event(5, "stale", "a", 1)]
    frame = attempts_frame([*told, event(9, "complete", "a", 2)], now=10.0, running=True)
    assert list(frame["ended"]) == ["interrupted", "complete"] and list(frame["end"]) == [4.0, 9.0]


def test_no_event_is_no_attempt() -> None:
    assert len(attempts_frame([], now=1.0, running=False)) == 0


def test_trials_beside_each_other_differ_where_they_differ() -> None:
    one = {
        "model": {"d_model": 64, "block": [{"name": "attention", "query": [{"type": "rope"}], "bias": False}]},
        "recipe": {"lr": 1e-3, "optimizer": {"type": "adamw", "betas": [0.9, 0.95]}},
        "data": "abc",
        "seed": 0,
        "machine": {"torch": "2.13"},
    }
    other = {
        "model": {"d_model": 64, "block": [{"name": "mamba2", "query": [], "bias": True}]},
        "recipe": {"lr": 2e-3, "optimizer": {"type": "adamw", "betas": [0.9, 0.95]}},
        "data": "abc",
        "seed": 0,
        "machine": None,
    }
    found = side_by_side([one, other])
    assert [row for row in found["recipe"] if row[2]] == [("lr", ["0.001", "0.002"], True)]
    assert ("optimizer.betas", ["[0.9, 0.95]"] * 2, False) in found["recipe"] and ("seed", ["0", "0"], False) in found[
        "recipe"
    ]
    assert ("d_model", ["64", "64"], False) in found["model"]
    assert ("block.attention.query", ["[rope]", ""], True) in found["model"]
    assert ("block.mamba2.bias", ["", "yes"], True) in found["model"]
    assert found["machine"] == [("torch", ["2.13", ""], True)]
    assert not any(differs for rows in side_by_side([one, one]).values() for _, _, differs in rows)

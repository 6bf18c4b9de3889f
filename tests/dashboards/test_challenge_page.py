"""The page of a ledger: who challenged whom, in figure, table and tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archlab.search.challenge.ledger import Entry, Ledger, remember, round_of
from tests.dashboards.conftest import XSS
from tests.dashboards.generate import Plan, make_store, make_study
from tests.dashboards.test_app import Client

ENTRIES = [
    Entry(
        1, "gate", [{"block.attention.gate": {"position": "sdpa"}}], "baseline", "better", 4, 0.06, -0.05, 0.02, -0.04
    ),
    Entry(2, XSS, ["qk_norm"], "gate", "hopeless", 1, 0.02, 0.01),
    Entry(3, "late", [{"block.norm": "layernorm"}], "gate", "impossible", 0, 0.01, reason="it is too late"),
]


@pytest.fixture
def client(tmp_path: Path) -> Any:
    """The pages of a store with a study, one of its rounds, and a ledger."""
    with make_store(tmp_path) as made:
        make_study(made)
        make_study(made, Plan(effects={"baseline": 0.0, "gate": -0.05}, name=round_of("gate-position", 1)))
        remember(made, Ledger("gate-position", "baseline", "0123", {"a": [3.0, None]}, ENTRIES))
    return Client(tmp_path)


def test_the_page_shows_each_challenger_under_the_champion_that_it_met(client: Any) -> None:
    page = client.page("/challenge/gate-position")
    assert "Who beats gate?" in page and "champion: gate; the test set was looked at once" in page
    assert "block.attention.gate: {position: sdpa}" in page and "changes qk_norm" in page
    assert "late: it is too late" in page and "/study/gate-position.challenge-1" in page
    assert "/study/gate-position.challenge-3" not in page  # nothing was trained for it
    assert page.index('"baseline"') < page.rindex('"gate"') and "−0.0500" in page


def test_the_page_shows_what_is_confirmed_together_and_what_waits_for_it(tmp_path: Path) -> None:
    parts = [
        Entry(1, "shift", ["shift"], "baseline", "lower", 1, 0.06, -0.02),
        Entry(2, "norm", ["norm"], "shift", "not lower", 1, 0.06, 0.01),
        Entry(3, "gate", ["gate"], "shift", "lower", 1, 0.06, -0.01),
        Entry(
            4,
            "together 1",
            ["shift", "gate"],
            "baseline",
            "better",
            3,
            0.06,
            -0.03,
            0.01,
            -0.03,
            parts=["shift", "gate"],
        ),
        Entry(5, "wide", ["wide"], "together 1", "lower", 1, 0.02, -0.01),
    ]
    with make_store(tmp_path) as made:
        make_study(made)
        remember(made, Ledger("gate-position", "baseline", "0123", {"a": [3.0, None]}, parts))
    page = Client(tmp_path).page("/challenge/gate-position")
    assert "Who beats together 1?" in page and "to be confirmed: wide" in page and "together 1: shift, gate" in page
    assert all(f"changes {name}" in page for name in ("shift", "norm", "gate", "shift, gate", "wide"))  # of the tree


def test_a_ledger_stands_for_its_rounds_among_the_studies_unless_one_searches(client: Any) -> None:
    home = client.page("/")
    assert "1 better, 1 hopeless, 1 impossible" in home and "/challenge/gate-position" in home
    assert "/study/gate-position.challenge-1" not in home
    assert "/study/gate-position.challenge-1" in client.page("/", "?q=challenge-1")


def test_a_study_without_a_ledger_is_told_which_have_one(client: Any) -> None:
    page = client.page("/challenge/nobody")
    assert "nobody" in page and "gate-position" in page

"""What a stream of challengers may take: limits hold over one call or over all, before a look and in its middle."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.challenge.budget import spent_of
from archlab.search.challenge.rules import Rules
from archlab.search.running.ending import EXIT_BUDGET
from archlab.search.store.store import Store
from tests.search.challenge.test_challenge import held, study_in, trials_in

WILD = {"wild": {"train.lr": 1e30, "train.clip": None}}
GATE = {"gate": {"block.attention.gate": {"position": "sdpa"}}}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(trials=1), "takes 2 trials, of 1 that are left"),
        (Rules(trials=1, of_life=True), "takes 2 trials, of 1 that are left"),
        (Rules(core_seconds=0.01), "core-seconds, of 0 that are left"),
        (Rules(disk=1000), "of 1 kB"),
    ],
)
def test_a_look_that_would_take_too_much_is_refused_and_trains_nothing(
    tmp_path: Path, rules: Rules, message: str
) -> None:
    found = held(tmp_path, GATE, rules)
    assert found.summary is not None and found.summary.exit_code == EXIT_BUDGET
    assert message in found.summary.message and found.entries == {"gate": None}
    assert trials_in(tmp_path) == {}


def test_limits_of_life_count_what_earlier_calls_trained(tmp_path: Path) -> None:
    held(tmp_path, WILD, Rules(seeds=2))
    with Store.open(tmp_path / "store", create=False) as store:
        one, three = spent_of(store, "gates", 1), spent_of(store, "gates", 3)
        assert spent_of(store, "gate", 1).trials == frozenset()
    assert one.trials == trials_in(tmp_path).keys() and len(one.trials) == 2
    assert one.core_seconds > 0 and three.core_seconds == pytest.approx(3 * one.core_seconds)
    found = held(tmp_path, GATE, Rules(seeds=2, trials=2, of_life=True))
    assert found.summary is not None and "takes 1 trial, of 0 that are left" in found.summary.message
    found = held(tmp_path, GATE, Rules(seeds=2, core_seconds=one.core_seconds, of_life=True))
    assert found.summary is not None and "core-seconds, of 0 that are left" in found.summary.message
    assert trials_in(tmp_path).keys() == one.trials


@pytest.mark.slow
def test_core_seconds_end_a_look_in_the_middle_and_it_goes_on_later(tmp_path: Path) -> None:
    def guess(*_: object) -> float:  # that nothing is known of what a look takes
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("archlab.search.challenge.budget.Allowance.guess", guess)
        cut = held(tmp_path, GATE, Rules(seeds=2, core_seconds=0.02, of_life=True))
    assert cut.summary is not None and cut.summary.exit_code == EXIT_BUDGET
    assert "of 0.02 core-seconds are spent" in cut.summary.message and cut.entries == {"gate": None}
    whole = held(tmp_path, GATE, Rules(seeds=2))
    assert whole.entries["gate"] is not None
    assert {state for state, _ in trials_in(tmp_path).values()} == {"complete"}


def test_a_size_that_is_none_is_told_with_what_is_allowed(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["challenge", str(study_in(tmp_path)), "--disk", "5 apples"])
    assert found.exit_code == 2 and "a size such as 8GB or 500MB, found '5 apples'" in found.output

"""What is known of a stream before the next challenger: made-up ledgers, of which nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.challenge.changes import patch_of, plain
from archlab.search.challenge.ledger import Entry, remember
from archlab.search.challenge.look import look
from archlab.search.challenge.referee import challenge
from archlab.search.challenge.rules import Rules
from archlab.search.challenge.standing import Standing
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.challenge.test_challenge import SLOW, study_in, trials_in

TOGETHER = Rules(seeds=2, together=2)
RECURRENT = {"block.attention": {"type": "gated_delta_net", "heads": 2}}
FASTER, GATE = {"train.lr": 1e-3}, {"block.attention.gate": "sdpa"}
Verdicts = dict[str, tuple[Any, str]]


@contextmanager
def standing(folder: Path, verdicts: Verdicts, rules: Rules, parts: tuple[str, ...] = ()) -> Iterator[Standing]:
    """After entries with these changes and verdicts, each looked at with one seed but for what has the parts."""
    folder.mkdir(exist_ok=True)
    study = load_study(study_in(folder))
    with Store.open(folder / "store") as store:
        ledger = Standing(study, store, rules).ledger
        for number, (name, (changes, verdict)) in enumerate(verdicts.items(), 1):
            mine, whole = plain(patch_of(changes, name)), name.startswith("together")
            one = Entry(number, name, mine, "baseline", verdict, 1, 0.05, parts=[*parts] * whole, one_seed=not whole)
            ledger.entries.append(one)
        remember(store, ledger)
        yield Standing(study, store, rules)


def test_what_no_longer_goes_with_the_candidate_does_not_keep_a_stream_from_going_on(tmp_path: Path) -> None:
    with standing(tmp_path, {"recurrent": (RECURRENT, "lower")}, TOGETHER) as referee:
        few = patch_of({"block.attention.kv_heads": 1}, "few")
        with pytest.raises(SpecError, match="matches nothing"):
            referee.round("few", few, 1)
        referee.check({"few": few, "again": patch_of(RECURRENT, "again")})
        with pytest.raises(SpecError, match="did you mean 'attention'"):
            referee.check({"bad": patch_of({"block.atention.kv_heads": 1}, "bad")})


def test_a_ledger_is_printed_without_training(tmp_path: Path) -> None:
    with standing(tmp_path, {"faster": (FASTER, "lower")}, Rules()):
        pass
    found = challenge(tmp_path / "study.yaml", {}, tmp_path / "store", executor="inline")
    assert [each.name for each in found.ledger.candidate] == ["faster"] and trials_in(tmp_path) == {}


def test_parts_of_a_champion_are_kept_and_those_of_another_candidate_are_not(tmp_path: Path) -> None:
    verdicts: Verdicts = {"faster": (FASTER, "lower"), "gate": (GATE, "lower"), "together 1": ({**FASTER, **GATE}, "")}
    for verdict, tried in (("better", True), ("hopeless", False)):
        known = {**verdicts, "together 1": (verdicts["together 1"][0], verdict)}
        with standing(tmp_path / verdict, known, Rules(again=True), ("faster", "gate")) as referee:
            assert [referee.known(patch_of(each, "again")) is not None for each in (FASTER, GATE)] == [tried, tried]


def test_a_look_with_one_seed_is_no_test_and_no_verdict(tmp_path: Path) -> None:
    looks: Verdicts = {"gate": (GATE, "not lower"), "faster": (FASTER, "diverged"), "few": (RECURRENT, "impossible")}
    with standing(tmp_path, looks, Rules(seeds=2)) as referee:
        assert referee.ledger.tests == 0
        assert referee.known(patch_of(GATE, "gate")) is None, "it gets all seeds where challengers are held one by one"
        told = look(referee, "gate", patch_of(GATE, "gate"))
        assert told["trials"] == {"first_look": 4, "all_seeds": 6}, "two rows: the seed that has chosen, and one or two"
    with standing(tmp_path / "more", looks, TOGETHER) as referee:
        assert referee.known(patch_of(GATE, "gate")) is not None


def test_another_baseline_begins_a_ledger_whose_rounds_have_names_of_their_own(tmp_path: Path) -> None:
    with standing(tmp_path, {"faster": (FASTER, "lower"), "gate": (GATE, "lower")}, TOGETHER) as first:
        other = load_study(study_in(tmp_path, train=SLOW.replace("1e-4", "2e-4")))
        second = Standing(other, first.store, TOGETHER)
        assert second.ledger.entries == [] and first.ledger.base != second.ledger.base
        assert [first.ledger.round(1), second.ledger.round(1)] == ["gates.challenge-1", "gates.challenge-4"]
        remember(first.store, second.ledger)
        assert Standing(first.study, first.store, TOGETHER).ledger.after == 0

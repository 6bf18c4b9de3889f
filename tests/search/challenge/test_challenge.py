"""`archlab challenge`: proposals become verdicts; nothing is trained twice, and a bad proposal trains nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import archlab
from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.main import main
from archlab.search.challenge.changes import composed, patch_of, plain
from archlab.search.challenge.ledger import KIND
from archlab.search.challenge.referee import Outcome, challenge
from archlab.search.challenge.rules import Rules
from archlab.search.results.selection import loss
from archlab.search.running.ending import EXIT_BUDGET
from archlab.search.store.store import Store, StoreRefused
from tests.search.study_files import SECTIONS, TINY_MODEL, write_study

SLOW = SECTIONS["train"].replace("lr: 1e-3", "lr: 1e-4").replace("tokens: 1k", "tokens: 2k")
STREAM: dict[str, Any] = {
    "faster": {"train.lr": 1e-2},
    "slower": {"train.lr": 1e-6},
    "gate": [{"block.attention.gate": {"position": "sdpa"}}],
}
RULES = Rules(seeds=6, margin=1.0)


def study_in(folder: Path, **sections: Any) -> Path:
    base = {"model": TINY_MODEL, "components": None, "variants": "variants: {baseline: {}}", "train": SLOW}
    return write_study(folder, **{**base, **sections})


def held(folder: Path, challengers: dict[str, Any] = STREAM, rules: Rules = RULES, **sections: Any) -> Outcome:
    return challenge(study_in(folder, **sections), challengers, folder / "store", rules=rules, executor="inline")


def seeds_of(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The seeds of each variant of a round."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["variant"], []).append(row["seed"])
    return found


def trials_in(folder: Path) -> dict[str, tuple[str, int]]:
    """key -> (state, attempt) of all trials of the store."""
    if not (folder / "store").exists():
        return {}
    with Store.open(folder / "store", create=False) as store:
        rows = [row for study in store.studies() for row in store.study_trials(study["name"])]
    return {row["key"]: (row["state"], row["attempt"]) for row in rows}


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("stream")
    return folder, held(folder)


@pytest.mark.slow
def test_a_better_one_becomes_champion_and_meets_those_that_follow(stream: tuple[Path, Outcome]) -> None:
    ledger = stream[1].ledger
    assert [(each.name, each.against) for each in ledger.entries] == [
        ("faster", "baseline"),
        ("slower", "faster"),
        ("gate", "faster"),
    ]
    faster, slower, gate = ledger.entries
    assert ledger.champion == "faster" and faster.verdict == "better" and slower.verdict in ("worse", "hopeless")
    assert faster.difference is not None and faster.half_width is not None
    assert faster.difference < -faster.half_width
    assert gate.verdict in ("equivalent", "worse", "hopeless") and slower.near == ["faster (better)"]


@pytest.mark.slow
def test_the_test_set_is_looked_at_for_those_kept_alone(stream: tuple[Path, Outcome]) -> None:
    assert [each.test is not None for each in stream[1].ledger.entries] == [True, False, False]


@pytest.mark.slow
def test_the_same_stream_trains_nothing_again(stream: tuple[Path, Outcome]) -> None:
    folder, first = stream
    before, told = trials_in(folder), list[tuple[str, bool]]()
    again = challenge(
        folder / "study.yaml",
        STREAM,
        folder / "store",
        rules=RULES,
        executor="inline",
        on_entry=lambda entry, known: told.append((entry.name, known)),
    )
    assert again.ledger == first.ledger and trials_in(folder) == before and again.summary is None
    assert told == [("faster", True), ("slower", True), ("gate", True)]


@pytest.mark.slow
def test_a_stream_that_ran_out_of_trials_goes_on_to_the_same_ledger(
    stream: tuple[Path, Outcome], tmp_path: Path
) -> None:
    cut = held(tmp_path, rules=Rules(seeds=6, margin=1.0, trials=5))
    assert cut.summary is not None and cut.summary.exit_code == EXIT_BUDGET
    assert len(trials_in(tmp_path)) <= 5 and None in cut.entries.values()
    whole = held(tmp_path)
    assert [(e.name, e.verdict, e.seeds, e.difference, e.test) for e in whole.ledger.entries] == [
        (e.name, e.verdict, e.seeds, e.difference, e.test) for e in stream[1].ledger.entries
    ]
    assert {attempt for _, attempt in trials_in(tmp_path).values()} == {1}


@pytest.mark.slow
def test_what_lost_to_an_earlier_champion_is_tried_again_when_it_is_asked_for(tmp_path: Path) -> None:
    first = {"slower": {"train.lr": 1e-6}}
    held(tmp_path, {**first, "faster": {"train.lr": 1e-2}})
    assert len(held(tmp_path, first).ledger.entries) == 2
    found = held(tmp_path, first, Rules(seeds=6, margin=1.0, again=True)).ledger.entries
    assert [(each.name, each.against) for each in found][2:] == [("slower", "faster")]


@pytest.mark.slow
def test_verdicts_are_over_all_recipes_and_at_equal_parameters(tmp_path: Path) -> None:
    found = held(
        tmp_path,
        {"no positions": {"block.attention.positional": "none"}},
        Rules(seeds=2),
        recipes="recipes: {as is: {}, slower: {lr: 5e-5}}",
        match="match: {parameters: baseline, by: block.ffn.width}",
    )
    assert found.ledger.entries[0].trials == 8  # two rows, two recipes, two seeds
    with Store.open(tmp_path / "store", create=False) as store:
        record = store.study("gates.challenge-1")
    assert record["match"]["to"] == "baseline" and len(record["variants"]) == 4


LADDER: dict[str, Any] = {
    "faster": {"train.lr": 1e-3},
    "slower": {"train.lr": 1e-6},
    "fastest": {"train.lr": 1e-2},
    "stopped": {"train.lr": 1e-7},
}
TOGETHER = Rules(seeds=6, together=2)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("ladder")
    return folder, held(folder, LADDER, TOGETHER)


@pytest.mark.slow
def test_what_is_lower_with_one_seed_is_confirmed_together_with_others(ladder: tuple[Path, Outcome]) -> None:
    folder, found = ladder
    assert [(each.name, each.against, each.verdict, each.parts) for each in found.ledger.entries] == [
        ("faster", "baseline", "lower", []),
        ("slower", "faster", "not lower", []),
        ("fastest", "faster", "lower", []),
        ("together 1", "baseline", "better", ["faster", "fastest"]),
        ("stopped", "together 1", "not lower", []),
    ]
    assert found.ledger.champion == "together 1" and found.ledger.candidate == []
    *_, confirmed, _ = found.ledger.entries
    with Store.open(folder / "store", create=False) as store:
        rows = store.study_trials("gates.challenge-4")
    seeds = {row["seed"] for row in rows if row["variant"] == "baseline"}
    assert seeds == {*range(confirmed.seeds + 1)}  # the first seed has chosen, and does not count
    assert confirmed.trials == 2 * confirmed.seeds  # what the first seed has trained is there
    losses = {name: [loss(row, "validation") for row in rows if row["variant"] == name] for name in seeds_of(rows)}
    apart = [ours - theirs for ours, theirs in zip(losses["together 1"], losses["baseline"], strict=True)]
    assert confirmed.difference == pytest.approx(sum(apart[1:]) / confirmed.seeds)
    levels = [each.level for each in found.ledger.entries]
    assert levels[0] == levels[3] > levels[4]  # a look with one seed takes no part of the chance of error


@pytest.mark.slow
def test_a_candidate_outlives_the_call_and_the_budget(ladder: tuple[Path, Outcome], tmp_path: Path) -> None:
    first = held(tmp_path, dict([*LADDER.items()][:2]), TOGETHER).ledger
    assert [each.name for each in first.candidate] == ["faster"] and first.champion == "baseline"
    cut = held(tmp_path, LADDER, replace(TOGETHER, trials=4))  # all looks with one seed, and not what confirms
    assert cut.stopped is not None and cut.stopped.exit_code == EXIT_BUDGET
    assert [each.name for each in cut.ledger.candidate] == ["faster", "fastest"]
    words = ["challenge", str(tmp_path / "study.yaml"), "--store", str(tmp_path / "store"), "--inline"]
    refused = CliRunner().invoke(main, [*words, "--together", "2", "--trials", "1"])
    assert refused.exit_code == EXIT_BUDGET and "not confirmed: faster, fastest" in refused.stderr
    whole = held(tmp_path, LADDER, TOGETHER).ledger
    assert [(e.name, e.verdict, e.seeds, e.difference, e.test) for e in whole.entries] == [
        (e.name, e.verdict, e.seeds, e.difference, e.test) for e in ladder[1].ledger.entries
    ]
    assert {attempt for _, attempt in trials_in(tmp_path).values()} == {1}


@pytest.mark.slow
def test_a_candidate_is_confirmed_when_it_is_asked_for_and_again_is_no_new_part(tmp_path: Path) -> None:
    held(tmp_path, {"faster": {"train.lr": 1e-3}}, TOGETHER)
    again = held(tmp_path, {"faster": {"train.lr": 1e-3}}, replace(TOGETHER, again=True)).ledger
    assert len(again.entries) == 1
    found = held(tmp_path, {}, replace(TOGETHER, confirm=True)).ledger
    assert (found.champion, found.entries[-1].parts) == ("together 1", ["faster"])
    with pytest.raises(SpecError, match="'together 7' is what confirmed challengers are called"):
        held(tmp_path, {"together 7": {"train.lr": 1e-2}}, TOGETHER)


def test_a_challenger_without_a_loss_is_never_kept(tmp_path: Path) -> None:
    found = held(tmp_path, {"wild": {"train.lr": 1e30, "train.clip": None}}, Rules(seeds=2)).ledger
    assert found.entries[0].verdict == "diverged" and found.champion == "baseline"


@pytest.mark.parametrize(
    ("challengers", "sections", "message"),
    [
        ({"x": {"block.attention.gat": 1}}, {}, "did you mean"),
        ({"x": {"train.lr": 1e-4}}, {}, "challengers.x: is the same model and recipe as 'baseline'"),
        ({"baseline": {"train.lr": 1e-2}}, {}, "is the name of a champion"),
        ({"x": {"train.context": 16}}, {}, "sees other batches than the champion"),
        ({"x": 5}, {}, "must be a mapping from paths to values or a list of components, found an integer"),
        ({"x [y]": {"train.lr": 1e-2}}, {}, r"challengers: 'x \[y\]' is no variant name"),
        ({"x": ["nobody"]}, {}, "challengers.x: 'nobody' is not a component"),
        ({"x": {"block.ffn.width": 8}}, {"match": "match: {parameters: baseline, by: block.ffn.width}"}, "would be"),
        ({"x": {"train.lr": 1e-2}}, {"grid": "grid: {train.lr: [1e-3, 1e-2]}"}, "crosses the challengers"),
    ],
)
def test_a_bad_proposal_is_refused_and_trains_nothing(
    tmp_path: Path, challengers: dict[str, Any], sections: dict[str, str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        held(tmp_path, {"gate": {"block.attention.gate": {"position": "sdpa"}}, **challengers}, **sections)
    assert trials_in(tmp_path) == {}


@pytest.mark.slow
def test_a_damaged_ledger_is_told_and_not_begun_anew(stream: tuple[Path, Outcome], tmp_path: Path) -> None:
    held(tmp_path, {"faster": {"train.lr": 1e-2}}, Rules(seeds=2))
    with Store.open(tmp_path / "store", create=False) as store:
        (key,) = store.recall_all([KIND])[KIND]
        store.remember(KIND, key, {"rows": {}, "entries": [{"name": "faster"}]})
    with pytest.raises(StoreRefused, match="the ledger of 'gates' is damaged"):
        held(tmp_path, {"faster": {"train.lr": 1e-2}}, Rules(seeds=2))


def test_changes_stand_on_top_of_those_of_the_champion() -> None:
    champion = patch_of(
        [
            "qk_norm",
            {"block.attention.gate.position": "sdpa", "block.norm": "layernorm", "block.attention.key": "rope"},
        ],
        "champion",
    )
    changes = [{"block.attention.gate": {"position": "value"}}, {"block.attention.key": {"prepend": "shift"}}]
    assert plain(composed(champion, patch_of(changes, "x"))) == [
        "qk_norm",
        {"block.norm": "layernorm"},
        {"block.attention.key": "rope"},
        *changes,
    ]
    assert plain(composed(champion, patch_of(["qk_norm"], "x"))).count("qk_norm") == 1


@pytest.mark.slow
def test_the_python_door_gives_the_same_ledger(stream: tuple[Path, Outcome]) -> None:
    folder, first = stream
    found = archlab.challenge(
        folder / "study.yaml", STREAM, folder / "store", quiet=True, executor="inline", seeds=6, margin=1.0
    )
    assert found.ledger == first.ledger and found.entries["faster"] == first.ledger.entries[0]


@pytest.mark.slow
def test_the_command_reads_files_and_yaml_and_tells_the_ledger(stream: tuple[Path, Outcome]) -> None:
    folder = stream[0]
    (folder / "ideas.yaml").write_text("faster: {train.lr: 1e-2}\nslower: {train.lr: 1e-6}\n")
    words = ["challenge", str(folder / "study.yaml"), "--store", str(folder / "store"), "--inline"]
    found = CliRunner().invoke(main, [*words, str(folder / "ideas.yaml"), "--json"])
    *told, last = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.exit_code == 0, found.output
    assert [(each["name"], each["known"]) for each in told] == [("faster", True), ("slower", True)]
    assert last["champion"] == "faster" and last["test_looks"] == 1 and len(last["entries"]) == 3
    shown = CliRunner().invoke(main, [*words, "faster: {train.lr: 1e-2}"])
    assert shown.exit_code == 0 and "champion: faster; the test set was looked at once" in shown.stdout
    for wrong in ("[1, 2]", "x: {block.nothing: 1}", "{"):
        refused = CliRunner().invoke(main, [*words, wrong])
        assert refused.exit_code == 2 and "Traceback" not in refused.output

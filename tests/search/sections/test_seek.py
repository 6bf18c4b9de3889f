"""Searches, with real trials: what is proposed, refused, resumed after a kill, and repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.executors.inline import InlineExecutor
from archlab.search.planning.plan import plan
from archlab.search.running import run as running
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.trackers.database import open_optuna
from tests.search.study_files import write_study

SPACE = """\
space:
  block.attention.kv_heads: {choice: [1, 2, 3, 4]}
  block.ffn.width: {int: [16, 64], step: 16}
  train.lr: {float: [1e-3, 1e-1], log: true}"""
SMALL = {
    "model": """\
model:
  d_model: 16
  n_layers: 1
  block:
    norm: rmsnorm
    attention: {heads: 4, positional: rope}
    ffn: {type: glu, activation: silu}""",
    "train": "train: {data: {text: corpus.txt}, tokens: 256, context: 16, batch: 4, lr: 1e-2}",
    "components": None,
    "variants": None,
    "space": SPACE,
}


def searched(folder: Path, trials: int = 8, **sections: str | None) -> Path:
    text = f"search: {{trials: {trials}, seed: 3}}"
    return write_study(folder, **{**SMALL, "search": text, **sections})


def rows_of(folder: Path, study: str = "gates") -> list[dict[str, Any]]:
    with Store.open(folder, create=False) as store:
        return store.study_trials(study)


def asked(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["settings"]["number"]: row["settings"] for row in rows if row["role"] == "search"}


def kept(folder: Path, study: str = "gates") -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=study, storage=open_optuna(folder)).get_trials()


def test_search_proposes_refuses_and_repeats_its_best(tmp_path: Path) -> None:
    store = tmp_path / "store"
    search = "search: {trials: 12, seed: 3, sampler: tpe}"
    summary = run(searched(tmp_path, search=search), store, executor="inline", track=False)
    assert summary.exit_code == 0, summary.message
    rows = rows_of(store)
    trials = kept(store)
    assert [trial.number for trial in trials] == list(range(12)), "each proposal is recorded once"
    refused = [trial for trial in trials if trial.params["block.attention.kv_heads"] == 3]
    assert refused, "the seed proposes what makes no sense"
    assert {trial.state for trial in refused} == {optuna.trial.TrialState.FAIL}
    assert sorted(asked(rows)) == [trial.number for trial in trials if trial not in refused]
    losses = {row["settings"]["number"]: row["result"]["validation"]["loss"] for row in rows if row["role"] == "search"}
    assert {trial.number: trial.value for trial in trials if trial.value is not None} == losses
    with Store.open(store, create=False) as opened:
        record = opened.study("gates")
        events = [event for event in opened.events("gates") if event["kind"] == "refused"]
    assert [variant["name"] for variant in record["variants"]] == ["baseline", "found"]
    assert len(events) == len(refused) and "3 key/value heads do not divide 4" in events[0]["detail"]["message"]
    best = min(losses, key=lambda number: (losses[number], number))
    found = [row for row in rows if row["variant"] == "found"]
    assert [(row["role"], row["seed"]) for row in found] == [("repeat", 0), ("repeat", 1)]
    assert found[0]["key"] == next(row["key"] for row in rows if row["settings"].get("number") == best)
    assert found[0]["settings"] == {"lr": asked(rows)[best]["train.lr"]}
    assert [row["role"] for row in rows if row["variant"] == "baseline"] == ["repeat", "repeat"]


def test_a_search_of_which_nothing_can_be_trained_is_refused(tmp_path: Path) -> None:
    space = "space:\n  overrides.7.block.attention.mask: {choice: [causal, {type: window, size: 4}]}"
    with pytest.raises(SpecError, match=r"none of 2 proposals can be trained: .*'7' names no layer of 1"):
        run(searched(tmp_path, trials=2, space=space), tmp_path / "store", executor="inline", track=False)
    assert [row for row in rows_of(tmp_path / "store") if row["state"] == "complete"] == []


def test_a_plan_says_that_a_space_is_smaller_than_its_search(tmp_path: Path) -> None:
    space = "space:\n  block.attention.kv_heads: {choice: [1, 2, 4]}\n  block.norm: {choice: [rmsnorm]}"
    for trials, told in (
        (5, ["the space has 3 points: the other 2 proposals repeat them, and train nothing"]),
        (3, []),
    ):
        planned = plan(load_study(searched(tmp_path, trials=trials, space=space)), tmp_path)
        assert planned.study.search and [*planned.study.search.lines(planned)] == told


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run gets to clean up."""


@pytest.mark.slow
def test_killed_search_goes_on_with_the_same_proposals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = searched(tmp_path, trials=5)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(study, whole, executor="inline", track=False).exit_code == 0
    trained = 0

    class Dying(InlineExecutor):
        def wait(self, timeout: float) -> Any:
            nonlocal trained
            trained += 1
            if trained % 3 == 0:
                raise Killed
            return super().wait(timeout)

    monkeypatch.setattr(running, "InlineExecutor", Dying)
    attempts = 0
    while True:
        attempts += 1
        assert attempts < 20
        try:
            summary = run(study, broken, executor="inline", track=False)
        except Killed:
            continue
        break
    assert summary.exit_code == 0 and attempts > 2
    assert asked(rows_of(broken)) == asked(rows_of(whole))
    assert [trial.params for trial in kept(broken)] == [trial.params for trial in kept(whole)]
    one, other = ({row["key"]: row["result"]["test"] for row in rows_of(folder)} for folder in (whole, broken))
    assert one == other, "the table is the same to the last digit"
    again = run(study, broken, executor="inline", track=False)
    assert (again.exit_code, again.counts["reused"]) == (0, again.counts["complete"]), "nothing runs twice"


def test_condition_asks_the_base_by_type(tmp_path: Path) -> None:
    space = """\
space:
  block.ffn.width: {int: [16, 32], step: 16, when: "block.attention.mask == 'causal'"}
  block.ffn.activation: {choice: [silu, gelu], when: "block.ffn.type == 'mlp'"}"""
    store = tmp_path / "store"
    assert run(searched(tmp_path, trials=2, space=space), store, executor="inline", track=False).exit_code == 0
    for settings in asked(rows_of(store)).values():
        assert settings.keys() == {"number", "lr", "block.ffn.width"}, "the feed-forward is no mlp"


def test_another_space_under_the_same_name_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run(searched(tmp_path, trials=1), store, executor="inline", track=False).exit_code == 0
    before = rows_of(store)
    with pytest.raises(SpecError, match="the search 'gates' began with another space"):
        run(
            searched(tmp_path, space="space:\n  block.ffn.width: {int: [16, 32]}"),
            store,
            executor="inline",
            track=False,
        )
    assert rows_of(store) == before


def test_another_base_under_the_same_name_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run(searched(tmp_path, trials=1), store, executor="inline", track=False).exit_code == 0
    before = rows_of(store)
    longer = SMALL["train"].replace("256", "512")  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="the search 'gates' began with another model or recipe; give the study a new"):
        run(searched(tmp_path, trials=1, train=longer), store, executor="inline", track=False)
    assert rows_of(store) == before
    rate = SMALL["train"].replace("1e-2", "2e-2")  # type: ignore[union-attr]
    assert run(searched(tmp_path, trials=1, train=rate), store, executor="inline", track=False).exit_code == 0


def test_search_whose_database_is_deleted_goes_on_from_the_trial_table(tmp_path: Path) -> None:
    store = tmp_path / "store"
    space = "space:\n  block.attention.kv_heads: {choice: [1, 3]}\n  train.lr: {float: [1e-3, 1e-1], log: true}"
    study = searched(tmp_path, trials=4, space=space, seeds="seeds: 1")
    assert run(study, store, executor="inline", track=False).exit_code == 0
    rows, trials = rows_of(store), kept(store)
    assert {trial.state.name for trial in trials} == {"COMPLETE", "FAIL"}, "one was refused"
    for path in store.glob("optuna.db*"):
        path.unlink()
    summary = run(study, store, executor="inline", track=False)
    assert (summary.exit_code, summary.counts["reused"]) == (0, summary.counts["complete"]), "nothing runs twice"
    assert rows_of(store) == rows
    found = [(trial.number, trial.params, trial.state, trial.value) for trial in kept(store)]
    assert found == [(trial.number, trial.params, trial.state, trial.value) for trial in trials]
    with Store.open(store, create=False) as opened:
        refused = [event["detail"]["number"] for event in opened.events("gates") if event["kind"] == "refused"]
    assert len(refused) == len(set(refused)), "a refusal is noted once"


def test_results_of_another_model_are_not_taken_for_those_of_a_proposal(tmp_path: Path) -> None:
    store = tmp_path / "store"
    one = {
        "search": "search: {trials: 1, sampler: random}",
        "seeds": "seeds: 1",
        "space": "space:\n  block.ffn.width: {int: [16, 64], step: 16}",
    }
    assert run(searched(tmp_path, **one), store, executor="inline", track=False).exit_code == 0  # type: ignore[arg-type]
    old = {row["key"] for row in rows_of(store)}
    for path in store.glob("optuna.db*"):
        path.unlink()
    longer = SMALL["train"].replace("256", "512")  # type: ignore[union-attr]
    again = searched(tmp_path, train=longer, **one)  # type: ignore[arg-type]
    assert run(again, store, executor="inline", track=False).exit_code == 0
    rows = rows_of(store)
    assert {row["variant"] for row in rows} == {"baseline", "found", "search-0000"}
    assert not old & {row["key"] for row in rows}


def test_best_proposal_that_is_a_variant_already_is_not_repeated_under_a_second_name(tmp_path: Path) -> None:
    store = tmp_path / "store"
    space = "space:\n  block.norm: {choice: [rmsnorm]}"
    study = searched(tmp_path, trials=1, space=space)
    for _ in range(2):
        assert run(study, store, executor="inline", track=False).exit_code == 0
    with Store.open(store, create=False) as opened:
        names = [variant["name"] for variant in opened.study("gates")["variants"]]
        (event,) = (event["detail"] for event in opened.events("gates") if event["kind"] == "found")
    assert names == ["baseline"] and (event["variant"], event["number"]) == ("baseline", 0)
    assert event["message"] == "the best proposal, 0, is the variant 'baseline'"
    assert [(row["variant"], row["role"]) for row in rows_of(store)] == [
        ("search-0000", "search"),
        ("baseline", "repeat"),
        ("baseline", "repeat"),
    ]


def test_a_search_begins_with_the_base_and_with_what_its_store_has_trained(tmp_path: Path) -> None:
    store, base = tmp_path / "store", {key: value for key, value in SMALL.items() if key != "space"}
    other = {"study": "study: other", "variants": "variants:\n  baseline: {block.norm.placement: res_post}"}
    alone = write_study(tmp_path, **{**base, **other})
    assert run(alone, store, executor="inline", track=False).exit_code == 0
    space = "space:\n  block.attention.kv_heads: {choice: [1, 2, 4]}\n  block.norm.placement: {choice: [pre, res_post]}"
    sampler = "search: {trials: 6, sampler: {type: effects, known: 3, startup: 1}}"
    study = write_study(tmp_path, **{**SMALL, "search": sampler, "space": space})
    assert run(study, store, executor="inline", track=False).exit_code == 0
    rows = [row for row in rows_of(store) if row["role"] == "search"]
    proposed = [
        [row["settings"][path] for path in ("block.attention.kv_heads", "block.norm.placement")] for row in rows
    ]
    assert proposed[:2] == [[4, "pre"], [4, "res_post"]] and rows[1]["reused"], "the base, and the other study's"
    assert len({*map(tuple, proposed)}) == 6, "all of the space, each point once"
    with Store.open(store, create=False) as opened:
        assert [[*point.values()] for point in opened.decided("gates", "known points")] == proposed[:2]
    assert run(study, store, executor="inline", track=False).counts.get("complete", 0) >= 6

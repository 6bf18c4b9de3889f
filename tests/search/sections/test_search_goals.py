"""Searches for several goals and under constraints, with real trials: refused, resumed, repeated and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.search.comparison.compare import load_comparison
from archlab.search.executors.inline import InlineExecutor
from archlab.search.planning.plan import plan
from archlab.search.reporting.report import report
from archlab.search.running import run as running
from archlab.search.running.run import run
from archlab.search.running.status import lines, status_of
from archlab.search.sections.search.judged import exceeded
from archlab.search.sections.search.optuna_values import importances
from archlab.search.sections.search.space import Space
from archlab.search.statistics.pareto import front
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.sections.test_seek import SMALL, Killed, asked, kept, rows_of
from tests.search.study_files import write_study

SMALL_SEARCH = Path(__file__).parents[3] / "studies" / "search-small.yaml"
WIDTHS = "space:\n  block.ffn.width: {int: [8, 64], step: 8}\n  block.attention.heads: {choice: [2, 4]}"
COMPONENTS = """\
components:
  qk_norm: {block.attention.qk_norm: rmsnorm}
  sdpa_gate: {block.attention.gate: {position: sdpa}}
  value_gate: {block.attention.gate: {position: value}}"""


def searched(folder: Path, search: str, **sections: str | None) -> Path:
    return write_study(folder, **{**SMALL, "space": WIDTHS, "search": f"search: {{{search}}}", **sections})


def go(study: Path, store: Path) -> Any:
    summary = run(study, store, executor="inline", track=False)
    assert summary.exit_code == 0, summary.message
    return summary


def events_of(store: Path, kind: str) -> list[dict[str, Any]]:
    with Store.open(store, create=False) as opened:
        return [event["detail"] for event in opened.events("gates") if event["kind"] == kind]


def test_the_front_of_two_goals_is_repeated_and_printed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    goals = (
        "trials: 7, sampler: {type: nsga2, population: 3}, minimize: [perplexity, flops_per_token], keep: 2, seed: 1"
    )
    go(searched(tmp_path, goals), store)
    with Store.open(store, create=False) as opened:
        comparison = load_comparison(opened, "gates")
    frame = comparison.search
    points = list(zip(frame["validation_loss"], frame["flops_per_token"], strict=True))
    assert len(frame) == 7 and set(frame.index[frame["front"]]) == set(front(points))
    assert not frame["front"].all(), "some are dominated"
    names = list(comparison.table["variant"])
    repeated = names[1:]
    assert names[0] == "baseline" and repeated == [f"found-{n}" for n in range(1, len(repeated) + 1)]
    assert 1 <= len(repeated) <= 2 and set(comparison.table["n"]) == {2}
    first = {row["key"] for row in rows_of(store) if row["variant"].startswith("found-") and row["seed"] == 0}
    assert first <= set(frame["key"][frame["front"]]), "what is repeated is on the front"
    summary = comparison.searched
    assert summary["hypervolume"] > 0 and summary["reference"]["flops_per_token"] == frame["flops_per_token"].max()
    text = report(comparison, "text")
    assert "front of" in text and "hypervolume" in text and "FLOPs/token" in text and "dominated" in text
    assert [len(trial.values or ()) for trial in kept(store)] == [2] * 7


def test_what_breaks_a_constraint_is_never_trained_and_counts_as_no_trial(tmp_path: Path) -> None:
    store = tmp_path / "store"
    study = searched(tmp_path, "trials: 4, sampler: random, constraints: {parameters: 7k, memory: 1GB}, seed: 2")
    go(study, store)
    rows, refused = rows_of(store), events_of(store, "refused")
    assert len(asked(rows)) == 4 and refused
    assert sorted(asked(rows)) == sorted(set(range(4 + len(refused))) - {event["number"] for event in refused})
    assert all(event["message"].startswith("parameters ") and event["excess"]["parameters"] > 0 for event in refused)
    with Store.open(store, create=False) as opened:
        proposals = {each["number"]: each for each in opened.study("gates")["search"]["proposals"]}
        comparison = load_comparison(opened, "gates")
    assert all((proposals[number]["parameters"] <= 7000) == (number in asked(rows)) for number in proposals)
    (note,) = (note for note in comparison.notes if "break" in note)
    assert f"not trained (parameters {len(refused)})" in note
    assert {trial.state.name for trial in kept(store) if trial.user_attrs["state"] == "refused"} == {"FAIL"}
    before = rows_of(store)
    go(study, store)
    assert rows_of(store) == before and len(events_of(store, "refused")) == len(refused), "nothing is drawn twice"


def test_a_search_without_anything_feasible_ends_before_it_trains(tmp_path: Path) -> None:
    store = tmp_path / "store"
    study = searched(tmp_path, "trials: 2, sampler: random, proposals: 9, constraints: {parameters: 10}")
    with pytest.raises(
        SpecError, match=r"search.constraints: none of 9 proposals keeps to them; the nearest: parameters"
    ):
        run(study, store, executor="inline", track=False)
    assert not any(row["state"] != "planned" for row in rows_of(store))
    with Store.open(store) as opened:
        name = opened.studies()[0]["name"]
        notes = load_comparison(opened, name).notes
    assert any("9 proposals break a constraint and were not trained (parameters 9)" in note for note in notes), notes
    (line,) = lines(status_of(store, name))
    assert "0 trials: none yet, 9 proposals refused (they break a constraint, or make no sense)" in line


@pytest.mark.slow
def test_a_loosened_constraint_lets_what_was_refused_run(tmp_path: Path) -> None:
    store = tmp_path / "store"
    text = "trials: 2, sampler: random, constraints: {{parameters: {}}}, seed: 2"
    go(searched(tmp_path, text.format("7k")), store)
    refused = {event["number"] for event in events_of(store, "refused")}
    trained = set(asked(rows_of(store)))
    go(searched(tmp_path, text.replace("2", "5", 1).format("9k")), store)
    assert trained < set(asked(rows_of(store))) and refused & set(asked(rows_of(store)))


def test_proposals_that_make_the_same_trial_share_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    space = "space:\n  block.attention.heads: {choice: [2, 4]}"
    go(searched(tmp_path, "trials: 6, sampler: random", space=space, seeds="seeds: 1"), store)
    rows = [row for row in rows_of(store) if row["role"] == "search"]
    assert len(rows) == 6 and len({row["key"] for row in rows}) == 2
    assert {row["attempt"] for row in rows} == {1}, "each is trained once"


def test_axes_over_components_recipe_and_layers_with_nested_conditions(tmp_path: Path) -> None:
    store = tmp_path / "store"
    space = """\
space:
  qk_norm: {component: [off, on]}
  gate: {component: [off, sdpa_gate, value_gate], when: "qk_norm == 'on'"}
  train.optimizer.betas: {choice: [[0.9, 0.95], [0.9, 0.99]], when: "gate != 'off' and qk_norm == 'on'"}
  train.schedule.warmup: {float: [0, 0.1], step: 0.05, when: "train.optimizer == 'adamw'"}
  overrides.0.block.attention.mask: {choice: [causal, {type: window, size: 4}]}"""
    go(searched(tmp_path, "trials: 10, seed: 4", space=space, components=COMPONENTS, seeds="seeds: 1"), store)
    settings = [each for _, each in sorted(asked(rows_of(store)).items())]
    assert {each["qk_norm"] for each in settings} == {"on", "off"}
    for each in settings:
        assert ("gate" in each) == (each["qk_norm"] == "on")
        assert ("train.optimizer.betas" in each) == (each.get("gate", "off") != "off")
        assert each["train.schedule.warmup"] in (0, 0.05, 0.1)
    assert any("train.optimizer.betas" in each for each in settings), "a condition on two axes holds at times"
    with Store.open(store, create=False) as opened:
        found = opened.study("gates")["variants"][-1]
    rows = rows_of(store)
    (key,) = (row["key"] for row in rows if row["variant"] == "found")
    _, chosen = min(asked([row for row in rows if row["key"] == key]).items())
    on = {
        "qk_norm": chosen["qk_norm"] == "on",
        **{name: chosen.get("gate") == name for name in ("sdpa_gate", "value_gate")},
    }
    assert found["components"] == on


def test_step_times_are_measured_once_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from archlab.search.sections.search import rows as seek

    measured: list[float] = []
    real = seek.measure

    def counting(*args: Any) -> dict[str, Any]:
        measured.append(1.0)
        return real(*args)

    monkeypatch.setattr(seek, "measure", counting)
    store = tmp_path / "store"
    space = "space:\n  block.attention.heads: {choice: [2, 4]}"
    text = "trials: 5, sampler: random, minimize: [perplexity, step_time], constraints: {step_time: 60s}"
    study = searched(tmp_path, text, space=space, seeds="seeds: 1")
    go(study, store)
    assert len(measured) == 2
    with Store.open(store, create=False) as opened:
        frame = load_comparison(opened, "gates").search
    assert (frame["step_time"] > 0).all() and (frame["step_time"] < 60).all()
    go(study, store)
    assert len(measured) == 2, "what was measured is remembered"
    with pytest.raises(SpecError, match="none of 20 proposals keeps to them; the nearest: step_time"):
        quick = searched(
            tmp_path, text.replace("60s", "0.0001ms").replace("5", "2", 1), study="study: quick", space=space
        )
        run(quick, store, executor="inline", track=False)


def test_the_small_search_can_be_planned(tmp_path: Path) -> None:
    write_study(tmp_path)  # for its corpus
    changed = {"train.data": {"text": str(tmp_path / "corpus.txt")}, "train.context": 32, "train.batch": 4}
    planned = plan(load_study(SMALL_SEARCH, changed), tmp_path / "data")
    assert planned.trials == 2 + 32 + 3, "two seeds of the base, the search, a second seed of three of the front"
    (base,) = planned.variants
    assert base.parameters < planned.study.search.constraints.parameters  # type: ignore[union-attr,operator]


def test_importances_name_the_axis_that_matters() -> None:
    axes = {"a": {"float": [0, 1]}, "b": {"choice": ["x", "y"]}, "c": {"int": [1, 9], "when": "b == 'x'"}}
    space = parse(Space, axes, "space")
    trials = []
    for index in range(24):
        values = {"a": (index * 7 % 24) / 24, "b": "xy"[index % 2]} | ({"c": 1 + index % 9} if index % 2 == 0 else {})
        trials.append((values, 3 + 2 * values["a"]))  # type: ignore[operator]
    found = importances(space, trials)
    assert found.keys() == {"a", "b", "c"} and max(found, key=lambda path: found[path]) == "a"
    assert sum(found.values()) == pytest.approx(1)
    assert importances(space, trials[:19]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", ["random", "{type: tpe, startup: 3}", "{type: gp, startup: 3}", "cmaes", "nsga2", "nsga3"]
)
def test_every_sampler_goes_on_with_the_same_proposals_after_kills(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampler.startswith("nsga"):
        sampler = f"{{type: {sampler}, population: 3}}, minimize: [perplexity, flops_per_token]"
    space = "space:\n  block.ffn.width: {int: [8, 64], step: 8}\n  train.lr: {float: [1e-3, 1e-1], log: true}"
    text = f"trials: 7, sampler: {sampler}, constraints: {{parameters: 8k}}, seed: 5"
    study = searched(tmp_path, text, space=space, seeds="seeds: 1")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    go(study, whole)
    waits = 0

    class Dying(InlineExecutor):
        def wait(self, timeout: float) -> Any:
            nonlocal waits
            waits += 1
            if waits % 3 == 0:
                raise Killed
            return super().wait(timeout)

    monkeypatch.setattr(running, "InlineExecutor", Dying)
    for _attempt in range(30):
        try:
            summary = run(study, broken, executor="inline", track=False)
        except Killed:
            continue
        break
    assert summary.exit_code == 0 and waits > 6
    assert asked(rows_of(broken)) == asked(rows_of(whole))
    one, other = ({row["key"]: row["result"]["test"] for row in rows_of(folder)} for folder in (whole, broken))
    assert one == other, "the table is the same to the last digit"
    assert events_of(broken, "refused") == events_of(whole, "refused")


def test_a_limit_that_is_broken_by_little_is_told_to_the_digit() -> None:
    costs, limits = {"parameters": 300_421.0, "memory": 3.1e9}, {"parameters": 300_000.0, "memory": 2e9}
    told = exceeded(costs, limits, {"parameters": 421.0, "memory": 1.1e9})
    assert told == "parameters 300,421 > 300,000, memory 3.1B > 2B"

"""Searches of one store that ask the same are held against each other: which these are, and what is told of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from archlab.search.comparison.compare import load_comparison
from archlab.search.reporting.report import report
from archlab.search.results.comparison import Comparison
from archlab.search.running.run import run
from archlab.search.sections.search.frames import rivals_frame, search_frame
from archlab.search.statistics.pareto import hypervolume
from archlab.search.store.store import Store
from tests.search.sections.test_seek import SMALL
from tests.search.study_files import write_study

NAMED = {"base": "b", "space": {}, "constraints": {}}
SPACE = "space:\n  block.ffn.width: {int: [8, 64], step: 8}\n  block.attention.heads: {choice: [2, 4]}"


def trial(number: int, loss: float, flops: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A finished trial of a search, and the facts of its proposal."""
    result = {"validation": {"loss": loss, "perplexity": math.exp(loss)}}
    row = {
        "role": "search",
        "settings": {"number": number},
        "variant": f"search-{number}",
        "state": "complete",
        "result": result,
        "key": f"{number}",
    }
    return row, {"number": number, "flops_per_token": flops}


def search(name: str, goals: list[str], *found: tuple[float, float | None]) -> tuple[dict[str, Any], Any]:
    """The record and the frame of a search of which these (loss, FLOPs) came in this order."""
    rows, facts = zip(*(trial(number, *point) for number, point in enumerate(found)), strict=True)
    record = {"study": name, "search": {**NAMED, "minimize": goals, "sampler": name, "proposals": facts}}
    return record, search_frame(record, rows)


def test_two_fronts_are_measured_up_to_one_reference() -> None:
    goals = ["perplexity", "flops_per_token"]
    mine = search("mine", goals, (3.0, 400.0), (1.0, 200.0))
    theirs = search("theirs", goals, (2.0, 100.0), (2.5, 800.0))
    frame = rivals_frame([mine, theirs]).set_index("study")
    assert list(frame.index) == ["mine", "theirs"] and frame["after"].tolist() == [[1, 2]] * 2
    reference = (3.0, math.log(800.0))  # the worst of each goal, of different searches
    assert frame["course"]["mine"] == pytest.approx([0.0, hypervolume([(1.0, math.log(200.0))], reference)])
    assert frame["course"]["theirs"] == pytest.approx([hypervolume([(2.0, math.log(100.0))], reference)] * 2)
    assert frame["front"].tolist() == [1, 1] and frame["common_front"].tolist() == [1, 1]
    assert frame["perplexity"].tolist() == pytest.approx([math.exp(1.0), math.exp(2.0)])


def test_with_one_goal_the_course_is_the_best_so_far_over_as_many_trials_of_each() -> None:
    mine = search("mine", ["perplexity"], *((loss, None) for loss in (3.0, 2.0, 2.5, 1.0)))
    theirs = search("theirs", ["perplexity"], *((loss, None) for loss in (2.0, 2.2, 2.1, 1.9, 1.8, 0.5)))
    frame = rivals_frame([mine, theirs]).set_index("study")
    assert frame["after"]["mine"] == [1, 2, 3, 4], "the longer search is looked at no further"
    assert frame["course"]["mine"] == pytest.approx([math.exp(each) for each in (3.0, 2.0, 2.0, 1.0)])
    assert frame["course"]["theirs"] == pytest.approx([math.exp(each) for each in (2.0, 2.0, 2.0, 1.9)])
    assert frame["complete"].tolist() == [4, 6]


def test_a_search_alone_is_held_against_nothing() -> None:
    assert not len(rivals_frame([search("mine", ["perplexity"], (1.0, None))]))


def compared(store: Path, name: str) -> Comparison:
    with Store.open(store, create=False) as opened:
        return load_comparison(opened, name)


def test_the_report_shows_searches_that_ask_the_same_and_no_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    text = "search: {{trials: {}, sampler: {}, minimize: [perplexity, flops_per_token], seed: 1}}"
    asked = {**SMALL, "space": SPACE, "seeds": "seeds: 1"}
    guided = write_study(tmp_path, **asked, search=text.format(4, "{type: nsga2, population: 2}"))
    run(guided, store, executor="inline", track=False)
    assert not len(compared(store, "gates").rivals)
    run(guided, store, overrides={"study": "wide", "model.d_model": 32}, executor="inline", track=False)
    run(guided, store, overrides={"study": "long", "train.tokens": 512}, executor="inline", track=False)
    assert not len(compared(store, "gates").rivals), "another model and another recipe are other questions"
    chance = write_study(tmp_path, **asked, search=text.format(6, "random"))
    run(chance, store, overrides={"study": "chance"}, executor="inline", track=False)
    found = compared(store, "gates")
    assert found.rivals["study"].tolist() == ["gates", "chance"]
    assert found.rivals["sampler"].tolist() == ["nsga2", "random"] and found.rivals["complete"].tolist() == [4, 6]
    assert compared(store, "chance").rivals["study"].tolist() == ["chance", "gates"]
    told = report(found, "text")
    assert "Searches of the same space" in told and "common front" in told and "after 4" in told


@pytest.mark.slow
def test_components_that_mean_something_else_are_another_space(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for heads in (1, 2):
        few, gate = f"few: {{block.attention.kv_heads: {heads}}}", "G1: {block.attention.gate: sdpa}"
        asked = SMALL | {"components": f"components: {{{few}, {gate}}}", "seeds": "seeds: 3"}
        asked["space"] = "space:\n  heads: {component: [off, few]}\n  gate: {component: [off, G1]}\n"
        asked["search"] = "search: {trials: 8, sampler: random, minimize: [perplexity, parameters], keep: 3}"
        asked["model"] = f"{SMALL['model']}\n  init: {{std: 0.02}}"
        asked["train"] = f"{str(SMALL['train'])[:-1]}, schedule: {{warmup: 0}}}}"
        study = write_study(tmp_path, **asked)
        run(study, store, overrides={"study": f"heads-{heads}"}, executor="inline", track=False)
    found = compared(store, "heads-2")
    assert not len(found.rivals)
    assert not len(found.effects), "what was found differs in more than a component"
    assert "found-2 is trial 4 " in report(found, "text"), "of equal proposals the first, which stands on the front"

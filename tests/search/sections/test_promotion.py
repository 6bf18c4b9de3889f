"""Promotion in a search: who goes on from rung to rung, on which seeds, and what the report says was luck."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from archlab.search.comparison.compare import load_comparison
from archlab.search.executors.inline import InlineExecutor
from archlab.search.planning.plan import plan
from archlab.search.reporting.report import report
from archlab.search.running import run as running
from archlab.search.running.run import run
from archlab.search.sections.search.promotion import promoting_of, rung_seeds
from archlab.search.sections.search.promotion_frames import promotion_frames
from archlab.search.sections.search.rows import Seeker
from archlab.search.store.store import TERMINAL, Store
from archlab.search.study.load import load_study
from tests.search.sections.test_seek import Killed, rows_of, searched

SPACE = "space:\n  block.ffn.width: {int: [16, 128], step: 16}\n  train.lr: {float: [1e-3, 1e-1], log: true}"
RUNGS = "[{tokens: 128, keep: 3}, {tokens: 256, keep: 2, seeds: 2}, {tokens: 512, keep: 1}]"
Loss = Callable[[str, int], float]  # of a trial's variant, without its rung, and its seed


def promoting(folder: Path, trials: int = 4, rungs: str = RUNGS, **sections: str | None) -> Path:
    text = f"search: {{trials: {trials}, seed: 3, sampler: random, promote: {rungs}}}"
    given: dict[str, Any] = {"search": text, "space": SPACE, **sections}
    return searched(folder, **given)


class Simulation:
    """A study that promotes, whose trials end in a random order with losses that the test says."""

    def __init__(self, folder: Path, study: Path, order: int = 0) -> None:
        self.chance, self.table = random.Random(order), dict[tuple[str, str], dict[str, Any]]()
        self.planned = plan(load_study(study), folder / "data")
        self.store = Store.open(folder / f"store-{order}")
        self.store.save_study("gates", self.planned.record(), "study: gates\n")
        self.again()

    def again(self) -> None:
        """As the next run of the same study."""
        self.planned = plan(self.planned.study, self.store.root.parent / "data")
        search, space = self.planned.study.search, self.planned.study.space
        assert search and space
        self.seeker = Seeker(search, space, self.planned, self.store, slots=2)

    def go(self, loss: Loss, ends: int = 1000) -> list[dict[str, Any]]:
        """The table when nothing is left, or after so many trials ended."""
        for _ in range(ends):
            rows = self.seeker.rows([*self.table.values()])
            for row in rows:
                start = {"key": row.trial.key, "variant": row.variant, "role": row.role, "settings": row.settings}
                start |= {"seed": row.seed, "state": "planned", "result": None, "reason": None, "folder": ""}
                self.table.setdefault((row.trial.key, row.variant), start)
            waiting = [row for row in self.table.values() if row["state"] not in TERMINAL]
            if not waiting:
                break
            row = self.chance.choice(waiting)
            value = loss(row["variant"].partition(" (")[0], row["seed"])
            row["state"] = "complete" if math.isfinite(value) else "diverged"
            row["result"] = {"validation": {"loss": value}, "test": {"loss": value}}
        return [*self.table.values()]

    @property
    def rungs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.planned.record()["search"]["promote"]
        return found


def noisy(name: str, seed: int) -> float:
    """A loss with luck in it, the same for the same variant and seed."""
    return 3 + random.Random(f"{name} {seed}").gauss(0, 0.1)


def test_each_rung_chooses_by_seeds_of_its_own_and_the_table_by_none_of_them() -> None:
    taken = [seed for number in range(1, 9) for seed in rung_seeds(number, 1000)]
    assert len(taken) == len({*taken}) and min(taken) == 1000, "tables have the seeds from 0 to 999"
    assert rung_seeds(2, 3) == (2000, 2001, 2002)


@pytest.mark.parametrize("order", [1, 2])
def test_who_goes_on_does_not_depend_on_the_order_in_which_trials_end(tmp_path: Path, order: int) -> None:
    study = promoting(tmp_path, trials=6, rungs="[{tokens: 128, keep: 4}, {tokens: 128, keep: 2, seeds: 2}]")
    one, other = Simulation(tmp_path, study), Simulation(tmp_path, study, order)
    rows, others = one.go(noisy), other.go(noisy)
    assert one.rungs == other.rungs
    assert {(row["variant"], row["key"]) for row in rows} == {(row["variant"], row["key"]) for row in others}
    first, second = one.rungs
    means = {number: noisy(name, 1000) for number, name in first["entered"].items()}
    assert [str(number) for number in first["chosen"]] == sorted(means, key=lambda n: means[n])[:4]
    assert [int(number) for number in second["entered"]] == first["chosen"]
    own = {
        number: (noisy(f"search-{number:04d}", 2000) + noisy(f"search-{number:04d}", 2001)) / 2
        for number in first["chosen"]
    }
    assert second["chosen"] == sorted(own, key=lambda n: own[n])[:2], "the first rung's losses count no more"
    assert second["found"] == {str(number): f"found-{at}" for at, number in enumerate(second["chosen"], 1)}
    assert {row["seed"] for row in rows if row["variant"].startswith("found")} == {0, 1}
    for rung in one.rungs:
        assert {row["seed"] for row in rows if row["variant"] == rung["baseline"]} == {*rung["seeds"]}, "it is paired"


def test_what_diverges_goes_no_further_and_equal_proposals_count_once(tmp_path: Path) -> None:
    space = "space:\n  block.ffn.width: {choice: [16, 32, 48]}"
    study = promoting(tmp_path, trials=8, rungs="[{tokens: 128, keep: 2}, {tokens: 256, keep: 1}]", space=space)
    simulated = Simulation(tmp_path, study)
    best = None

    def loss(name: str, seed: int) -> float:
        nonlocal best
        if name.startswith("search") and seed >= 2000:
            best = best or name
            return math.inf if name == best else 2.0
        return noisy(name, seed)

    rows = simulated.go(loss)
    first, second = simulated.rungs
    proposals = [row for row in rows if row["role"] == "search"]
    assert len(proposals) > len(first["entered"]) == len({row["key"] for row in proposals}), "of equal ones the first"
    assert len(second["entered"]) == 2 and len(second["chosen"]) == 1
    assert best is not None and int(best[-4:]) not in second["chosen"]


def test_a_decision_is_stored_once_and_replayed(tmp_path: Path) -> None:
    study = promoting(tmp_path, rungs="[{tokens: 128, keep: 2}, {tokens: 256, keep: 1}]")
    simulated = Simulation(tmp_path, study)
    simulated.go(noisy)
    before = simulated.rungs
    for row in simulated.table.values():
        if row["role"] == "search":
            row["result"] = {"validation": {"loss": 6 - row["result"]["validation"]["loss"]}, "test": None}
    with simulated.store:
        rows = simulated.seeker.rows([*simulated.table.values()])
        assert simulated.rungs == before and len(rows) == len(simulated.table)
        assert simulated.store.extent("gates", ())["decisions"] == 2


def test_report_says_of_each_rung_what_was_lost_on_other_seeds() -> None:
    losses = {
        ("b1", 1000): 3.0, ("s0", 1000): 2.7, ("s1", 1000): 2.8, ("s2", 1000): 3.1,
        ("b2", 2000): 3.0, ("b2", 2001): 3.2, ("s0 2", 2000): 3.0, ("s0 2", 2001): 3.2,
        ("s1 2", 2000): 2.9, ("s1 2", 2001): 3.0,
        ("b", 0): 2.5, ("found", 0): 2.45,
    }  # fmt: skip
    trials = [
        {"variant": name, "seed": seed, "state": "complete", "result": {"validation": {"loss": value}}}
        for (name, seed), value in losses.items()
    ]
    same = {"tokens": 100, "parameters": 10}
    first = {"rung": 1, **same, "keep": 2, "seeds": [1000], "baseline": "b1", "chosen": [0, 1]}
    second = {"rung": 2, **same, "keep": 1, "seeds": [2000, 2001], "baseline": "b2", "chosen": [1]}
    first["entered"] = {"0": "s0", "1": "s1", "2": "s2"}
    second |= {"entered": {"0": "s0 2", "1": "s1 2"}, "found": {"1": "found"}}
    record = {"seeds": [0], "baseline": "b", "search": {"promote": [first, second]}}
    found = promotion_frames(record, trials)
    rungs, each = found["promotion"].set_index("rung"), found["promoted"].set_index(["rung", "number"])
    assert each["delta"][1, 0] == pytest.approx(-0.3) and each["repeated"][1, 0] == pytest.approx(0.0)
    assert each["delta"][1, 1] == pytest.approx(-0.2) and each["repeated"][1, 1] == pytest.approx(-0.15)
    assert math.isnan(each["repeated"][1, 2]) and not each["promoted"][1, 2]
    assert rungs["chosen"][1] == pytest.approx(-0.25) and rungs["repeated"][1] == pytest.approx(-0.075)
    assert rungs["shrinkage"][1] == pytest.approx(0.175) and rungs["shrinkage_n"][1] == 2
    assert rungs["chosen"][2] == pytest.approx(-0.15) and rungs["repeated"][2] == pytest.approx(-0.05)
    assert each["becomes"][2, 1] == "found" and rungs["one_scale"].all()


def test_promoted_search_runs_is_told_and_goes_on_without_training_again(tmp_path: Path) -> None:
    study, store = (
        promoting(tmp_path, trials=3, rungs="[{tokens: 128, keep: 2}, {tokens: 256, keep: 1}]", seeds="seeds: 1"),
        tmp_path / "store",
    )
    told: list[str] = []
    summary = run(study, store, executor="inline", track=False, on_event=lambda e: told.extend(e.get("messages", ())))
    assert summary.exit_code == 0, summary.message
    rows = rows_of(store)
    beside = [row for row in rows if row["role"] == "screen"]
    at = [(row["variant"].partition(" (")[2], row["seed"], row["result"]["tokens"]) for row in beside]
    assert at == [("rung 1)", 1000, 128), *[("rung 2)", 2000, 256)] * 3]
    assert {(row["seed"], row["result"]["tokens"]) for row in rows if row["role"] == "search"} == {(1000, 128)}
    assert {(row["variant"], row["seed"], row["result"]["tokens"]) for row in rows if row["role"] == "repeat"} == {
        ("baseline", 0, 256), ("found", 0, 256),
    }  # fmt: skip
    assert [line.partition(" (")[0] for line in told] == [
        "promotion: 2 of 3 go on from rung 1",
        "promotion: 1 of 2 go on from rung 2",
    ]
    with Store.open(store, create=False) as opened:
        text = report(load_comparison(opened, "gates"))
    assert "Promotion, rung by rung" in text and "chosen at" in text and "search: found is trial" in text
    again = run(study, store, executor="inline", track=False)
    assert (again.exit_code, again.counts["reused"]) == (0, len(rows)), "nothing runs twice"
    assert rows_of(store) == rows


@pytest.mark.slow
def test_killed_promotion_goes_on_to_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = promoting(tmp_path, trials=3, rungs="[{tokens: 128, keep: 2}, {tokens: 256, keep: 1}]")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(study, whole, executor="inline", track=False).exit_code == 0
    ended = 0

    class Dying(InlineExecutor):
        def wait(self, timeout: float) -> Any:
            nonlocal ended
            ended += 1
            if ended % 3 == 0:
                raise Killed
            return super().wait(timeout)

    monkeypatch.setattr(running, "InlineExecutor", Dying)
    attempts, summary = 0, None
    while summary is None:
        attempts += 1
        assert attempts < 30
        with suppress(Killed):
            summary = run(study, broken, executor="inline", track=False)
    assert summary.exit_code == 0 and attempts > 2
    one, other = ({row["key"]: row["result"]["test"] for row in rows_of(folder)} for folder in (whole, broken))
    assert one == other, "the table is the same to the last digit"


def test_size_takes_width_and_depth_from_the_rule_of_the_zoo(tmp_path: Path) -> None:
    model = "model: {zoo: llama, size: {parameters: 100k}}"
    space = "space:\n  block.norm: {choice: [rmsnorm, layernorm]}"
    rungs = "[{tokens: 128, keep: 2}, {size: {parameters: 300k}, keep: 1, seeds: 2}]"
    made = plan(load_study(promoting(tmp_path, trials=2, rungs=rungs, model=model, space=space)), tmp_path / "data")
    part = promoting_of(made)
    assert part is not None
    small, large = (rung.baseline for rung in part.rungs)
    assert small.figures["non_embedding"] < 150_000 < 225_000 < large.figures["non_embedding"] < 375_000
    assert large.recipe.tokens == 128, "what a rung leaves open is as at the one before"
    assert made.variants[0].model == large.model, "the table is trained as the last rung"
    search = made.study.search
    assert search is not None
    lines = [*search.lines(made)]
    assert f"{large.parameters:,} parameters: 6 trials" in lines[2] and "at most 13 trials" in lines[-1]


def test_fresh_seeds_find_a_better_proposal_and_leave_less_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    promotion = importlib.import_module("promotion")
    found = {}
    for name in ("one rung, 1 seed", "one rung, 3 seeds", "promotion, fresh seeds"):
        chance = random.Random(0)
        each = [promotion.search(promotion.WAYS[name], 0.02, 0.02, chance) for _ in range(100)]
        found[name] = [fmean(getattr(one, what) for one in each) for what in ("regret", "luck", "trials")]
    single, thrice, promoted = found.values()
    assert promoted[0] < thrice[0] < single[0] and promoted[2] < thrice[2], "a better winner with fewer trials"
    assert 0 < promoted[1] < thrice[1] < single[1] and single[1] > 0.02

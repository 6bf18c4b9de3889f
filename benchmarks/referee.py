"""What a night of proposals comes to under five rules, at equal core-seconds.

    python benchmarks/referee.py                     # 200 nights of 240 trials each
    python benchmarks/referee.py --noise 0.02
    python benchmarks/referee.py --table --trials 80 # proposals and losses of benchmarks/results/search-table.json

By itself a proposer makes random changes: one in five is better, by 0.01 nats and more, half are worse, the others do
nothing. Of a gain a share is lost (0.3 on average), as changes do part of the same. The noise of a trial is that of the
quickstart's trials; seeds add what all models of a seed have in common.

With `--table` the night begins with the base of studies/search/table.yaml, and each proposal changes one axis of the
champion, or two once those are exhausted: no model twice. The true loss of a model is the mean of its two seeds in the
table, and what a trial costs is the table's. A trial draws its noise anew, normal, as large as that of the table's
seeds. Rules:

* lower: each proposal once, all with one seed; what is lower than the champion was is kept;
* three seeds: the champion and each proposal at the same three seeds; what is lower on average is kept;
* fixed level: `archlab challenge` with 5% for each proposal, whatever their number;
* challenge: `archlab challenge` as it is: e-LOND's levels, at most 8 seeds, a margin of equivalence of a trial's noise;
* together: `archlab challenge --together 4`: one seed each, on top of what was lower; four of these are confirmed at
  once, with other seeds.

Printed as JSON: for each rule the proposals and keeps of a night; the share of keeps that are false (no better than the
champion they replaced), as the mean over nights with its standard error; and the final champion's true loss less the
baseline's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.search.challenge.judge import judge
from archlab.search.statistics.online import level

FALSE_KEEPS, SEEDS, SEED_SD = 0.1, 8, 0.05
TABLE = Path(__file__).resolve().parent / "results/search-table.json"


class Model(NamedTuple):
    """A champion or a proposal: its true loss less the baseline's, core-seconds of a trial, and its point."""

    loss: float = 0.0
    seconds: float = 1.0
    point: tuple[int, ...] = ()


BASELINE = Model()


@dataclass
class Night:
    """The trials of one night, for `left` core-seconds, and what the champion is."""

    generator: np.random.Generator
    noise: float
    left: float
    champion: Model = BASELINE
    proposals: int = 0
    keeps: int = 0
    false: int = 0
    of_seed: dict[int, float] = field(default_factory=dict)

    def train(self, model: Model, seed: int) -> float:
        """A trial's loss. Raises StopIteration when the night is over."""
        if self.left < model.seconds:
            raise StopIteration
        self.left -= model.seconds
        common = self.of_seed.setdefault(seed, float(self.generator.normal(0, SEED_SD)))
        return model.loss + common + float(self.generator.normal(0, self.noise))

    def propose(self, on: Model) -> Model:
        """A model with a random change."""
        self.proposals += 1
        drawn = self.generator.random()
        if drawn < 0.2:
            gain = (0.01 + self.generator.exponential(0.02)) * self.generator.beta(7, 3)
            return Model(on.loss - float(gain))
        return Model(on.loss + (float(self.generator.exponential(0.05)) if drawn < 0.7 else 0.0))

    def keep(self, model: Model) -> None:
        """Makes a proposal the champion."""
        self.keeps += 1
        self.false += model.loss >= self.champion.loss
        self.champion = model


class Table:
    """The models of a space that was trained as a whole, by their points: true losses less the base's."""

    def __init__(self, file: Path) -> None:
        said = json.loads(file.read_text())
        losses = np.array([model["full"] for model in said["models"]])
        residuals = np.diff(losses, axis=1)
        self.noise = float(residuals.std(ddof=1) / 2**0.5)
        self.sizes = [len(values) for values in said["axes"].values()]
        truth = losses.mean(axis=1) - losses[0].mean()
        self.models: dict[tuple[int, ...], Model] = {}
        for model, loss in zip(said["models"], truth, strict=True):
            first = tuple(model["points"][0])
            for point in model["points"]:
                self.models[tuple(point)] = Model(float(loss), model["full_s"], first)
        self.base = self.models[tuple(said["models"][0]["points"][0])]
        self.seconds = float(np.mean([model["full_s"] for model in said["models"]]))


@dataclass
class TableNight(Night):
    """A night whose proposals are neighbours of the champion in a table."""

    table: Any = None
    tried: set[tuple[int, ...]] = field(default_factory=set)

    def propose(self, on: Model) -> Model:
        """An untried model that differs on one axis, or on two where there is none. Raises StopIteration where all of
        these were tried."""
        self.tried.add(on.point)
        for several in (1, 2):
            near = [*dict.fromkeys(self.near(on, several))]
            if near:
                self.proposals += 1
                model = near[int(self.generator.integers(len(near)))]
                self.tried.add(model.point)
                return model
        raise StopIteration

    def near(self, on: Model, several: int) -> Iterator[Model]:
        """The untried models that so many axes lie between."""
        for point, model in self.table.models.items():
            apart = sum(one != other for one, other in zip(point, on.point, strict=True))
            if apart == several and model.point not in self.tried:
                yield model


def lower(night: Night) -> Iterator[None]:
    """Each proposal once, beside what the champion had."""
    best = night.train(night.champion, 0)
    while True:
        model = night.propose(night.champion)
        if (found := night.train(model, 0)) < best:
            best = found
            night.keep(model)
        yield


def three_seeds(night: Night) -> Iterator[None]:
    """Each proposal at three seeds, beside what the champion had at these."""
    best = [night.train(night.champion, seed) for seed in range(3)]
    while True:
        model = night.propose(night.champion)
        found = [night.train(model, seed) for seed in range(3)]
        if np.mean(found) < np.mean(best):
            best = found
            night.keep(model)
        yield


def refereed(night: Night, allowed: Callable[[int, int], float]) -> Iterator[None]:
    """As archlab.search.challenge.referee does it: all rows share their noise, trials are kept."""
    rows: list[list[float]] = [[]]
    models, champion, tried = [night.champion], 0, 0
    while True:
        model, tried = night.propose(night.champion), tried + 1
        rows.append([])
        models.append(model)
        if decided(night, rows, models, champion, allowed(tried, night.keeps)) == "better":
            night.keep(model)
            champion = len(rows) - 1
        yield


def decided(night: Night, rows: list[list[float]], models: list[Model], champion: int, level: float) -> str | None:
    """Seeds for the last row, the champion and the baseline until there is a verdict."""
    for seeds in range(1, SEEDS + 1):
        for row in dict.fromkeys((0, champion, len(rows) - 1)):
            while len(rows[row]) < seeds:
                rows[row].append(night.train(models[row], len(rows[row])))
        seen = judge(padded(rows), len(rows) - 1, champion, level, SEEDS)
        if seen and (verdict := seen.verdict(night.noise)):
            return verdict
    return None


def together(night: Night, several: int) -> Iterator[None]:
    """The same, with candidates of several proposals that were lower with one seed, each on top of the one before; of
    fewer at the end, when nothing is left to propose."""
    rows: list[list[float]] = [[]]
    models, champion, tests, left = [night.champion], 0, 0, True
    best = [night.train(night.champion, SEEDS)]  # with the seed that chooses
    while left:
        candidate, lowest, parts = night.champion, best[champion], 0
        while parts < several:
            try:
                model = night.propose(candidate)
            except StopIteration:
                left = False
                break
            if (loss := night.train(model, SEEDS)) < lowest:
                candidate, lowest, parts = model, loss, parts + 1
            yield
        if not parts:
            return
        tests += 1
        rows.append([])
        models.append(candidate)
        best.append(lowest)
        if decided(night, rows, models, champion, level(tests, night.keeps, FALSE_KEEPS)) == "better":
            night.keep(candidate)
            champion = len(rows) - 1
        yield


def padded(rows: Sequence[Sequence[float]]) -> Any:
    """Losses `[rows, seeds]`, NaN where a row has fewer."""
    table = np.full((len(rows), SEEDS), np.nan)
    for place, losses in enumerate(rows):
        table[place, : len(losses)] = losses
    return table


RULES: dict[str, Callable[[Night], Iterator[None]]] = {
    "lower": lower,
    "three seeds": three_seeds,
    "fixed level": lambda night: refereed(night, lambda _number, _keeps: 0.05),
    "challenge": lambda night: refereed(night, lambda number, keeps: level(number, keeps, FALSE_KEEPS)),
    "together": lambda night: together(night, 4),
}


def main() -> None:
    """Plays the nights and prints what they came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=200)
    parser.add_argument("--trials", type=int, default=240, help="core-seconds, in mean trials")
    parser.add_argument("--noise", type=float, default=0.0086, help="standard deviation of a trial, nats per token")
    parser.add_argument(
        "--table", type=Path, nargs="?", const=TABLE, help="losses of real models in place of drawn ones"
    )
    asked = parser.parse_args()
    table = Table(asked.table) if asked.table else None
    for name, rule in RULES.items():
        nights = []
        for number in range(asked.nights):
            generator = np.random.default_rng(number)
            night = Night(generator, asked.noise, asked.trials)
            if table:
                left = asked.trials * table.seconds
                night = TableNight(generator, table.noise, left, table.base, table=table)
            steps = rule(night)
            try:
                while True:
                    next(steps)
            except (StopIteration, RuntimeError):  # a generator turns what ends the night into the latter
                nights.append(night)
        shares = np.array([night.false / max(night.keeps, 1) for night in nights])
        gains = np.array([night.champion.loss for night in nights])
        told = {
            "rule": name,
            "proposals": round(float(np.mean([night.proposals for night in nights])), 1),
            "keeps": round(float(np.mean([night.keeps for night in nights])), 1),
            "false_keeps": round(float(shares.mean()), 3),
            "false_keeps_se": round(float(shares.std(ddof=1) / len(nights) ** 0.5), 3),
            "champion": round(float(gains.mean()), 4),
            "champion_se": round(float(gains.std(ddof=1) / len(nights) ** 0.5), 4),
            "worse_than_baseline": round(float(np.mean(gains > 0)), 3),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

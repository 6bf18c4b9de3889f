"""What a night of proposals comes to under three rules, at equal numbers of trials.

    python benchmarks/referee.py                     # 200 nights of 240 trials each
    python benchmarks/referee.py --noise 0.02

A proposer makes random changes: one in five is better, by 0.01 nats and more, half are worse, the others do nothing.
Of a gain a share is lost (0.3 on average), as changes do part of the same. The noise of a trial is that of the
quickstart's trials; seeds add what all models of a seed have in common. Rules:

* lower: each proposal once, with the next seed; what is lower than the champion was is kept;
* three seeds: the champion and each proposal at the same three seeds; what is lower on average is kept;
* fixed level: `archlab challenge` with 5% for each proposal, whatever their number;
* challenge: `archlab challenge` as it is: e-LOND's levels, at most 8 seeds, a margin of equivalence of a trial's noise.

Printed as JSON: for each rule the proposals and keeps of a night; the share of keeps that are false (no better than the
champion they replaced), as the mean over nights with its standard error; and the final champion's true loss less the
baseline's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.search.challenge.judge import judge
from archlab.search.statistics.online import level

FALSE_KEEPS, SEEDS, SEED_SD = 0.1, 8, 0.05


@dataclass
class Night:
    """The trials of one night: `left` of them, and what the champion has above (negative: below) the baseline."""

    generator: np.random.Generator
    noise: float
    left: int
    champion: float = 0.0
    proposals: int = 0
    keeps: int = 0
    false: int = 0
    of_seed: dict[int, float] = field(default_factory=dict)

    def train(self, loss: float, seed: int) -> float:
        """A trial's loss. Raises StopIteration when the night is over."""
        if not self.left:
            raise StopIteration
        self.left -= 1
        common = self.of_seed.setdefault(seed, float(self.generator.normal(0, SEED_SD)))
        return loss + common + float(self.generator.normal(0, self.noise))

    def propose(self) -> float:
        """The true loss of the champion with a random change."""
        self.proposals += 1
        drawn = self.generator.random()
        if drawn < 0.2:
            gain = (0.01 + self.generator.exponential(0.02)) * self.generator.beta(7, 3)
            return self.champion - float(gain)
        return self.champion + (float(self.generator.exponential(0.05)) if drawn < 0.7 else 0.0)

    def keep(self, loss: float) -> None:
        self.keeps += 1
        self.false += loss >= self.champion
        self.champion = loss


def lower(night: Night) -> Iterator[None]:
    seed, best = 0, night.train(night.champion, 0)
    while True:
        loss, seed = night.propose(), seed + 1
        if (found := night.train(loss, seed)) < best:
            best = found
            night.keep(loss)
        yield


def three_seeds(night: Night) -> Iterator[None]:
    best = [night.train(night.champion, seed) for seed in range(3)]
    while True:
        loss = night.propose()
        found = [night.train(loss, seed) for seed in range(3)]
        if np.mean(found) < np.mean(best):
            best = found
            night.keep(loss)
        yield


def refereed(night: Night, allowed: Callable[[int, int], float]) -> Iterator[None]:
    """As archlab.search.challenge.referee does it: all rows share their noise, trials are kept."""
    rows: list[list[float]] = [[]]
    truth, champion, tried = [night.champion], 0, 0
    while True:
        loss, tried = night.propose(), tried + 1
        rows.append([])
        truth.append(loss)
        for seeds in range(1, SEEDS + 1):
            for row in dict.fromkeys((0, champion, len(rows) - 1)):
                while len(rows[row]) < seeds:
                    rows[row].append(night.train(truth[row], len(rows[row])))
            table = np.full((len(rows), SEEDS), np.nan)
            for place, losses in enumerate(rows):
                table[place, : len(losses)] = losses
            seen = judge(table, len(rows) - 1, champion, allowed(tried, night.keeps), SEEDS)
            verdict = seen.verdict(night.noise) if seen else None
            if verdict == "better":
                night.keep(loss)
                champion = len(rows) - 1
            if verdict:
                break
        yield


RULES: dict[str, Callable[[Night], Iterator[None]]] = {
    "lower": lower,
    "three seeds": three_seeds,
    "fixed level": lambda night: refereed(night, lambda _number, _keeps: 0.05),
    "challenge": lambda night: refereed(night, lambda number, keeps: level(number, keeps, FALSE_KEEPS)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=200)
    parser.add_argument("--trials", type=int, default=240)
    parser.add_argument("--noise", type=float, default=0.0086, help="standard deviation of a trial, nats per token")
    asked = parser.parse_args()
    for name, rule in RULES.items():
        nights = []
        for number in range(asked.nights):
            night = Night(np.random.default_rng(number), asked.noise, asked.trials)
            steps = rule(night)
            try:
                while True:
                    next(steps)
            except (StopIteration, RuntimeError):  # a generator turns what ends the night into the latter
                nights.append(night)
        shares = np.array([night.false / max(night.keeps, 1) for night in nights])
        gains = np.array([night.champion for night in nights])
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

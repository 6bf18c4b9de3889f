"""What promotion on fresh seeds is worth: simulated searches through the real choice of each rung. Trains nothing.

    python benchmarks/promotion.py                    # 2000 searches, some seconds
    python benchmarks/promotion.py --spread 0.01      # proposals that are more alike than seeds of one

Each search has 40 proposals whose true losses are normal with a standard deviation of `--spread`; a trial adds seed
noise of `--noise`. Both are in nats/token. The scale is the same on all rungs, so that what is lost is chance alone.
A search with one rung chooses by 1, 2 or 3 seeds of every proposal. Promotion keeps 16, 4 and 1 by 1, 3 and 3 seeds,
fresh ones at each rung, or the same ones again, where trials are reused. `trials` counts each once. `regret` is the
winner's true loss above that of the best proposal, in nats/token. `luck` is by how much the losses that it was chosen
by at the last rung were better than its true loss: what seeds that nobody chose by take back.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.search.sections.search.promotion import RungPlan, by_loss, climb, rung_seeds

PROPOSALS = 40
Way = tuple[list[tuple[int, int]], bool]  # (keep, seeds) of each rung, and whether each has seeds of its own
_RUNGS = [(16, 1), (4, 3), (1, 3)]
WAYS: dict[str, Way] = {
    **{f"one rung, {seeds} seed{'s' * (seeds > 1)}": ([(1, seeds)], True) for seeds in (1, 2, 3)},
    "promotion, the same seeds": (_RUNGS, False),
    "promotion, fresh seeds": (_RUNGS, True),
}


@dataclass(frozen=True)
class Proposal:
    """What the choice of a rung needs of a variant."""

    name: str

    @property
    def recipe(self) -> Any:
        """Its learning rate, which rows say."""
        return SimpleNamespace(lr=1e-3)

    def trial(self, seed: int) -> Any:
        """A trial with a key of its own."""
        return SimpleNamespace(key=f"{self.name.partition(' (')[0]} {seed}")


@dataclass(frozen=True)
class Outcome:
    """One search: the winner's true loss above the best one's, how lucky the choice was, how many trials it took."""

    regret: float
    luck: float
    trials: int


def search(way: Way, spread: float, noise: float, chance: random.Random) -> Outcome:
    """One search, carried out in this way."""
    rungs, fresh = way
    truths = {f"search-{number}": chance.gauss(0, spread) for number in range(PROPOSALS)} | {"baseline": 0.0}
    base: Any = Proposal("baseline")
    scale: Any = SimpleNamespace()  # one for all: losses are drawn
    plans = [
        RungPlan(number, scale, keep, rung_seeds(number if fresh else 1, seeds), base, None)
        for number, (keep, seeds) in enumerate(rungs, 1)
    ]
    candidates: Mapping[int, Any] = {number: [Proposal(f"search-{number}")] * len(rungs) for number in range(PROPOSALS)}
    every = sorted({seed for plan in plans for seed in plan.seeds})
    losses = {(name, seed): truth + chance.gauss(0, noise) for name, truth in truths.items() for seed in every}
    trials = [
        {"key": f"{name} {seed}", "state": "complete", "result": {"validation": {"loss": 3 + value}}}
        for (name, seed), value in losses.items()
    ]
    _, standing = climb(plans, candidates, trials, lambda _, compute: compute(), by_loss)
    (winner,) = standing[-1].chosen or ()
    name, last = f"search-{winner}", plans[-1]
    believed = fmean(losses[name, seed] for seed in last.seeds)
    best = min(truth for at, truth in truths.items() if at != "baseline")
    took = {(number, seed) for each in standing for number in each.entered for seed in each.rung.seeds}
    return Outcome(truths[name] - best, truths[name] - believed, len(took))


def mean(values: Sequence[float]) -> str:
    """A mean with its standard error."""
    return f"{fmean(values):+.4f} ± {stdev(values) / math.sqrt(len(values)):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--spread", type=float, default=0.02)
    parser.add_argument("--noise", type=float, default=0.02)
    options = parser.parse_args()
    print(f"{options.searches} searches, spread {options.spread:g}, seed noise {options.noise:g} nats/token")
    for name, way in WAYS.items():
        chance = random.Random(0)
        found = [search(way, options.spread, options.noise, chance) for _ in range(options.searches)]
        regret, luck = mean([each.regret for each in found]), mean([each.luck for each in found])
        print(f"{name:26}{found[0].trials:4} trials   regret {regret}   luck {luck}")


if __name__ == "__main__":
    main()

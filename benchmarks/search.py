"""What searches find on a space that was trained as a whole: a trial costs a look-up. Trains nothing.

    python benchmarks/search.py                          # every way 200 times; `gp` takes hours, the others minutes
    python benchmarks/search.py --only effects random --repeats 20
    python benchmarks/search.py --only random tpe effects gp --repeats 40 --first 150   # minutes for `gp`, too

The table is that of benchmarks/search_table.py. A model's true loss is the mean of its two seeds. A trial adds luck to
it, drawn anew, normal, as large as that of the table's seeds. Printed as JSON, a line for each way:

* reached: core-seconds until a model of the best 1% was trained at full length, or one within 0.001 nats/token of
  these; the mean over repeats with its 95% bootstrap interval, and the same as a share of random's;
* proposal_ms: processor time of a proposal, the mean in milliseconds;
* found, regret: after the core-seconds of 15, 30 and 60 full trials the share of searches that had trained one, and the
  loss of the model that they would return less the lowest one, in nats/token. With `--first` a search ends where the
  first figure is known: found is the share of those that reached it, the others count with what they spent, and there
  is no regret.

Ways: samplers by name; `NAME, rungs` trains proposals for the shorter length with half of its core-seconds, and the
best of these for the full one with the other half (`promote`), and is told after each budget alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.arch_dsl import resolve
from archlab.search.sections.search.known_points import known_points
from archlab.search.sections.search.points import Points
from archlab.search.sections.search.proposer import Ending, Proposer
from archlab.search.sections.search.samplers import EffectsSampler, Sampler
from archlab.search.sections.search.space import Space
from archlab.search.study.changes import value_at
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.utils.canonical import canonical_json

ROOT = Path(__file__).resolve().parents[1]
TABLE, STUDY = ROOT / "benchmarks/results/search-table.json", ROOT / "studies/search/table.yaml"
WAYS = ["random", "effects", "tpe", "nsga2", "random, rungs", "effects, rungs"]
SLOW = ["gp"]
AFTER = (15, 30, 60)  # full trials
BEST, TOLD_APART = 0.01, 0.001  # a share of the models; nats/token within which two are as good as each other
MOST = 1500  # proposals of one search
LENGTHS = "short", "full"
RUNGS = ", rungs"


class Table:
    """The losses of every model of a space: `[models, seeds]` for each length."""

    def __init__(self, file: Path, study: Study) -> None:
        if not file.is_file():
            raise SystemExit(f"{file} is not there: benchmarks/search_table.py trains and writes it")
        said = json.loads(file.read_text())
        axes: dict[str, list[Any]] = said["axes"]
        self.models = {
            canonical_json({path: axes[path][at] for path, at in zip(axes, point, strict=True)}): number
            for number, model in enumerate(said["models"])
            for point in model["points"]
        }
        there = [length for length in LENGTHS if all(length in model for model in said["models"])]
        if "full" not in there:
            raise SystemExit(f"{file} is not whole: benchmarks/search_table.py --begin {file} goes on with it")
        self.losses = {length: np.array([model[length] for model in said["models"]]) for length in there}
        self.seconds = {length: smoothed(said, f"{length}_s") for length in there}
        self.truth = self.losses["full"].mean(axis=1)
        self.noise = {length: float(np.diff(each, axis=1).std(ddof=1) / 2**0.5) for length, each in self.losses.items()}
        fewest = np.sort(self.truth)[math.ceil(BEST * len(self.truth)) - 1]
        self.best = {*np.flatnonzero(self.truth <= fewest + TOLD_APART).tolist()}
        self.budgets = [each * float(self.seconds["full"].mean()) for each in AFTER]
        assert isinstance(study.space, Space)
        self.space = study.space
        model = resolve(study.model, vocab=257, max_positions=study.train.context)
        known = known_points(study.space, model, study.components, partial(value_at, study), [], 8)
        self.known = [Points(study.space, {}).completed(each) for each in known]

    def regret(self, model: int) -> float:
        """By how much a model's loss is above the lowest, in nats/token."""
        return float(self.truth[model] - self.truth.min())


def smoothed(said: dict[str, Any], name: str) -> Any:
    """Core-seconds of each model as a sum over its axes, by least squares: what else the machine did meanwhile drops
    out."""
    sizes = [len(values) for values in said["axes"].values()]
    points = [model["points"][0] for model in said["models"]]
    taken = np.array(
        [
            [1.0, *(place == at for size, place in zip(sizes, point, strict=True) for at in range(size))]
            for point in points
        ]
    )
    seconds = np.array([model[name] for model in said["models"]])
    return taken @ np.linalg.lstsq(taken, seconds)[0]


class Search:
    """Proposals that are trained for one length with one seed, some side by side; a model that was trained before is
    free."""

    def __init__(self, table: Table, name: str, length: str, repeat: int, at_once: int = 1) -> None:
        self.table, self.length, self.spent, self.at_once = table, length, 0.0, at_once
        self.running: list[tuple[float, int, int]] = []  # when each ends, its number and its model
        self.now = 0.0
        self.luck = np.random.default_rng(repeat)
        self.sampler = Sampler.members[name]()
        starts = table.known[: self.sampler.known] if isinstance(self.sampler, EffectsSampler) else ()
        self.proposer = Proposer(None, "benchmark", table.space, self.sampler, repeat, starts=starts)
        self.losses: dict[int, float] = {}
        self.values: dict[int, dict[str, Any]] = {}
        self.proposing: list[float] = []

    def step(self) -> int:
        """Trains proposals until one has ended; which model it is."""
        while len(self.running) < self.at_once:
            before = time.process_time()
            number, values = self.proposer.ask()
            self.proposing.append(time.process_time() - before)
            model = self.table.models[canonical_json(values)]
            self.values[model] = values
            takes = 0.0 if model in self.losses else float(self.table.seconds[self.length][model])
            heapq.heappush(self.running, (self.now + takes, number, model))
        self.now, number, model = heapq.heappop(self.running)
        if model not in self.losses:
            self.spent += float(self.table.seconds[self.length][model])
            self.losses[model] = self.trained(model, self.length)
        self.proposer.tell(number, Ending("complete", (self.losses[model],)))
        return model

    def trained(self, model: int, length: str) -> float:
        """The loss of a trial: that of the model, and luck."""
        return float(self.table.losses[length][model].mean() + self.luck.normal(0, self.table.noise[length]))

    def ranked(self) -> list[int]:
        """The models so far, the best first, as the sampler sees them."""
        points, models = Points(self.table.space, {}), dict(enumerate(self.losses))
        losses = {number: self.losses[model] for number, model in models.items()}
        values = {number: self.values[model] for number, model in models.items()}
        return [models[number] for number in self.sampler.ranked(points, values, losses)]


@dataclass
class Found:
    """One search: core-seconds at its first model of the best 1%; by budget whether it had one, and its regret; the
    seconds that each proposal took."""

    reached: float
    found: list[bool]
    regrets: list[float]
    proposing: list[float]


def first(table: Table, name: str, at_once: int, proposals: int, repeat: int) -> Found:
    """A search that ends at its first model of the best 1%, or after so many proposals."""
    search = Search(table, name, "full", repeat, at_once)
    for _ in range(proposals):
        if search.step() in table.best:
            return Found(search.spent, [True], [], search.proposing)
    return Found(search.spent, [False], [], search.proposing)


def alone(table: Table, name: str, at_once: int, repeat: int) -> Found:
    """A search whose trials all have the full length."""
    search, reached = Search(table, name, "full", repeat, at_once), math.inf
    found, regrets = list[bool](), list[float]()
    for _ in range(MOST):
        before = search.ranked()[:1] if len(regrets) < len(AFTER) and _near(search, len(regrets)) else []
        model = search.step()
        while len(regrets) < len(AFTER) and search.spent > table.budgets[len(regrets)]:
            found.append(math.isfinite(reached))
            regrets.append(table.regret(before[0]))
        if model in table.best:
            reached = min(reached, search.spent)
        if len(regrets) == len(AFTER) and math.isfinite(reached):
            return Found(reached, found, regrets, search.proposing)
    missing = len(AFTER) - len(regrets)
    left = table.regret(search.ranked()[0])
    found += [math.isfinite(reached)] * missing
    return Found(search.spent, found, [*regrets, *[left] * missing], search.proposing)


def _near(search: Search, budget: int) -> bool:
    """Whether the next trial may pass a budget."""
    return search.spent + float(search.table.seconds["full"].max()) > search.table.budgets[budget]


def rungs(table: Table, name: str, repeat: int) -> Found:
    """Half of each budget for proposals at the shorter length, half for the best of them at the full one."""
    found, regrets, proposing = list[bool](), list[float](), list[float]()
    for budget in table.budgets:
        search = Search(table, name, "short", repeat)
        for _ in range(MOST):
            if search.spent >= budget / 2:
                break
            search.step()
        proposing += search.proposing
        spent, losses = search.spent, dict[int, float]()
        for model in search.ranked():
            if spent + table.seconds["full"][model] > budget:
                break
            spent += float(table.seconds["full"][model])
            losses[model] = search.trained(model, "full")
        found.append(bool(table.best & losses.keys()))
        regrets.append(table.regret(min(losses, key=losses.__getitem__)))
    return Found(math.nan, found, regrets, proposing)


def interval(figure: Callable[[Any], float], repeats: int) -> list[float]:
    """The 95% bootstrap interval of a figure of repeats, which takes their numbers."""
    generator = np.random.default_rng(0)
    drawn = [figure(generator.integers(repeats, size=repeats)) for _ in range(2000)]
    return [round(float(each), 3) for each in np.quantile(drawn, [0.025, 0.975])]


def main() -> None:
    """Runs the ways of searching and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--only", nargs="+", metavar="WAY", help=f"of {', '.join([*WAYS, *SLOW])}")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1, help="trials that run side by side; not those of rungs")
    parser.add_argument("--first", type=int, metavar="N", help="ends at a model of the best 1%%, or after N proposals")
    given = parser.parse_args()
    if given.first is not None and any(way.endswith(RUNGS) for way in given.only or WAYS):
        parser.error("--first: a search with rungs has no first model of the full length; name others with --only")
    table, random = Table(given.table, load_study(STUDY)), None
    for way in given.only or [*WAYS, *SLOW]:
        if way.endswith(RUNGS):
            search = partial(rungs, table, way.removesuffix(RUNGS))
        elif given.first is not None:
            search = partial(first, table, way, given.at_once, given.first)
        else:
            search = partial(alone, table, way, given.at_once)
        runs = [search(repeat) for repeat in range(given.repeats)]
        line: dict[str, Any] = {"way": way, "repeats": len(runs)} | ({"at_once": n} if (n := given.at_once) > 1 else {})
        if not way.endswith(RUNGS):
            reached = np.array([each.reached for each in runs])
            line["reached_s"] = round(float(reached.mean()), 1)
            line["interval"] = interval(partial(lambda x, at: x[at].mean(), reached), len(runs))
            random = reached if way == "random" else random
            if random is not None and len(random) == len(runs):
                line["of_random"] = round(float(reached.mean() / random.mean()), 3)
                both = partial(lambda x, y, at: x[at].mean() / y[at].mean(), reached, random)
                line["of_random_interval"] = interval(both, len(runs))
        line["proposal_ms"] = round(1000 * float(np.mean([took for each in runs for took in each.proposing])), 1)
        line["found"] = np.array([each.found for each in runs]).mean(axis=0).round(3).tolist()
        regrets = np.array([each.regrets for each in runs])
        if not regrets.size:
            print(json.dumps(line | {"first": given.first}), flush=True)
            continue
        line["regret"] = regrets.mean(axis=0).round(4).tolist()
        line["regret_se"] = (regrets.std(axis=0) / len(runs) ** 0.5).round(4).tolist()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

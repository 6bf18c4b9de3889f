"""What certainty costs: simulated studies through the real planner, against variants x 5 learning rates x 5 seeds.

    python benchmarks/certainty.py                  # 500 studies at each noise level, a minute or two
    python benchmarks/certainty.py --studies 50
    python benchmarks/certainty.py --known          # in a store whose studies have told the noise of a trial's seed

Every study draws a library of learning curves with known truth (benchmarks/curves.py), and is planned by what plans
real ones: `planning.plan.Plan.rows` is asked again and again what should exist, and the library's curves fill in what
a trainer would have found, up to the step that a row asks for. Nothing is trained and no store is written; the planner
knows trials, not truths. The study is the engine's default: rates on a 1-2-5 grid that ends early what is behind and
grows at its edges, and seeds until differences are resolved or as small as the margin (below, STUDY).

A study is right if the variant with the lowest mean test loss is the best one, or not further behind than the margin.
Its cost is the training tokens of all its trials, of paused ones as far as they went, over those of the full grid, all
trials of which are trained to their end; that grid is judged by the same rule, its rates chosen over all seeds.
Rankings are the pairs of variants in their right order, of those that are further apart than the margin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from curves import Library, make_library  # noqa: E402

from archlab.search.comparison.compare import compare  # noqa: E402
from archlab.search.planning.plan import Plan, plan  # noqa: E402
from archlab.search.study.load import load_study  # noqa: E402

VARIANTS, SPREAD, MARGIN = 6, 0.03, 0.01
RATES = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
GRID_SEEDS = 5
NOISES = (0.0025, 0.005, 0.01, 0.02)
OTHERS = "\n".join(f"  v{number}: {{block.ffn.width: {64 + 8 * number}}}" for number in range(1, VARIANTS))
STUDY = f"""\
study: certainty
model: {{d_model: 64, n_layers: 1, block: {{norm: rmsnorm, attention: {{heads: 4}}, ffn: {{type: glu, width: 64}}}}}}
variants:
  baseline: {{}}
{OTHERS}
train: {{data: {{text: corpus.txt}}, tokens: 256k, context: 64, batch: 8, lr: 1e-3}}
tune: {{lr: {{grid: 1-2-5, from: 5e-4, to: 1e-2}}}}
seeds: {{min: 2, max: 5, until: resolved, margin: {MARGIN}}}
"""


class Outcome(NamedTuple):
    """What a study said: each variant's mean test loss, and its tokens over those of the full grid."""

    losses: list[float]
    cost: float
    verdicts: list[str]


def make_plan(folder: Path, text: str = STUDY) -> Plan:
    """The plan that all simulated studies share."""
    (folder / "corpus.txt").write_text("\n\n".join(f"document {number} " + "word " * 400 for number in range(40)))
    (folder / "study.yaml").write_text(text)
    return plan(load_study(folder / "study.yaml"), folder / "data")


def simulate(planned: Plan, library: Library) -> Outcome:
    """One study, from its first row to its table."""
    fresh = Plan(planned.study, planned.builder, planned.variants, tuner=planned.tuner)
    if fresh.tuner:
        fresh.tuner.curves.clear()
    trials: dict[tuple[str, str], dict[str, Any]] = {}
    while True:
        rows = fresh.rows(list(trials.values()))
        asked = {(row.trial.key, row.role): row for row in rows}
        new = [row for place, row in asked.items() if place not in trials or not _done(trials[place], row.until)]
        for place, row in asked.items():
            if place in trials:
                trials[place]["until"] = row.until
        if not new:
            break
        furthest = {row.trial.key: max(_end(r.until) for r in rows if r.trial.key == row.trial.key) for row in new}
        for row in new:
            trials[row.trial.key, row.role] = _trained(fresh, library, row, furthest[row.trial.key])
    steps = {key: max(t["result"]["step"] for t in trials.values() if t["key"] == key) for key, _ in trials}
    comparison = compare(fresh.record(), list(trials.values()))
    whole = planned.variants[0].recipe.all_steps * len(RATES) * GRID_SEEDS * len(planned.variants)
    losses = [float(loss) for loss in comparison.table["loss_mean"]]
    return Outcome(losses, sum(steps.values()) / whole, list(comparison.table["verdict"]))


def _end(until: int | None) -> float:
    return math.inf if until is None else until


def _done(trial: dict[str, Any], until: int | None) -> bool:
    return trial["state"] in ("complete", "diverged") or trial["result"]["step"] >= _end(until)


def _trained(planned: Plan, library: Library, row: Any, end: float) -> dict[str, Any]:
    """What a trainer would have made of a row."""
    index = next(i for i, variant in enumerate(planned.variants) if variant.name == row.variant)
    variant = planned.variants[index]
    total = variant.recipe.all_steps
    steps = [*(planned.tuner.rungs(variant) if planned.tuner else []), total]
    losses, test = library.trial(index, row.settings["lr"], row.seed, [step / total for step in steps])
    state, last = ("complete", total) if end >= total else ("paused", int(end))
    if not np.isfinite(losses).all():
        state, last = "diverged", total // 20
    result: dict[str, Any] = {"state": state, "step": last, "validation": None, "test": None}
    curve = [(step, float(loss)) for step, loss in zip(steps, losses, strict=True) if step <= last]
    if state != "diverged":
        result["validation"] = _measures(curve[-1][1])
    if state == "complete":
        result["test"] = _measures(test)
    return {
        **{"key": row.trial.key, "variant": row.variant, "role": row.role, "settings": row.settings},
        **{"seed": row.seed, "until": row.until, "state": state, "attempt": 1, "reused": False, "reason": None},
        **{"folder": None, "result": result, "curve": curve, "documents": None},
    }


def _measures(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}


def full_grid(library: Library) -> Outcome:
    """Every variant at every rate with every seed, all to their ends; the rate of the lowest mean validation loss."""
    losses = []
    for variant in range(len(library.variants)):
        ends = [[library.trial(variant, lr, seed, [1.0]) for seed in range(GRID_SEEDS)] for lr in RATES]
        best = min(ends, key=lambda trials: float(np.mean([losses[-1] for losses, _ in trials])))
        losses.append(float(np.mean([test for _, test in best])))
    return Outcome(losses, 1.0, [])


def judged(outcome: Outcome, library: Library) -> dict[str, float]:
    """Whether the best variant was found within the margin, and the share of clear pairs in their right order."""
    truth = [variant.best(RATES) for variant in library.variants]
    losses = [loss if math.isfinite(loss) else math.inf for loss in outcome.losses]
    right = truth[int(np.argmin(losses))] - min(truth) <= MARGIN
    clear = [(a, b) for a, b in itertools.combinations(range(len(truth)), 2) if abs(truth[a] - truth[b]) > MARGIN]
    ordered = [(truth[a] < truth[b]) == (losses[a] < losses[b]) for a, b in clear]
    return {"right": right, "ordered": float(np.mean(ordered)) if ordered else math.nan, "cost": outcome.cost}


def summary(planned: Plan, studies: int, noise: float, known: bool = False) -> dict[str, Any]:
    """Both ways over so many studies; `known` is whether the planner knows the noise of a trial's seed."""
    if planned.tuner:
        planned.tuner.noise = lambda _: noise if known else math.inf
    found: dict[str, list[dict[str, float]]] = {"engine": [], "grid": []}
    for seed in range(studies):
        library = make_library(seed, VARIANTS, SPREAD, noise)
        found["engine"].append(judged(simulate(planned, library), library))
        found["grid"].append(judged(full_grid(library), library))
    told: dict[str, Any] = {"noise": noise, "studies": studies}
    for way, rows in found.items():
        told |= {f"{way}_{name}": round(float(np.nanmean([row[name] for row in rows])), 4) for name in rows[0]}
    told["engine_cost_largest"] = round(max(row["cost"] for row in found["engine"]), 4)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--studies", type=int, default=500)
    parser.add_argument("--noise", type=float, nargs="+", default=NOISES, help="standard deviations in nats/token")
    parser.add_argument("--known", action="store_true", help="the noise of a trial's seed is known when it begins")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each noise level")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        planned = make_plan(Path(folder))
        for noise in options.noise:
            row = summary(planned, options.studies, noise, options.known)
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            print(
                f"noise {noise:g}, margin {MARGIN:g}, {row['studies']} studies: best variant or within the margin "
                f"{row['engine_right']:.1%} (full grid {row['grid_right']:.1%}) with {row['engine_cost']:.1%} of its "
                f"tokens (at most {row['engine_cost_largest']:.1%}); clear pairs in order {row['engine_ordered']:.1%} "
                f"(full grid {row['grid_ordered']:.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()

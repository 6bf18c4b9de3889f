"""Whether brackets choose the rate that training all rates to their end chooses, on real tiny trials.

    python benchmarks/brackets.py --store /tmp/rates     # 56 trials, about ten minutes of one quiet core

Eight variants are trained on the standard library's source at seven learning rates each, all to their ends. Then every
grid of 3, 4, 5 and 7 neighbouring rates is decided by the planner's own procedure, which sees of each curve only what
it asked for. Printed per kind of brackets: how often it chose the rate with the lowest loss at the end, how much worse
its choice was, and the share of all steps that it took. Without --store nothing is kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.search.running.run import run
from archlab.search.sections.tune.halving import tuned
from archlab.search.sections.tune.spec import Brackets, Tune, Values
from archlab.search.store.store import Store
from archlab.search.trial.metrics import validation_history

RATES = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
STUDY = f"""\
study: rates
model:
  d_model: 48
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {{heads: 4, positional: rope}}
    ffn: {{type: glu, activation: silu}}
variants:
  baseline: {{}}
  gated: {{block.attention.gate: {{position: sdpa}}}}
  qk-norm: {{block.attention.qk_norm: rmsnorm}}
  post: {{block.norm.placement: post}}
  mlp: {{block.ffn: {{type: mlp}}}}
  nope: {{block.attention.positional: none}}
  wsd: {{train.schedule: wsd}}
  wide: {{d_model: 96}}
train: {{data: {{type: stdlib, bytes: 2M}}, tokens: 160k, context: 64, batch: 8, lr: 1e-3}}
tune: {{lr: [{", ".join(f"{rate:g}" for rate in RATES)}]}}
seeds: 1
"""
KINDS = (None, Brackets(), Brackets(rungs=(0.2, 0.5)), Brackets(rungs=(0.1,)), Brackets(keep=0.3))
Curve = tuple[list[tuple[int, float]], float]  # the points of the validation curve, and the loss at the end


def trained(folder: Path) -> dict[str, dict[float, Curve]]:
    """Variant to rate to curve; trains what is missing."""
    file = folder / "rates.yaml"
    file.write_text(STUDY)
    run(file, folder / "store", executor="inline", track=False)
    found: dict[str, dict[float, Curve]] = {}
    with Store.open(folder / "store") as store:
        for row in store.study_trials("rates"):
            if row["role"] == "tune":
                end = row["result"]["validation"]["loss"] if row["state"] == "complete" else float("inf")
                curve = validation_history(Path(row["folder"])), end
                found.setdefault(row["variant"], {})[row["settings"]["lr"]] = curve
    return found


def decided(curves: dict[float, Curve], rates: tuple[float, ...], brackets: Brackets | None) -> tuple[float, float]:
    """The rate that is chosen, and the trials that it took, in whole ones."""
    tune = Tune(axes={"train.lr": Values(rates)}, extend=0, brackets=brackets)
    shares = [*(brackets.rungs if brackets else ()), 1.0]
    ran: dict[float, int] = {}

    def losses(point: dict[str, Any]) -> list[float | None]:
        points, end = curves[point["lr"]]
        at = [*(points[round(10 * share) - 1][1] for share in shares[:-1]), end]
        return [loss if rung <= ran.get(point["lr"], -1) else None for rung, loss in enumerate(at)]

    while True:
        found = tuned(tune, len(shares) - 1, losses)
        asked = {point["lr"]: found.reach[name] for name, point in found.points.items()}
        if asked == ran:
            done = [rate for rate, rung in ran.items() if rung == len(shares) - 1]
            return min(done, key=lambda rate: curves[rate][1]), sum(shares[rung] for rung in ran.values())
        ran = asked


def main() -> None:
    """Prints a row per kind of brackets and size of the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="a folder that keeps the trials")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.store or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        library = trained(folder)
    print("brackets              rates  same choice  worse on average  at most  steps")
    for brackets in KINDS:
        for count in (3, 4, 5, 7):
            same, worse, cost = 0, [], 0.0
            for curves in library.values():
                for first in range(len(RATES) - count + 1):
                    rates = RATES[first : first + count]
                    choice, took = decided(curves, rates, brackets)
                    best = min(rates, key=lambda rate: curves[rate][1])
                    same, cost = same + (choice == best), cost + took / count
                    worse.append(curves[choice][1] - curves[best][1])
            kind = "none" if brackets is None else f"{list(brackets.rungs)}, keep {brackets.keep:g}"
            mean = sum(worse) / len(worse)
            told = f"{same} of {len(worse)}"
            print(f"{kind:<22}{count:<7}{told:<13}{mean:<18.4f}{max(worse):<9.3f}{cost / len(worse):.0%}")


if __name__ == "__main__":
    main()

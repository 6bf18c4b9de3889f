"""What a core-minute resolves: the quickstart under the recipe that it had at first, under what `archlab calibrate`
made of that, and under its own, all at equal time.

    python benchmarks/power.py [--store FOLDER] [--seeds 6]

Five variants under each. Of each recipe the test loss of the baseline, the standard deviation of one trial around its
variant and its seed with its 95% interval, the seconds of training the baseline, and the smallest difference that a
table of five variants resolves in so many core-minutes (Dunnett's intervals, documents not counted). The seconds are
those of its steps, timed beside those of the first recipe before anything is trained, so that other work on the machine
meets both. The ratio at the end is how much longer the first recipe takes to resolve what another one does: (sd / sd)^2
times (seconds / seconds).
"""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archlab.search.calibration.choices import equal_time
from archlab.search.comparison.compare import load_comparison
from archlab.search.planning.plan import plan
from archlab.search.running.run import run
from archlab.search.sections.calibration.told import resolvable, sd_interval
from archlab.search.statistics.intervals import unbalanced_residual_variance
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.training.step_times import Timings, measure
from archlab.search.trial.fingerprint import cpu_model
from archlab.search.variants.variant import Variant

STUDY = Path(__file__).parents[1] / "studies" / "quickstart.yaml"
VARIANTS = ("baseline", "G1", "G2", "forget gate", "KV-shift")
FIRST = {
    "tokens": 1_000_000,
    "batch": 8,
    "optimizer": "adamw",
    "schedule": {"type": "cosine", "warmup": 0.02},
    "model.init.std": 0.02,
}
FOUND = {  # by `archlab calibrate` from that: docs/guides/calibrate.md
    "tokens": 1_000_000,
    "batch": 8,
    "lr": 5.7e-3,
    "optimizer": {"type": "adamw", "betas": [0.9, 0.999], "weight_decay": 0},
    "schedule": "wsd",
}
MINUTES = (5, 20, 60)


@dataclass(frozen=True)
class Power:
    """What a recipe is like: losses `[variant, seed]` in nats per token, seconds of a trial."""

    name: str
    losses: np.ndarray
    seconds: float

    @property
    def noise(self) -> tuple[float, int]:
        """The standard deviation of one trial around its variant and its seed, and its degrees of freedom."""
        variance, df = unbalanced_residual_variance(self.losses)
        assert variance is not None, "--seeds 1 tells nothing of the noise"
        return math.sqrt(variance), df

    def line(self) -> str:
        sd, df = self.noise
        low, high = sd_interval(sd, df)
        resolved = (resolvable(sd, each * 60 / self.seconds, len(self.losses)) for each in MINUTES)
        noise = f"{sd:.4f} [{low:.4f}, {high:.4f}]"
        told = "  ".join(f"{each:.4f}" for each in resolved)
        return f"{self.name:<9} {self.losses[0].mean():.4f}   {noise}   {self.seconds:7.1f}   {told}"


def recipes(store: Path, overrides: dict[str, object]) -> dict[str, dict[str, object]]:
    """All three, the study's own at the tokens that take the time of the first."""
    first = {"train.tokens": FIRST["tokens"], "train.batch": FIRST["batch"], "recipes": None}
    (baseline, *_) = plan(load_study(STUDY, overrides | first), store / "data").variants
    own = load_study(STUDY).train
    tokens = equal_time(baseline, own.batch, Timings(store / "timings"))
    return {"at first": FIRST, "found": FOUND, "now": {"tokens": tokens, "batch": own.batch}}


def seconds_of(baselines: dict[str, Variant]) -> dict[str, float]:
    """Of training the baseline under each recipe, by steps that are timed beside the first one's."""
    first = next(iter(baselines.values()))
    found = {name: measure(each.timed, first.timed) for name, each in baselines.items()}
    step = next(iter(found.values()))["of"]
    return {name: step * found[name]["ratio"] * each.recipe.steps for name, each in baselines.items()}


def _tick(event: dict[str, Any]) -> None:
    if event["event"] == "finished":
        print(".", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="keeps the trials there; a folder that goes away without it")
    parser.add_argument("--seeds", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store = (asked.store or Path(scratch)).absolute()
        overrides: dict[str, object] = {"seeds": asked.seeds, "study": "power"}
        overrides["variants.G1"] = {"block.attention.gate": "sdpa"}
        named = recipes(store, overrides)
        study = load_study(STUDY, overrides | {"recipes": named})
        kept = {name: patch for name, patch in study.variants.items() if name in VARIANTS}
        study = study.replace(variants=kept)
        planned = {each.name: each for each in plan(study, store / "data").variants}
        seconds = seconds_of({name: planned[f"baseline [recipe={name}]"] for name in named})
        run(study, store, track=False, on_event=_tick)
        with Store.open(store, create=False) as opened:
            trials = load_comparison(opened, "power").trials
    print(f"\n{cpu_model()}, {platform.python_version()}, torch {torch.__version__}; {asked.seeds} seeds")
    print(f"\nrecipe    loss     sd of a trial [95%]        s/trial   Δ in {', '.join(map(str, MINUTES))} core-minutes")
    found = []
    for name in named:
        rows = [trials[trials["variant"] == f"{variant} [recipe={name}]"].sort_values("seed") for variant in VARIANTS]
        losses = np.array([each["test_loss"] for each in rows], float)
        found.append(Power(name, losses, seconds[name]))
        print(found[-1].line())
    first, *others = found
    for each in others:
        ratio = (first.noise[0] / each.noise[0]) ** 2 * first.seconds / each.seconds
        print(f"the first recipe takes {ratio:.1f} times as long to resolve as much as '{each.name}'")


if __name__ == "__main__":
    main()

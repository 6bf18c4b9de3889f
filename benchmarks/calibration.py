"""How often are two copies of one variant called different, and is a planted difference found? With real trials.

    python benchmarks/calibration.py                   # trains 96 tiny trials, some minutes on two cores
    python benchmarks/calibration.py --simulated       # trains nothing: draws of known laws, a minute
    python benchmarks/calibration.py --losses FILE     # takes losses, such as benchmarks/results/calibration.json

A study trains one variant under 16 data seeds (`train.data_seed`) with four initialisation seeds each, and another
variant, whose feed-forward is an eighth as wide, with two. Copies of the variant are drawn from these: for each data
seed, so many different initialisation seeds. They see the same batches and start from other values, so that nothing but
chance tells them apart. Every drawn study is judged by a fixed number of seeds, and by seeds that are added until it is
resolved (`archlab.search.sections.seeds.decide`), with seed noise alone: documents would only make the intervals wider.

With `--simulated`, copies are draws of laws of known shape instead: normal, heavy-tailed (Student's t with 3 degrees of
freedom), skewed (exponential), and normal with one variant twice as noisy as the others, which pooling takes them not
to be.

Printed are the shares of studies in which any copy is called better or worse, with the largest that is compatible with
5% (99.9% of the binomial law), and how often the planted difference is found among copies. `--out` writes the losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from archlab.search.sections.seeds.decide import decision  # noqa: E402
from archlab.search.statistics.contrast import Floats  # noqa: E402
from archlab.search.statistics.intervals import Analysis, analyse  # noqa: E402

LOSSES = ROOT / "benchmarks" / "results" / "calibration.json"
DATA_SEEDS, COPIES, PLANTED = 16, 4, 2
STUDY = f"""\
study: calibration
question: Are copies of one variant told apart?
model:
  d_model: 32
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {{heads: 2, positional: rope}}
    ffn: {{type: glu, activation: silu, width: 64}}
  init: {{std: 0.02}}
variants:
  copies: {{}}
grid:
  train.data_seed: [{", ".join(map(str, range(DATA_SEEDS)))}]
train:
  data: {{type: stdlib, validation_bytes: 16k, test_bytes: 64k}}
  tokenizer: bytes
  tokens: 100k
  context: 64
  batch: 16
  lr: 5e-3
  schedule: {{warmup: 0.02}}
"""


def train(store: Path, file: Path, inline: bool) -> dict[str, Any]:
    """Runs the study; the test losses by variant as [data seed][initialisation seed], and what they were made with."""
    from archlab.search.running.run import run
    from archlab.search.store.store import Store

    losses = {}
    for name, patch, seeds in (("copies", "{}", COPIES), ("planted", "{block.ffn.width: 8}", PLANTED)):
        text = STUDY.replace("study: calibration", f"study: {name}").replace("copies: {}", f"{name}: {patch}")
        file.write_text(f"{text}seeds: {seeds}\nreport: {{baseline: {name}}}\n")
        run(file, store, track=False, executor="inline" if inline else "ray")
        with Store.open(store) as opened:
            rows = opened.study_trials(name)
        found = {(row["variant"], row["seed"]): round(row["result"]["test"]["loss"], 6) for row in rows}
        names = [f"{name} [data_seed={number}]" for number in range(DATA_SEEDS)]
        losses[name] = [[found[cell, seed] for seed in range(seeds)] for cell in names]
        made = rows[0]["result"]["fingerprint"]
    versions = {name: made[name] for name in ("archlab", "torch", "numpy", "python", "cpu") if name in made}
    return {"losses": losses, "versions": versions}


def draw(rng: np.random.Generator, pool: Floats, copies: int, seeds: int) -> Floats:
    """Losses [copy, data seed]: for `seeds` different data seeds, so many different initialisation seeds of each."""
    rows = rng.permutation(len(pool))[:seeds]
    return np.array([rng.permutation(pool[row])[:copies] for row in rows]).T


def fixed(losses: Floats, seeds: int) -> list[str]:
    """What a study of a fixed number of seeds says of each row but the first."""
    return _said(analyse(losses[:, :seeds], 0))


def sequential(losses: Floats, least: int = 2) -> list[str]:
    """What a study says that adds seeds until each row is resolved, the first row being the baseline."""
    rows, most = losses.shape
    counts, said = np.full(rows, least), ["undecided"] * (rows - 1)
    while True:
        said = _said(analyse(np.where(np.arange(most) < counts[:, None], losses, np.nan), 0, always_valid=True))
        growing = [row for row in range(1, rows) if said[row - 1] == "undecided" and counts[row] < most]
        if not growing:
            return said
        counts[growing] += 1
        counts[0] = counts.max()


def _said(analysis: Analysis) -> list[str]:
    return [decision(contrast, None) or "undecided" for contrast in analysis.contrasts[1:] if contrast is not None]


KINDS: dict[str, Callable[[Floats], list[str]]] = {
    "3": lambda losses: fixed(losses, 3),
    "5": lambda losses: fixed(losses, 5),
    "2 to 8": sequential,
}


def rates(losses: dict[str, Any], studies: int, seed: int = 0) -> list[dict[str, Any]]:
    """For fixed and sequential seeds, and two and four copies: the share of studies with a false alarm, the share in
    which a planted variant beside the copies is called worse, and the largest share that is compatible with 5%."""
    rng = np.random.default_rng(seed)
    copies, planted = np.array(losses["copies"]), np.array(losses["planted"])
    found = []
    for kind, how in KINDS.items():
        for count in (2, 4):
            alarms = hits = 0
            for _ in range(studies):
                order = rng.permutation(len(copies))
                drawn = draw(rng, copies[order], count, 8)
                alarms += any(verdict != "undecided" for verdict in how(drawn))
                rows = rng.permutation(len(copies))[:8]
                beside = np.array(
                    [[*rng.permutation(copies[row])[: count - 1], rng.choice(planted[row])] for row in rows]
                )
                hits += how(beside.T)[-1] == "worse"
            limit = float(stats.binom.ppf(0.999, studies, 0.05)) / studies
            found.append(
                {
                    "seeds": kind,
                    "copies": count,
                    "studies": studies,
                    "false": alarms / studies,
                    "limit": limit,
                    "found": hits / studies,
                }
            )
    return found


LAWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda rng, copies: rng.normal(size=(copies, 8)),
    "heavy tails": lambda rng, copies: rng.standard_t(3, size=(copies, 8)),
    "skewed": lambda rng, copies: rng.exponential(size=(copies, 8)),
    "one noisier": lambda rng, copies: rng.normal(size=(copies, 8)) * (1 + (np.arange(copies) == 1))[:, None],
}


def simulated(studies: int, seed: int = 0) -> list[dict[str, Any]]:
    """The share of studies with a false alarm by law, number of variants and kind of seeds."""
    rng = np.random.default_rng(seed)
    found = []
    for law, noise in LAWS.items():
        for count in (2, 3, 5, 9):
            alarms = dict.fromkeys(KINDS, 0)
            for _ in range(studies):
                losses = noise(rng, count) + 3 * rng.normal(size=8)
                for kind, how in KINDS.items():
                    alarms[kind] += any(verdict != "undecided" for verdict in how(losses))
            found.append({"law": law, "variants": count, **{kind: n / studies for kind, n in alarms.items()}})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--losses", type=Path, help="take these losses; train nothing")
    parser.add_argument("--out", type=Path, help="write the losses that were trained")
    parser.add_argument("--inline", action="store_true", help="train in this process, one trial after another")
    parser.add_argument("--studies", type=int, default=1000, help="studies to draw")
    parser.add_argument("--simulated", action="store_true", help="draw from known laws; train nothing")
    options = parser.parse_args()
    if options.simulated:
        for row in simulated(options.studies):
            told = ", ".join(f"{kind} seeds {row[kind]:.3f}" for kind in KINDS)
            print(f"{row['law']:>12}, {row['variants']} variants: called different {told}")
        return
    if options.losses:
        result = json.loads(options.losses.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = train(Path(folder) / "store", Path(folder) / "calibration.yaml", options.inline)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    copies = np.array(result["losses"]["copies"])
    noise = float(np.sqrt(copies.var(axis=1, ddof=1).mean()))
    shift = float(np.mean(result["losses"]["planted"]) - copies.mean())
    print(
        f"{copies.size} copies and {np.size(result['losses']['planted'])} planted; seed noise {noise:.4f} nats/token, "
        f"planted {shift:+.4f}; {result['versions']}"
    )
    for row in rates(result["losses"], options.studies):
        print(
            f"{row['seeds']:>8} seeds, {row['copies']} variants: called different {row['false']:.3f} "
            f"(at most {row['limit']:.3f}), planted found {row['found']:.3f}"
        )


if __name__ == "__main__":
    main()

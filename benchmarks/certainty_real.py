"""What certainty costs on a real small study: three variants, once over the full grid, once by the engine's default.

    python benchmarks/certainty_real.py             # about a hundred tiny trials: some minutes on two cores
    python benchmarks/certainty_real.py --inline    # in this process, without Ray

The full grid trains every variant at five learning rates with five seeds, all to their ends, and takes the rate of the
lowest mean validation loss. The default tunes on a grid that ends early what is behind and grows at its edges, and adds
seeds until differences are resolved or as small as the margin; it has a store of its own, and reuses nothing. Printed
are both tables' means, whether the default found the best variant of the full grid or one not further behind than the
margin, and its share of the grid's training tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from archlab.search.comparison.compare import load_comparison  # noqa: E402
from archlab.search.running.run import run  # noqa: E402
from archlab.search.store.store import Store  # noqa: E402

MARGIN = 0.05
RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
BASE = """\
model:
  d_model: 32
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {heads: 2, positional: rope}
    ffn: {type: glu, activation: silu, width: 64}
  init: {std: 0.02}
variants:
  baseline: {}
  narrow: {block.ffn.width: 8}
  no_position: {block.attention.positional: none}
train:
  data: {type: stdlib, validation_bytes: 32k, test_bytes: 64k}
  tokenizer: bytes
  tokens: 100k
  context: 64
  batch: 8
  lr: 5e-3
  schedule: {warmup: 0.02}
"""
GRID = f"study: grid\n{BASE}grid: {{train.lr: [{', '.join(f'{rate:g}' for rate in RATES)}]}}\nseeds: 5\n"
DEFAULT = f"""\
study: default
{BASE}tune: {{lr: {{grid: 1-2-5, from: 1e-3, to: 2e-2}}}}
seeds: {{min: 2, max: 5, until: resolved, margin: {MARGIN}}}
"""


def trained(folder: Path, text: str, name: str, executor: Any) -> tuple[list[dict[str, Any]], Any]:
    """The rows of a study in a store of its own, and its comparison."""
    file = folder / f"{name}.yaml"
    file.write_text(text)
    run(file, folder / name, executor=executor, track=False)
    with Store.open(folder / name) as store:
        return store.study_trials(name), load_comparison(store, name)


def tokens(rows: list[dict[str, Any]]) -> int:
    """What was trained on, each trial once."""
    return sum({row["key"]: row["result"]["tokens"] for row in rows if row["result"]}.values())


def grid_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each variant's mean test loss at the rate of its lowest mean validation loss."""
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        variant, _, rate = row["variant"].partition(" [")
        if row["state"] == "complete":
            cells.setdefault(variant, {}).setdefault(rate, []).append(row["result"])

    def mean(results: list[dict[str, Any]], split: str) -> float:
        return float(np.mean([result[split]["loss"] for result in results]))

    best = {name: min(rates.values(), key=lambda found: mean(found, "validation")) for name, rates in cells.items()}
    return {name: mean(found, "test") for name, found in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inline", action="store_true", help="train in this process, one trial after another")
    executor = "inline" if parser.parse_args().inline else "ray"
    with tempfile.TemporaryDirectory() as folder:
        default, comparison = trained(Path(folder), DEFAULT, "default", executor)
        grid, _ = trained(Path(folder), GRID, "grid", executor)
    truth = grid_means(grid)
    table = comparison.table.set_index("variant")
    for name, loss in truth.items():
        row = table.loc[name]
        print(
            f"{name}: full grid {loss:.4f}; default {row['loss_mean']:.4f} at rate {row['lr']:g} "
            f"with {row['n']} seeds, {row['delta']:+.4f} [{row['delta_low']:+.4f}, {row['delta_high']:+.4f}] "
            f"{row['verdict']}"
        )
    picked = str(table["loss_mean"].idxmin())
    behind = truth[picked] - min(truth.values())
    share, noise = tokens(default) / tokens(grid), comparison.noise["seed_sd"]
    print(f"noise of a trial {noise:.4f} nats/token")
    print(
        f"the default takes {picked}, {behind:.4f} behind the best of the full grid (margin {MARGIN:g}), "
        f"with {share:.1%} of its tokens: {tokens(default):,} of {tokens(grid):,}"
    )


if __name__ == "__main__":
    main()

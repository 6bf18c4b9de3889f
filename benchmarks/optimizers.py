"""An optimizer's step beside torch's nearest one on the same parameters: milliseconds and their ratio.

    python benchmarks/optimizers.py

The two take turns; the figure of each is its median over the turns. Ratios above 1: ours is faster. Adam and AdamW are
torch's own; torch has no Lion, whose peer is AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from archlab.search.recipe.optimizers import Adafactor, Lion, Muon, Optimizer

Make = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def parameters(d_model: int, n_layers: int) -> list[tuple[str, nn.Parameter]]:
    """The matrices and vectors of a decoder, each with a gradient."""
    shapes = {
        "query": (d_model, d_model),
        "up": (4 * d_model, d_model),
        "down": (d_model, 4 * d_model),
        "norm": (d_model,),
    }
    found = []
    for layer in range(n_layers):
        for name, shape in shapes.items():
            value = nn.Parameter(torch.randn(shape))
            value.grad = torch.randn(shape)
            found.append((f"{layer}.{name}", value))
    return found


def of(spec: Optimizer) -> Make:
    """What a recipe builds."""
    return lambda named: spec.build(named, 1e-3)


CONTESTS: dict[str, tuple[Make, str, Make]] = {
    "adafactor": (
        of(Adafactor()),
        "torch.optim.Adafactor",
        lambda named: torch.optim.Adafactor([value for _, value in named], lr=1e-3),
    ),
    "adafactor, unfactored": (
        of(Adafactor(factored=False)),
        "torch.optim.AdamW, a loop",
        lambda named: torch.optim.AdamW([value for _, value in named], lr=1e-3, foreach=False),
    ),
    "lion": (
        of(Lion()),
        "torch.optim.AdamW, a loop",
        lambda named: torch.optim.AdamW([value for _, value in named], lr=1e-3, foreach=False),
    ),
    "muon": (
        of(Muon()),
        "torch.optim.Muon",
        lambda named: torch.optim.Muon([value for _, value in named if value.ndim == 2], lr=1e-3),
    ),
}


def main() -> None:
    """Prints one line per optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--n-layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = sum(value.numel() for _, value in parameters(options.d_model, options.n_layers))
    print(f"{count:,} parameters, one thread, torch {torch.__version__}")
    for name, (own, peer, other) in CONTESTS.items():
        pair = [make(parameters(options.d_model, options.n_layers)) for make in (own, other)]
        seconds: list[list[float]] = [[], []]
        for _ in range(options.turns):
            for optimizer, seen in zip(pair, seconds, strict=True):
                started = time.perf_counter()
                optimizer.step()
                seen.append(time.perf_counter() - started)
        ours, theirs = (1e3 * statistics.median(seen) for seen in seconds)
        print(f"{name:24} {ours:6.2f} ms   {peer:26} {theirs:6.2f} ms   ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()

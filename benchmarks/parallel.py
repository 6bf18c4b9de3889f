"""What several processes make of one trial: tokens per second of every layout, and what their agreement costs.

    python benchmarks/parallel.py [--steps 60] [--four]

Every layout trains the same trial (a LLaMA block, random bytes), one torch thread for each process, gloo on the
loopback. `tokens_per_s` leaves out validation and checkpoints. `alone` is one process, so on a machine with a core for
each process `ratio` is at most their number; on fewer cores it says what dividing costs.
`said_us` is what one `Team.agree` takes, once for every step. Printed as JSON, a line for each layout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archlab.arch_dsl import canonical, load, resolve
from archlab.search.data.dataset import write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.executors.process_group import Gang, Parallel
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.train import train
from archlab.search.trial.trial import Trial

MODEL = {
    "d_model": 128,
    "n_layers": 4,
    "vocab": 257,
    "max_positions": 128,
    "block": {
        "norm": "rmsnorm",
        "attention": {"heads": 4, "kv_heads": 2, "positional": "rope"},
        "ffn": {"type": "glu"},
    },
}
TWO = [Parallel(data=2), Parallel(shard=2), Parallel(tensor=2), Parallel(pipeline=2)]
FOUR = [Parallel(data=2, shard=2), Parallel(tensor=2, pipeline=2), Parallel(shard=2, tensor=2)]
ASKED = 500


def main() -> None:
    """Prints a line for each layout."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--four", action="store_true", help="also layouts of four processes")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data").mkdir()
        draw = np.random.default_rng(0)
        texts = {name: [draw.bytes(4000) for _ in range(count)] for name, count in SPLITS.items()}
        write(root / "data", Bytes().train([], "tokenizer"), texts, {})
        alone = 0.0
        for layout in [Parallel(), *TWO, *(FOUR if asked.four else [])]:
            found = measure(root, layout, asked.steps)
            alone = alone or found["tokens_per_s"]
            print(
                json.dumps({"layout": str(layout), **found, "ratio": round(found["tokens_per_s"] / alone, 3)}),
                flush=True,
            )


SPLITS = {"train": 100, "validation": 3, "test": 3}


def measure(root: Path, layout: Parallel, steps: int) -> dict[str, Any]:
    """Trains the trial so; what the leader found."""
    folder = root / str(layout).replace(", ", "-").replace(" ", "")
    folder.mkdir()
    recipe = load_recipe({"tokens": steps * 16 * 128, "context": 128, "batch": 16, "accumulate": 2, "lr": 1e-3})
    (folder / "trial.json").write_text(Trial(canonical(resolve(load(MODEL))), canonical(recipe), "data", 0).to_json())
    addresses = [free_address(), free_address()]  # of the trial, and of what is asked afterwards
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    gangs = [[Gang(rank, layout.world, address, layout) for address in addresses] for rank in range(layout.world)]
    ranks = [context.Process(target=_rank, args=(folder, root, *pair, answers)) for pair in gangs]
    for rank in ranks:
        rank.start()
    found: dict[str, Any] = answers.get(timeout=600)
    for rank in ranks:
        rank.join(timeout=60)
    return found


def free_address() -> str:
    """A place on the loopback where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def _rank(folder: Path, root: Path, gang: Gang, again: Gang, answers: Any) -> None:
    torch.set_num_threads(1)
    several = gang if gang.world > 1 else None
    result = train(folder, root, 1, lambda: False, gang=several)
    found = {"tokens_per_s": result["tokens_per_s"], "peak_memory_mb": round(result["peak_memory_bytes"] / 1e6)}
    if several:
        from archlab.search.training.parallel.team import Together

        team = Together(again, torch.device("cpu"))
        started = time.perf_counter()
        for _ in range(ASKED):
            team.agree(False, False)
        found["said_us"] = round((time.perf_counter() - started) / ASKED * 1e6, 1)
        team.leave()
    if gang.leads:
        answers.put(found)


if __name__ == "__main__":
    main()

"""Trials that several processes train: a store with a trial, the processes, and what they left."""

import json
import multiprocessing
import queue
import socket
import time
import traceback
from pathlib import Path

import torch

from arch_dsl import canonical, load, resolve
from search import checkpoint
from search.data.dataset import write
from search.data.tokenizers import Bytes
from search.gang import Gang, Parallel
from search.recipe import load_recipe
from search.trial import Trial

GUARD_S = 180.0
LLAMA = {
    "d_model": 32,
    "n_layers": 4,
    "vocab": 257,
    "max_positions": 16,
    "block": {
        "norm": {"type": "rmsnorm", "placement": "pre"},
        "attention": {
            "heads": 4,
            "kv_heads": 2,
            "positional": "rope",
            "qk_norm": "rmsnorm",
            "gate": {"position": "sdpa", "granularity": "headwise"},
        },
        "ffn": {"type": "glu", "width": 48},
    },
}
RECIPE = {
    "tokens": 10 * 8 * 16,
    "context": 16,
    "batch": 8,
    "accumulate": 2,
    "lr": 0.01,
    "clip": 0.5,
    "z_loss": 1e-3,
    "schedule": {"type": "cosine", "warmup": 0.2},
}


def write_store(root: Path) -> Path:
    """A folder with one prepared data set, `data`: bytes of sums."""
    (root / "data").mkdir(parents=True)
    texts = {
        name: [f"{i} + {i * k} = {i + i * k}\n".encode() for i in range(count)]
        for k, (name, count) in enumerate([("train", 300), ("validation", 23), ("test", 25)], start=2)
    }
    write(root / "data", Bytes().train([], "tokenizer"), texts, {})
    return root


def make(folder: Path, model=None, **recipe) -> Path:
    """A folder for a trial of a model, by default LLaMA's block."""
    folder.mkdir(parents=True)
    spec = canonical(resolve(load(LLAMA | (model or {}))))
    trial = Trial(spec, canonical(load_recipe(RECIPE | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


def build(trial, recipe, device):
    """The trial's model in float64, so that sums in another order agree to 1e-10."""
    from search.train import build_model

    return build_model(trial, recipe, device).double()


def train_alone(folder: Path, root: Path, stop_after: int | None = None, **options):
    """Trains in this process; the result, or None if it was stopped."""
    from search.train import Interrupted, train

    calls = iter(range(1, 10**6))
    stop = (lambda: False) if stop_after is None else (lambda: next(calls) >= stop_after)
    try:
        return train(folder, root, 1, stop, build=build, **options)
    except Interrupted:
        return None


def _rank(folder: Path, root: Path, gang: Gang, stop_after: int | None, options, answers) -> None:
    torch.set_num_threads(1)
    try:
        answers.put((gang.rank, train_alone(folder, root, stop_after, gang=gang, **options), None))
    except BaseException:
        answers.put((gang.rank, None, traceback.format_exc()))


def train_together(folder: Path, root: Path, stop_after: int | None = None, options=None, **parallel):
    """Trains in as many processes as `parallel` takes; what each returned, by rank."""
    layout = Parallel(**parallel)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["search.train", "search.parallel.together"])
    answers = context.Queue()
    address = f"127.0.0.1:{free_port()}"
    gangs = [Gang(rank, layout.world, address, layout) for rank in range(layout.world)]
    ranks = [
        context.Process(target=_rank, args=(folder, root, gang, stop_after, options or {}, answers)) for gang in gangs
    ]
    for rank in ranks:
        rank.start()
    try:
        found = _answers(answers, len(ranks))
    finally:
        for rank in ranks:
            rank.join(timeout=10)
            rank.kill()
    return [found[rank] for rank in range(layout.world)]


def _answers(answers, count: int):
    found, deadline = {}, time.monotonic() + GUARD_S
    while len(found) < count:
        try:
            rank, result, fault = answers.get(timeout=max(deadline - time.monotonic(), 0.1))
        except queue.Empty:
            raise AssertionError(f"of {count} ranks only {sorted(found)} answered in {GUARD_S:g} s") from None
        assert fault is None, f"rank {rank}:\n{fault}"
        found[rank] = result
    return found


def free_port() -> int:
    """A port on the loopback that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def weights(folder: Path):
    """The weights of the newest checkpoint."""
    return checkpoint.load(folder, checkpoint.steps_in(folder)[0])["model"]


def lines(folder: Path):
    """The measures of a trial without what depends on the clock."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("time", "attempt", "tokens_per_s")}
        for line in found
    ]

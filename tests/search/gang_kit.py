"""Trials that several processes train: a store with a trial, the processes, and what they left."""

import itertools
import json
import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from archlab.arch_dsl import canonical, load, resolve
from archlab.search.data.dataset import write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.executors.group_end import free_port
from archlab.search.executors.process_group import Gang, Parallel
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.module import build_model
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.forked import forking

LLAMA = {
    "d_model": 32,
    "n_layers": 4,
    "vocab": 257,
    "max_positions": 16,
    "init": {"std": 0.02},
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
    said = {name: value for name, value in (LLAMA | (model or {})).items() if value is not None}
    spec = canonical(resolve(load(said)))
    trial = Trial(spec, canonical(load_recipe(RECIPE | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


def double(trial, recipe, device):
    """The trial's model in float64, so that sums in another order agree to 1e-10."""
    return build_model(trial, recipe, device).double()


@dataclass(frozen=True)
class Job:
    """A trial for several processes, trained until it ends or is asked to stop after some steps."""

    folder: Path
    parallel: Parallel
    stop_after: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def run(job: Job, root: Path, gang: Gang | None = None):
    """Trains in this process; the result, or None if it was stopped."""
    calls = itertools.count(1)
    stop = (lambda: False) if job.stop_after is None else (lambda: next(calls) >= job.stop_after)
    try:
        return train(job.folder, root, 1, stop, gang=gang, **{"build": double} | job.options)
    except Interrupted:
        return None


def _rank(jobs: list[tuple[Job, Gang]], root: Path, answers, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    for job, gang in jobs:
        try:
            answers.put((gang.rank, run(job, root, gang), None))
        except BaseException:
            answers.put((gang.rank, None, traceback.format_exc()))
            raise


def run_together(jobs: list[Job], root: Path, environment: dict[int, dict[str, str]] | None = None):
    """Trains one job after another, in as many processes as each takes; what each rank returned, job by job.

    `environment` has variables of single ranks.
    """
    world = jobs[0].parallel.world
    context = forking()
    answers = context.Queue()
    ports: set[int] = set()
    while len(ports) < len(jobs):  # the store of one job may still listen when the next one begins
        ports.add(free_port())
    addresses = [f"127.0.0.1:{port}" for port in ports]
    ranks = []
    for rank in range(world):
        mine = [(job, Gang(rank, world, at, job.parallel)) for job, at in zip(jobs, addresses, strict=True)]
        ranks.append(context.Process(target=_rank, args=(mine, root, answers, (environment or {}).get(rank, {}))))
    for rank in ranks:
        rank.start()
    try:
        return _answers(answers, world, len(jobs))
    finally:
        for rank in ranks:
            rank.join(timeout=60)
            rank.kill()


def _answers(answers, world: int, jobs: int):
    found = [[] for _ in range(world)]
    while sum(map(len, found)) < world * jobs:
        rank, result, fault = answers.get()
        assert fault is None, f"rank {rank}:\n{fault}"
        found[rank].append(result)
    return list(zip(*found, strict=True))


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

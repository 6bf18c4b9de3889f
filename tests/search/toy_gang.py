"""The toy as a gang: its ranks really talk (gloo) at every step, rank 0 writes, and each can go wrong by recipe."""

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.search.toy_trainer import Interrupted, hold, log, strike, write

__all__ = ["Interrupted", "train"]


def train(folder, data_root, attempt, should_stop, *, gang, until=None):
    """x_{k+1} = sum over ranks of (a x_k + seed + rank) mod m; `fault` {"kind", "step", "rank", "attempts"} strikes."""
    host, _, port = gang.address.rpartition(":")
    store = dist.TCPStore(host, int(port), gang.world, gang.leads, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=gang.rank, world_size=gang.world)
    trial = json.loads((folder / "trial.json").read_text())
    recipe, checkpoint = trial["recipe"], folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "x": trial["model"]["x"]}
    if gang.leads:
        log(data_root, trial, state["step"], "start")
    (folder / f"rank-{gang.rank}.json").write_text(
        json.dumps({"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "host": os.uname().nodename})
    )
    for step in range(state["step"], recipe["steps"]):
        if gang.leads:
            hold(recipe, step, data_root, should_stop)
        if gang.rank == (recipe.get("fault") or {}).get("rank"):
            strike(recipe["fault"], step, attempt, folder)
        part = torch.tensor([(state["x"] * 48271 + trial["seed"] + gang.rank) % 2147483647], dtype=torch.int64)
        dist.all_reduce(part)
        state = {"step": step + 1, "x": int(part) % 2147483647}
        time.sleep(recipe["step_s"])
        stop = torch.tensor([int(should_stop())])
        dist.broadcast(stop, 0)
        if gang.leads:
            lead(folder, data_root, trial, attempt, checkpoint, state)
        if stop:
            raise Interrupted(f"at step {step + 1}")
    result = {"state": "complete", "reason": None, "step": state["step"], "train_s": 0.1, "validation": {"loss": 1.0}}
    result["test"] = result["validation"]
    result["x"] = state["x"]
    if gang.leads:
        write(folder / "result.json", result)
    return result


def lead(folder, data_root, trial, attempt, checkpoint, state):
    """What rank 0 does after a step."""
    log(data_root, trial, state["step"] - 1, "step")
    line = {"step": state["step"], "time": time.time(), "attempt": attempt, "tokens": state["step"], "loss": 1.0}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**line, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 1.0}) + "\n")
        file.write(json.dumps({**line, "validation_loss": 1.0}) + "\n")
    write(checkpoint, state)

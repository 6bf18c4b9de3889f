"""A second trainer: pure Python, deterministic, a checkpoint every step, and every way to go wrong by recipe."""

import errno
import json
import os
import threading
import time
from pathlib import Path


class Interrupted(Exception):
    """Stopped on request, after a checkpoint."""


def train(folder, data_root, attempt, should_stop, *, until=None, checkpoint_s=None):
    """x_{k+1} = (a x_k + seed) mod m, `steps` times of `step_s` s; `fault` {"kind", "step", "attempts"} strikes.

    Before each step of `holds` it waits until the test lets it `go` on, or somebody asks it to stop.
    """
    trial = json.loads((folder / "trial.json").read_text())
    recipe, checkpoint = trial["recipe"], folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "x": trial["model"]["x"]}
    log(data_root, trial, state["step"], "start")
    if until is not None and until <= state["step"] < recipe["steps"]:
        return paused(folder, until)
    for step in range(state["step"], recipe["steps"]):
        hold(recipe, step, data_root, should_stop)
        strike(recipe.get("fault"), step, attempt, folder)
        state = {"step": step + 1, "x": (state["x"] * 48271 + trial["seed"]) % 2147483647}
        time.sleep(recipe["step_s"])
        log(data_root, trial, step, "step")
        line = {
            "step": step + 1,
            "time": time.time(),
            "attempt": attempt,
            "tokens": step + 1,
            "loss": state["x"] / 2**31,
        }
        validation = {"step": step + 1, "time": time.time(), "attempt": attempt, "validation_loss": line["loss"]}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(
                json.dumps({**line, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 1.0})
                + "\n"
                + json.dumps(validation)
                + "\n"
            )
        write(checkpoint, state)
        if step + 1 == until and until < recipe["steps"]:
            return paused(folder, until)
        if should_stop():
            raise Interrupted(f"at step {step + 1}")
    ending = "diverged" if recipe.get("diverges") else "complete"
    result = {
        "state": ending,
        "reason": None,
        "step": state["step"],
        "train_s": 0.1,
        "validation": {"loss": state["x"] / 2**31},
        "test": {"loss": state["x"] / 2**31},
        **({} if checkpoint_s is None else {"checkpoint_s": checkpoint_s}),
    }
    write(folder / "result.json", result)
    return result


def paused(folder, step):
    """What a trial that waits after a step tells."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (loss,) = {line["validation_loss"] for line in lines if line["step"] == step and "validation_loss" in line}
    return {"state": "paused", "step": step, "tokens": step, "validation": {"loss": loss}}


def strike(fault, step, attempt, folder):
    """Does what the recipe's fault says, at its step, in its first attempts."""
    if not fault or step != fault["step"] or attempt > fault.get("attempts", 99):
        return
    match fault["kind"]:
        case "raise":
            raise ValueError("the toy broke")
        case "unpicklable":
            raise type("Local", (Exception,), {"lock": threading.Lock()})
        case "exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "system_exit":
            raise SystemExit(0)
        case "memory":
            raise MemoryError
        case "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "checkpoint.json"))
        case "port":
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        case "grow":
            grow()
        case "hang":
            time.sleep(600)


def grow():
    """Takes 6 GB, 50 MB at a time, and touches them."""
    kept = []
    for _ in range(120):
        kept.append(bytearray(os.urandom(1) * 50_000_000))
        time.sleep(0.05)
    time.sleep(600)


def hold(recipe, step, data_root, should_stop):
    """Waits before a step, so that nothing a test does meanwhile comes too late."""
    while step in recipe.get("holds", ()) and not (Path(data_root) / f"go-{step}").exists() and not should_stop():
        time.sleep(0.02)


def log(data_root, trial, step, what):
    """One line per start and step of every process, so that a test can count what ran."""
    with open(Path(data_root) / "steps.log", "a") as file:
        file.write(
            f"{trial['model']['x']}/{trial['seed']} {step} {os.getpid()} {what} {sorted(os.sched_getaffinity(0))}\n"
        )


def write(path, value):
    """The old file or the new one, never half of it."""
    path.with_suffix(".tmp").write_text(json.dumps(value))
    os.replace(path.with_suffix(".tmp"), path)

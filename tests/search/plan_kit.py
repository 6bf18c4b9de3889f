"""Drives a plan without training: trials whose validation losses are a function of variant, settings, seed and step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archlab.search.planning.plan import Plan, plan
from archlab.search.store.store import TERMINAL
from archlab.search.study.load import load_study
from tests.search.study_files import write_study

# (variant, settings, seed, share of the steps) -> validation loss in nats/token; not finite: diverged there
Loss = Callable[[str, dict[str, Any], int, float], float]


def made_plan(folder: Path, text: str, **sections: str) -> Plan:
    """The plan of a small study that tunes as `text` says."""
    return plan(load_study(write_study(folder, "study.yaml", tune=f"tune: {text}", **sections)), folder / "data")


def simulate(
    made: Plan, loss: Loss, trials: list[dict[str, Any]] | None = None, seed: int = 0, ends: int | None = None
) -> list[dict[str, Any]]:
    """The table after the plan is carried out, one trial at a time in a random order, or after `ends` of them ended."""
    chance, table = random.Random(seed), {_member(row): row for row in trials or []}
    wanted: set[tuple[str, str, str]] = set()
    for _ in range(ends if ends is not None else 10_000):
        wanted = want(made, table)
        waiting = [row for member, row in table.items() if member in wanted and _goes_on(row)]
        if not waiting:
            break
        row = chance.choice(waiting)
        steps = next(v for v in made.variants if v.name == row["variant"]).recipe.all_steps
        outcome = _end(row, steps, loss)
        for twin in table.values():
            if twin["key"] == row["key"]:
                twin.update(outcome)
    wanted = want(made, table)
    return [row for member, row in table.items() if member in wanted]


def want(made: Plan, table: dict[tuple[str, str, str], dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Brings the wanted rows into the table; returns which they are."""
    rows = made.rows(list(table.values()))
    known = {row["key"]: row for row in table.values()}
    for row in rows:
        fresh: dict[str, Any] = {"key": row.trial.key, "state": "planned", "result": None, "curve": []}
        like = known.get(row.trial.key, {})
        state = fresh | {name: like[name] for name in fresh if name in like}
        state |= {"attempt": 0, "reused": False, "reason": None, "folder": None}
        at = table.setdefault((row.variant, row.role, row.trial.key), state)
        shown = {"variant": row.variant, "role": row.role, "settings": row.settings, "seed": row.seed}
        at.update(until=row.until, **shown)
    return {(row.variant, row.role, row.trial.key) for row in rows}


def cost(trials: list[dict[str, Any]], steps: int) -> float:
    """Steps that were run, in whole trials; each trial once."""
    ran: dict[str, int] = {row["key"]: (row["result"] or {"step": 0})["step"] for row in trials}
    return sum(ran.values()) / steps


def _member(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["variant"], row["role"], row["key"]


def _goes_on(row: dict[str, Any]) -> bool:
    if row["state"] == "paused":
        return row["until"] is None or bool(row["result"]["step"] < row["until"])
    return row["state"] not in TERMINAL


def _end(row: dict[str, Any], steps: int, loss: Loss) -> dict[str, Any]:
    """What becomes of a trial that runs as far as it is wanted."""
    until = row["until"]
    curve = list(row["curve"])
    first = curve[-1][0] if curve else 0
    for point in range(1, 11):
        step = -(-steps * point // 10)
        if step <= first:
            continue
        value = loss(row["variant"], row["settings"], row["seed"], point / 10)
        if not math.isfinite(value):
            return {"state": "diverged", "result": {"step": step, "validation": None, "test": None}, "curve": curve}
        curve.append((step, value))
        if step == until:
            return {"state": "paused", "result": {"step": step, "validation": {"loss": value}}, "curve": curve}
    measures = {"loss": value, "perplexity": math.exp(value), "bits_per_byte": value}
    result: dict[str, Any] = {"step": steps, "validation": measures, "test": measures}
    return {"state": "complete", "result": result, "curve": curve}

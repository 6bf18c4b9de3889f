"""What a tracker's run says about its trial besides the curves: name, params, tags and final measures."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from archlab.search.hardware.facts import usable_cores, version_of
from archlab.search.store.roles import ROLE
from archlab.search.trackers.tracked import Tracked
from archlab.search.trial import fingerprint
from archlab.search.utils.canonical import canonical_json

# MLflow's limits for names and values; a value that is too long is refused by some of its servers and cut by others.
MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 5000


def run_name(trial: Tracked) -> str:
    """`G1 lr=0.001 seed=0`, `G1 probe lr=0.01 seed=0`."""
    probe = " probe" if trial.roles == (ROLE,) else ""
    return f"{trial.variant}{probe} lr={trial.lr:g} seed={trial.seed}"


def facts_of(trial: Tracked, record: dict[str, Any]) -> dict[str, Any]:
    """Variant, seed, parameter count, the recipe's fields by dotted name, and the settings by `settings.<path>`."""
    about: dict[str, Any] = next((each for each in record.get("variants", ()) if each["name"] == trial.variant), {})
    counted = (trial.result or {}).get("parameters", about.get("parameters"))
    found: dict[str, Any] = {"variant": trial.variant, "seed": trial.seed}
    if counted is not None:
        found["parameters"] = counted
    found |= _flat(trial.trial.recipe, "")
    found |= {f"settings.{path}": value for path, value in trial.settings.items() if path != "lr"}
    return found | {f"changes.{path}": after for path, _, after in about.get("changes", ())}


def params_of(trial: Tracked, record: dict[str, Any]) -> dict[str, str]:
    """The facts as MLflow takes them: short texts."""
    return {_name(name): _text(value)[:MAX_PARAM] for name, value in facts_of(trial, record).items()}


def standing_tags(trial: Tracked, study: str) -> dict[str, str]:
    """What identifies the run, the whole spec, and where it began. They are given with the run's creation."""
    spec = canonical_json(trial.trial.model)
    pieces = [spec[at : at + MAX_TAG] for at in range(0, len(spec), MAX_TAG)]
    environment = _environment()
    tags = {
        "archlab.key": trial.key,
        "archlab.study": study,
        "archlab.data": trial.trial.data,
        "archlab.spec_hash": hashlib.sha256(spec.encode()).hexdigest(),
        **{f"archlab.spec{f'.{index}' if index else ''}": piece for index, piece in enumerate(pieces)},
        **{f"fingerprint.{name}": value for name, value in environment.items()},
        "mlflow.source.name": "archlab",
    }
    if environment.get("commit"):
        tags["mlflow.source.git.commit"] = environment["commit"]
    return tags


def state_tags(trial: Tracked) -> dict[str, str]:
    """What may change while the run exists."""
    measured = (trial.result or {}).get("fingerprint", {})
    return {
        "archlab.state": trial.state,
        "archlab.variant": trial.variant,
        "archlab.roles": ", ".join(trial.roles),
        "archlab.attempt": str(trial.attempt),
        "archlab.reused": str(trial.reused).lower(),
        "archlab.wanted": str(trial.wanted).lower(),
        "archlab.reason": (trial.reason or "")[:MAX_TAG],
        **{_name(f"fingerprint.{name}"): _text(value)[:MAX_TAG] for name, value in measured.items()},
    }


def final_metrics(trial: Tracked) -> tuple[dict[str, float], int]:
    """The measures of result.json by name (`test_perplexity`, `final_validation_loss`, ...) and the last step."""
    result = trial.result if trial.result and trial.finished else {}
    found: dict[str, Any] = {}
    for split in ("validation", "test"):
        for name, value in (result.get(split) or {}).items():
            # `validation_loss` is the curve's name.
            found[f"final_{split}_loss" if name == "loss" else f"{split}_{name}"] = value
    found |= {name: result[name] for name in ("train_s", "peak_memory_bytes") if result.get(name) is not None}
    return {name: _finite_or_nan(value) for name, value in found.items()}, int(result.get("step", 0))


def measured_points(trial: Tracked, step: int) -> Iterator[tuple[str, float, float, int]]:
    """Name, value, when (unix s) and step of what was measured of a finished trial; of curves, x is the step."""
    for each in trial.findings(trial.key) if trial.measured else ():
        for name, value in each["values"].items():
            yield _name(name), _finite_or_nan(value), each["time"], step
        for name, curve in each["curves"].items():
            for x, y in zip(curve["x"], curve["y"], strict=True):
                yield _name(name), _finite_or_nan(y), each["time"], x


@cache
def _environment() -> dict[str, str]:
    """Versions, commit and hardware of this process, without importing any of it."""
    versions = {name: version_of(name) for name in ("archlab", "torch", "triton", "numpy", "ray", "optuna", "mlflow")}
    found = {
        **versions,
        "commit": fingerprint.commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": fingerprint.cpu_model(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
        "host": platform.node(),
    }
    return {name: value for name, value in found.items() if value}


def _flat(value: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {f"{prefix}{name}": item}
    return found


def _name(name: str) -> str:
    """A name as MLflow accepts it: `block.*.pre` has a star."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:MAX_NAME]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _finite_or_nan(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else float(value)

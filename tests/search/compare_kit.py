"""What the tests of tables share: the record and the trials of a study with known effects, as plain data."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from archlab.search.results.comparison import Comparison

RATES = (5e-4, 1e-3, 2e-3)
FINGERPRINT = {"torch": "2.13.0", "python": "3.11.7", "threads": "1", "cpu": "some cpu", "archlab": "0.1.0"}


def make_study(
    effects: dict[str, float],
    seeds: int = 3,
    rates: tuple[float, ...] = RATES,
    seed_sd: float = 0.003,
    best: float = 1e-3,
    paired: bool = True,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A finished study: `effects` in nats/token per variant, the first one the baseline; `best` is the best rate.

    80 documents of two bytes per token; a batch effect of each seed that all variants share.
    """
    variants = [
        {
            "name": name,
            "changes": [],
            "components": {"sdpa_gate": name == "sdpa"},
            "parameters": 861_312 + i,
            "mismatch": 1e-4 * i,
            "matched": {"block.ffn.width": 340 - i} if i else {},
            "flops_per_token": 5_234_000,
            "spec": {},
        }
        for i, name in enumerate(effects)
    ]
    record = {
        "study": "gate-position",
        "question": "Where should attention be gated?",
        "baseline": next(iter(effects)),
        "seeds": list(range(seeds)),
        "tune": {"lr": list(rates)} if rates else {},
        "paired": paired,
        "context": 128,
        "tokens": 500_000,
        "variants": variants,
        "recipe": {"lr": 1e-3},
        "data": {
            "identity": "0123456789abcdef0123",
            "source": "stdlib",
            "tokenizer": "bytes",
            "train_tokens": 12_000_000,
            "validation_tokens": 200_000,
            "test_tokens": 210_000,
        },
        "published": None,
    }
    trials = []
    for name, effect in effects.items():
        for lr in rates:
            trials.append(make_trial(name, "tune", {"lr": lr}, 0, effect + 0.1 * abs(math.log(lr / best)), seed_sd))
        for seed in range(seeds):
            trials.append(make_trial(name, "repeat", {"lr": best} if rates else {}, seed, effect, seed_sd))
    return record, trials


def make_trial(
    variant: str, role: str, settings: dict[str, Any], seed: int, effect: float, seed_sd: float = 0.003
) -> dict[str, Any]:
    """A complete trial whose numbers depend on variant, settings, seed and effect alone, not on its role."""
    key = f"{zlib.crc32(f'{variant} {settings} {seed}'.encode()):064x}"
    shared = np.random.default_rng(0)
    tokens = shared.integers(50, 400, 80)
    hard = shared.normal(3.0, 0.5, 80) + shared.normal(size=32)[seed] * 0.02
    own = np.random.default_rng(int(key, 16))
    nll = (hard + effect + own.normal() * seed_sd + own.normal(size=80) * 0.01) * tokens
    loss = float(nll.sum() / tokens.sum())
    return {
        "key": key,
        "variant": variant,
        "role": role,
        "settings": settings,
        "seed": seed,
        "state": "complete",
        "attempt": 1,
        "reused": False,
        "reason": None,
        "folder": None,
        "documents": {"nll": nll, "tokens": tokens, "bytes": 2 * tokens},
        "result": {
            "state": "complete",
            "reason": None,
            "step": 250,
            "tokens": 500_000,
            "parameters": 861_312,
            "validation": measures(loss + 0.01),
            "test": measures(loss),
            "train_s": 12.5,
            "tokens_per_s": 40_000.0 + seed,
            "peak_memory_bytes": 10**8,
            "fingerprint": dict(FINGERPRINT),
        },
    }


def measures(loss: float, bytes_per_token: float = 2.0) -> dict[str, float]:
    """A result's measures at a loss in nats/token."""
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
    }


def pick(trials: list[dict[str, Any]], variant: str, **wanted: Any) -> list[dict[str, Any]]:
    """The variant's trials with these values; `lr` stands in the settings."""
    return [
        t
        for t in trials
        if t["variant"] == variant
        and all((t["settings"].get("lr") if k == "lr" else t[k]) == v for k, v in wanted.items())
    ]


def end_as(trials: list[dict[str, Any]], state: str, reason: str | None = None) -> None:
    """Ends the given trials in another state."""
    assert trials, "no such trial"
    result = {"state": "diverged", "reason": reason, "step": 12, "tokens": 9, "validation": None, "test": None}
    for trial in trials:
        trial |= {"state": state, "reason": reason, "result": result if state == "diverged" else None}


def retold(found: Comparison, **values: Any) -> Comparison:
    """The comparison with other values of what its sections told."""
    told = {key: {name: values.get(name, old) for name, old in mine.items()} for key, mine in found.told.items()}
    return replace(found, told=told)

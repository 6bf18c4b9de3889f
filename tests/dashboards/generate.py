"""Plausible studies without training: stores made through the real Store, with curves, results and documents."""

import json
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from archlab.search.store.store import Row, Store
from archlab.search.trial.rough_start import read_signs
from archlab.search.trial.trial import Trial

TOKENS, CONTEXT, BATCH = 1_500_000, 256, 16
STEPS = TOKENS // (CONTEXT * BATCH)
DOCUMENTS = 60
BYTES_PER_TOKEN = 1.0

EFFECTS = {"baseline": 0.0, "G1": -0.046, "G2": -0.021, "G3": -0.003, "G4": 0.002, "G5": 0.034}
"""Difference of the final loss to the baseline, nats/token."""
CHANGES = {
    "baseline": [],
    "G1": [["block.attention.sdpa", "[]", "[gate(headwise, sigmoid)]"]],
    "G2": [["block.attention.value", "[]", "[gate(elementwise, sigmoid)]"]],
    "G3": [["block.attention.key", "[rope]", "[gate(elementwise, sigmoid), rope]"]],
    "G4": [["block.attention.query", "[rope]", "[gate(elementwise, sigmoid), rope]"]],
    "G5": [["block.attention.post", "[]", "[gate(elementwise, sigmoid)]"]],
}
SITES = {
    "G1": {"sdpa": [{"type": "gate", "granularity": "headwise"}]},
    "G2": {"value": ["gate"]},
    "G3": {"key": ["gate", "rope"]},
    "G4": {"query": ["gate", "rope"]},
    "G5": {"post": ["gate"]},
}
"""What a variant has at the sites of its attention that others have not."""


def spec_of(name):
    """The resolved model of a variant, as a study's record keeps it."""
    sites = {"pre": ["rmsnorm"], "query": ["rope"], "key": ["rope"], **SITES.get(name, {})}
    heads = (
        {"heads": 4, "kv_heads": 4, "head_dim": 32} if name in CHANGES else {"heads": 8, "kv_heads": 8, "head_dim": 16}
    )
    block = {
        "attention": {"type": "attention", **heads, **sites},
        "ffn": {"type": "glu", "pre": ["rmsnorm"], "width": 344},
    }
    sizes = {"d_model": 128, "n_layers": 5, "vocab": 257, "max_positions": CONTEXT}
    return {**sizes, "block": block, "final": ["rmsnorm"], "init": {"std": "small"}}


@dataclass
class Plan:
    """A study to make. `diverge` has (variant, lr) pairs that blow up, `fail` those that crash."""

    name: str = "gate-position"
    question: str = "Where should attention be gated?"
    effects: dict = field(default_factory=lambda: dict(EFFECTS))
    rates: tuple = (1e-3, 2e-3, 4e-3)
    seeds: tuple = (0, 1, 2)
    best_rate: dict = field(default_factory=lambda: {"G1": 4e-3})
    diverge: tuple = ()
    fail: tuple = ()
    points: int = 120
    steps: int = STEPS


def make_store(root):
    """An empty store."""
    return Store.open(root, create=True)


def make_study(store, plan=None, finish=True):
    """Stores a study with its rows; `finish` runs all of them. Returns the plan."""
    plan = plan or Plan()
    store.save_study(plan.name, record(plan), f"study: {plan.name}\n")
    store.add_trials(plan.name, rows(plan))
    if finish:
        for key in planned(store, plan):
            run_trial(store, plan, key)
    return plan


def planned(store, plan, role=None):
    """Keys of the trials that have not been started, each once."""
    members = store.study_trials(plan.name)
    return list(dict.fromkeys(m["key"] for m in members if m["state"] == "planned" and role in (None, m["role"])))


@contextmanager
def live(root):
    """A study whose last trial is still to come: (its store, its plan, the key of that trial)."""
    plan = Plan(effects={"baseline": 0.0, "G1": -0.05}, rates=(), name="live", best_rate={})
    with make_store(root) as made:
        make_study(made, plan, finish=False)
        *done, last = planned(made, plan)
        for key in done:
            run_trial(made, plan, key)
        yield made, plan, last


def record(plan):
    """What `run` stores with a study."""
    variants = []
    for i, name in enumerate(plan.effects):
        variants.append(
            {
                "name": name,
                "changes": CHANGES.get(name, [["block.attention.heads", "4", "8"]]),
                "components": {},
                "parameters": 1_052_416 + 37 * i,
                "mismatch": 0.0 if i == 0 else 0.0004 * (-1) ** i,
                "matched": {} if i == 0 else {"block.ffn.width": 342 - 3 * i},
                "flops_per_token": 6_180_000 + 4_100 * i,
                "spec": spec_of(name),
            }
        )
    return {
        "study": plan.name,
        "question": plan.question,
        "baseline": next(iter(plan.effects)),
        "seeds": list(plan.seeds),
        "tune": {"lr": list(plan.rates)} if plan.rates else {},
        "paired": True,
        "context": CONTEXT,
        "tokens": TOKENS,
        "variants": variants,
        "recipe": {"tokens": TOKENS, "context": CONTEXT, "batch": BATCH, "lr": 1e-3},
        "data": {
            "identity": "5d41402abc4b2a76",
            "source": "stdlib",
            "tokenizer": "bytes",
            "train_tokens": 21_402_112,
            "validation_tokens": 262_144,
            "test_tokens": 262_144,
        },
        "published": None,
    }


def rows(plan):
    """Tune with the first seed, then all seeds at the best rate, as `run` would have chosen it."""
    found = []
    for name in plan.effects:
        for lr in plan.rates:
            found.append(Row(_trial(plan, name, lr, plan.seeds[0]), name, "tune", {"lr": lr}, plan.seeds[0]))
    for name in plan.effects:
        lr = _best(plan, name) if plan.rates else 1e-3
        settings = {"lr": lr} if plan.rates else {}
        for seed in plan.seeds:
            found.append(Row(_trial(plan, name, lr, seed), name, "repeat", settings, seed))
    return found


def _best(plan, name):
    stable = [lr for lr in plan.rates if (name, lr) not in (*plan.diverge, *plan.fail)]
    wanted = plan.best_rate.get(name, 2e-3)
    return min(stable or plan.rates, key=lambda lr: abs(math.log(lr / wanted)))


def _trial(plan, name, lr, seed):
    return Trial({"variant": name, "study": plan.name}, {"lr": lr, "tokens": TOKENS}, "5d41402abc4b2a76", seed)


def final_loss(plan, name, lr, seed, split):
    """nats/token: the variant's effect, a parabola in log rate, noise shared by the seed, noise of its own."""
    own = np.random.default_rng([_number(name), seed, round(lr * 1e7), split == "test"])
    seed_part = np.random.default_rng(1000 + seed).normal(0, 0.012)
    wanted = plan.best_rate.get(name, 2e-3)
    return 1.55 + plan.effects[name] + 0.05 * math.log2(lr / wanted) ** 2 + seed_part + own.normal(0, 0.0035)


def _number(text):
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % (2**31)


def run_trial(store, plan, key, fraction=1.0):
    """Claims a trial, writes its files and finishes it; with `fraction` < 1 it stays running at that point."""
    member = next(m for m in store.study_trials(plan.name) if m["key"] == key)
    attempt = store.claim(key, plan.name)
    name, seed = member["variant"], member["seed"]
    lr = member["settings"].get("lr", 1e-3)
    folder = Path(store.trial_folder(key))
    bad = (name, lr) in plan.diverge
    cut = 0.35 if bad else fraction
    write_curve(folder, plan, name, lr, seed, attempt, cut, bad)
    if fraction < 1.0:
        return attempt
    if (name, lr) in plan.fail:
        store.finish(key, attempt, "failed", None, "RuntimeError: out of memory")
        return attempt
    result = _result(plan, folder, name, lr, seed, bad)
    if not bad:
        result["signs"] = list(read_signs(folder))
    (folder / "result.json").write_text(json.dumps(result))
    store.finish(key, attempt, result["state"], result, result["reason"])
    return attempt


def write_curve(folder, plan, name, lr, seed, attempt, fraction, bad):
    """metrics.jsonl up to `fraction` of the training; a bad one ends in nulls."""
    noise = np.random.default_rng([_number(name), seed, 7])
    end = final_loss(plan, name, lr, seed, "validation")
    lines, start = [], 1_760_000_000.0
    every = max(1, plan.steps // plan.points)
    for step in range(every, int(plan.steps * fraction) + 1, every):
        done = step / plan.steps
        fall = 4.0 * math.exp(-step / (0.05 * plan.steps)) + 0.55 * (1 - done) ** 1.6
        lost = bad and done > 0.3
        loss = None if lost else end + fall + float(noise.normal(0, 0.03))
        warm = min(1.0, done / 0.05)
        common = {"step": step, "time": start + 0.12 * step, "attempt": attempt}
        schedule = lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        speed = 34_000 + 900 * float(noise.normal())
        numbers = {
            "loss": loss,
            "lr": schedule,
            "grad_norm": 0.4 + abs(float(noise.normal(0, 0.1))),
            "tokens_per_s": speed,
        }
        lines.append({**common, "tokens": step * CONTEXT * BATCH, **numbers})
        if (step // every) % 6 == 0:
            lines.append({**common, "validation_loss": None if lost else end + fall + float(noise.normal(0, 0.002))})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _result(plan, folder, name, lr, seed, bad):
    common = {
        "step": STEPS,
        "tokens": TOKENS,
        "parameters": 1_052_416,
        "train_s": 43.2,
        "checkpoints": {"count": 3, "waited_s": 0.0412, "writing_s": 0.93, "bytes": 29_500_000},
        "peak_memory_bytes": 412_000_000,
    }
    common |= {
        "tokens_per_s": 34_100.0 + 40 * seed,
        "fingerprint": {"torch": "2.13.0", "python": "3.11.7", "threads": 1},
    }
    if bad:
        return {
            "state": "diverged",
            "reason": "loss is not finite at step 130",
            "validation": None,
            "test": None,
            **common,
        }
    measures = {}
    for split in ("validation", "test"):
        loss = final_loss(plan, name, lr, seed, split)
        measures[split] = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) / BYTES_PER_TOKEN,
        }
    documents = np.random.default_rng(3)
    tokens = documents.integers(2000, 6000, DOCUMENTS)
    shape = documents.normal(0, 0.2, DOCUMENTS) + np.random.default_rng([_number(name), 9]).normal(0, 0.01, DOCUMENTS)
    nll = tokens * (measures["test"]["loss"] + shape - np.average(shape, weights=tokens))
    np.savez(folder / "test_documents.npz", nll=nll, tokens=tokens, bytes=(tokens * BYTES_PER_TOKEN).astype(np.int64))
    return {"state": "complete", "reason": None, **measures, **common}


if __name__ == "__main__":
    import sys

    with make_store(Path(sys.argv[1])) as made:
        make_study(made)
        running = make_study(
            made,
            Plan(
                "qk-norm",
                "Does query-key normalisation allow larger rates?",
                {"baseline": 0.0, "qk_norm": -0.01, "qk_norm + G1": -0.05},
                diverge=(("baseline", 4e-3),),
            ),
            finish=False,
        )
        for i, each in enumerate(planned(made, running, "tune")[:6]):
            run_trial(made, running, each, 1.0 if i < 5 else 0.6)
    print(time.strftime("%H:%M:%S"), sys.argv[1])

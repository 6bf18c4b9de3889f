"""Generated studies of other kinds: a search, a ladder with IsoFLOP profiles, and a factorial of components."""

import itertools
import json
import math
from pathlib import Path

import numpy as np

from archlab.search.store.store import Row
from archlab.search.trial.trial import Trial
from tests.dashboards.generate import Plan, record

SEARCH, LADDER, FACTORIAL, RECIPES = "search-small", "ladder-small", "factorial", "recipes"
MASK = {"type": "window", "size": 32}


def finish(store, study, trial, loss, **facts):
    """Completes a planned trial with these losses."""
    attempt = store.claim(trial["key"], study)
    both = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}
    result = {"state": "complete", "reason": None, "validation": both, "test": both, "step": 100, "tokens": 100_000}
    result |= {"tokens_per_s": 34_000.0, "fingerprint": {}, "train_s": 3.0, **facts}
    (Path(store.trial_folder(trial["key"])) / "result.json").write_text(json.dumps(result))
    store.finish(trial["key"], attempt, "complete", result, None)


def _trial(*what, seed=0):
    return Trial({"variant": list(what)}, {"tokens": 100_000}, "5d41402abc4b2a76", seed)


def make_search(store, count=30, study=SEARCH, sampler="nsga2", seed=5):
    """A search for perplexity and FLOPs: `count` trials, of which the last two wait."""
    draw, rows, facts, losses = np.random.default_rng(seed), [], [], []
    for number in range(count):
        layers, width = int(draw.integers(1, 5)), int(draw.integers(1, 13)) * 32
        lr, gate = float(10 ** draw.uniform(-3, -2)), ("off", "sdpa_gate")[int(draw.integers(2))]
        settings = {"n_layers": layers, "block.ffn.width": width, "gate": gate, "train.lr": lr, "lr": lr}
        if layers > 1:
            settings["block.attention.mask"] = ("causal", MASK)[int(draw.integers(2))]
        flops = 20_000 * layers + 120 * width * layers
        facts.append({"number": number, "flops_per_token": flops, "parameters": flops // 2, "tokens_per_step": 1024})
        losses.append(2.9 - 0.12 * math.log(flops / 2e4) + 0.1 * math.log10(lr / 4e-3) ** 2 - 0.05 * (gate != "off"))
        name = f"search-{number:04d}"
        rows.append(Row(_trial(study, name), name, "search", settings | {"number": number}, 0))
    shares = {"n_layers": 0.42, "block.ffn.width": 0.31, "train.lr": 0.15, "gate": 0.12}
    made = record(Plan(study, "What does a FLOP buy?", {"baseline": 0.0}, rates=(), seeds=(0,)))
    made["search"] = {"sampler": sampler, "minimize": ["perplexity", "flops_per_token"], "constraints": {}, "base": ""}
    made["search"] |= {"trials": count, "most": 320, "importances": shares, "proposals": facts, "space": {}}
    store.save_study(study, made, f"study: {study}\n")
    store.add_trials(study, rows)
    for trial, loss in list(zip(store.study_trials(study), losses, strict=True))[:-2]:
        finish(store, study, trial, loss)
    return dict(enumerate(losses[:-2]))


def make_ladder(store):
    """Two series over four sizes at two computes: L = 1.2 + 40 N^-0.5 + 300 D^-0.5, the gated one a little better."""
    draw, variants, rows, losses = np.random.default_rng(2), [], [], []
    for compute, size in itertools.product((1e12, 4e12), (1e5, 2e5, 4e5, 8e5)):
        for series in ("baseline", "gated"):
            tokens = compute / (6 * size)
            name, rung = (
                f"{series} [size={size / 1e3:.0f}k, C={compute:.0e}]",
                f"size={size / 1e3:.0f}k, C={compute:.0e}",
            )
            own = {"name": name, "series": series, "rung": rung, "baseline": name.replace("gated", "baseline")}
            own |= {"changes": [], "components": {}, "parameters": int(size * 1.1), "non_embedding": int(size)}
            own |= {"flops_per_token": int(2 * size), "training_flops_per_token": 6 * size, "tokens": tokens}
            variants.append(own | {"context": 256, "matched": {}, "mismatch": 0.0, "spec": {}})
            better = 0.03 if series == "gated" else 0.0
            loss = 1.2 + 40 * size**-0.5 + 300 * tokens**-0.5 - better + draw.normal(0, 0.002)
            losses.append((loss, tokens))
            rows.append(Row(_trial(name), name, "repeat", {}, 0))
    made = record(Plan(LADDER, "How much compute is a gate worth?", {"baseline": 0.0}, rates=(), seeds=(0,)))
    made |= {"variants": variants, "baseline": variants[0]["name"]}
    made["ladder"] = {"count": "non_embedding", "lengths": 2}
    store.save_study(LADDER, made, "study: ladder-small\n")
    store.add_trials(LADDER, rows)
    for trial, (loss, tokens) in zip(store.study_trials(LADDER), losses, strict=True):
        finish(store, LADDER, trial, loss, tokens=tokens)


def make_factorial(store):
    """A full factorial of three components over an axis of two, with three seeds; {(variant, seed): loss}."""
    names, draw = ("gate", "qk_norm", "short_conv"), np.random.default_rng(9)
    effects = {"gate": -0.05, "qk_norm": -0.01, "short_conv": 0.02}
    variants, rows, losses = [], [], {}
    for levels, placement in itertools.product(itertools.product((False, True), repeat=3), ("pre", "sandwich")):
        mine = dict(zip(names, levels, strict=True))
        said = " + ".join(name for name in names if mine[name]) or "baseline"
        name = f"{said} [placement={placement}]"
        own = {"name": name, "baseline": f"baseline [placement={placement}]", "changes": [], "components": mine}
        own |= {"axes": {"block.norm.placement": placement}, "parameters": 10**6, "flops_per_token": 2 * 10**6}
        variants.append(own | {"mismatch": 0.0, "matched": {}, "spec": {}})
        loss = 1.6 + sum(effects[each] for each in names if mine[each])
        loss += 0.03 * (mine["gate"] and mine["qk_norm"]) - 0.02 * (placement == "sandwich")
        for seed in range(3):
            losses[name, seed] = loss + 0.01 * seed + draw.normal(0, 0.002)
            rows.append(Row(_trial(name, seed=seed), name, "repeat", {}, seed))
    made = record(Plan(FACTORIAL, "Which parts help, and together?", {"baseline": 0.0}, rates=(), seeds=(0, 1, 2)))
    made |= {"variants": variants, "baseline": variants[0]["name"]}
    store.save_study(FACTORIAL, made, "study: factorial\n")
    store.add_trials(FACTORIAL, rows)
    for trial in store.study_trials(FACTORIAL):
        finish(store, FACTORIAL, trial, losses[trial["variant"], trial["seed"]])
    return losses


def make_recipes(store):
    """Under a rough recipe `careful` leads, under a calm one it does not; `good` leads under both."""
    effects = {"baseline": (0.3, 0.0), "careful": (0.1, 0.0), "good": (0.2, -0.1)}
    draw, losses, variants, trials = np.random.default_rng(5), {}, [], []
    for place, recipe in enumerate(("rough", "calm")):
        for row, effect in effects.items():
            name = f"{row} [recipe={recipe}]"
            own = {"name": name, "baseline": f"baseline [recipe={recipe}]", "changes": [], "components": {}, "row": row}
            own |= {"axes": {"recipe": recipe}, "parameters": 10**6, "flops_per_token": 2 * 10**6}
            variants.append(own | {"mismatch": 0.0, "matched": {}, "spec": {}})
            for seed in range(3):
                losses[name, seed] = 1.6 + effect[place] + 0.01 * seed + draw.normal(0, 0.002)
                trials.append(Row(_trial(name, seed=seed), name, "repeat", {}, seed))
    made = record(Plan(RECIPES, "Does care pay?", {"baseline": 0.0}, rates=(), seeds=(0, 1, 2)))
    rows = {variant["name"]: [variant["row"], variant["axes"]["recipe"]] for variant in variants}
    made |= {"variants": variants, "baseline": variants[0]["name"], "recipes": {"named": {}, "rows": rows}}
    store.save_study(RECIPES, made, "study: recipes\n")
    store.add_trials(RECIPES, trials)
    for trial in store.study_trials(RECIPES):
        finish(store, RECIPES, trial, losses[trial["variant"], trial["seed"]])

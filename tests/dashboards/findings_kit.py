"""Plausible findings for generated studies: what `evaluate` would have kept of their finished trials."""

import numpy as np

from archlab.search.store.findings import ask, keep_finding

LENGTHS, DEPTHS = (64, 128, 256, 512), (0.0, 25.0, 50.0, 75.0, 100.0)
LAYERS, HEADS, WINDOW = 6, 4, 512


def measure_all(store, study, gated=("G1", "G2")):
    """Findings of every measure that the pages draw, for each trial of a table, by (variant, seed)."""
    kept = {}
    for trial in {each["key"]: each for each in store.study_trials(study)}.values():
        if trial["state"] == "complete" and trial["role"] == "repeat":
            place = sum(map(ord, trial["variant"]))
            draw = np.random.default_rng([place, trial["seed"]])
            kept[trial["variant"], trial["seed"]] = _findings(draw, place % 7, trial["variant"] in gated)
            for finding in kept[trial["variant"], trial["seed"]]:
                keep_finding(store, trial["key"], finding["measure"], finding)
    ask(store, study, {finding["measure"] for found in kept.values() for finding in found})
    return kept


def _finding(measure, values=None, curves=None, grids=None):
    told = {"values": values or {}, "curves": curves or {}, "grids": grids or {}}
    return {"measure": measure, "version": 1, "data": "d", **told, "seconds": 1.0, "fingerprint": {}, "time": 0.0}


def _grid(values, rows, columns, row, column, n=16):
    cells = [[round(float(v), 6) if np.isfinite(v) else None for v in line] for line in values]
    return {"rows": [*rows], "columns": [*columns], "row": row, "column": column, "values": cells, "n": n}


def _heads(values, column="head"):
    return _grid(values, range(len(values)), range(len(values[0])), "layer", column)


def _curve(x, y, n):
    return {"x": [*map(int, x)], "y": [float(v) for v in y], "n": [int(v) for v in n]}


def _findings(draw, level, gated):
    sink = 0.05 if gated else 0.45
    layers = np.arange(LAYERS)[:, None]
    heads = draw.normal(0, 0.02, (LAYERS, HEADS))
    first = np.clip(sink * (0.4 + layers / LAYERS) + heads, 0, 1)
    x = np.arange(1, WINDOW + 1)
    loss = 1.6 + 0.02 * level + 2.4 * x**-0.6 + 0.1 * np.maximum(x / 256 - 1, 0) ** 2 + draw.normal(0, 0.03, WINDOW)
    n = np.full(WINDOW, 64) - (x > 400)
    perplexity = np.exp(np.cumsum(loss * n) / np.cumsum(n))
    found = np.clip(1.1 - 0.1 * level - np.log2(np.array(LENGTHS)[:, None] / 48) * 0.16 + heads[:4, :1], 0, 1)
    cells = np.clip(found + 0.12 * (np.array(DEPTHS) / 100 - 0.5), 0, 1)
    needle = {name: _grid(values, LENGTHS, DEPTHS, "length", "depth %", 4) for name, values in (
        ("needle_chosen", cells), ("needle_exact", cells**2), ("needle_rank", 1 + 7 * (1 - cells)),
        ("needle_loss", 3 * (1 - cells) + 0.1))}  # fmt: skip
    share = float(cells.mean())
    told = {"needle_chosen": share, "needle_exact": share**2, "needle_rank": 1 + 7 * (1 - share), "needle_loss": 1.0}
    told |= {"needle_floor": 0.13, "needle_ceiling": 0.97, "needle_exact_ceiling": 0.9, "needle_chance": 0.125}
    right = float(np.clip(0.9 - 0.09 * level + draw.normal(0, 0.02), 0, 1))
    recall = {"recall_accuracy": right, "recall_loss_first": 5.1, "recall_loss_second": 1.2, "recall_chance": 0.0156}
    same = {"induction_accuracy": right**2, "induction_loss_first": 5.2, "induction_loss_second": 2.0}
    made = [
        _finding("loss_by_position_512", curves={"loss_by_position_512": _curve(x, loss, n),
                 "perplexity_by_context_512": _curve(x, perplexity, np.cumsum(n))}),
        _finding("needle", told, grids=needle),
        _finding("recall", recall),
        _finding("induction", same | {"induction_chance": 0.0079}),
        _finding("first_token_attention", {"first_token_attention": float(first.mean()),
                 "first_token_attention_uniform": 0.024}, grids={"first_token_attention": _heads(first)}),
        _finding("attention_entropy", {"attention_entropy": 2.4, "attention_entropy_uniform": 4.5},
                 grids={"attention_entropy": _heads(4.4 - 3 * first)}),
        _finding("massive_activations", {"massive_activations": 90.0}, {"massive_activations_by_layer": _curve(
            range(LAYERS), 8 * (3 if gated else 20) ** (np.arange(LAYERS) / LAYERS), [900] * LAYERS)}),
        _finding("activation_norms", {"activation_norm": 3.0, "activation_norm_growth": 5.0}, grids={
            "activation_norms": _grid(1 + layers * np.array([0.6, 0.3, 0.1]), range(LAYERS),
                                      ["stream", "attention", "ffn"], "layer", "node")}),
        _finding("loss_spikes", {"loss_spikes": float(level % 3), "gradient_spikes": 1.0, "journal_lines": 120.0}),
    ]  # fmt: skip
    if gated:
        bins = np.exp(-np.linspace(0, 5, 21))
        site = _grid(0.2 + 0.05 * layers, range(LAYERS), ["attention.sdpa"], "layer", "node")
        histogram = _curve(np.linspace(0, 100, 21), bins / bins.sum(), [1000] * 21)
        made.append(_finding("gates", {"gate_mean": 0.32, "gate_below_0.1": 0.4}, {"gate_histogram": histogram},
                             {"gate_mean": site}))  # fmt: skip
    else:
        kept = np.clip(0.9 + 0.02 * layers + heads / 4, 0, 0.999)
        distances = [1, 2, 4, 8, 16, 32, 64, 128]
        far = np.repeat(kept.mean(1)[:, None], 8, 1) ** np.array(distances)
        made.append(_finding("forget_gate", {"forget_gate": float(kept.mean()), "forget_gate_half_life": 12.0}, grids={
            "forget_gate": _heads(kept), "forget_gate_half_life": _heads(np.log(2) / -np.log(kept)),
            "forget_gate_map": _grid(far, range(LAYERS), distances, "layer", "distance")}))  # fmt: skip
    return made

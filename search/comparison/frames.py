"""The frames beside the table: trials, and the domains of a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.frames import NAN
from archlab.search.results.selection import Selection, choose, group, rate
from archlab.search.store.roles import ROLE

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd


def domains_frame(record: dict[str, Any], selections: list[Selection]) -> pd.DataFrame:
    """A row per variant and domain of a mixture: the test loss per token and exp of it, means over the seeds."""
    import pandas as pd

    rows = []
    whole = [domain["name"] for domain in record["data"].get("domains", ())]
    own = {variant["name"]: variant.get("domains", whole) for variant in record["variants"]}
    for selection in selections:
        names = own[selection.variant]
        found = [t["documents"] for t in selection.complete.values() if "domain" in (t.get("documents") or {})]
        for place, name in enumerate(names if found and not selection.has_no_mean else ()):
            mine = [documents["domain"] == place for documents in found]
            losses = [d["nll"][those].sum() / d["tokens"][those].sum() for d, those in zip(found, mine, strict=True)]
            mean, perplexity = float(np.mean(losses)), float(np.mean(np.exp(losses)))
            rows.append({"variant": selection.variant, "domain": name, "loss": mean, "perplexity": perplexity})
    return pd.DataFrame(rows, columns=["variant", "domain", "loss", "perplexity"])


def trials_frame(selections: list[Selection], trials: list[dict[str, Any]]) -> pd.DataFrame:
    """A row per trial and variant; `reported` marks those that stand in the table."""
    import pandas as pd

    names = {s.variant for s in selections}
    grouped = group(trials)
    others = [choose({"seeds": []}, name, grouped[name]) for name in grouped if name not in names]
    rows = []
    for selection in [*selections, *others]:
        reported = {t["key"] for t in selection.reported.values()} if selection.variant in names else set()
        known = {t["key"] for t in selection.trials}
        probes = [t for t in grouped.get(selection.variant, ()) if t["role"] == ROLE and t["key"] not in known]
        for trial in [*probes, *selection.trials]:
            told = {"lr": NAN if rate(trial) is None else rate(trial), "reported": trial["key"] in reported}
            rows.append({**trial, **told, "reused": bool(trial["reused"]), **_numbers(trial["result"] or {})})
    plain = ["variant", "role", "lr", "seed", "state", "attempt", "reused", "reported", "reason"]
    return pd.DataFrame(rows, columns=[*plain, *_numbers({}), "settings", "key", "folder"])


_OF_SPLIT = ("validation_loss", "validation_perplexity", "test_loss", "test_perplexity", "test_bits_per_byte")


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    """What the frame has of a trial's result, NaN where that is not there."""
    found = {name: (result.get(name.partition("_")[0]) or {}).get(name.partition("_")[2]) for name in _OF_SPLIT}
    found |= {name: result.get(name) for name in ("step", "tokens", "train_s", "tokens_per_s", "peak_memory_bytes")}
    return {name: NAN if value is None else value for name, value in found.items()}

"""The frames beside the table: trials, and the domains of a mixture."""

from __future__ import annotations

from collections.abc import Callable
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
        for place, name in enumerate(names if found and not selection.diverged else ()):
            mine = [documents["domain"] == place for documents in found]
            losses = [d["nll"][those].sum() / d["tokens"][those].sum() for d, those in zip(found, mine, strict=True)]
            mean, perplexity = float(np.mean(losses)), float(np.mean(np.exp(losses)))
            rows.append({"variant": selection.variant, "domain": name, "loss": mean, "perplexity": perplexity})
    return pd.DataFrame(rows, columns=["variant", "domain", "loss", "perplexity"])


_RESULT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "validation_loss": lambda r: (r.get("validation") or {}).get("loss"),
    "validation_perplexity": lambda r: (r.get("validation") or {}).get("perplexity"),
    "test_loss": lambda r: (r.get("test") or {}).get("loss"),
    "test_perplexity": lambda r: (r.get("test") or {}).get("perplexity"),
    "test_bits_per_byte": lambda r: (r.get("test") or {}).get("bits_per_byte"),
    "step": lambda r: r.get("step"),
    "tokens": lambda r: r.get("tokens"),
    "train_s": lambda r: r.get("train_s"),
    "tokens_per_s": lambda r: r.get("tokens_per_s"),
    "peak_memory_bytes": lambda r: r.get("peak_memory_bytes"),
}


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
            result = trial["result"] or {}
            rows.append(
                {
                    "variant": trial["variant"],
                    "role": trial["role"],
                    "lr": NAN if rate(trial) is None else rate(trial),
                    "seed": trial["seed"],
                    "state": trial["state"],
                    "attempt": trial["attempt"],
                    "reused": bool(trial["reused"]),
                    "reported": trial["key"] in reported,
                    "reason": trial["reason"],
                    **{name: _number(read(result)) for name, read in _RESULT.items()},
                    "settings": trial["settings"],
                    "key": trial["key"],
                    "folder": trial["folder"],
                }
            )
    plain = ["variant", "role", "lr", "seed", "state", "attempt", "reused", "reported", "reason"]
    return pd.DataFrame(rows, columns=[*plain, *_RESULT, "settings", "key", "folder"])


def _number(value: float | None) -> float:
    return NAN if value is None else value

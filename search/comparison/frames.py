"""The frames beside the table: learning-rate curves, trials, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.frames import NAN
from archlab.search.formatting.words import spelled
from archlab.search.results.selection import Selection, choose, group, loss, rate
from archlab.search.store.roles import ROLE

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd


def rates_frame(record: dict[str, Any], selections: list[Selection]) -> pd.DataFrame:
    """A row per variant and tuned setting, rates ascending: the curve beside the table.

    `setting` names it: the rate alone where nothing else is tuned. `step` is how far a trial came, `share` that of its
    steps; `settled` is whether the variant's tuning is over, else one that is paused waits for the others; `along` is
    whether all but the rate is as it was chosen.
    """
    import pandas as pd

    rows = []
    batches = {variant["name"]: variant.get("batches") for variant in record["variants"]}
    first = record["variants"][0]["name"]
    names = {name for s in selections for t in s.tuned if t["role"] == "tune" for name in t["settings"]}
    alone = names <= {"lr"} or not names
    for selection in selections:
        tuned = [(rate(t), t) for t in selection.tuned if t["role"] == "tune"]
        ends = [t["result"].get("step") for _, t in tuned if t["state"] == "complete"]
        planned = record.get("steps") if batches[selection.variant] == batches[first] else None
        whole = max((end for end in ends if end), default=planned)
        for lr, trial in sorted(tuned, key=lambda pair: pair[0] or 0.0):
            value = loss(trial, "validation")
            step = (trial["result"] or {}).get("step")
            rows.append(
                {
                    "variant": selection.variant,
                    "lr": NAN if lr is None else lr,
                    "seed": trial["seed"],
                    "state": trial["state"],
                    "validation_loss": NAN if value is None else value,
                    "validation_perplexity": NAN if value is None else trial["result"]["validation"]["perplexity"],
                    "best": trial["settings"] == selection.settings and value is not None,
                    "setting": f"{lr:g}" if alone and lr is not None else spelled(trial["settings"]),
                    "step": step or NAN,
                    "share": step / whole if step and whole else NAN,
                    "settled": selection.settled,
                    "along": _others(trial["settings"]).items() <= (selection.settings or trial["settings"]).items(),
                }
            )
    measured = ["validation_loss", "validation_perplexity", "best"]
    columns = ["variant", "lr", "seed", "state", *measured, "setting", "step", "share", "settled", "along"]
    return pd.DataFrame(rows, columns=columns)


def _others(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "lr"}


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

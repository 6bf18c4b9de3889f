"""What evaluating costs: `evaluate: all` on the quickstart's models, measure by measure, and perplexity over a million
held-out bytes.

The quickstart's baseline and its first gated variant are trained for a few steps, as what they learned changes no time.
Seconds are those that the findings of a store tell, on as many cores as a trial has (one).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from archlab import run
from archlab.search.evaluation.measures import Measure
from archlab.search.evaluation.sample import Diagnostic
from archlab.search.store.findings import findings
from archlab.search.store.store import Store

QUICKSTART = Path(__file__).parents[1] / "studies" / "quickstart.yaml"
PASS = "perplexity_128"  # one pass over the test set, at the context of training


def study(evaluate: Any, test_bytes: str, variants: tuple[str, ...]) -> dict[str, Any]:
    """The quickstart with other measures, and one short trial of some of its variants."""
    plain: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    plain["variants"] = {name: plain["variants"][name] for name in variants}
    plain["train"] |= {"tokens": 16_384, "data": {**plain["train"]["data"], "test_bytes": test_bytes}}
    plain |= {"seeds": 1, "evaluate": evaluate}
    for section in ("recipes", "tune", "budget", "match", "report"):
        plain.pop(section, None)
    return plain


def seconds(root: Path, name: str, plain: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Variant, and the seconds of each of its measures."""
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(plain | {"study": name}))
    summary = run(path, root / "store", executor="inline", track=False)
    if summary.exit_code:
        raise SystemExit(summary.message)
    with Store.open(root / "store", create=False) as store:
        for row in store.study_trials(name):
            yield (
                row["variant"],
                {each["measure"]: each["seconds"] for each in findings(store, [row["key"]])[row["key"]]},
            )


def measured(root: Path, variants: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A row per variant: all measures, the pass over the test set beside them, and the share of diagnostics in it."""
    for variant, told in seconds(root, "all", study(["all", {"perplexity": [128]}], "128k", variants)):
        watched = sum(told.get(name, 0.0) for name, member in Measure.members.items() if issubclass(member, Diagnostic))
        total = sum(told.values()) - told[PASS]
        row = {"what": "all", "variant": variant, "seconds": round(total, 2), "pass_s": told[PASS]}
        yield row | {"diagnostics_s": round(watched, 3), "share": round(watched / told[PASS], 3), "measures": told}
    for variant, told in seconds(root, "million", study([{"perplexity": [128]}], "1M", variants[:1])):
        yield {"what": "perplexity of 1 MB", "variant": variant, "seconds": told[PASS]}


def main() -> None:
    """Prints a line of JSON per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["baseline", "G1"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(Path(folder), tuple(parser.parse_args().variants)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""What a study found, in sentences: the same numbers as its table, read aloud."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.dashboards.library import STATES, Study
from archlab.search.formatting.tables import Cell, Column
from archlab.search.results.comparable import lossy_of, objective_of, tested_on

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

_LINES, _NAMED = 6, 6  # sentences of a kind of verdict; variants that one of them names
MINUS = "\N{MINUS SIGN}"
STATE_WORDS = dict(zip(STATES, STATES, strict=True)) | {"planned": "waiting", "pruned": "stopped early"}


def verdicts(comparison: Comparison) -> list[tuple[str, str]]:
    """(kind, sentence) in the order of interest: better, worse, within noise, what can't be said yet.

    Kinds are the verdicts of the table, by which the page colours them.
    """
    if comparison.told.get("calibration"):
        return [_of_calibration(comparison)]
    rows = [row for row in _judged(comparison) if row["variant"] != row["baseline"]]
    unit = comparison.noise["unit"].split("/")[0]
    found = []
    for kind in ("better", "worse"):
        own = sorted((r for r in rows if r["verdict"] == kind), key=lambda r: abs(r["delta"]), reverse=True)
        for row in own[:_LINES]:
            reach = f"[{signed(row['delta_low'])}, {signed(row['delta_high'])}]"
            said = f"{row['variant']} is {kind} than {row['baseline']}: {signed(row['delta'])} {unit} {reach}"
            found.append((kind, f"{said}, {row['holds']}" if row.get("holds") else said))
        if len(own) > _LINES:
            more = len(own) - _LINES
            found.append((kind, f"{more} more {'is' if more == 1 else 'are'} {kind} than {_against(own)}, by less"))
    for kind, one, many in (
        ("within noise", "is within noise of", "are within noise of"),
        ("equivalent", "is equivalent to", "are equivalent to"),
        ("undecided", "is not told apart yet from", "are not told apart yet from"),
        ("diverged", "diverged: no comparison with", "diverged: no comparison with"),
        ("left out", "was left out by its probe: no comparison with", "were left out by their probes: none with"),
        ("other objective", "has another objective than", "have another objective than"),
        ("other test text", "was tested on other text than", "were tested on other text than"),
        ("lossy tokenizer", "has another tokenizer (one is lossy) than", "have other tokenizers (some lossy) than"),
        ("too few seeds", "has too few seeds for an interval against", "have too few seeds for an interval against"),
        ("incomplete", "has no finished comparison with", "have no finished comparison with"),
    ):
        own = [row for row in rows if row["verdict"] == kind]
        if own:
            said = listed([row["variant"] for row in own], _NAMED)
            found.append((kind, f"{said} {one if len(own) == 1 else many} {_against(own)}"))
    return found


def _of_calibration(comparison: Comparison) -> tuple[str, str]:
    """What became of a calibration."""
    rows = {row["recipe"]: row for row in comparison.calibrated_recipes.to_dict("records")}
    told = comparison.calibrated
    own, chosen = rows["as is"], rows[told["chosen"]]
    if chosen is own:
        return "within noise", f"Of {told['tried']} recipes none is better than {told['of']}'s own at equal time"
    if not own["loss"] < float("inf"):
        return "better", f"The recipe {told['chosen']} trains {told['of']}, which its own does not"
    noise = f"the noise of a trial is {chosen['sd']:.2g}, it was {own['sd']:.2g}"
    gain = f"{own['loss'] - chosen['loss']:.2f} nats better than {told['of']}'s own at equal time"
    return "better", f"The recipe {chosen['recipe']} is {gain}; {noise}"


def _judged(comparison: Comparison) -> list[dict[str, Any]]:
    """The rows that verdicts are told of: those of the table, or of several recipes each row at its best one."""
    best_at = comparison.best_recipes.to_dict("records")
    bases = [row["row"] for row in best_at if row["verdict"] == "baseline"]
    if not bases:
        return comparison.table.to_dict("records")
    base = bases[0] if len(bases) == 1 else "its baseline"
    return [
        {**row, "variant": row["row"], "baseline": row["row"] if row["row"] in bases else base}
        | {"delta_low": row["low"], "delta_high": row["high"]}
        for row in best_at
    ]


def _against(rows: Sequence[dict[str, Any]]) -> str:
    """The baseline that all of them have, or that each has its own."""
    bases = {row["baseline"] for row in rows}
    return str(next(iter(bases))) if len(bases) == 1 else "their baselines"


def best(comparison: Comparison) -> dict[str, Any] | None:
    """The row of the table with the lowest mean test loss, None before there is one."""
    rows = [row for row in comparison.table.to_dict("records") if math.isfinite(row["loss_mean"])]
    return min(rows, key=lambda row: float(row["loss_mean"]), default=None)


def perplexities_compare(study: Study) -> bool:
    """Whether all variants with a result have one objective, one test text and one tokenizer."""
    assert study.comparison is not None
    table = study.comparison.table
    done = set(table["variant"][table["loss_mean"].notna()])
    asked = [told for name, told in _asked(study).items() if name in done]
    return study.comparison.noise["unit"] != "bits/byte" and all(one == asked[0] for one in asked)


def unlike_baseline(study: Study) -> list[str]:
    """Variants with another objective, test text or tokenizer than their baseline: token by token no loss compares."""
    assert study.comparison is not None
    table, asked = study.comparison.table, _asked(study)
    pairs = zip(table["variant"], table["baseline"], strict=True)
    return [name for name, base in pairs if asked[name] != asked.get(base)]


def _asked(study: Study) -> dict[str, list[Any]]:
    """By variant what its loss depends on beside the model: objective, test text, tokenizer."""
    return {
        v["name"]: [objective_of(v), tested_on(study.record, v), lossy_of(v), round(v.get("bytes_per_token") or 0.0, 4)]
        for v in study.record["variants"]
    }


def signed(value: float) -> str:
    """A difference to three decimals with its sign, a true minus."""
    return f"{value:+.3f}".replace("-", MINUS)


def pretty(text: str) -> str:
    """A printed cell with a true minus sign and the edge mark of a paper."""
    if text[:1] in "-[+" or text[:1].isdigit():
        return text.replace("-", MINUS).replace("^", " †").replace(f"e{MINUS}", "e-")
    return text


def shown(cell: Cell, column: Column) -> str:
    """A cell as a page has it: what stands at the right is a number, all else is as it was written."""
    return pretty(cell.text) if column.align == "r" else cell.text


def marked(legend: str) -> str:
    """A printed legend with the marks that a page has."""
    return legend.replace("* best", "bold: best").replace("^ rate", "† rate")


def listed(names: Sequence[str], most: int = 0) -> str:
    """a, b and c; of more than `most`, where that is said, the first ones and how many more there are."""
    if 0 < most < len(names):
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def progress(study: Study) -> str:
    """12 of 21 trials · 2 running · 7 waiting."""
    counts = study.counts
    shown = ("running", "interrupted", "paused", "failed", "diverged", "pruned")
    extra = [f"{counts[state]} {STATE_WORDS[state]}" for state in shown if counts.get(state)]
    return " · ".join([f"{study.done} of {study.expected} trials", *extra])


def activity(study: Study) -> tuple[str, str]:
    """(kind, sentence): is it training now, stopped on the way, or done? Kinds: live, stopped, done."""
    counts = study.counts
    if study.holder is not None:
        who = f" by process {study.holder['pid']} on {study.holder['host']}" if study.holder else ""
        return "live", f"training now{who}"
    if counts.get("running"):
        return "live", "another study trains its trials now"
    if study.done < study.expected:
        return "stopped", "not running; the command below goes on where it stopped"
    if counts.get("failed"):
        return "stopped", "ended, with failed trials; archlab retry runs them again"
    return "done", "finished"


def ago(then: float, now: float | None = None) -> str:
    """How long ago a time (unix s) was, in one unit."""
    seconds = max((time.time() if now is None else now) - then, 0.0)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            many = int(seconds // size)
            return f"{many} {unit}{'s' if many > 1 else ''} ago"
    return "just now"


def command_elsewhere(study: Study) -> str:
    """What to type on any machine to go on with the study: no folder of this one."""
    own = Path(study.record.get("file") or f"{study.name}.yaml")
    file = own.name if own.is_absolute() else str(own)
    return command(replace(study, record={**study.record, "file": file}), True, "")


def command(study: Study, default_store: bool, root: str) -> str:
    """What to type to go on with the study."""
    if own := study.record.get("command"):
        return own if default_store else f"{own} --store {shlex.quote(root)}"
    words = ["archlab", "run", study.record.get("file") or f"{study.name}.yaml"]
    for path, value in study.record.get("overrides", {}).items():
        words += ["--set", f"{path}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words if default_store else [*words, "--store", root])

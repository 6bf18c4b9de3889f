"""What pages say of a study and its state, in words."""

from __future__ import annotations

import json
import math
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.dashboards.library import STATES, Study
from archlab.search.formatting.tables import Cell, Column
from archlab.search.reporting.findings import MINUS
from archlab.search.results.comparable import lossy_of, objective_of, tested_on

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

STATE_WORDS = dict(zip(STATES, STATES, strict=True)) | {"planned": "waiting", "pruned": "stopped early"}


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


def curve_of(study: Study, variant: str | None = None) -> str:
    """On how much of the validation text its curve is read, of one variant or of all: "19 windows of 128 tokens"."""
    told = [each for each in study.record["variants"] if variant in (None, each["name"])]
    seen = {(each.get("curve_windows"), each.get("context")) for each in told}
    (windows, context), *others = seen or {(None, None)}
    return "a few windows" if others or not windows else f"{windows} windows of {context} tokens"


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
    return legend.replace("* best", "bold: best").replace("* lowest", "bold: lowest").replace("^ rate", "† rate")


def progress(study: Study) -> str:
    """12 of 21 trials · 2 running · 7 waiting; beside that what a plan allows at most, where seeds and rates come by
    need."""
    counts = study.counts
    shown = ("running", "interrupted", "paused", "failed", "diverged", "pruned")
    extra = [f"{counts[state]} {STATE_WORDS[state]}" for state in shown if counts.get(state)]
    most = study.record.get("trials") or 0
    bound = f" (at most {most})" if most > study.expected and study.done < study.expected else ""
    return " · ".join([f"{study.done} of {study.expected} trials{bound}", *extra])


def activity(study: Study) -> tuple[str, str]:
    """(kind, sentence): is it training now, stopped on the way, or done? Kinds: live, stopped, done."""
    counts = study.counts
    if study.holder is not None:
        who = f" by process {study.holder['pid']} on {study.holder['host']}" if study.holder else ""
        doing = "measuring what is trained" if study.done == study.expected else "training now"
        return "live", f"{doing}{who}"
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
    return command(replace(study, file=file), True, "")


def command(study: Study, default_store: bool, root: str) -> str:
    """What to type to go on with the study."""
    if own := study.record.get("command"):
        return own if default_store else f"{own} --store {shlex.quote(root)}"
    words = ["archlab", "run", study.file or study.record.get("file") or f"{study.name}.yaml"]
    for path, value in study.record.get("overrides", {}).items():
        words += ["--set", f"{path}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words if default_store else [*words, "--store", root])

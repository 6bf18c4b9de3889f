"""What a study found, in sentences: the same numbers as its table, read aloud."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

_LINES, _NAMED = 6, 6  # sentences of a kind of verdict; variants that one of them names
_DECIDED = "better", "worse"
MINUS = "\N{MINUS SIGN}"


def findings(comparison: Comparison) -> list[tuple[str, str]]:
    """(kind, sentence) in the order of interest: better, worse, within noise, what can't be said yet.

    Kinds are the verdicts of the table, by which the page colours them.
    """
    if comparison.told.get("calibration"):
        return [_of_calibration(comparison)]
    rows = [row for row in _judged(comparison) if row["variant"] != row["baseline"]]
    unit = comparison.noise["unit"].split("/")[0]
    means = {row["row"]: row for row in records(comparison.mean_of_recipes)}
    on_average = [
        row for row in rows if row["verdict"] not in _DECIDED and means.get(row["variant"], row)["verdict"] in _DECIDED
    ]
    rows = [row for row in rows if row not in on_average]
    found = []
    for kind in _DECIDED:
        own = sorted((r for r in rows if r["verdict"] == kind), key=lambda r: abs(r["delta"]), reverse=True)
        for row in own[:_LINES]:
            reach = f"[{signed(row['delta_low'])}, {signed(row['delta_high'])}]"
            said = f"{row['variant']} is {kind} than {row['baseline']}: {signed(row['delta'])} {unit} {reach}"
            found.append((kind, f"{said}, {row['holds']}" if row.get("holds") else said))
        if len(own) > _LINES:
            more = len(own) - _LINES
            found.append((kind, f"{more} more {'is' if more == 1 else 'are'} {kind} than {_against(own)}, by less"))
        for row in [row for each in on_average if (row := means[each["variant"]])["verdict"] == kind][:_LINES]:
            reach = f"{signed(row['delta'])} {unit} [{signed(row['low'])}, {signed(row['high'])}]"
            found.append((kind, f"{row['row']} is {kind} than {row['baseline']} on average over recipes: {reach}"))
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
    best_at = records(comparison.best_recipes)
    if not any(row["verdict"] == "baseline" for row in best_at):
        return records(comparison.table)
    return [{**row, "variant": row["row"], "delta_low": row["low"], "delta_high": row["high"]} for row in best_at]


def _against(rows: Sequence[dict[str, Any]]) -> str:
    """The baseline that all of them have, or that each has its own."""
    bases = {row["baseline"] for row in rows}
    return str(next(iter(bases))) if len(bases) == 1 else "their baselines"


def signed(value: float) -> str:
    """A difference to three decimals with its sign, a true minus."""
    return f"{value:+.3f}".replace("-", MINUS)


def listed(names: Sequence[str], most: int = 0) -> str:
    """a, b and c; of more than `most`, where that is said, the first ones and how many more there are."""
    if 0 < most < len(names):
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

"""What a search found: the frame of its trials, their Pareto front, and what is told beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from archlab.search.formatting.frames import records
from archlab.search.results.selection import loss
from archlab.search.sections.search.scores import measured, told
from archlab.search.statistics.pareto import front, hypervolume

NAN = float("nan")

Summary = dict[str, Any]


def search_frame(record: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The trials of a search, best validation perplexity first, unfinished last; `number` is that of the proposal.

    A column for each other goal. `front`: no trial that keeps to the constraints is better in all goals.
    """
    goals = goals_of(record)
    facts = {each["number"]: each for each in record.get("search", {}).get("proposals", ())}
    rows, points = [], []
    for order, trial in enumerate(t for t in trials if t["role"] == "search"):
        value = loss(dict(trial), "validation")
        number = trial["settings"].get("number", order)
        own = facts.get(number, {})
        done = trial["state"] == "complete"
        known = {**own, **(measured(trial["result"], own.get("tokens_per_step", 0)) if done else {}), "loss": value}
        feasible = not own.get("infeasible")
        point = told(goals, known)
        points.append(point if done and feasible and None not in point else None)
        others = {goal: NAN if known.get(goal) is None else known[goal] for goal in goals if goal != "perplexity"}
        rows.append(
            {
                "number": number,
                "variant": trial["variant"],
                "state": trial["state"],
                "validation_loss": NAN if value is None else value,
                "validation_perplexity": NAN if value is None else trial["result"]["validation"]["perplexity"],
                **others,
                "feasible": feasible,
                "front": False,
                "settings": {k: v for k, v in trial["settings"].items() if k != "number"},
                "key": trial["key"],
            }
        )
    kept = [index for index, point in enumerate(points) if point is not None]
    for place in front([points[index] for index in kept]):  # type: ignore[misc]
        rows[kept[place]]["front"] = True
    plain = ["number", "variant", "state", "validation_loss", "validation_perplexity"]
    columns = [*plain, *(goal for goal in goals if goal != "perplexity"), "feasible", "front", "settings", "key"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(["validation_perplexity", "number"], ignore_index=True)


def goals_of(record: Mapping[str, Any]) -> list[str]:
    """What a search minimizes."""
    return list(record.get("search", {}).get("minimize", ["perplexity"]))


def search_summary(record: Mapping[str, Any], frame: pd.DataFrame) -> Summary:
    """What is told beside the frame: the goals, what was refused, the hypervolume of the front, importances.

    `hypervolume` is in natural logarithms of the goals, up to `reference`, the worst of each among the complete trials
    that keep to the constraints. {} for a study that searched nothing.
    """
    search = record.get("search", {})
    if not search:
        return {}
    goals = goals_of(record)
    refused = [each for each in search["proposals"] if each.get("refused")]
    broken = Counter(
        part.split(" ")[0] for each in refused if each.get("infeasible") for part in each["refused"].split(", ")
    )
    found: Summary = {
        "sampler": search["sampler"],
        "minimize": goals,
        "constraints": search["constraints"],
        "trials": len(frame),
        "proposals": len(search["proposals"]),
        "infeasible": sum(bool(each.get("infeasible")) for each in refused),
        "senseless": sum(not each.get("infeasible") for each in refused),
        "broken": dict(broken),
        "asked": search["trials"],
        "most": search["most"],
        "importances": search.get("importances", {}),
    }
    known = in_question(frame, goals)
    if len(goals) > 1 and len(known):
        points = points_of(goals, known)
        reference = [max(column) for column in zip(*points, strict=True)]
        worst = {goal: float(known[column_of(goal)].max()) for goal in goals}
        found |= {"hypervolume": hypervolume(points, reference), "reference": worst}
    return found


def column_of(goal: str) -> str:
    """The column of the frame that has a goal."""
    return "validation_perplexity" if goal == "perplexity" else goal


def in_question(frame: pd.DataFrame, goals: Sequence[str]) -> pd.DataFrame:
    """The trials that may stand on a front: complete, within the constraints, all of their goals known."""
    complete = frame[(frame["state"] == "complete") & frame["feasible"]]
    return complete.dropna(subset=[column_of(goal) for goal in goals])


def points_of(goals: Sequence[str], known: pd.DataFrame) -> list[list[float]]:
    """What a sampler sees of each of these trials: natural logarithms of the goals."""
    seen = ({**row, "loss": row["validation_loss"]} for row in records(known))
    return [[value for value in told(goals, row) if value is not None] for row in seen]


def search_notes(summary: Summary) -> list[str]:
    """What a reader of a search must know besides its trials."""
    if not summary:
        return []
    notes = []
    if count := summary["infeasible"]:
        why = ", ".join(f"{name} {times}" for name, times in summary["broken"].items())
        those = "proposals break a constraint and were" if count > 1 else "proposal breaks a constraint and was"
        notes.append(f"search: {count} {those} not trained ({why})")
    if count := summary["senseless"]:
        notes.append(f"search: {count} proposal{'s make' if count > 1 else ' makes'} no sense, and counts as a trial")
    drawn = summary["trials"] + summary["senseless"]
    if summary["proposals"] >= summary["most"] and drawn < summary["asked"]:
        notes.append(
            f"search: {drawn} of {summary['asked']} trials: of {summary['most']} proposals no more were feasible"
        )
    return notes

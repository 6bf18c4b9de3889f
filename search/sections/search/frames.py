"""What a search found: scores of its trials, their front, what is told beside them, searches that ask the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import NAN, records
from archlab.search.results.selection import loss
from archlab.search.statistics.pareto import front, hypervolume

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

    from archlab.search.store.store import Store

STAGES = 4
_SAME = ("base", "space", "components", "minimize", "constraints")


def excess(limits: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """The logarithm of cost over limit by constraint: above 0 where it is broken, 0.69 at twice the limit."""
    return {name: math.log(max(known[name], 1e-9) / limit) for name, limit in limits.items() if name in known}


def told(goals: Iterable[str], known: Mapping[str, float | None]) -> tuple[float | None, ...]:
    """What a sampler sees of each goal: natural logarithms, so that a factor counts the same everywhere; None: unknown.

    `known` has the validation loss, which is the logarithm of perplexity. Of whole numbers 0 counts as 1.
    """
    found: list[float | None] = []
    for goal in goals:
        value = known.get("loss" if goal == "perplexity" else goal)
        if value is None or not math.isfinite(value):
            found.append(None)
        elif goal == "perplexity":
            found.append(value)
        else:
            found.append(math.log(max(value, 1e-9 if goal == "step_time" else 1.0)))
    return tuple(found)


def measured(result: Mapping[str, Any] | None, tokens_per_step: int) -> dict[str, float | None]:
    """What a complete trial told: its validation loss in nats per token, seconds of a step, bytes."""
    result = result or {}
    rate = result.get("tokens_per_s")
    return {
        "loss": (result.get("validation") or {}).get("loss"),
        "step_time": tokens_per_step / rate if rate else None,
        "peak_memory": result.get("peak_memory_bytes"),
    }


def search_frame(record: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The trials of a search, best validation perplexity first, unfinished last; `number` is that of the proposal.

    A column for each other goal. `front`: no trial that keeps to the constraints is better in all goals.
    """
    import pandas as pd

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


def search_summary(record: Mapping[str, Any], frame: pd.DataFrame) -> dict[str, Any]:
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
    found: dict[str, Any] = {
        "sampler": search["sampler"],
        "minimize": goals,
        "constraints": search["constraints"],
        "trials": len(frame),
        "proposals": len(search["proposals"]),
        "infeasible": sum(bool(each.get("infeasible")) for each in refused),
        "senseless": sum(not each.get("infeasible") for each in refused),
        "why": next((each["refused"].splitlines()[0] for each in refused if not each.get("infeasible")), ""),
        "broken": dict(broken),
        "asked": search["trials"],
        "most": search["most"],
        "importances": search.get("importances", {}),
    }
    known = in_question(frame, goals)
    if len(goals) > 1 and len(known):
        points = points_of(goals, known)
        reference = [max(column) for column in zip(*points, strict=True)]
        worst = {goal: float(known[_column(goal)].max()) for goal in goals}
        found |= {"hypervolume": hypervolume(points, reference), "reference": worst}
    return found


def _column(goal: str) -> str:
    """The column of the frame that has a goal."""
    return "validation_perplexity" if goal == "perplexity" else goal


def in_question(frame: pd.DataFrame, goals: Sequence[str]) -> pd.DataFrame:
    """The trials that may stand on a front: complete, within the constraints, all of their goals known."""
    complete = frame[(frame["state"] == "complete") & frame["feasible"]]
    return complete.dropna(subset=[_column(goal) for goal in goals])


def points_of(goals: Sequence[str], known: pd.DataFrame) -> list[list[float]]:
    """What a sampler sees of each of these trials: natural logarithms of the goals."""
    seen = ({**row, "loss": row["validation_loss"]} for row in records(known))
    return [[value for value in told(goals, row) if value is not None] for row in seen]


def rivals_of(store: Store, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of the other studies of the store that search the same space from the same model, with the same
    recipe, for the same goals under the same constraints; [] for a study that searches nothing."""
    if "base" not in (mine := record.get("search") or {}):
        return []
    others = (other for name, other in store.records().items() if name != record["study"])
    theirs = ((other, other.get("search") or {}) for other in others)
    return [other for other, search in theirs if all(search.get(name) == mine.get(name) for name in _SAME)]


def rivals_frame(searches: Sequence[tuple[Mapping[str, Any], pd.DataFrame]]) -> pd.DataFrame:
    """A row per search that has drawn a trial, the study's own first; empty where it is the only one.

    complete: trials with a result that keep to the constraints; perplexity: the lowest on VALIDATION; front: how many
        of them stand on the front of their own search; common_front: on that of all searches together.
    after: numbers of trials, the same for all, up to the least that any has drawn.
    course: what had been found by then: of one goal the lowest perplexity (NaN: none yet), of several the hypervolume
        in natural logarithms, up to the worst of each goal among the trials of all searches.
    """
    import pandas as pd

    goals = goals_of(searches[0][0])
    searches = [(record, frame) for record, frame in searches if len(frame)]
    known = [in_question(frame, goals) for _, frame in searches]
    points = [points_of(goals, each) for each in known]
    everything = [point for each in points for point in each]
    columns = ["study", "sampler", "complete", "perplexity", "front", "common_front", "after", "course"]
    if len(searches) < 2 or not everything:
        return pd.DataFrame(columns=columns)
    reference = [max(column) for column in zip(*everything, strict=True)]
    best = {tuple(everything[index]) for index in front(everything)}
    drawn = min(len(frame) for _, frame in searches)
    after = sorted({max(1, round(drawn * stage / STAGES)) for stage in range(1, STAGES + 1)})
    rows = []
    for (record, frame), own, mine in zip(searches, known, points, strict=True):
        soonest = frame.sort_values("number", kind="stable")
        by_then = [in_question(soonest.head(count), goals) for count in after]
        rows.append(
            {
                "study": record["study"],
                "sampler": record["search"]["sampler"],
                "complete": len(own),
                "perplexity": _best(own),
                "front": int(own["front"].sum()),
                "common_front": len(best & set(map(tuple, mine))),
                "after": after,
                "course": [
                    _best(each) if len(goals) == 1 else hypervolume(points_of(goals, each), reference)
                    for each in by_then
                ],
            }
        )
    return pd.DataFrame(rows, columns=columns)


def _best(known: pd.DataFrame) -> float:
    return float(known["validation_perplexity"].min())

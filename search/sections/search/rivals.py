"""Searches of one store that ask the same: what each had found after as many trials, measured alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from archlab.search.sections.search.frames import goals_of, in_question, points_of
from archlab.search.statistics.pareto import front, hypervolume

if TYPE_CHECKING:
    from archlab.search.store.store import Store

STAGES = 4
COLUMNS = ["study", "sampler", "complete", "perplexity", "front", "common_front", "after", "course"]
_SAME = ("base", "space", "components", "minimize", "constraints")

Search = tuple[Mapping[str, Any], pd.DataFrame]


def rivals_of(store: Store, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of the other studies of the store that search the same space from the same model, with the same
    recipe, for the same goals under the same constraints; [] for a study that searches nothing."""
    if "base" not in (mine := record.get("search") or {}):
        return []
    others = (store.study(each["name"]) for each in store.studies() if each["name"] != record["study"])
    theirs = ((other, other.get("search") or {}) for other in others)
    return [other for other, search in theirs if all(search.get(name) == mine.get(name) for name in _SAME)]


def rivals_frame(searches: Sequence[Search]) -> pd.DataFrame:
    """A row per search that has drawn a trial, the study's own first; empty where it is the only one.

    complete: trials with a result that keep to the constraints; perplexity: the lowest on VALIDATION; front: how many
        of them stand on the front of their own search; common_front: on that of all searches together.
    after: numbers of trials, the same for all, up to the least that any has drawn.
    course: what had been found by then: of one goal the lowest perplexity (NaN: none yet), of several the hypervolume
        in natural logarithms, up to the worst of each goal among the trials of all searches.
    """
    goals = goals_of(searches[0][0])
    searches = [(record, frame) for record, frame in searches if len(frame)]
    known = [in_question(frame, goals) for _, frame in searches]
    points = [points_of(goals, each) for each in known]
    everything = [point for each in points for point in each]
    if len(searches) < 2 or not everything:
        return pd.DataFrame(columns=COLUMNS)
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
    return pd.DataFrame(rows, columns=COLUMNS)


def _best(known: pd.DataFrame) -> float:
    return float(known["validation_perplexity"].min())

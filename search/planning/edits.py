"""What of a study was edited since its last run: said by `plan`, and by `run` before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from archlab.search.planning.plan import Plan
from archlab.search.store.store import Store
from archlab.search.variants.section import Section

_NAMED = 6  # variants that a line lists


def edits(planned: Plan, store: Store) -> list[str]:
    """A line about each part of a stored study that this plan does not share; none for a study that is new."""
    name = planned.study.study
    if name not in {each["name"] for each in store.studies()}:
        return []
    trials = store.study_trials(name)
    return [*_changed(store.study(name), planned.record()), *_left_out(planned, trials)]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in ("question", "baseline"):
        if before.get(part) and before[part] != now[part]:
            yield f"the {part} was '{before[part]}', now it is '{now[part]}'"
    if (was := before.get("data", {}).get("identity")) and was != now["data"]["identity"]:
        yield f"the data was {was}, now it is {now['data']['identity']}"
    old, new = before.get("recipe", {}), now["recipe"]
    fields = [field for field in {**old, **new} if old and old.get(field) != new.get(field)]
    if told := [field for field in fields if field not in ("data", "tokenizer")]:
        yield f"the recipe has another {', '.join(told)} than before"
    for key, section in Section.known.items() if before else ():
        yield from section.edited(before.get(key), now.get(key))


def _left_out(planned: Plan, trials: list[dict[str, Any]]) -> Iterator[str]:
    """The trials that the table loses, by variant: another model, recipe, data or seed makes another trial.

    What is wanted only once other results are there is not lost.
    """
    members = {(row.trial.key, row.variant, row.role) for row in planned.rows(trials)}
    gone: dict[tuple[str, str], None] = {}
    for row in trials:
        in_table = (row["key"], row["variant"], row["role"]) in members
        if row["role"] != "search" and not in_table and not planned.may_want(row):
            gone[row["key"], row["variant"]] = None
    lost = Counter(variant for _, variant in gone)
    if lost:
        named = [f"{count} of {variant}" for variant, count in sorted(lost.items())[:_NAMED]]
        more = f" and {len(lost) - _NAMED} more variants" if len(lost) > _NAMED else ""
        yield (
            f"{lost.total()} trials are no part of the study any more ({', '.join(named)}{more}): they stay in the "
            "store, and another study or the file as it was takes them up again"
        )

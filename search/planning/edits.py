"""What of a study was edited since its last run: said by `plan`, and by `run` before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from archlab.arch_dsl.language.errors import shorten
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.planning.plan import Plan
from archlab.search.recipe.schedules import AUTO
from archlab.search.store.store import Store
from archlab.search.variants.section import Section

_NAMED = 6  # variants that a line lists


def edits(planned: Plan, store: Store) -> list[str]:
    """A line about each part of a stored study that this plan does not share; none for a study that is new."""
    name = planned.study.study
    if (before := store.records().get(name)) is None:
        return []
    trials = store.study_trials(name)
    follows = planned.study.train.schedule.warmup == AUTO
    return [*_changed(before, planned.record(), follows), *_left_out(planned, trials)]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], warmup_follows: bool = False) -> Iterator[str]:
    for part in ("question", "baseline"):
        if before.get(part) and before[part] != now[part]:
            yield f"the {part} was '{before[part]}', now it is '{now[part]}'"
    if (was := before.get("data", {}).get("identity")) and was != now["data"]["identity"]:
        yield f"the data was {was}, now it is {now['data']['identity']}"
    old, new = before.get("recipe", {}), now["recipe"]
    fields = [field for field in {**old, **new} if old and old.get(field) != new.get(field)]
    own = [field for field in fields if field not in ("data", "tokenizer")]
    if len(own) > 1 and warmup_follows and _one_but_for_warmup(old.get("schedule"), new.get("schedule")):
        own.remove("schedule")
    if told := [f"{field} (was {_short(old.get(field))}, now {_short(new.get(field))})" for field in own]:
        yield f"the recipe has another {', '.join(told)}"
    for key, section in Section.known.items() if before else ():
        yield from section.edited(before.get(key), now.get(key))


def _one_but_for_warmup(was: Any, now: Any) -> bool:
    """Whether two schedules differ in their warm-up alone."""
    return isinstance(was, dict) and isinstance(now, dict) and was != now and {**was, "warmup": now["warmup"]} == now


def _short(value: Any) -> str:
    return shorten(brief_text(value), 40)


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

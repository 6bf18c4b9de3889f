"""What a change would be and cost, before anything is trained for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from archlab.arch_dsl.tree.identity import diff
from archlab.search.challenge.budget import missing
from archlab.search.challenge.changes import plain
from archlab.search.challenge.rounds import Round
from archlab.search.challenge.standing import Standing
from archlab.search.executors.resources import Room
from archlab.search.formatting.numbers import size
from archlab.search.variants.memory import memory_bytes
from archlab.search.variants.patches import Patch
from archlab.search.variants.variant import Variant


def look(referee: Standing, name: str, patch: Patch) -> dict[str, Any]:
    """As JSON: the differences to the champion, parameters and forward FLOPs per token of both, how many trials the
    first look and all seeds take beyond what the store has, about how many core-seconds (of which little is known
    before the first trials), why the first look is refused by the budget or the memory (None: it is not), and earlier
    challengers.

    Raises SpecError for what is no change of the champion. What was tried is told with its entry, and not planned.
    """
    if entry := referee.known(patch):
        return {"tried": asdict(entry), "changes": entry.changes}
    least, most = referee.seeds_of_looks
    first = referee.round(name, patch, least)
    keys = missing(first.planned, referee.store)
    every = keys if least == most else missing(referee.round(name, patch, most).planned, referee.store)
    mine, theirs = row_of(first, first.challenger), row_of(first, first.champion)
    return {
        "tried": None,
        "changes": plain(patch),
        "against": first.champion,
        "differences": differences(theirs, mine),
        "matched": mine.matched,
        "parameters": mine.parameters,
        "champion_parameters": theirs.parameters,
        "flops_per_token": mine.flops_per_token,
        "champion_flops_per_token": theirs.flops_per_token,
        "trials": {"first_look": len(keys), "all_seeds": len(every)},
        "core_seconds": {
            "first_look": round(referee.allowance.guess(first.planned, len(keys)), 1),
            "all_seeds": round(referee.allowance.guess(first.planned, len(every)), 1),
        },
        "refused": referee.allowance.refuses(first.planned, keys, 0) or _too_large(mine),
        "near": referee.ledger.near(plain(patch)),
    }


def _too_large(variant: Variant) -> str | None:
    """Why a variant can't be trained on the CPU of this machine, if it can't."""
    least, there = memory_bytes(variant, rows=1), Room.here()
    if there.gpus or least <= there.memory:
        return None
    return f"a trial takes {size(least)} of memory at least, and this machine has {size(there.memory)}"


def row_of(made: Round, row: str) -> Variant:
    """The variant of a row of a round, under its first recipe."""
    return next(each for each in made.planned.variants if each.base == row)


def differences(before: Variant, after: Variant) -> list[str]:
    """What differs between the models and recipes of two variants, `path: before → after`."""
    found = [*diff(before.model, after.model)]
    recipe = [f"train.{each}" for each in diff(before.recipe, after.recipe)]
    return [*map(str, found), *recipe]

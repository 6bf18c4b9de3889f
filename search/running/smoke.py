"""Tries out every variant for a few steps before a study starts, and finds the micro-batch at which all of them fit.

A smaller micro-batch changes the last bits of a sum, so all variants of a study get it: it is decided once, kept in
the store, and part of the recipe of every trial. Nothing is decided once a trial has begun.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.executors.executor import Executor, ExecutorError, Failure
from archlab.search.executors.resources import Resources
from archlab.search.planning.plan import Plan
from archlab.search.store.store import Store
from archlab.search.study.study import Study
from archlab.search.training.step_times import step_time_key
from archlab.search.variants.asks import Events
from archlab.search.variants.variant import Variant

ENTRY = "archlab.search.training.smoke_trial:train"
DECISION = "micro_batch"
LONGEST_S = 900.0  # for the few steps of one variant
_TICK_S = 0.5

Verdict = Literal["fits", "out of memory", "diverges", "fails"]


@dataclass(frozen=True)
class Smoked:
    """How the first steps of a variant went, in micro-batches of so many sequences."""

    variant: str
    verdict: Verdict
    reason: str | None
    micro_batch: int
    step_s: float | None = None
    peak_memory_bytes: int | None = None


def smoke(
    planned: Plan, store: Store, workers: Executor, replan: Callable[[int], Plan], tell: Events | None = None
) -> Plan:
    """The plan with the micro-batch at which every variant fits: the same one where all fit as they are.

    `replan` plans the study again with micro-batches of at most so many sequences. Raises SpecError where a variant
    cannot run, or where it would need a smaller micro-batch than trials of the study were begun with.
    """
    trying, now = _all(planned), planned
    rows = max(map(_micro_batch, trying))
    while True:
        found = [*_tried(trying, planned.study, store, workers, tell)]
        wrong = {each.variant: each for each in found if each.verdict == "fails"}
        starved = {each.variant for each in found if each.verdict == "out of memory"}
        rows = max((each.micro_batch for each in found if each.variant in starved), default=rows) if starved else rows
        if wrong or (starved and rows == 1):
            raise SpecError([_problem(planned, each) for each in found if each.variant in {*wrong, *starved}])
        if not starved:
            break
        rows //= 2
        now = replan(rows)
        trying = [variant for variant in _all(now) if variant.name in starved]
    if now is not planned:
        _refuse_begun(planned, store, rows)
        decided = store.decide(planned.study.study, DECISION, lambda: rows)
        now = now if decided == rows else replan(decided)
    return now


def _all(planned: Plan) -> list[Variant]:
    """The variants, and what its sections train beside them."""
    return [*planned.variants, *planned.beside]


def _micro_batch(variant: Variant) -> int:
    return max(recipe.micro_batch for recipe in variant.recipe.whole)


def _tried(
    variants: list[Variant], study: Study, store: Store, workers: Executor, tell: Events | None
) -> Iterable[Smoked]:
    """Runs the first steps of each, as many at once as trials would run, in folders that are gone afterwards."""
    root = store.root / "smoke" / study.study
    shutil.rmtree(root, ignore_errors=True)  # of a run that was killed
    waiting, running = deque(variants), dict[str, tuple[Variant, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers.slots:
                variant = waiting.popleft()
                trial = variant.trial(0)
                folder = root / trial.key
                folder.mkdir(parents=True)
                (folder / "trial.json").write_text(trial.to_json())
                workers.submit(trial.key, folder, 1, entry=ENTRY)
                running[trial.key] = variant, time.monotonic()
            for ended in workers.wait(_TICK_S):
                variant, _ = running.pop(ended.key)
                found = _judged(variant, ended.outcome)
                _remember(store, variant, found, study.resources)
                if tell:
                    tell({"event": "smoke", **asdict(found)})
                yield found
            for key, (_, since) in running.items():
                if time.monotonic() - since > LONGEST_S:
                    workers.cancel(key)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _judged(variant: Variant, outcome: dict[str, Any] | Failure) -> Smoked:
    rows = _micro_batch(variant)
    if isinstance(outcome, Failure):
        if outcome.kind in ("node", "infra", "disk"):
            raise ExecutorError(outcome.message)
        if outcome.kind == "oom":
            return Smoked(variant.name, "out of memory", outcome.message, rows)
        slow = f"took more than {LONGEST_S:.0f} s" if outcome.kind == "cancelled" else outcome.message
        return Smoked(variant.name, "fails", slow, rows)
    verdict: Verdict = "diverges" if outcome["state"] == "diverged" else "fits"
    return Smoked(variant.name, verdict, outcome["reason"], rows, outcome["step_s"], outcome["peak_memory_bytes"])


def _remember(store: Store, variant: Variant, found: Smoked, resources: Resources) -> None:
    """What `plan` estimates from. A time that is known stays, as constraints of searches were judged by it."""
    key = step_time_key(variant.timed, resources.cpus, str(resources.parallel))
    if found.verdict == "fits" and found.step_s and store.recall("step_time", key) is None:
        store.remember("step_time", key, {"seconds": found.step_s})


def _problem(planned: Plan, found: Smoked) -> Problem:
    variant = next(each for each in _all(planned) if each.name == found.variant)
    smallest = ", even one sequence at a time" if found.verdict == "out of memory" else ""
    message = f"{found.verdict}{smallest}: {found.reason}"
    return Problem(f"variants.{found.variant}", message, planned.study.mark(f"variants.{variant.base}"))


def _refuse_begun(planned: Plan, store: Store, rows: int) -> None:
    """Trials that are there were computed otherwise, and comparing them with others would not be fair."""
    begun = [row for row in store.study_trials(planned.study.study) if row["attempt"] > 0]
    if begun:
        message = (
            f"a variant fits only in micro-batches of {rows}, and {len(begun)} trials of this study were begun with "
            f"larger ones; say `accumulate` yourself, which makes them new trials, or leave that variant out"
        )
        raise SpecError.of("train.accumulate", message, planned.study.train.mark("batch"))


def decided(root: Path, study: str) -> int | None:
    """The micro-batch that was decided for a study of a store, None where none was, or no store is there."""
    if not (root / "store.json").exists():
        return None
    with Store.open(root, create=False) as store:
        found: int | None = store.decided(study, DECISION)
        return found

"""What a study may spend and has spent: trials, tokens and GPU time count over all of its runs, wall time over one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from archlab.arch_dsl.language.spec import Count, Positive, Spec
from archlab.search.store.store import Store
from archlab.search.trial.metrics import read_metrics
from archlab.search.trial.outcome_files import read_attempt
from archlab.search.utils.quantities import Duration


class Budget(Spec):
    """What may be spent before a run stops with what it has. `wall` is the time of one run.

    The others count over all runs of the study: `trials` started, `tokens` trained on, `gpu_hours` in which trials held
    a GPU. What other studies have trained is free.
    """

    title: ClassVar[str] = "budget"
    wall: Duration | None = None
    trials: Count | None = None
    tokens: Count | None = None
    gpu_hours: Positive | None = None

    @property
    def of_life(self) -> bool:
        """Whether anything is limited over all runs of the study."""
        return (self.trials, self.tokens, self.gpu_hours) != (None, None, None)


class Spent(NamedTuple):
    """What attempts took: different trials, tokens trained on (repeated ones too), seconds of GPUs."""

    trials: frozenset[str] = frozenset()
    tokens: int = 0
    gpu_s: float = 0.0

    def __str__(self) -> str:
        trials = "1 trial" if len(self.trials) == 1 else f"{len(self.trials):,} trials"
        return f"{trials}, {self.tokens:,} tokens, {self.gpu_s / 3600:.2f} GPU hours"


def spent_of(store: Store, study: str) -> Spent:
    """What all runs of a study have spent so far, but for what runs now. A trial that another study trained is free."""
    trials, tokens, gpu_s = set(), 0, 0.0
    for event in store.events(study):
        if event["kind"] == "running":
            trials.add(event["key"])
        spent = event["detail"].get("spent") or {}
        tokens += spent.get("tokens", 0)
        gpu_s += spent.get("gpu_s", 0.0)
    return Spent(frozenset(trials), tokens, gpu_s)


def standing(budget: Budget, spent: Spent) -> str:
    """What is limited and how much of it is spent, in a line; "" without limits."""
    of = [
        f"{len(spent.trials):,} of {budget.trials:,} trials" if budget.trials is not None else "",
        f"{spent.tokens:,} of {budget.tokens:,} tokens" if budget.tokens is not None else "",
        f"{spent.gpu_s / 3600:.2f} of {budget.gpu_hours:g} GPU hours" if budget.gpu_hours is not None else "",
    ]
    told = [", ".join(filter(None, of)) + " are spent"] if any(of) else []
    told += [f"{budget.wall.seconds:.0f} s for each run"] if budget.wall else []
    return f"budget: {'; '.join(told)}" if told else ""


def attempt_spent(folder: Path, attempt: int, gpus: float, seconds: float | None = None) -> dict[str, Any]:
    """What an attempt that ended took, by what it left; `seconds` is how long it held its place, if that is known.

    A driver that died has timed nothing: then the attempt's own clock says, from its start to its last line.
    """
    before = tokens = 0
    last = started = float(read_attempt(folder).get("started", 0.0)) if gpus and seconds is None else 0.0
    for line in read_metrics(folder):
        if line.get("attempt") == attempt:
            tokens, last = max(tokens, line.get("tokens", 0)), line["time"]
        else:
            before = max(before, line.get("tokens", 0))
    if seconds is None:
        seconds = max(0.0, last - started)
    return {"tokens": max(0, tokens - before), "gpu_s": round(gpus * seconds, 3)}


@dataclass
class Account:
    """The budget of one run: what was spent before, what ended meanwhile, what running trials will take."""

    limits: Budget
    spent: Spent = field(default_factory=Spent)
    gpus: float = 0.0  # of one trial
    reserved: dict[str, int] = field(default_factory=dict)  # tokens that running trials may still take
    started: float = field(default_factory=time.monotonic)

    def refuses(self, key: str, tokens: int) -> str | None:
        """Why a trial that takes `tokens` more is not launched, if it would exceed the budget."""
        limits, spent = self.limits, self.spent
        if limits.trials is not None and key not in spent.trials and len(spent.trials) >= limits.trials:
            return self.told(f"{limits.trials:,} trials")
        if limits.tokens is not None and spent.tokens + sum(self.reserved.values()) + tokens > limits.tokens:
            return self.told(f"{limits.tokens:,} tokens") + f"; the next trial takes {tokens:,} more"
        return self.over(())

    def launched(self, key: str, tokens: int, gpus: float) -> None:
        """A trial takes its place, up to so many tokens and so many GPUs."""
        self.gpus = gpus
        self.spent = self.spent._replace(trials=self.spent.trials | {key})
        self.reserved[key] = tokens

    def ended(self, key: str, spent: dict[str, Any]) -> None:
        """An attempt ended that took what `attempt_spent` says."""
        self.reserved.pop(key, None)
        tokens, gpu_s = self.spent.tokens + spent["tokens"], self.spent.gpu_s + spent["gpu_s"]
        self.spent = self.spent._replace(tokens=tokens, gpu_s=gpu_s)

    def over(self, running_s: Iterable[float]) -> str | None:
        """Why the run ends, if its time or that of the GPUs is spent; each trial has run for so many seconds."""
        limits = self.limits
        if limits.wall and time.monotonic() - self.started > limits.wall.seconds:
            return self.told(f"{limits.wall.seconds:.0f} s for one run")
        gpu_s = self.spent.gpu_s + self.gpus * sum(running_s)
        if limits.gpu_hours is not None and gpu_s >= limits.gpu_hours * 3600:
            return self.told(f"{limits.gpu_hours:g} GPU hours")
        return None

    def told(self, limit: str) -> str:
        """That the budget is spent, and what was, over all runs."""
        return f"the budget of {limit} is spent ({self.spent} so far)"

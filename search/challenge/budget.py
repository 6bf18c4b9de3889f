"""What a stream of challengers may take: trials, core-seconds, bytes of the store; and what it has taken so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from archlab.search.challenge.ledger import round_of
from archlab.search.executors.resources import Resources
from archlab.search.formatting.numbers import size
from archlab.search.planning.estimate import estimate
from archlab.search.planning.plan import Plan
from archlab.search.store.store import Store
from archlab.search.trial.metrics import read_metrics
from archlab.search.trial.outcome_files import read_attempt
from archlab.search.utils.files import size_of
from archlab.search.utils.names import ROUND

_BYTES_PER_PARAMETER = 16  # a checkpoint in float32: weights, gradients, two moments of Adam
_ENDS = ("complete", "paused", "planned", "failed", "diverged", "pruned", "stale")
_ORPHANED = "its driver ended"  # why an attempt was given back that nobody has timed


@dataclass(frozen=True)
class Spent:
    """What rounds have taken: the keys of the trials that were started for them, and the seconds for which an attempt
    held its cores, times their number. What other studies trained is free."""

    trials: frozenset[str] = frozenset()
    core_seconds: float = 0.0


@dataclass(frozen=True)
class Limits:
    """The most that may be taken, None where that is open. With `of_life` it counts from the first ledger of the study
    in this store, else from the call. `disk` is the size of the whole store in bytes, in either case."""

    trials: int | None = None
    core_seconds: float | None = None
    disk: int | None = None
    of_life: bool = False


def cores(resources: Resources) -> int:
    """Of one trial."""
    return resources.cpus * resources.world


def rounds_in(store: Store, study: str) -> list[str]:
    """The names of the studies that rounds of a study have made in a store, of all its ledgers."""
    found = []
    for row in store.studies():
        ending = row["name"].rpartition(ROUND)[2]
        if ending.isdigit() and row["name"] == round_of(study, ending):
            found.append(row["name"])
    return found


def spent_of(store: Store, study: str, each_cores: int) -> Spent:
    """What all rounds of a study have taken in a store, by the events of its trials; an attempt that runs now counts up
    to its last line."""
    rounds, trials, total = {*rounds_in(store, study)}, set(), 0.0
    began: dict[tuple[str, int], float] = {}
    for event in store.events():
        place = event["key"], event["attempt"]
        if event["kind"] == "running" and event["study"] in rounds:
            trials.add(event["key"])
            began[place] = event["time"]
        elif event["kind"] in _ENDS and place in began and event["detail"].get("reason") != _ORPHANED:
            total += max(0.0, event["time"] - began.pop(place))
    total += sum(max(0.0, _last_line(store, *place) - start) for place, start in began.items())
    return Spent(frozenset(trials), total * each_cores)


def _last_line(store: Store, key: str, attempt: int) -> float:
    """When an attempt wrote last (unix s); 0 where it left nothing."""
    folder = store.trial_folder(key)
    told = read_attempt(folder)
    started = float(told.get("started", 0.0)) if told.get("attempt") == attempt else 0.0
    lines = (line.get("time") or 0.0 for line in read_metrics(folder) if line.get("attempt") == attempt)
    return max(started, *lines, 0.0)


@dataclass
class Allowance:
    """The limits of one call at work: what was there when it began, and what the next look would take."""

    limits: Limits
    store: Store
    study: str
    resources: Resources
    at_once: int | None = None  # trials that run side by side, at most; None where that is not known
    before: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        if not self.limits.of_life:
            self.before = self._all()

    def _all(self) -> Spent:
        return spent_of(self.store, self.study, cores(self.resources))

    def spent(self) -> Spent:
        """Since the call began, or since the first ledger."""
        now = self._all()
        return Spent(now.trials - self.before.trials, now.core_seconds - self.before.core_seconds)

    def refuses(self, planned: Plan, keys: set[str], trained: int) -> str | None:
        """Why the trials of these keys are not trained, of a plan; `trained` is how many this call has trained."""
        if not keys:
            return None
        limits, left = self.limits, len(keys)
        now = self._all()
        taken = len(now.trials) if limits.of_life else trained
        needed = len(now.trials | keys) if limits.of_life else trained + left
        if limits.trials is not None and needed > limits.trials:
            many = "1 trial" if left == 1 else f"{left} trials"
            return f"the next look takes {many}, of {max(0, limits.trials - taken)} that are left"
        if limits.core_seconds is not None:
            rest = limits.core_seconds - (now.core_seconds - self.before.core_seconds)
            if (guess := self.guess(planned, left, now)) > rest:
                return f"the next look takes about {guess:.0f} core-seconds, of {max(0.0, rest):.0f} that are left"
        return self._no_room(planned, left)

    def _no_room(self, planned: Plan, left: int) -> str | None:
        """Why the store may not grow by so many trials of a plan."""
        if self.limits.disk is None:
            return None
        held, most = size_of(self.store.root), self.limits.disk
        more = left * max(variant.parameters for variant in planned.variants) * _BYTES_PER_PARAMETER
        if held + more <= most:
            return None
        return f"the store holds {size(held)}, and the next look takes up to {size(more)} more, of {size(most)}"

    def guess(self, planned: Plan, left: int, now: Spent | None = None) -> float:
        """Core-seconds of so many trials of a plan: as earlier trials of these rounds took, more for a model of more
        FLOPs than the baseline; before the first ones by an estimate."""
        now = now or self._all()
        if now.trials and now.core_seconds:
            flops = [variant.flops_per_token for variant in planned.variants]
            return left * now.core_seconds / len(now.trials) * max(flops) / flops[0]
        return left * estimate(planned, self.store.root, 1).core_s / planned.trials

    def wall_s(self, left: int) -> float | None:
        """Seconds after which a run of so many trials has taken all core-seconds that are left; None: no limit."""
        if self.limits.core_seconds is None:
            return None
        rest = self.limits.core_seconds - self.spent().core_seconds
        return max(rest, 0.0) / (cores(self.resources) * max(1, min(self.at_once or left, left)))

    def standing(self) -> dict[str, Any]:
        """What is limited, and how much of it is spent, as JSON."""
        now = self.spent()
        taken = {"trials": len(now.trials), "core_seconds": round(now.core_seconds, 1)}
        taken["disk_bytes"] = size_of(self.store.root)
        most = {"trials": self.limits.trials, "core_seconds": self.limits.core_seconds, "disk_bytes": self.limits.disk}
        return {name: {"spent": taken[name], "limit": most[name]} for name in taken}


def missing(planned: Plan, store: Store) -> set[str]:
    """The keys of the trials that a plan still lacks, as far as is known."""
    if not planned.left(planned.done(store)):
        return set()
    known: Iterable[dict[str, Any]] = planned.known(store)
    over = {row["key"] for row in known if row["state"] not in ("planned", "running", "paused", "failed", "pruned")}
    return {row.trial.key for row in planned.rows([*known])} - over

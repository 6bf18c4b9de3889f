"""By which rules a stream of challengers is judged."""

from __future__ import annotations

from dataclasses import dataclass

from archlab.search.challenge.budget import Limits

FEWEST = 1  # seeds before the first look, which may show that there is no hope


@dataclass(frozen=True)
class Rules:
    """How a stream is judged: the seeds that a challenger gets at most, the half-width of equivalence in nats per
    token, the share of false ones among those kept, and whether what lost to an earlier champion is tried again.
    `together` are as many as are confirmed at once; with `confirm` those that are left at the end of a call are, too.

    `trials`, `core_seconds` and `disk` (bytes of the store) are the most that this call may take; with `of_life` the
    most that all ledgers of the study in this store may take together (archlab.search.challenge.budget).
    """

    seeds: int = 8
    margin: float | None = None
    false_keeps: float = 0.1
    trials: int | None = None
    again: bool = False
    together: int = 1
    confirm: bool = False
    core_seconds: float | None = None
    disk: int | None = None
    of_life: bool = False

    def __post_init__(self) -> None:
        at_least_1 = min(self.seeds, self.together)
        if at_least_1 < 1 or not 0 < self.false_keeps < 1 or (self.margin is not None and self.margin <= 0):
            raise ValueError(f"needs a seed or more, a share below 1 and a margin above 0; received {self}")

    @property
    def limits(self) -> Limits:
        """What may be taken."""
        return Limits(self.trials, self.core_seconds, self.disk, self.of_life)


DEFAULT = Rules()

"""How a study's run ends: its exit code, its summary, and the signals that end it early."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

EXIT_FAILED, EXIT_BUDGET, EXIT_TRY_AGAIN, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 3, 75, 130, 143
GRACE_S = 60.0  # from the request to stop until trials that have not written a checkpoint are killed


@dataclass(frozen=True)
class Summary:
    """How a study's run ended.

    exit_code: 0 everything has a result; 1 some trial failed; 3 the budget is spent; 75 the machine is to blame, run
    it again; 130 interrupted; 143 terminated, by SIGTERM. counts: trials by state, and "reused": those that had ended
    before this run.
    """

    exit_code: int
    counts: dict[str, int]
    message: str


@dataclass
class Stop:
    """Why a run starts nothing more, and until when what runs may take to write its checkpoint."""

    exit_code: int
    message: str
    deadline: float = field(default_factory=lambda: time.monotonic() + GRACE_S)
    announced: bool = False

    def overdue(self) -> bool:
        """True when the grace is over, and again after another one."""
        if time.monotonic() <= self.deadline:
            return False
        self.deadline = time.monotonic() + GRACE_S
        return True


def count(states: Mapping[str, str], before: Set[str]) -> dict[str, int]:
    """Trials by state, and "reused": those of them that had ended before."""
    return {**Counter(states.values()), "reused": len(before & states.keys())}


def summarise(states: Mapping[str, str], before: Set[str], stop: Stop | None, left: int) -> Summary:
    """The exit code follows from the table: a stop that came when all was done, nothing being `left`, is no stop."""
    counts = count(states, before)
    failed = counts.get("failed", 0)
    if stop is not None and (left or stop.exit_code == EXIT_FAILED):
        return Summary(stop.exit_code, counts, stop.message)
    if failed:
        trials = "1 trial" if failed == 1 else f"{failed} trials"
        return Summary(EXIT_FAILED, counts, f"{trials} failed; the reasons are in the table, tracebacks in error.txt")
    wanted = "every trial that is needed" if counts.get("paused") else "every trial"  # values that were behind pause
    return Summary(0, counts, f"{wanted} has a result")


@contextmanager
def on_signals(interrupt: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM call `interrupt` with their exit code meanwhile. Only a main thread can have handlers.

    Yields what sets the handlers again: Ray puts one of its own in their place while it starts, which would end us.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        interrupt(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}

    def again() -> None:
        for number in numbers:
            signal.signal(number, handle)

    try:
        yield again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

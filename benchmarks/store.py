"""A trial table of many trials: how long it takes to plan them, to ask how far they are, and to pass each through.

    python benchmarks/store.py [--trials 10000] [--passed 500]

On SQLite in a temporary folder, or on PostgreSQL where ARCHLAB_DATABASE names an empty database.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from archlab.search.running.status import status_of
from archlab.search.store.store import Row, Store
from archlab.search.trial.trial import Trial

MODEL = {"note": "x" * 3000}  # about what a spec takes
RESULT = {"state": "complete", "validation": {"loss": 1.0}, "test": {"loss": 1.0}, "note": "x" * 2000}


def main() -> None:
    """Prints seconds, and trials per second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--passed", type=int, default=500)
    options = parser.parse_args()
    rows = [Row(Trial(MODEL, {"lr": i}, "none", 0), f"v{i}", "repeat", {"lr": i}, 0) for i in range(options.trials)]
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store") as store:
        print(f"trial table: {store.database.name}")
        store.save_study("s", {"study": "s", "question": "?", "variants": [], "seeds": [0]}, "study: s\n")
        show(f"plan {options.trials} trials", timed(lambda: store.add_trials("s", rows)))
        show("plan them again, nothing new", timed(lambda: store.add_trials("s", rows)))
        seconds = timed(lambda: [through(store, row) for row in rows[: options.passed]])
        show(f"claim and finish {options.passed}", seconds, f"{options.passed / seconds:.0f} trials/s")
        show("read all rows", timed(lambda: store.study_trials("s")))
        show("status", timed(lambda: status_of(store.root)))
        print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def through(store: Store, row: Row) -> None:
    """A trial from planned to complete."""
    attempt = store.claim(row.trial.key, "s")
    assert attempt is not None
    store.finish(row.trial.key, attempt, "complete", RESULT)


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(what: str, seconds: float, more: str = "") -> None:
    """A line of the report."""
    print(f"{what:<32} {seconds:8.2f} s  {more}".rstrip())


if __name__ == "__main__":
    main()

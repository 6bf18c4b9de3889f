"""Works off one ticket, in a process of its own: `python -m archlab.search.challenge.work JSON`.

It ends in order, as at Ctrl-C, when its standard input does: whoever started it has stopped it, or is gone. What it
prints goes wherever the one who started it says; what comes of the ticket is in the store.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.challenge.changes import Idea
from archlab.search.challenge.queue import RUNNING, WAITING, Queue, Ticket, lock_name
from archlab.search.challenge.referee import Outcome, challenge
from archlab.search.challenge.rules import Rules
from archlab.search.challenge.standing import Standing
from archlab.search.executors.executor import ExecutorError, ResourcesError
from archlab.search.running.ending import EXIT_BUDGET, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TRY_AGAIN
from archlab.search.store.lock import StudyLocked, holder_of
from archlab.search.store.store import Store, StoreError
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.utils.exits import leaving_early

BUSY = 4  # the exit code where another process writes the ledger


@dataclass(frozen=True)
class Job:
    """Which ticket of which study in which store, and by which rules."""

    study: str
    store: str
    ticket: str
    overrides: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    executor: Literal["ray", "inline"] = "ray"
    address: str | None = None
    allow_plugins: bool = False
    command: str = ""

    def text(self) -> str:
        """As the process takes it."""
        return json.dumps(asdict(self))

    def load(self) -> Study:
        """The study, as it is now. Raises SpecError."""
        return load_study(self.study, self.overrides, self.allow_plugins, self.store)


def work(job: Job) -> int:
    """Holds the challenger of a ticket against the champion, and keeps in the queue what came of it. Returns an exit
    code: 0 it has ended, BUSY, or that of an interruption, after which it waits as before."""
    study = job.load()
    with Store.open(job.store) as store:
        queue = Queue.of(store, Standing(study, store, Rules(**job.rules)).ledger)
        ticket = queue.find(job.ticket)
        if ticket is None or not ticket.open:
            return 0
        try:
            found = challenge(
                study,
                {ticket.name: Idea(ticket.changes, ticket.why)},
                job.store,
                rules=Rules(**job.rules),
                executor=job.executor,
                address=job.address,
                on_plan=lambda _: queue.end(ticket, RUNNING),  # it has the ledger's lock
                allow_plugins=job.allow_plugins,
                command=job.command,
            )
        except StudyLocked as error:
            if holder_of(store.root, lock_name(study.study)) is not None:
                return BUSY
            queue.end(ticket, "failed", str(error))
        except SpecError as error:
            queue.end(ticket, "refused", str(error))
        except (ResourcesError, ExecutorError, StoreError, OSError) as error:
            queue.end(ticket, "failed", str(error))
        else:
            return _keep(queue, ticket, found)
    return 0


def _keep(queue: Queue, ticket: Ticket, found: Outcome) -> int:
    """Keeps what came of a ticket whose run has ended."""
    entry, summary = found.entries[ticket.name], found.summary
    if entry is not None:
        queue.end(ticket, "decided", entry=entry.number)
        return 0
    assert summary is not None, "a challenger without a verdict was stopped"
    if summary.exit_code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        queue.end(ticket, WAITING)
        return summary.exit_code
    over = summary.exit_code == EXIT_BUDGET
    again = "; ask again to go on" if summary.exit_code == EXIT_TRY_AGAIN else ""
    queue.end(ticket, "over budget" if over else "failed", f"{summary.message}{again}")
    return 0


def _end_with_input() -> None:
    """Asks this process to end when its standard input does."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Works off the ticket that the first argument names."""
    job = Job(**json.loads(sys.argv[1]))
    with leaving_early():
        _end_with_input()
        code = work(job)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is in the store; to end in order takes seconds, for which the next one would wait


if __name__ == "__main__":
    main()

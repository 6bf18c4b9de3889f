"""The referee of one study, to whom a proposer puts questions: each answer is JSON, each mistake an error that says
what is allowed. It trains nothing itself: a challenge becomes a ticket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import MAX_BYTES, MAX_NODES, Node, nodes_in, read_text
from archlab.cli.referee_server import language
from archlab.cli.referee_server.diagnostics import diagnosed
from archlab.search.challenge.changes import patch_of, plain
from archlab.search.challenge.ledger import KIND as LEDGER
from archlab.search.challenge.look import look
from archlab.search.challenge.queue import KIND, RUNNING, WAITING, Queue, Ticket, lock_name
from archlab.search.challenge.rounds import refuse
from archlab.search.challenge.rules import Rules
from archlab.search.challenge.standing import Standing
from archlab.search.challenge.work import Job
from archlab.search.store.lock import in_use, name_of
from archlab.search.store.store import Store
from archlab.search.variants.patches import Patch

LONGEST_WHY = 2000  # characters
MOST_WAITING = 100
_LONGEST_NAME = 80
_OF_THE_OWNER = ("data", "tokenizer", "init", "stages")  # fields of a recipe that can name files


class Refused(ValueError):
    """What a proposer asked for is not done, for a reason that the message says."""


@dataclass
class Desk:
    """`job` says which study, store and rules; its ticket is that of no challenger."""

    job: Job
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rules(self) -> Rules:
        """By which challengers are judged."""
        return Rules(**self.job.rules)

    @contextmanager
    def referee(self) -> Iterator[Standing]:
        """One that looks at the study and the ledger as they are now; one at a time. Raises SpecError, StoreError."""
        with self.lock:
            study, root = self.job.load(), Path(self.job.store)
            refuse(study)
            with Store.open(root) as store, in_use(root):
                yield Standing(study, store, self.rules)

    def describe(self, topic: str) -> dict[str, Any]:
        """What may be written: archlab.cli.referee_server.language."""
        with self.referee() as referee:
            return language.told(referee, topic)

    def check(self, changes: Any) -> dict[str, Any]:
        """What a patch would be and cost; trains nothing. Raises SpecError for what is none."""
        name = "this patch"
        patch = _patch(name, changes)
        with self.referee() as referee:
            return look(referee, name, patch)

    def challenge(self, name: str, changes: Any, why: str) -> dict[str, Any]:
        """The ticket of a challenger, which waits for its turn, or what came of it where that is known.

        Raises SpecError for what is no challenger, Refused for one that the budget or the queue has no room for.
        """
        if len(name) > _LONGEST_NAME or len(why) > LONGEST_WHY:
            raise Refused(f"a name has at most {_LONGEST_NAME} characters, a reason (why) at most {LONGEST_WHY:,}")
        patch = _patch(name, changes)
        with self.referee() as referee:
            if entry := referee.known(patch):
                return {"state": "decided", "known": True, "entry": asdict(entry)}
            found = look(referee, name, patch)
            if found["refused"]:
                raise Refused(f"{found['refused']}; nothing was queued")
            queue = Queue.of(referee.store, referee.ledger)
            _fits(queue, name, plain(patch))
            ticket = queue.ask(name, plain(patch), why)
            ahead = [each.id for each in queue.waiting()].index(ticket.id)
            more = {"ahead": ahead, "trials": found["trials"], "core_seconds": found["core_seconds"]}
            after = "state(wait_seconds=50, ticket=…) until it is decided"
            return {**_told(replace(ticket, state=WAITING)), **more, "next": after}

    def ledger(self) -> dict[str, Any]:
        """Everything that was tried and what came of it."""
        with self.referee() as referee:
            return referee.ledger.told()

    def state(self, ticket: str | None = None) -> dict[str, Any]:
        """Who is champion, which tickets run and wait, what became of the others, and how much of the budget is spent.
        With a ticket, its state first. Raises Refused for one that is none."""
        with self.referee() as referee:
            queue, store = Queue.of(referee.store, referee.ledger), referee.store
            holder = store.holder(lock_name(referee.study.study))
            tickets = [_now(each, holder is not None) for each in queue.tickets()]
            head = {}
            if ticket is not None:
                head = {"asked": self._asked(ticket, tickets, referee)}
            return {
                **head,
                "champion": referee.champion,
                "candidate": [*referee.candidate],
                "entries": len(referee.ledger.entries),
                "running": None if holder is None else {"by": name_of(holder), **_progress(referee)},
                "queue": [_told(each) for each in tickets if each.open],
                "ended": [_told(each) for each in tickets if not each.open and each.state != "decided"],
                "level": referee.level,
                "budget": referee.allowance.standing(),
            }

    def _asked(self, ticket: str, tickets: list[Ticket], referee: Standing) -> dict[str, Any]:
        """What became of one ticket."""
        found = next((each for each in tickets if each.id == ticket), None)
        if found is None:
            known = ", ".join(each.id for each in tickets[-20:]) or "none yet"
            raise Refused(f"there is no ticket {ticket[:40]!r}; there are {known}")
        entry = None if found.entry is None else referee.ledger.entries[found.entry - 1]
        return {**_told(found), **({"entry": asdict(entry)} if entry else {})}

    def diagnostics(self, entry: str | int) -> dict[str, Any]:
        """The losses and curves of one challenger's trials. Raises Refused for none of the ledger."""
        with self.referee() as referee:
            entries = referee.ledger.entries
            found = [each for each in entries if str(entry) in (str(each.number), each.name)]
            if not found:
                known = ", ".join(f"{each.number} ({each.name})" for each in entries[-20:]) or "none yet"
                raise Refused(f"the ledger has no entry {str(entry)[:80]!r}; it has {known}")
            return diagnosed(referee.store, found[-1], referee.ledger.round(found[-1].number))

    def withdraw(self, ticket: str) -> dict[str, Any]:
        """Takes a waiting ticket out of the queue. Raises Refused for one that does not wait."""
        with self.referee() as referee:
            queue = Queue.of(referee.store, referee.ledger)
            held = referee.store.holder(lock_name(referee.study.study)) is not None
            told = self._asked(ticket, [_now(each, held) for each in queue.tickets()], referee)
            found = queue.find(ticket)
            if found is None or told["state"] != WAITING:
                raise Refused(f"ticket {ticket} does not wait: it is {told['state']}")
            queue.end(found, "withdrawn")
            return _told(replace(found, state="withdrawn"))

    def next(self) -> tuple[Job | None, bool]:
        """The job of the oldest ticket that waits, None without one; and whether another process writes the ledger."""
        with Store.open(self.job.store) as store:
            if store.holder(lock_name(self.job.load().study)) is not None:
                return None, True
        with self.referee() as referee:
            waiting = Queue.of(referee.store, referee.ledger).waiting()
            return (replace(self.job, ticket=waiting[0].id) if waiting else None), False

    def version(self) -> dict[str, dict[str, float]]:
        """What is another one when any ticket or ledger of the store has changed; quick."""
        with Store.open(self.job.store) as store:
            return store.names([KIND, LEDGER])

    def crashed(self, ticket: str, code: int) -> None:
        """Says of a ticket whose process has ended without a word that it failed, so that it does not run for ever."""
        with self.referee() as referee:
            queue = Queue.of(referee.store, referee.ledger)
            found = queue.find(ticket)
            if found is not None and found.open:
                queue.end(found, "failed", f"its process ended with exit code {code}; the server's stderr says why")


def _patch(name: str, changes: Any) -> Patch:
    """From YAML, or from JSON as it is. Raises SpecError for what is none, or far too large."""
    node = Node.of(changes)
    if nodes_in(node) > MAX_NODES or len(json.dumps(changes)) > MAX_BYTES:
        raise SpecError.of("changes", f"a patch has at most {MAX_BYTES:,} bytes and {MAX_NODES:,} values")
    if isinstance(changes, str):
        node = read_text(changes, "<changes>")
    if not node.value or not isinstance(node.value, dict | list):
        message = f"must be a mapping from paths to values or a list of components, found {node.kind}"
        raise SpecError.of("changes", message if node.value else "changes nothing; name a path and a value")
    patch = patch_of(node, f"challengers.{name}")
    problems = [
        Problem(setting.path, "names data or files of this machine; its owner alone chooses them, in the study")
        for setting in patch.settings
        if setting.path.startswith("train.") and setting.path.split(".")[1] in (*_OF_THE_OWNER, "*")
    ]
    if problems:
        raise SpecError(problems)
    return patch


def _fits(queue: Queue, name: str, changes: list[Any]) -> None:
    """Raises Refused for a challenger for which the queue has no place."""
    waiting = queue.waiting()
    if any(each.name == name and each.changes != changes for each in waiting):
        raise Refused(f"another challenger that waits is called '{name}'; call this one otherwise")
    if same := [each for each in waiting if each.changes == changes and each.name != name]:
        raise Refused(f"the same changes wait already, as '{same[0].name}' (ticket {same[0].id})")
    if len(waiting) >= MOST_WAITING:
        raise Refused(f"{MOST_WAITING} challengers wait already; ask again when some are decided")


def _now(ticket: Ticket, held: bool) -> Ticket:
    """A ticket, which does not run where nobody holds the ledger's lock: who ran it was killed."""
    return ticket if held or ticket.state != RUNNING else replace(ticket, state=WAITING)


def _told(ticket: Ticket) -> dict[str, Any]:
    """A ticket as JSON, without what is empty."""
    told = {"ticket": ticket.id, "name": ticket.name, "state": ticket.state, "message": ticket.message}
    return {name: value for name, value in told.items() if value != ""}


def _progress(referee: Standing) -> dict[str, Any]:
    """How many trials of the round that goes on are in which state."""
    name = referee.ledger.round(len(referee.ledger.entries) + 1)
    counts: dict[str, int] = {}
    for row in referee.store.study_trials(name):
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    return {"round": name, "trials": counts}

"""The queue of a ledger: challengers that wait for their turn, kept in the store, whoever proposes them.

A ticket is one challenger. It outlives the program that asked for it, and is worked off once, whichever process does.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from archlab.search.challenge.ledger import Ledger, round_of
from archlab.search.store.store import Store
from archlab.search.utils.canonical import canonical_json

KIND = "ticket"
WAITING, RUNNING = "waiting", "running"


@dataclass(frozen=True)
class Ticket:
    """A challenger and how far it is: waiting, running (if anybody writes the ledger; else it waits), decided (the
    ledger's `entry`), refused (it does not go with the champion that it would meet), over budget, failed or withdrawn,
    for a reason that `message` says."""

    id: str
    number: int
    name: str
    changes: list[Any]
    why: str = ""
    state: str = WAITING
    message: str = ""
    entry: int | None = None

    @property
    def open(self) -> bool:
        """Whether it is to be worked off."""
        return self.state in (WAITING, RUNNING)


@dataclass(frozen=True)
class Queue:
    """The tickets of one ledger in a store."""

    store: Store
    study: str
    base: str

    @classmethod
    def of(cls, store: Store, ledger: Ledger) -> Queue:
        """That of a ledger."""
        return cls(store, ledger.study, ledger.base)

    def tickets(self) -> list[Ticket]:
        """All of them, in the order in which they were asked for."""
        names = {each.name for each in fields(Ticket)} - {"id"}
        found = []
        for key, told in self.store.recall_all([KIND]).get(KIND, {}).items():
            study, base, ticket = json.loads(key)
            if (study, base) == (self.study, self.base):
                found.append(Ticket(ticket, **{name: told[name] for name in names if name in told}))
        return sorted(found, key=lambda each: (each.number, each.id))

    def find(self, ticket: str) -> Ticket | None:
        """The ticket with this id."""
        return next((each for each in self.tickets() if each.id == ticket), None)

    def waiting(self) -> list[Ticket]:
        """Those that wait or run, the oldest first."""
        return [each for each in self.tickets() if each.open]

    def ask(self, name: str, changes: list[Any], why: str) -> Ticket:
        """The ticket of this challenger, which waits from now on; asking twice is the same as asking once."""
        before = self.tickets()
        mine = hashlib.sha256(canonical_json([name, changes]).encode()).hexdigest()[:8]
        old = next((each for each in before if each.id == mine), None)
        if old is not None and old.open:
            return old
        number = 1 + max((each.number for each in before), default=0)
        ticket = Ticket(mine, number, name, changes, why or (old.why if old else ""))
        self._keep(ticket)
        return ticket

    def end(self, ticket: Ticket, state: str, message: str = "", entry: int | None = None) -> None:
        """Says what became of a ticket."""
        self._keep(replace(ticket, state=state, message=message, entry=entry))

    def _keep(self, ticket: Ticket) -> None:
        told = {name: value for name, value in asdict(ticket).items() if name != "id"}
        self.store.remember(KIND, canonical_json([self.study, self.base, ticket.id]), told)


def lock_name(study: str) -> str:
    """Under which lock a ledger is written, one process at a time."""
    return round_of(study, "ledger")

"""The processes of one trial as one: how the trial ends when each of them ends in a way of its own."""

from __future__ import annotations

import json
import random
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from archlab.search.executors.executor import LOST
from archlab.search.executors.forkserver import connected

Answer = dict[str, Any]

_WORST = ("node", "infra", "oom", "crash", "disk", "busy", "user", "cancelled", "interrupted")
# From the first failure to the end of all: who lost a neighbour often says so before the neighbour's death is known.
FAILED_S = 2.0
LED_S = 5.0  # from the end of rank 0, who had the others do their part, to the end of all
_FIRST_PORT = 20_000  # above those that Ray gives to its workers


class Ends:
    """Collects how the ranks of a trial end, and says when the trial is over and how.

    Rank 0 writes what the trial leaves: its result, and its word that it stopped on request, stand. Else the worst
    failure does, the machine's before the process's before the trainer's, and the first of that kind.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._answers: dict[int, Answer] = {}
        self._deadline = float("inf")

    def add(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer
        well = "outcome" in answer or answer["failure"] == "interrupted"
        if rank == 0 or not well:
            self._deadline = min(self._deadline, time.monotonic() + (LED_S if well else FAILED_S))

    def over(self) -> bool:
        """Whether nothing more is waited for; the ranks that are left are to be killed."""
        return len(self._answers) == self._world or time.monotonic() > self._deadline

    def answer(self) -> Answer:
        """{"outcome": result} or {"failure": kind, "message"}."""
        lead = self._answers.get(0, {})
        if "outcome" in lead or lead.get("failure") == "interrupted":
            return lead
        failures = [(rank, each) for rank, each in self._answers.items() if "failure" in each]
        if not failures:
            return {"failure": "crash", "message": "rank 0 ended without a result"}
        rank, worst = min(failures, key=lambda each: (_WORST.index(each[1]["failure"]), LOST in each[1]["message"]))
        return {**worst, "message": f"rank {rank}: {worst['message']}" if self._world > 1 else worst["message"]}


def ask(address: str, jobs: list[dict[str, Any]]) -> Answer:
    """Has a fork server run the ranks of a trial, and returns how the trial ends, when all of them are gone.

    Dying meanwhile kills them. Raises ConnectionError without a server.
    """
    ends = Ends(len(jobs))
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, job in enumerate(jobs):
            connection = stack.enter_context(connected(address))
            connection.sendall(json.dumps(job).encode() + b"\n")
            selector.register(connection, selectors.EVENT_READ, (rank, bytearray()))
        ready: list[Any] = []
        while selector.get_map() and (ready or not ends.over()):  # what was said is heard, however late we look
            ready = selector.select(timeout=0.1)
            for key, _ in ready:
                rank, said = key.data
                if answer := _read(key.fileobj, said, address):
                    ends.add(rank, answer)
                    selector.unregister(key.fileobj)
        for key in selector.get_map().values():
            _hang_up(key.fileobj)
    return ends.answer()


def _read(connection: Any, said: bytearray, address: str) -> Answer | None:
    """The answer, when it is whole."""
    part = connection.recv(65536)
    if not part:
        raise ConnectionResetError(f"the fork server at {address} went away")
    said += part
    if not said.endswith(b"\n"):
        return None
    found: Answer = json.loads(said)
    return found


def _hang_up(connection: Any) -> None:
    """Has the server kill a rank, and waits until that is done: then it closes the connection.

    Where the server has died, its ranks have died with it.
    """
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def free_port() -> int:
    """A port of loopback that nobody listens on now, and that the kernel gives to nobody who asks for any.

    One of the kernel's own choice may be the near end of somebody's connection by the time it is listened on.
    """
    low = _FIRST_PORT
    with suppress(OSError, ValueError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    wanted = [random.SystemRandom().randrange(_FIRST_PORT, low) for _ in range(50)] if low > _FIRST_PORT + 1000 else []
    for port in [*wanted, 0]:
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            bound: int = found.getsockname()[1]
            return bound
    raise OSError("no port of loopback is free")

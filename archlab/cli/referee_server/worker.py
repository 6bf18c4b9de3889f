"""Has the tickets of a queue worked off, one after the other, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from archlab.cli.referee_server.desk import Desk
from archlab.search.challenge.work import BUSY
from archlab.search.running.ending import EXIT_INTERRUPTED, EXIT_TERMINATED

_LOOK_S = 1.0  # between two looks at a ledger that another process writes
_PATIENCE_S = 40.0  # for trials to write checkpoints; clients give up after a minute
_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)


class Worker:
    """The process that runs now, and its ticket; None where none does."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.ticket: str | None = None
        self._process: Process | None = None
        self._loop: asyncio.Task[None] | None = None
        self._stopping = self._let_go = False

    def begin(self) -> None:
        """Works off what waits, from now on."""
        self._stopping = False
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._work())

    async def stop(self) -> str | None:
        """Ends what runs here, whose trials write checkpoints first, and waits for that a while. Returns its ticket,
        None where nothing ran."""
        self._stopping, ticket = True, self.ticket
        self.let_go()
        if self._loop is not None:
            await asyncio.wait({self._loop}, timeout=_PATIENCE_S)
        return ticket

    def let_go(self) -> None:
        """Asks what runs to end, without waiting for it."""
        if self._process is not None and self._process.stdin is not None:
            self._let_go = True
            self._process.stdin.close()

    async def _work(self) -> None:
        while not self._stopping:
            job, busy = await asyncio.to_thread(self.desk.next)
            if busy:
                await asyncio.sleep(_LOOK_S)
                continue
            if job is None:
                return
            code = await self._run(job.ticket, job.text())
            if code == BUSY:
                await asyncio.sleep(_LOOK_S)
            elif code in _STOPPED:
                if not self._let_go:
                    return  # somebody else has stopped it
            elif code:
                await asyncio.to_thread(self.desk.crashed, job.ticket, code)

    async def _run(self, ticket: str, job: str) -> int:
        """The exit code of the process that works off a ticket. It leads a session, as who ends us ends all of ours."""
        words = [sys.executable, "-m", "archlab.search.challenge.work", job]
        self._process = await asyncio.create_subprocess_exec(
            *words, stdin=PIPE, stdout=sys.stderr, start_new_session=True, env=os.environ
        )
        self.ticket, self._let_go = ticket, False
        try:
            if self._stopping:
                self.let_go()
            with suppress(ProcessLookupError):
                return await self._process.wait()
            return 0
        finally:
            self._process, self.ticket = None, None

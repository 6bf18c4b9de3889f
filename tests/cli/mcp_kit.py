"""What the tests of `archlab mcp` share: a study whose trials take a moment, and a server of it, here or elsewhere."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mcp import Client, ClientSession, StdioServerParameters, stdio_client

from archlab.cli.referee_server.desk import Desk
from archlab.cli.referee_server.serve import Answers, server_of
from archlab.cli.referee_server.worker import Worker
from archlab.search.challenge.work import Job
from tests.search.study_files import SECTIONS, TINY_MODEL, write_study

ROOT = Path(__file__).resolve().parents[2]
FEW = SECTIONS["train"].replace("tokens: 1k", "tokens: 256")  # two steps
GATE = {"block.attention.gate": {"position": "sdpa"}}
WILD = {"train.lr": 1e30, "train.clip": None}
Call = Callable[..., Awaitable[Any]]


def study_in(folder: Path) -> Path:
    """A study with one component, and its corpus."""
    return write_study(folder, model=TINY_MODEL, variants="variants: {baseline: {}}", train=FEW)


def desk_in(folder: Path, **rules: Any) -> Desk:
    """A desk of the study in a folder, by the rules of a server."""
    told = {"seeds": 2, "of_life": True, **rules}
    return Desk(Job(str(study_in(folder)), str(folder / "store"), "", rules=told, executor="inline"))


async def called(client: Any, tool: str, given: dict[str, Any]) -> Any:
    """What a tool answers: JSON, or the text of an error."""
    found = await client.call_tool(tool, given)
    return "".join(each.text for each in found.content) if found.is_error else found.structured_content


def run(session: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Its result, from a thread of its own: in this one a browser of earlier tests may have a loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(session())).result()


def ask(desk: Desk, tool: str, **given: Any) -> Any:
    """What a client in this process is answered."""

    async def talk() -> Any:
        async with Client(server_of(Answers(desk, Worker(desk)))) as client:
            return await called(client, tool, given)

    return run(talk)


def words_of(folder: Path, *more: str) -> list[str]:
    """The command line of a server."""
    place = [str(study_in(folder)), "--store", str(folder / "store"), "--inline", "--seeds", "2"]
    return ["-m", "archlab", "mcp", *place, *more]


def environment() -> dict[str, str]:
    """That of a server: one thread, as other tests run beside it."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def over_stdio(folder: Path, talk: Callable[[Call], Awaitable[Any]], *more: str) -> Any:
    """What a client does with a server in a process of its own."""
    started = StdioServerParameters(command=sys.executable, args=words_of(folder, *more), env=environment(), cwd=folder)

    async def session() -> Any:
        async with stdio_client(started) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            return await talk(lambda tool, **given: called(client, tool, given))

    return run(session)


async def decided(call: Call, ticket: str) -> dict[str, Any]:
    """A ticket that is over."""
    while True:
        found = await call("state", wait_seconds=5, ticket=ticket)
        if found["asked"]["state"] not in ("waiting", "running"):
            return dict(found["asked"])

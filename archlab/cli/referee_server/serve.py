"""Speaks the Model Context Protocol on standard input and output, and has the tickets of a queue worked off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.errors import unknown as unknown_name
from archlab.cli.referee_server.desk import Desk, Refused
from archlab.cli.referee_server.lines import Answered
from archlab.cli.referee_server.tools import MOST_WAIT_S, TOOLS
from archlab.cli.referee_server.worker import Worker
from archlab.search.challenge.queue import RUNNING, WAITING
from archlab.search.executors.executor import ResourcesError
from archlab.search.store.lock import StudyLocked
from archlab.search.store.store import StoreError, StoreRefused

_LOOK_S = 0.3  # between two looks at the store while somebody waits
INSTRUCTIONS = (
    "You propose changes to a language model's architecture or recipe. This server holds each against the champion of "
    'a study and says whether it is better. Begin with describe_language("patch"), describe_language("paths") and '
    "ledger(). Check each patch with check_patch, which is free. Then challenge(name, changes, why), and "
    "state(wait_seconds=50, ticket=...) until it is decided. A verdict is better, worse, equivalent, hopeless (more "
    "seeds would not make it better), undecided, diverged, failed or impossible. Only better changes the champion. "
    "diagnostics(entry) has the curves. The budget holds for the whole ledger: spend it on ideas that differ, and "
    "change one thing at a time."
)
TOGETHER = (
    " Here a challenge takes one seed, and is lower or not lower, which is no verdict yet: {} that were lower are "
    "confirmed together, under a name of their own, and become the champion or none of them does."
)


class Answers:
    """What each tool answers, from a desk and a worker."""

    def __init__(self, desk: Desk, worker: Worker) -> None:
        self.desk, self.worker = desk, worker

    async def answer(self, tool: str, given: dict[str, Any]) -> dict[str, Any]:
        """As JSON. Raises Refused, SpecError and what a store raises."""
        if tool not in TOOLS:
            raise Refused(unknown_name(tool, "tool", TOOLS))
        told = TOOLS[tool].checked(given)
        found: dict[str, Any] = await getattr(self, tool)(**told)
        return found

    async def describe_language(self, topic: str) -> dict[str, Any]:
        return await asyncio.to_thread(self.desk.describe, topic)

    async def check_patch(self, changes: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.desk.check, changes)

    async def challenge(self, name: str, changes: Any, why: str) -> dict[str, Any]:
        found = await asyncio.to_thread(self.desk.challenge, name, changes, why)
        self.worker.begin()
        return found

    async def ledger(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.desk.ledger)

    async def state(self, wait_seconds: float = 0.0, ticket: str | None = None) -> dict[str, Any]:
        """Now, or when something has changed since the question came."""
        if not 0 <= wait_seconds <= MOST_WAIT_S:
            raise Refused(
                f"state: 'wait_seconds' is 0 to {MOST_WAIT_S:g}, found {wait_seconds:g}; ask again to wait longer"
            )
        seen = await asyncio.to_thread(self.desk.version)
        found = await asyncio.to_thread(self.desk.state, ticket)
        left = wait_seconds
        while left > 0 and (ticket is None or found["asked"]["state"] in (WAITING, RUNNING)):
            await asyncio.sleep(min(_LOOK_S, left))
            left -= _LOOK_S
            if (now := await asyncio.to_thread(self.desk.version)) != seen:
                seen, found = now, await asyncio.to_thread(self.desk.state, ticket)
                if ticket is None:
                    break
        return {**found, "runs_here": self.worker.ticket}

    async def diagnostics(self, entry: str | int) -> dict[str, Any]:
        return await asyncio.to_thread(self.desk.diagnostics, entry)

    async def stop(self, ticket: str | None = None) -> dict[str, Any]:
        """Of one ticket, or of what this server runs."""
        if ticket is not None and ticket != self.worker.ticket:
            return await asyncio.to_thread(self.desk.withdraw, ticket)
        stopped = await self.worker.stop()
        if ticket is not None:
            return await asyncio.to_thread(self.desk.withdraw, ticket)
        found = await asyncio.to_thread(self.desk.state)
        waits = any(each["ticket"] == stopped for each in found["queue"])
        return {"stopped": stopped if waits else None, **found}


def server_of(answers: Answers) -> Server[Any]:
    """The protocol's server: the list of tools, and one call."""

    async def list_tools(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(
                    name=tool.name,
                    description=tool.about,
                    input_schema=tool.schema,
                    annotations=ToolAnnotations(read_only_hint=tool.reads, destructive_hint=False),
                )
                for tool in TOOLS.values()
            ]
        )

    async def call_tool(_: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        try:
            found = await answers.answer(params.name, params.arguments or {})
        except (Refused, SpecError, StoreError, StoreRefused, StudyLocked, ResourcesError, OSError) as error:
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
        return CallToolResult(
            content=[TextContent(type="text", text=json.dumps(found, ensure_ascii=False))], structured_content=found
        )

    several = answers.desk.rules.together
    instructions = INSTRUCTIONS + (TOGETHER.format(several) if several > 1 else "")
    return Server("archlab", version="1", instructions=instructions, on_list_tools=list_tools, on_call_tool=call_tool)


async def _talk(desk: Desk) -> None:
    worker = Worker(desk)
    server = server_of(Answers(desk, worker))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # what it runs ends with the pipe that goes with it
    async with stdio_server() as (read, write):
        await server.run(Answered(read, write), write, server.create_initialization_options())
    worker.let_go()


def serve(desk: Desk) -> None:
    """Until standard input ends. What runs then writes checkpoints, and the queue stays as it is."""
    asyncio.run(_talk(desk))
    sys.stderr.flush()
    os._exit(0)  # a question that is still looked at would keep it

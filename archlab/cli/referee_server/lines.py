"""Answers a line that is no message, such as JSON that is nested too deeply; the SDK itself would say nothing."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Self

from mcp.shared.message import SessionMessage
from mcp.types import ErrorData, JSONRPCError

_PARSE_ERROR = -32700
_ID = re.compile(r'"id"\s*:\s*(?:"([^"\\]{0,200})"|(\d{1,15}))')


class Answered:
    """A stream of messages: what can't be read is answered on `write` and left out."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write

    @property
    def last_context(self) -> Any:
        """The sender's, as the stream has it."""
        return getattr(self._read, "last_context", None)

    async def receive(self) -> Any:
        """The next message."""
        while isinstance(item := await self._read.receive(), Exception):
            await self._write.send(SessionMessage(answer(item)))
        return item

    async def aclose(self) -> None:
        """Closes the stream."""
        await self._read.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while isinstance(item := await self._read.__anext__(), Exception):
            await self._write.send(SessionMessage(answer(item)))
        return item

    async def __aenter__(self) -> Self:
        await self._read.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        found: bool | None = await self._read.__aexit__(kind, error, trace)
        return found


def answer(error: Exception) -> JSONRPCError:
    """What is said of a line that `error` is about: to the request that it seems to be, if its id can be read."""
    told: list[Any] = getattr(error, "errors", lambda **_: [])(include_url=False, include_context=False)
    line = next((each["input"] for each in told if isinstance(each.get("input"), str)), "")
    found = _ID.search(line[:1000]) or _ID.search(line[-1000:])
    number = None if found is None else found[1] if found[1] is not None else int(found[2])
    what = told[0]["msg"] if told else str(error)
    return JSONRPCError(
        jsonrpc="2.0", id=number, error=ErrorData(code=_PARSE_ERROR, message=f"not a message of the protocol: {what}")
    )

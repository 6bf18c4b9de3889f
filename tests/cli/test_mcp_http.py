"""`archlab mcp --port`: the same referee over HTTP, for those who show the token, from this machine alone."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import httpx2
from click.testing import CliRunner
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from archlab.cli.main import main
from archlab.cli.referee_server.over_http import TokenDoor
from archlab.dashboards.rate import GUESSES
from tests.cli.mcp_kit import GATE, WILD, called, decided, desk_in, environment, run, words_of

TOKEN = "a token of the tests"


def test_who_shows_no_token_is_not_let_in_and_who_guesses_has_to_wait() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def statuses(shown: list[bytes | None], address: str) -> list[int]:
        found: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        for each in shown:
            headers = [] if each is None else [(b"authorization", each)]
            await door({"type": "http", "headers": headers, "client": (address, 1)}, None, send)
        return found

    token = "ein Schlüssel der Tests"
    door, right = TokenDoor(application, token), f"Bearer {token}".encode()
    wrong = [None, b"", b"Bearer ", token.encode(), b"Basic x", right + b"x", b"Bearer \xff", right]
    assert run(lambda: statuses(wrong, "127.0.0.1")) == [401] * 7 + [200]
    guesses = [f"Bearer guess {n}".encode() for n in range(GUESSES + 1)]
    assert run(lambda: statuses([*guesses, right], "127.0.0.2")) == [401] * GUESSES + [429, 429]
    assert run(lambda: statuses([right], "127.0.0.1")) == [200]


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server in a process of its own, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, *words_of(folder, "--port", str(port))]
    told = {**environment(), "ARCHLAB_TOKEN": TOKEN}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=told)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert f"http://127.0.0.1:{port}/mcp" in lines[1] and TOKEN not in "".join(lines)
        yield port, process
    finally:
        process.kill()
        process.communicate()


def status(port: int, body: str, **headers: str) -> int:
    """What a request that no SDK makes is answered."""
    kinds = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    with closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/mcp", body, {**kinds, **headers})
        with connection.getresponse() as answer:
            return answer.status


@pytest.mark.slow
def test_two_clients_get_verdicts_strangers_none_and_ctrl_c_leaves_the_queue(tmp_path: Path) -> None:
    async def propose(port: int, name: str, changes: Any) -> str:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120) as http,
            streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http) as (read, write),
            ClientSession(read, write) as client,
        ):
            await client.initialize()
            asked = await called(client, "challenge", {"name": name, "changes": changes, "why": ""})
            if name == "left":
                return str(asked["state"])
            found = await decided(lambda tool, **given: called(client, tool, given), asked["ticket"])
            return str(found["entry"]["name"])

    async def both(port: int) -> list[str]:
        return await asyncio.gather(propose(port, "gate", GATE), propose(port, "wild", WILD))

    hello = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
    deep = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ' + '{"a":' * 30_000 + "1" + "}" * 30_001
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with served(tmp_path) as (port, process):
        assert status(port, hello) == 401
        assert status(port, hello, Host="evil.example", **bearer) == 421
        assert status(port, hello, Origin="http://evil.example", **bearer) == 403
        assert status(port, deep, **bearer) == 400
        assert status(port, "x" * 5_000_000, **bearer) == 413
        assert run(lambda: both(port)) == ["gate", "wild"]
        assert run(lambda: propose(port, "left", {"block.norm": "layernorm"})) in ("waiting", "running")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    state = desk_in(tmp_path).state()
    assert state["entries"] == 2 and [each["name"] for each in state["queue"]] == ["left"]


def test_a_port_that_is_taken_and_a_token_that_is_short_are_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = words_of(tmp_path, "--port", str(taken.getsockname()[1]))[2:]
        for token, message in ((TOKEN, "name another with --port"), ("short", "use at least 16")):
            monkeypatch.setenv("ARCHLAB_TOKEN", token)
            found = CliRunner().invoke(main, words)
            assert found.exit_code == 2 and message in found.stderr and len(found.stderr.splitlines()) == 1

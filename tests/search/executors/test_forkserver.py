"""The fork server's loop with real sockets and processes: what ends at the same moment ends once."""

import os
import selectors
import socket

import pytest

from archlab.search.executors.forkserver import _Child, _Server


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server in this process, and one that waits for this test's turns."""
    read, write = os.pipe()
    with open(read) as starter:
        monkeypatch.setattr("sys.stdin", starter)
        made = _Server(str(tmp_path / "socket"))
        yield made
        made.selector.close()
        made.listener.close()
    os.close(write)


def ended_child(server):
    """A child that has ended and the caller's end of its connection, neither noticed by the server yet."""
    caller, connection = socket.socketpair()
    child = _Child(server, connection)
    server.selector.register(connection, selectors.EVENT_READ, child.requested)
    child.pipe, write = os.pipe()
    child.pid = os.posix_spawn("/bin/true", ["true"], {})
    os.close(write)
    server.selector.register(child.pipe, selectors.EVENT_READ, child.reported)
    return child, caller


class Batch:
    """A selector that reports what is left of these registrations at once, in this order."""

    def __init__(self, selector, *files):
        self._selector, self._keys = selector, [selector.get_key(file) for file in files]

    def select(self, _timeout):
        return [(key, selectors.EVENT_READ) for key in self._keys]

    def __getattr__(self, name):
        return getattr(self._selector, name)


@pytest.mark.parametrize("first", ["pipe", "connection"])
def test_a_child_and_its_caller_that_end_in_one_batch_leave_the_server_alive(server, first):
    child, caller = ended_child(server)
    caller.close()
    second = {"pipe": "connection", "connection": "pipe"}[first]
    server.selector = Batch(server.selector, getattr(child, first), getattr(child, second))
    server.turn()
    assert child.connection.fileno() == -1
    assert {key.data for key in server.selector.get_map().values()} == {server.accept, server.starter_died}

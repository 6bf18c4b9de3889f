"""How often an address may ask the dashboard, and how often it may have the token wrong. The clock stands still until a
test moves it."""

import pytest
from werkzeug.test import Client

from archlab.dashboards import rate
from archlab.dashboards.door import Door
from archlab.dashboards.rate import GUESSES, MOST_ADDRESSES, REQUESTS, REQUESTS_PER_S, Buckets, TooOften, client_of

TOKEN = "correct-horse-battery-staple"
PORT = 8050


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Guarded:
    """A door with a clock of its own, asked from addresses."""

    def __init__(self, token=None):
        self.clock = Clock()
        inside = Door(self._inside, "0.0.0.0", token, self.clock)
        self._client = Client(inside, use_cookies=False)

    @staticmethod
    def _inside(environ, start):
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"inside"]

    def ask(self, path="/", address="192.0.2.1", method="GET", body=None, **headers):
        """The answer to a request from an address."""
        told = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
        told |= {"HTTP_HOST": f"127.0.0.1:{PORT}", "REMOTE_ADDR": address}
        return self._client.open(path, method=method, data=body, environ_overrides=told)

    def statuses(self, count, **how):
        """The statuses of so many answers."""
        return [self.ask(**how).status_code for _ in range(count)]

    def wrong(self, count, start=0, **how):
        """The statuses of so many tokens that are wrong, no two of them alike."""
        return [self.ask(f"/?token=wrong{start + each}", **how).status_code for each in range(count)]


def test_who_asks_too_often_waits_as_long_as_the_answer_says():
    door = Guarded()
    assert set(door.statuses(REQUESTS)) == {200}
    answer = door.ask()
    assert answer.status_code == 429 and answer.text == "too many requests from this address: ask again in 1 second\n"
    assert answer.headers["Retry-After"] == "1" and answer.headers["Cache-Control"] == "no-store"
    assert door.ask(address="192.0.2.2").status_code == 200, "another address is another client"
    door.clock.now += 1
    assert door.statuses(int(REQUESTS_PER_S) + 1) == [200] * int(REQUESTS_PER_S) + [429]
    door.clock.now += 1e6
    assert door.statuses(REQUESTS + 1) == [200] * REQUESTS + [429], "it saves up no more than that"


def test_fifty_tabs_that_ask_every_two_seconds_are_never_told_to_wait():
    door = Guarded()
    assert set(door.statuses(20 * 40)) == {200}, "twenty pages that are opened at once"
    for _ in range(60):
        door.clock.now += 2
        assert set(door.statuses(50 * 2)) == {200}


def test_loopback_is_an_address_too_and_no_header_makes_another_one():
    door = Guarded()
    door.statuses(REQUESTS, address="127.0.0.1")
    for name in ("X_Forwarded_For", "Forwarded", "X_Real_Ip"):
        assert door.ask(address="127.0.0.1", **{name: "192.0.2.9"}).status_code == 429


@pytest.mark.parametrize("how", ["address", "form", "header", "cookie"])
def test_a_few_wrong_tokens_are_all_that_an_address_may_try(how):
    door = Guarded(TOKEN)

    def guess(value):
        if how == "address":
            return door.ask(f"/?token={value}")
        if how == "form":
            return door.ask("/login", method="POST", body=f"token={value}".encode())
        return door.ask(**({"Authorization": f"Bearer {value}"} if how == "header" else {"Cookie": _cookie(value)}))

    assert [guess(f"wrong{each}").status_code for each in range(GUESSES + 1)] == [401] * GUESSES + [429]
    answer = guess(_cookie_value(door) if how == "cookie" else TOKEN)
    assert answer.status_code == 429, "a right one is not told from a wrong one any more"
    assert answer.headers["Retry-After"] == "60" and answer.text.startswith("too many wrong tokens")
    assert door.ask().status_code == 401, "who brings none is asked for it"
    assert door.ask(f"/?token={TOKEN}", address="192.0.2.2").status_code == 200
    door.clock.now += 61
    assert guess("another").status_code == 401 and guess("more").status_code == 429


def _cookie(value):
    return f"archlab-80={value}; archlab-{PORT}={value}"


def _cookie_value(door):
    opened = door.ask(f"/?token={TOKEN}", address="192.0.2.3")
    return opened.headers["Set-Cookie"].partition(";")[0].partition("=")[2]


def test_a_right_token_costs_nothing():
    door = Guarded(TOKEN)
    assert set(door.statuses(5 * GUESSES, Authorization=f"Bearer {TOKEN}")) == {200}
    assert door.wrong(GUESSES) == [401] * GUESSES


def test_a_tab_with_an_old_cookie_locks_nobody_out():
    door = Guarded(TOKEN)
    assert set(door.statuses(5 * GUESSES, Cookie=_cookie("before"))) == {401}
    assert door.ask(f"/?token={TOKEN}").status_code == 200


def test_who_is_logged_in_stays_so_while_another_one_of_that_address_guesses():
    door = Guarded(TOKEN)
    opened = _cookie(_cookie_value(door))
    assert door.ask(Cookie=opened).text == "inside"
    assert door.wrong(3 * GUESSES)[-1] == 429
    assert door.ask(Cookie=opened).text == "inside"
    assert door.ask(Authorization=f"Bearer {TOKEN}").status_code == 429


def test_a_value_that_is_right_as_a_cookie_is_no_token():
    door = Guarded(TOKEN)
    value = _cookie_value(door)
    assert door.ask(Cookie=_cookie(value)).text == "inside"
    assert door.ask(Authorization=f"Bearer {value}").status_code == 401
    assert door.ask(Cookie=_cookie(TOKEN)).status_code == 401 and door.ask(f"/?token={TOKEN}").status_code == 200


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_network_of_ipv6_is_one_client(address, client):
    assert client_of(address) == client


def test_the_addresses_that_are_remembered_are_few():
    clock = Clock()
    buckets = Buckets(1, 1.0, "too many", clock)
    for each in range(3 * MOST_ADDRESSES):
        buckets.take(str(each))
    assert len(buckets._held) == MOST_ADDRESSES
    with pytest.raises(TooOften, match="too many from this address: ask again in 1 second"):
        buckets.take(str(3 * MOST_ADDRESSES - 1))
    tries = rate.Tries(clock)
    for each in range(5 * GUESSES):
        assert tries.is_right("192.0.2.1", "token", "known", lambda _: True), each
    for each in range(2 * MOST_ADDRESSES):
        assert not tries.is_right(str(each), "token", "x", lambda _: False)
    assert len(tries._known) == MOST_ADDRESSES

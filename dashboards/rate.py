"""How often one address may ask, and how many wrong tokens it may try: a token bucket for each."""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

REQUESTS, REQUESTS_PER_S = 1000, 50.0
"""Of an address at once, and from then on. A page takes some forty when it is opened first, and asks once or twice in
two seconds while it is open, so this is that of fifty tabs."""
GUESSES, GUESSES_PER_S = 10, 1 / 60
"""Wrong tokens of an address."""
MOST_ADDRESSES = 4096
"""That are remembered; the one that asked longest ago is forgotten first."""
_VALUES = 64  # of an address that are remembered

Clock = Callable[[], float]


class TooOften(Exception):
    """An address has asked too often. It may ask again in `wait_s` seconds."""

    def __init__(self, what: str, wait_s: float) -> None:
        self.wait_s = max(1, math.ceil(wait_s))
        unit = "second" if self.wait_s == 1 else "seconds"
        super().__init__(f"{what} from this address: ask again in {self.wait_s} {unit}")


class Buckets:
    """A bucket per address, which holds `size` at first and gets `per_s` more each second up to that."""

    def __init__(self, size: int, per_s: float, what: str, clock: Clock) -> None:
        self._size, self._per_s, self._what, self._clock = float(size), per_s, what, clock
        self._held: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was
        self._lock = threading.Lock()

    def take(self, address: str) -> None:
        """Takes one out of the address's bucket. Raises TooOften where it is empty."""
        with self._lock:
            left = self._left(address)
            if left < 1:
                self._keep(address, left)
                raise TooOften(self._what, (1 - left) / self._per_s)
            self._keep(address, left - 1)

    def give_back(self, address: str) -> None:
        """Puts one back that was taken."""
        with self._lock:
            self._keep(address, self._left(address) + 1)

    def _left(self, address: str) -> float:
        left, when = self._held.get(address, (self._size, self._clock()))
        return min(self._size, left + self._per_s * (self._clock() - when))

    def _keep(self, address: str, left: float) -> None:
        self._held[address] = min(self._size, left), self._clock()
        self._held.move_to_end(address)
        if len(self._held) > MOST_ADDRESSES:
            self._held.popitem(last=False)


class Tries:
    """Whether a value is the right one, for addresses that may be wrong so often.

    A value that an address has tried before is answered as it was then and costs nothing: a tab that is left open with
    an old cookie locks nobody out, and who is logged in stays so while somebody else behind the same address guesses.
    """

    def __init__(self, clock: Clock) -> None:
        self._buckets = Buckets(GUESSES, GUESSES_PER_S, "too many wrong tokens", clock)
        self._known: OrderedDict[str, OrderedDict[tuple[str, bytes], bool]] = OrderedDict()
        self._lock = threading.Lock()

    def is_right(self, address: str, kind: str, value: str, check: Callable[[str], bool]) -> bool:
        """What `check` says of a value of that kind; an empty one is none. Raises TooOften where the address may not
        try."""
        if not value:
            return False
        tried = kind, sha256(value.encode("utf-8", "surrogateescape")).digest()
        with self._lock:
            mine = self._known.setdefault(address, OrderedDict())
            self._known.move_to_end(address)
            if tried not in mine:
                self._buckets.take(address)
                mine[tried] = check(value)
                if mine[tried]:
                    self._buckets.give_back(address)
            mine.move_to_end(tried)
            for kept, most in ((mine, _VALUES), (self._known, MOST_ADDRESSES)):
                if len(kept) > most:
                    kept.popitem(last=False)
            return mine[tried]


def client_of(address: str) -> str:
    """Whose address it is: in IPv6 a network of 64 bits is one client's."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))

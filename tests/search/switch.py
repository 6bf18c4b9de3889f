"""An Ethernet switch in a process of its own, whose cables can be cut, deaf in one direction, lossy and slow.

Each machine is a network namespace with one TAP device. `python -m tests.search.switch PID:ADDRESS …` plugs a cable
into the namespace of each process (0: of this one), then reads lines of JSON: {"from": machine, "to": machine,
"lost": share of frames, "delay_s", "jitter_s", "seed"} says what becomes of frames from one machine to another.
It needs root, and nothing of the kernel but TUN: netem is not in every kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from contextlib import suppress

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_NEWNET = 0x40000000
_FRAME_BYTES = 65536


class Cable:
    """What becomes of the frames from one machine to another."""

    def __init__(self, lost: float = 0.0, delay_s: float = 0.0, jitter_s: float = 0.0, seed: int = 0) -> None:
        self.lost, self.delay_s, self.jitter_s = lost, delay_s, jitter_s
        self.chance, self.last = random.Random(seed), 0.0

    def arrives(self, now: float) -> float | None:
        """When a frame that is sent now is there; None for one that is lost. None overtakes another."""
        if self.lost and self.chance.random() < self.lost:
            return None
        if not self.delay_s:
            return now
        self.last = max(self.last, now + self.delay_s + self.chance.uniform(-self.jitter_s, self.jitter_s))
        return self.last


class Switch:
    """Forwards frames by the addresses that it has seen, in one thread."""

    def __init__(self, taps: list[int]) -> None:
        self.taps, self.cables = taps, {}
        self.places: dict[bytes, int] = {}  # the machine by hardware address
        self.waiting: list[tuple[float, int, int, bytes]] = []  # when due, a number that keeps order, machine, frame
        self.count, self.half = 0, b""
        self.selector = selectors.DefaultSelector()
        for machine, tap in enumerate(taps):
            os.set_blocking(tap, False)
            self.selector.register(tap, selectors.EVENT_READ, machine)
        self.selector.register(0, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            wait = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            for key, _ in self.selector.select(wait):
                if key.data is not None:
                    self.take(key.data)
                elif not self.told():
                    return
            self.deliver()

    def told(self) -> bool:
        """Changes cables as asked; False when whoever asks is gone."""
        said = os.read(0, _FRAME_BYTES)
        *lines, self.half = (self.half + said).split(b"\n")
        for line in lines:
            cable = json.loads(line)
            place = cable.pop("from"), cable.pop("to")
            self.cables[place] = Cable(**cable)
        return bool(said)

    def take(self, machine: int) -> None:
        """What a machine has sent by now."""
        with suppress(BlockingIOError):
            for _ in range(64):
                frame = os.read(self.taps[machine], _FRAME_BYTES)
                self.places[frame[6:12]] = machine
                known = self.places.get(frame[:6]) if not frame[0] & 1 else None
                for other in [known] if known is not None else range(len(self.taps)):
                    if other != machine:
                        self.send(machine, other, frame)

    def send(self, machine: int, other: int, frame: bytes) -> None:
        cable = self.cables.get((machine, other))
        due = cable.arrives(time.monotonic()) if cable else 0.0
        if due is not None:
            self.count += 1
            heapq.heappush(self.waiting, (due, self.count, other, frame))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            _, _, machine, frame = heapq.heappop(self.waiting)
            with suppress(BlockingIOError):  # its queue is full: lost, as on any cable
                os.write(self.taps[machine], frame)


def plug(pid: int, address: str) -> int:
    """The near end of a cable into the namespace of a process, whose device there has that address."""
    libc, device = ctypes.CDLL(None, use_errno=True), f"lab{address.split('.')[1]}"
    with open("/proc/self/ns/net") as ours, open(f"/proc/{pid or 'self'}/ns/net") as theirs:
        _enter(libc, theirs.fileno())
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP | _NO_HEADER))
            for command in (f"addr add {address}/24 dev {device}", f"link set {device} up", "link set lo up"):
                subprocess.run(["ip", *command.split()], check=True)
        finally:
            _enter(libc, ours.fileno())
    return tap


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    plugged = [plug(int(pid), address) for pid, _, address in (each.partition(":") for each in sys.argv[1:])]
    print("ready", flush=True)
    Switch(plugged).run()

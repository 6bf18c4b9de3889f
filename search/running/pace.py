"""How long a study still takes, from the rates of its trials that have ended and of those that run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from archlab.search.store.roles import ROLE


def worker(variant: str, role: str | None) -> str:
    """The name under which the work of a trial is known."""
    return f"{variant}\n{role}" if role == ROLE else variant


class Part(NamedTuple):
    """A running trial: the share of its steps that its attempt has done in `took_s` seconds, and the share left.

    `variant` is whose work it is: `worker` of its variant and role.
    """

    variant: str
    done: float
    left: float
    took_s: float


@dataclass
class Pace:
    """Seconds of a slot per unit of work. A trial's work is its training FLOPs, as a multiple of the mean of those of
    the variants; that of their probes together is `probes` where a screen has some."""

    work: Mapping[str, float] = field(default_factory=dict)  # by variant; 1 for one that is not there
    width: int = 1  # trials that ran at once
    seconds: float = 0.0
    done: float = 0.0
    probes: float = 0.0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Pace:
        """The work of the variants of a study's record."""
        flops = {each["name"]: float(each["flops_per_token"] * each["tokens"]) for each in record.get("variants", ())}
        mean = sum(flops.values()) / len(flops) if flops else 1.0
        probed = [each for each in record.get("variants", ()) if "probe" in each]
        cheap = {worker(v["name"], ROLE): v["probe"]["flops_per_token"] * v["probe"]["tokens"] / mean for v in probed}
        return cls({name: value / mean for name, value in flops.items()} | cheap, probes=sum(cheap.values()))

    def ended(self, variant: str, seconds: float, share: float = 1.0) -> None:
        """A trial of this variant did this share of its steps between its launch and its end."""
        self.seconds += seconds
        self.done += share * self.work.get(variant, 1.0)

    def left_s(self, waiting: float, running: Iterable[Part]) -> float | None:
        """Seconds until `waiting` mean trials and the running ones have ended, at the rate so far.

        None without a rate, or with nothing left.
        """
        seconds, done, left, longest = self.seconds, self.done, float(waiting), 0.0
        for part in running:
            work = self.work.get(part.variant, 1.0)
            seconds, done = seconds + part.took_s, done + part.done * work
            left, longest = left + part.left * work, max(longest, part.left * work)
        if done <= 0.0 or seconds <= 0.0 or left <= 0.0:
            return None
        return seconds / done * max(left / max(self.width, 1), longest)

"""What a trial takes of a machine (`resources:`), what a machine has, and how many trials fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.include import read_whole
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.spec import Count, NotNegative, Spec
from archlab.search.executors.executor import ResourcesError
from archlab.search.executors.process_group import Parallel
from archlab.search.hardware import facts as machine
from archlab.search.utils.quantities import Duration, Memory


@dataclass(frozen=True)
class Room:
    """What a machine has for trials: cores, GPUs, bytes of memory; NaN where it is not known yet."""

    cpus: float
    gpus: float
    memory: float

    @classmethod
    def here(cls, gpus: bool = True) -> Room:
        """This machine. Counting GPUs imports torch."""
        return cls(machine.usable_cores(), machine.usable_gpus() if gpus else math.nan, machine.memory()[1])

    def __str__(self) -> str:
        return f"{self.cpus:g} cores, {self.gpus:g} GPUs and {self.memory / 1e9:.0f} GB of memory"


class Resources(Spec):
    """What each process of a trial gets: cores with one torch thread each, GPUs or a share of one, and memory.

    `gpus: null` is one where there are any. `memory` is all that a trial on the CPU may allocate. `checkpoint` is the
    time from one checkpoint to the next. With `parallel` a trial is several processes, whose number is the product.
    """

    title: ClassVar[str] = "resources"
    cpus: Count = 1
    gpus: NotNegative | None = None
    memory: Memory | None = None
    checkpoint: Duration | None = None
    parallel: Parallel = Parallel()

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds between checkpoints; None: as often as costs little."""
        return self.checkpoint.seconds if self.checkpoint else None

    @property
    def world(self) -> int:
        return self.parallel.world

    def problems(self, path: str = "resources") -> Iterator[Problem]:
        """What no machine could do."""
        gpus = self.gpus or 0.0
        if gpus > 1 and gpus != int(gpus):
            yield Problem(f"{path}.gpus", f"must be a share of one GPU or a whole number, found {gpus:g}", self._at())
        elif 0 < gpus < 1 and self.world > 1:
            message = f"processes of one trial ({self.parallel}) cannot share a GPU, found {gpus:g} of one for each"
            yield Problem(f"{path}.gpus", message, self._at())

    def _at(self) -> Mark | None:
        return self.mark("gpus") or self.mark()

    def with_gpus(self, available: float) -> Resources:
        """The same with the GPUs said: one for each process where there are any."""
        return self if self.gpus is not None else self.replace(gpus=1.0 if available else 0.0)

    def processes_on(self, room: Room) -> int:
        """How many processes of trials a machine has room for."""
        fits = [room.cpus / self.cpus]
        if self.gpus:
            fits.append(room.gpus / self.gpus)
        if self.memory:
            fits.append(room.memory / self.memory.bytes)
        return int(min((fit for fit in fits if not math.isnan(fit)), default=0.0) + 1e-9)

    def slots(self, rooms: Iterable[Room]) -> int:
        """How many trials fit at once; the processes of one may be on several machines.

        Raises ResourcesError with what there is when not even one fits.
        """
        rooms = list(rooms)
        fit = sum(map(self.processes_on, rooms)) // self.world
        if fit:
            return fit
        if len(rooms) == 1:
            has = f"this machine has {rooms[0]} for us"
        else:
            most = [max((getattr(room, name) for room in rooms), default=0) for name in ("cpus", "gpus", "memory")]
            has = f"the largest of {len(rooms)} machines has {Room(*most)}"
            has += f", all have room for {sum(map(self.processes_on, rooms))}" if self.world > 1 else ""
        raise ResourcesError(f"each trial asks for {self}; {has}")

    def __str__(self) -> str:
        """`4 cores and 1 GPU`; for each of so many processes where a trial has several."""
        parts = [f"{self.cpus} core{'s' * (self.cpus > 1)}"]
        parts += [f"{self.gpus:g} GPU{'s' * (self.gpus > 1)}"] if self.gpus else []
        parts += [f"{self.memory.bytes / 1e9:g} GB of memory"] if self.memory else []
        told = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
        return f"{told} for each of {self.world} processes" if self.world > 1 else told


def resources_in(file: str) -> Resources:
    """What a study's file asks for, whatever else it says. Raises SpecError."""
    value = read_whole(file).value
    node = value.get("resources") if isinstance(value, dict) else None
    problems: list[Problem] = []
    found = parse_value(Resources, node, "resources", problems) if node is not None else Resources()
    if found is not INVALID:
        problems += found.problems()
    if problems:
        raise SpecError(problems)
    asked: Resources = found
    return asked

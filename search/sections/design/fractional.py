"""Regular two-level fractional factorials: which components vary together, so that few runs tell their effects apart.

A component is a vector over GF(2) of length n for 2^n runs; any R - 1 vectors that are linearly independent make a
design of resolution R (Box and Hunter 1961, Technometrics 3, pages 311-351). The run without any component is always
part of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

MAX_RUNS = 2**13
_EXHAUSTIVE = 300_000  # defining words that are looked at to find the least aberration
_NODES = 100_000  # steps of the search for a resolution before it is given up


@dataclass(frozen=True)
class Fraction:
    """A vector of `bits` bits per component: unit vectors first, then the generated ones."""

    bits: int
    vectors: tuple[int, ...]

    @property
    def runs(self) -> list[tuple[bool, ...]]:
        """The levels of all components, run by run; the first has none."""
        return [tuple((vector & run).bit_count() % 2 == 1 for vector in self.vectors) for run in range(2**self.bits)]

    @property
    def words(self) -> list[tuple[int, ...]]:
        """The defining relation: sets of components whose levels always multiply to the same sign; shortest first."""
        basis = len(self.vectors) - self.bits
        found = []
        for chosen in range(1, 2**basis):
            extra = [self.bits + index for index in range(basis) if chosen >> index & 1]
            total = reduce(xor, (self.vectors[index] for index in extra))
            found.append(tuple([index for index in range(self.bits) if total >> index & 1] + extra))
        return sorted(found, key=lambda word: (len(word), word))

    @property
    def resolution(self) -> int | None:
        """The length of the shortest defining word; None for a full factorial, which has none."""
        fewest = {0: 0}  # how many vectors add up to a value
        shortest: int | None = None
        for vector in self.vectors:
            if vector in fewest:
                shortest = min(shortest or len(self.vectors), fewest[vector] + 1)
            for value, number in list(fewest.items()):
                fewest[value ^ vector] = min(fewest.get(value ^ vector, number + 1), number + 1)
        return shortest

    @property
    def aberration(self) -> list[int]:
        """How many defining words there are of length 3, 4, 5, …"""
        lengths = [len(word) for word in self.words]
        return [lengths.count(length) for length in range(3, len(self.vectors) + 1)]


def fraction(components: int, runs: int) -> Fraction:
    """The design of this many runs, a power of two, with the highest resolution that is found, and of these the one
    with the fewest short words where all can be looked at. Raises ValueError if there is none of resolution 3."""
    bits = runs.bit_length() - 1
    units = [1 << index for index in range(bits)]
    if components <= bits:
        return Fraction(components, tuple(units[:components]))
    extra = components - bits
    others = [vector for vector in range(1, 2**bits) if vector.bit_count() > 1]
    if extra > len(others):
        raise ValueError(f"{runs} runs tell at most {2**bits - 1} components apart, found {components}")
    if math.comb(len(others), extra) * 2**extra <= _EXHAUSTIVE:
        return min(
            (Fraction(bits, (*units, *chosen)) for chosen in itertools.combinations(others, extra)),
            key=lambda made: made.aberration,
        )
    for resolution in range(components, 3, -1):
        if chosen := _independent(units, others, extra, resolution):
            return Fraction(bits, (*units, *chosen))
    return Fraction(bits, (*units, *others[:extra]))


def smallest(components: int, resolution: int) -> Fraction:
    """The design of the fewest runs that has at least this resolution; the full factorial if no fraction has."""
    for bits in range(1, components):
        if 2**bits - 1 < components:
            continue
        made = fraction(components, 2**bits)
        if made.resolution is None or made.resolution >= resolution:
            return made
    return fraction(components, 2**components)


def _independent(units: list[int], others: list[int], extra: int, resolution: int) -> list[int] | None:
    """Vectors of which, with the unit vectors, any `resolution - 1` are independent; None if none are found."""
    nodes = 0

    def sums(level: list[set[int]], vector: int) -> list[set[int]]:
        """What up to `resolution - 2` vectors add up to, by their number, with one vector more."""
        return [level[0], *(level[size] | {vector ^ s for s in level[size - 1]} for size in range(1, len(level)))]

    def search(start: int, chosen: list[int], level: list[set[int]]) -> list[int] | None:
        nonlocal nodes
        if len(chosen) == extra:
            return chosen
        taken = set().union(*level)
        for index in range(start, len(others) - (extra - len(chosen)) + 1):
            nodes += 1
            if nodes > _NODES:
                return None
            if others[index] not in taken:
                found = search(index + 1, [*chosen, others[index]], sums(level, others[index]))
                if found:
                    return found
        return None

    level: list[set[int]] = [{0}, *(set() for _ in range(resolution - 2))]
    for unit in units:
        level = sums(level, unit)
    return search(0, [], level)


def aliases(made: Fraction, names: Sequence[str], order: int = 2) -> list[list[str]]:
    """Effects of at most `order` components that the design cannot tell apart, as classes; `−` where one stands for
    the opposite of the first. Main effects come first."""
    classes: dict[int, list[tuple[int, ...]]] = {}
    for size in range(1, order + 1):
        for effect in itertools.combinations(range(len(names)), size):
            classes.setdefault(reduce(xor, (made.vectors[index] for index in effect)), []).append(effect)
    return [
        [("−" if (len(e) - len(effects[0])) % 2 else "") + " × ".join(names[i] for i in e) for e in effects]
        for effects in classes.values()
        if len(effects) > 1
    ]

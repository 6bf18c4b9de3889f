"""Designs: which combinations of components a study runs. Each is a truth table, a row per variant."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from archlab.arch_dsl.language.spec import Family, Range
from archlab.search.sections.design.fractional import MAX_RUNS, Fraction, aliases, fraction, smallest
from archlab.search.variants.asks import Planned
from archlab.search.variants.patches import spelt
from archlab.search.variants.section import Section

Levels = tuple[bool, ...]
BASELINE, ALL = "baseline", "all"
_LONGEST = 80  # characters of a variant's name


class Design(Section, Family):
    """Which components a variant has: all components of the study in their order, or those named.

    `impossible` says what becomes of a combination that makes no sense: the study is refused, the variant is left out
    (skip), or it is changed as the rules of models say, and left out where these know no way (repair).
    """

    key = "design"
    noun: ClassVar[str] = "design"
    baseline: ClassVar[str] = BASELINE
    components: tuple[str, ...] | None = None
    impossible: Literal["refuse", "skip", "repair"] = "refuse"

    def size(self, count: int) -> int:
        """How many variants this many components make."""
        return len(set(self.table(count)))

    def table(self, count: int) -> list[Levels]:
        """The rows: which of the components a variant has."""
        raise TypeError(f"{type(self).__name__} has no table")

    def named(self, names: Sequence[str]) -> dict[str, Levels]:
        """The rows by the names that tables show."""
        table = dict.fromkeys(self.table(len(names)))
        return {self.name(row, names): row for row in table}

    def name(self, row: Levels, names: Sequence[str]) -> str:
        """`a + b`; `all − c` if that is too long; `++−` if that is too."""
        return _shortest(_sum(row, names), _difference(row, names), row)

    def complaint(self, count: int) -> str | None:
        """What makes no sense with this many components, or None."""
        return None

    def record(self, planned: Planned) -> dict[str, Any]:
        """What it made, what of it was left out or repaired, and what its components change."""
        study = planned.study
        names = self.components if self.components is not None else tuple(study.components)
        merged = {slot.name: list(slot.parts) for slot in study.ablate.slots} if study.ablate else {}
        return {
            **self.facts(names),
            "changes": {name: spelt(study.components[name].settings) for name in names},
            "merged": {name: parts for name, parts in merged.items() if parts},
            "omitted": planned.omitted,
            "repaired": {v.name: list(v.repaired) for v in planned.variants if v.repaired},
        }

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """What it is as a design of these components."""
        return {"type": self.type, "components": list(names), "impossible": self.impossible}


def _sum(row: Levels, names: Sequence[str]) -> str:
    return " + ".join(itertools.compress(names, row)) or BASELINE


def _difference(row: Levels, names: Sequence[str]) -> str:
    return " − ".join([ALL, *(name for name, on in zip(names, row, strict=True) if not on)])


def _shortest(first: str, second: str, row: Levels) -> str:
    """The first that is short enough for a name."""
    return next((n for n in (first, second) if len(n) <= _LONGEST), "".join("+" if on else "−" for on in row))


def _one(count: int, index: int, on: bool = True) -> Levels:
    return tuple((position == index) == on for position in range(count))


@Design.register("full_factorial")
class FullFactorial(Design):
    """Every combination: 2^k variants."""

    def size(self, count: int) -> int:
        return int(2**count)

    def table(self, count: int) -> list[Levels]:
        rows = itertools.product((False, True), repeat=count)
        return sorted((row[::-1] for row in rows), key=sum)


@Design.register("fractional")
class Fractional(Design):
    """2^(k-p) variants, chosen so that main effects are told apart: a regular fraction of the full factorial.

    Give the number of `runs`, a power of two, or the `resolution`: at 3 main effects are mixed up with effects of
    pairs, at 4 (the default) pairs with pairs, at 5 neither. The plan prints what is mixed up with what.
    """

    runs: Annotated[int, Range(min=2, max=MAX_RUNS)] | None = None
    resolution: Annotated[int, Range(min=3, max=8)] | None = None

    def size(self, count: int) -> int:
        return int(2 ** self.made(count).bits)

    def made(self, count: int) -> Fraction:
        """The fraction itself."""
        return fraction(count, self.runs) if self.runs else smallest(count, self.resolution or 4)

    def table(self, count: int) -> list[Levels]:
        return self.made(count).runs

    def complaint(self, count: int) -> str | None:
        if self.runs and self.resolution:
            return "takes `runs` or `resolution`, found both"
        if self.runs and self.runs.bit_count() > 1:
            return f"runs must be a power of two, found {self.runs}"
        if self.runs and self.runs <= count:
            need = 2 ** count.bit_length()
            return f"{self.runs} runs cannot tell {count} components apart; they take at least {need}"
        if self.runs and self.runs > 2**count:
            return f"there are {2**count} combinations of the components; found {self.runs} runs"
        return None

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        made = self.made(len(names))
        generators = {
            names[index]: [names[bit] for bit in range(made.bits) if made.vectors[index] >> bit & 1]
            for index in range(made.bits, len(names))
        }
        return {
            **super().facts(names),
            "resolution": made.resolution,
            "generators": generators,
            "aliases": aliases(made, names),
        }


@Design.register("leave_one_out")
class LeaveOneOut(Design):
    """All components, and all but each: k + 1 variants. The baseline is `all`."""

    baseline: ClassVar[str] = ALL

    def table(self, count: int) -> list[Levels]:
        return [(True,) * count, *(_one(count, index, on=False) for index in range(count))]

    def name(self, row: Levels, names: Sequence[str]) -> str:
        return _shortest(_difference(row, names), _sum(row, names), row)


@Design.register("add_one_in")
class AddOneIn(Design):
    """None of the components, and each alone: k + 1 variants."""

    def table(self, count: int) -> list[Levels]:
        return [(False,) * count, *(_one(count, index) for index in range(count))]


@Design.register("both_ends")
class BothEnds(Design):
    """None, each alone, all, and all but each: what a component does by itself, and what the others lack without it.

    2k + 2 variants. What is left out of `all` is compared with `all`, everything else with `baseline`.
    """

    def table(self, count: int) -> list[Levels]:
        return [*AddOneIn().table(count), *LeaveOneOut().table(count)]

    def name(self, row: Levels, names: Sequence[str]) -> str:
        if sum(row) < 2 and len(row) > 1:
            return super().name(row, names)
        return LeaveOneOut().name(row, names) if any(row) else BASELINE


@Design.register("chain")
class Chain(Design):
    """The components added one after another, in the order given: k + 1 variants."""

    def table(self, count: int) -> list[Levels]:
        return [tuple(position < length for position in range(count)) for length in range(count + 1)]


@Design.register("pairwise")
class Pairwise(Design):
    """None, each alone, and every pair: 1 + k + k(k-1)/2 variants, which give the interaction of every pair.

    (A covering array has fewer runs, but only shows that a pair fails: no row has a neighbour to be compared with.)
    """

    def size(self, count: int) -> int:
        return 1 + count + math.comb(count, 2)

    def table(self, count: int) -> list[Levels]:
        pairs = itertools.combinations(range(count), 2)
        return [*AddOneIn().table(count), *(tuple(i in pair for i in range(count)) for pair in pairs)]

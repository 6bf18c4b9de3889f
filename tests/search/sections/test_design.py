"""Designs: which combinations they run, what their fractions mix up, and what becomes of impossible combinations."""

from __future__ import annotations

import itertools

import pytest

from archlab.search.sections.design.fractional import aliases, fraction, smallest
from archlab.search.sections.design.spec import Design, Fractional

TABLES = {
    "full_factorial": ["baseline", "a", "b", "c", "a + b", "a + c", "b + c", "a + b + c"],
    "fractional": ["baseline", "a", "b", "c", "a + b", "a + c", "b + c", "a + b + c"],
    "leave_one_out": ["all", "all − a", "all − b", "all − c"],
    "add_one_in": ["baseline", "a", "b", "c"],
    "both_ends": ["baseline", "a", "b", "c", "all", "all − a", "all − b", "all − c"],
    "chain": ["baseline", "a", "a + b", "a + b + c"],
    "pairwise": ["baseline", "a", "b", "c", "a + b", "a + c", "b + c"],
}


@pytest.mark.parametrize("kind", Design.members)
def test_design_names_its_rows_after_their_components(kind: str) -> None:
    made = Design.members[kind]()
    named = made.named("abc")
    assert sorted(named) == sorted(TABLES[kind])
    assert kind == "fractional" or list(named) == TABLES[kind]
    assert made.size(3) == len(named)
    for name, row in named.items():
        off = [component for component, on in zip("abc", row, strict=True) if not on]
        meant = set("abc") - set(off) if name.startswith("all") else {n for n in name.split(" + ") if n != "baseline"}
        assert {component for component, on in zip("abc", row, strict=True) if on} == meant


@pytest.mark.parametrize("kind", Design.members)
@pytest.mark.parametrize("count", range(1, 9))
def test_design_has_the_size_that_it_says_and_no_row_twice(kind: str, count: int) -> None:
    made = Design.members[kind]()
    named = made.named([f"c{index}" for index in range(count)])
    assert len(named) == len(set(named.values())) == made.size(count)
    assert made.baseline in named or kind == "both_ends"


# Box, Hunter and Hunter (2005), table 6.22; Montgomery (2017), table 8.14: the highest resolution of 2^(k-p) runs.
PUBLISHED = {
    4: {3: 3},
    8: {4: 4, 5: 3, 6: 3, 7: 3},
    16: {5: 5, 6: 4, 7: 4, 8: 4, 9: 3, 10: 3, 11: 3, 12: 3, 13: 3, 14: 3, 15: 3},
    32: {6: 6, 7: 4, 8: 4, 9: 4, 10: 4, 11: 4, 12: 4, 13: 4, 14: 4, 15: 4},
    64: {7: 7, 8: 5, 9: 4, 10: 4, 11: 4},
    128: {8: 8, 9: 6, 10: 5, 11: 5},
}
CASES = [(runs, count, best) for runs, row in PUBLISHED.items() for count, best in row.items()]


@pytest.mark.parametrize(("runs", "count", "best"), CASES, ids=lambda value: str(value))
def test_fraction_has_the_published_resolution(runs: int, count: int, best: int) -> None:
    made = fraction(count, runs)
    assert made.resolution == best
    rows = made.runs
    assert len(set(rows)) == runs and not any(rows[0]), "each row once, the first without any component"
    for column in zip(*rows, strict=True):
        assert sum(column) == runs // 2, "every component is on in half of the runs"


@pytest.mark.parametrize(("count", "runs"), [(3, 4), (4, 8), (5, 8), (6, 16), (7, 16), (7, 32)])
def test_aliases_are_the_effects_whose_columns_agree(count: int, runs: int) -> None:
    names = [f"c{index}" for index in range(count)]
    made = fraction(count, runs)
    columns: dict[tuple[int, ...], list[tuple[int, str]]] = {}
    for size in (1, 2):
        for effect in itertools.combinations(range(count), size):
            column = []
            for row in made.runs:
                product = 1
                for index in effect:
                    product *= 1 if row[index] else -1
                column.append(product)
            sign = column[0]
            key = tuple(sign * value for value in column)
            columns.setdefault(key, []).append((sign, " × ".join(names[index] for index in effect)))
    expected = [
        [("" if sign == members[0][0] else "−") + name for sign, name in members]
        for members in columns.values()
        if len(members) > 1
    ]
    assert aliases(made, names) == expected


@pytest.mark.parametrize(
    ("count", "resolution", "runs"), [(3, 3, 4), (4, 4, 8), (5, 5, 16), (5, 4, 16), (6, 6, 32), (8, 5, 64), (3, 5, 8)]
)
def test_smallest_fraction_of_a_resolution(count: int, resolution: int, runs: int) -> None:
    made = smallest(count, resolution)
    assert len(made.runs) == runs
    assert made.resolution is None or made.resolution >= resolution


@pytest.mark.parametrize(
    ("fields", "count", "message"),
    [
        ({"runs": 8, "resolution": 4}, 4, "takes `runs` or `resolution`, found both"),
        ({"runs": 12}, 5, "runs must be a power of two, found 12"),
        ({"runs": 4}, 4, "4 runs cannot tell 4 components apart; they take at least 8"),
        ({"runs": 16}, 3, "there are 8 combinations of the components; found 16 runs"),
    ],
    ids=lambda value: str(value),
)
def test_fraction_that_cannot_be_is_told(fields: dict[str, int], count: int, message: str) -> None:
    assert Fractional(**fields).complaint(count) == message


def test_long_names_are_cut_to_what_is_missing_then_to_signs() -> None:
    names = [f"a_longer_component_{index}" for index in range(9)]
    named = Design.members["full_factorial"]().named(names)
    assert len(named) == 512 and max(map(len, named)) <= 80
    assert "all − a_longer_component_0" in named and "++++−−−−−" in named

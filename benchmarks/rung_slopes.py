"""Whether a difference lasts when models grow: its slope over a ladder's rungs, and the seeds that would decide it.

    python benchmarks/rung_slopes.py studies/results/three-claims.json

Reads a result of a ladder under several recipes; nothing is trained. A line for each variant: the least-squares slope
of its differences (the means over all recipes, nats per token) over log10 of the size, with an interval of the width
that those of the means give it, which are corrected for the rows of the table; and the number of seeds with which the
slope, and the difference at the largest size, would leave zero if they stay as they are. Widths shrink with the square
root of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = re.compile(r"(?P<variant>.*) \[size=(?P<size>[\d.]+)(?P<unit>[kMB]?)\]")
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}


def slope(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(slope, half of its interval's width) of (size, difference, half-width) over log10 of the size."""
    x = [math.log10(size) for size, _, _ in points]
    centre = sum(x) / len(x)
    total = sum((each - centre) ** 2 for each in x)
    weights = [(each - centre) / total for each in x]
    found = sum(weight * difference for weight, (_, difference, _) in zip(weights, points, strict=True))
    width = math.sqrt(sum((weight * half) ** 2 for weight, (_, _, half) in zip(weights, points, strict=True)))
    return found, width


def seeds_for(value: float, half: float, seeds: int) -> int:
    """With how many seeds the interval of a value that stays as it is would leave zero."""
    return max(2, math.ceil(seeds * (half / value) ** 2))


def slopes(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a report says of each variant but the baseline."""
    rungs: dict[str, list[tuple[float, float, float]]] = {}
    seeds = {}
    for row in report["mean_of_recipes"]:
        if row["row"] == row["baseline"] or not (name := NAME.fullmatch(row["row"])):
            continue
        size = float(name["size"]) * UNITS[name["unit"]]
        rungs.setdefault(name["variant"], []).append((size, row["delta"], (row["high"] - row["low"]) / 2))
        seeds[name["variant"]] = row["n"]
    for variant, points in rungs.items():
        value, half = slope(points)
        _, last, width = max(points)
        yield {
            "variant": variant,
            "per_tenfold": value,
            "low": value - half,
            "high": value + half,
            "seeds_for_slope": seeds_for(value, half, seeds[variant]),
            "seeds_at_largest": seeds_for(last, width, seeds[variant]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the JSON of a report")
    for found in slopes(json.loads(parser.parse_args().result.read_text())):
        print(json.dumps(found))


if __name__ == "__main__":
    main()

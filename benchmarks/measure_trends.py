"""How a measure changes with the training tokens of a ladder, and with how many it would reach a value.

    python benchmarks/measure_trends.py studies/results/sinks.json massive_activations=1053 first_token_attention=0.467

Reads the result of a ladder of tokens; nothing is trained. A line for each measure and row: by which factor it changes
with ten times the tokens, from a least-squares line through the logarithms of its means over seeds; and the tokens at
which that line is at the value, none where that is not beyond the tokens that were tried. The 95% interval (Welch and
Satterthwaite) has the noise of the seeds alone, not how far the points lie from the line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy import stats

Point = tuple[float, float, float, int]  # training tokens, mean, standard deviation over seeds, seeds


def trend(points: list[Point]) -> tuple[float, float, float, float]:
    """(slope, half of its interval's width, centre of x, centre of y) in decimal logarithms."""
    x, y = [math.log10(tokens) for tokens, *_ in points], [math.log10(mean) for _, mean, *_ in points]
    centre = sum(x) / len(x)
    total = sum((each - centre) ** 2 for each in x)
    weights = [(each - centre) / total for each in x]
    parts = [
        ((weight * std / mean / math.log(10)) ** 2 / n, n - 1)
        for weight, (_, mean, std, n) in zip(weights, points, strict=True)
    ]
    variance = sum(part for part, _ in parts)
    df = variance**2 / sum(part**2 / own for part, own in parts)
    half = stats.t.ppf(0.975, df) * math.sqrt(variance)
    return sum(weight * each for weight, each in zip(weights, y, strict=True)), half, centre, sum(y) / len(y)


def trends(report: dict[str, Any], values: dict[str, float]) -> Iterator[dict[str, Any]]:
    """What a report says of each measure of `values`, row by row."""
    rungs = {rung["variant"]: rung for rung in report["rungs"]}
    for measure, value in values.items():
        rows: dict[str, list[Point]] = {}
        for each in report["measures"]:
            if each["name"] == measure and (rung := rungs.get(each["variant"])):
                point = rung["tokens"], each["mean"], each["std"], each["n"]
                rows.setdefault(rung["series"], []).append(point)
        for series, points in rows.items():
            slope, half, x, y = trend(points)
            reached = x + (math.log10(value) - y) / slope
            ahead = reached > math.log10(max(points)[0])
            yield {
                "measure": measure,
                "row": series,
                "per_tenfold": 10**slope,
                "low": 10 ** (slope - half),
                "high": 10 ** (slope + half),
                "value": value,
                "tokens": float(f"{10**reached:.2g}") if ahead else None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the JSON of a report")
    parser.add_argument("values", nargs="+", metavar="MEASURE=VALUE")
    asked = parser.parse_args()
    values = {name: float(value) for name, _, value in (each.partition("=") for each in asked.values)}
    for found in trends(json.loads(asked.result.read_text()), values):
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Which verdicts of our studies changed when they were asked again under other recipes.

    python benchmarks/recipes_matter.py --keep gated-attention-table3-small   # before its result is replaced
    python benchmarks/recipes_matter.py                                       # writes the tables of the page

What a study said under its first recipe is kept in results/first-recipes.jsonl, a line for each study. The page holds
it beside what the study says now, under each of its recipes: the claims of the paper, and the rows, whose verdict is
another one under some recipe. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from archlab.search.sections.published.claims import HOLDS, REVERSED, UNDECIDED
from archlab.search.sections.recipes.average import AXIS, DEPENDS
from archlab.search.sections.recipes.average import GROUP as MEAN

ROOT = Path(__file__).resolve().parents[1]
RESULTS, KEPT = ROOT / "studies/results", ROOT / "benchmarks/results/first-recipes.jsonl"
PAGE = ROOT / "docs/papers/recipes-matter.md"
OPEN, CLOSE = "<!-- changed: written by `python benchmarks/recipes_matter.py` -->\n", "<!-- /changed -->\n"
CASE = f"{AXIS}="  # what a group of claims under a recipe is called by
DECIDED = (HOLDS, REVERSED)
SAYING = (*DECIDED, UNDECIDED, DEPENDS)  # verdicts on a claim that its study can test
ENDS = ("delta", "delta_low", "delta_high")

Told = dict[str, Any]


def told(study: str) -> Told:
    """What a result says, recipe by recipe and on average: claims, rows, rank correlation; and what it cost."""
    report = json.loads((RESULTS / f"{study}.json").read_text())
    rows = {row["variant"]: row for row in report.get("under_recipes") or ()}
    found: Told = {
        "study": study,
        "tokens": report["cost"]["without"],  # those of trials that were reused, too
        "claims": {},
        "rows": {},
        "rho": {},
    }
    for claim in report["claims"]:
        found["claims"].setdefault(claim["claim"], {})[recipe_of(claim["group"])] = claim["verdict"]
    for row in report["table"]:
        under = rows.get(row["variant"], {"row": row["variant"], "recipe": ""})
        said = {"verdict": row["verdict"], **{name: row[name] for name in ENDS}}
        found["rows"].setdefault(under["row"], {})[under["recipe"]] = said
    for row in report.get("mean_of_recipes") or ():
        ends = {name: row[name.removeprefix("delta_")] for name in ENDS}
        found["rows"][row["row"]][MEAN] = {"verdict": row["verdict"], **ends}
    for each in report["agreement"]:
        if each["rows"] == "all" and not each["without"]:
            found["rho"][recipe_of(each["group"])] = [each[f"spearman{end}"] for end in ("", "_low", "_high")]
    return found


def recipe_of(group: str) -> str:
    """The recipe of a group of rows, or their mean; '' where a study has one alone."""
    if group.startswith(MEAN):
        return MEAN
    return next((part.removeprefix(CASE) for part in group.split(", ") if part.startswith(CASE)), "")


def keep(study: str) -> None:
    """Adds what a study of one recipe says today to what was said at first. Raises SystemExit where that is known."""
    kept = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    if any(each["study"] == study for each in kept):
        raise SystemExit(f"{study} is kept already")
    found = told(study)
    if any({*by} != {""} for by in found["rows"].values()):
        raise SystemExit(f"{study} has several recipes: its first table is gone")
    lines = [*kept, found]
    KEPT.write_text("".join(json.dumps(each) + "\n" for each in sorted(lines, key=lambda each: str(each["study"]))))


def tables() -> Iterator[str]:
    """The lines of the page between the marks: a table for each study."""
    first = [json.loads(line) for line in KEPT.read_text().splitlines()]
    for before in first:
        after = told(before["study"])
        recipes = list(dict.fromkeys(recipe for by in after["rows"].values() for recipe in by))
        tokens = f"{before['tokens'] / 1e6:.0f}M tokens at first, {after['tokens'] / 1e6:.0f}M now"
        yield from ["", f"### {before['study'].removesuffix('-small')}: {tokens}", ""]
        yield f"| [result](../../studies/results/{before['study']}.md) | at first | {' | '.join(recipes)} |"
        yield f"| :-- | --: |{' --: |' * len(recipes)}"
        for title, cell in (("**claims decided**", _decided), ("**half-width**", _width), ("**rho**", _rho)):
            yield f"| {title} | {cell(before, '')} | {' | '.join(cell(after, recipe) for recipe in recipes)} |"
        yield from _changed(before["claims"], after["claims"], recipes, str, str)
        yield from _changed(before["rows"], after["rows"], recipes, lambda row: str(row["verdict"]), _difference)


def _changed(
    before: Told, after: Told, recipes: list[str], verdict: Callable[[Any], str], shown: Callable[[Any], str]
) -> Iterator[str]:
    """A line for each claim or row that has another verdict now, under some recipe or on average."""
    for name, by in before.items():
        now = after.get(name, {})
        if {verdict(each) for each in now.values()} - {verdict(by[""])}:
            cells = [name.replace("_", r"\_"), shown(by[""])]
            cells += [shown(now[recipe]) if recipe in now else "" for recipe in recipes]
            yield f"| {' | '.join(cells)} |"


def _decided(said: Told, recipe: str) -> str:
    verdicts = [verdicts.get(recipe) for verdicts in said["claims"].values()]
    tested = [verdict for verdict in verdicts if verdict in SAYING]
    return f"{sum(verdict in DECIDED for verdict in tested)} of {len(tested)}"


def _width(said: Told, recipe: str) -> str:
    """Half the length of the interval of a difference to the baseline, the median over rows."""
    known = [by[recipe] for by in said["rows"].values() if recipe in by and by[recipe]["delta_low"] is not None]
    return f"{median((each['delta_high'] - each['delta_low']) / 2 for each in known):.3f}" if known else ""


def _rho(said: Told, recipe: str) -> str:
    found = said["rho"].get(recipe)
    if not found or found[0] is None:
        return ""
    rho, low, high = found
    ends = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{rho:.2f}{ends}".replace("-", "−")


def _difference(row: Told) -> str:
    if row["delta"] is None or row["delta_low"] is None:
        return str(row["verdict"])
    reach = f"[{row['delta_low']:+.3f}, {row['delta_high']:+.3f}]"
    return f"{row['verdict']} {row['delta']:+.3f} {reach}".replace("-", "−")


def written() -> str:
    """The page with its tables as they would be made today."""
    before, rest = PAGE.read_text().split(OPEN)
    return before + OPEN + "\n".join(tables()) + "\n" + CLOSE + rest.split(CLOSE)[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", metavar="STUDY")
    asked = parser.parse_args()
    if asked.keep:
        keep(asked.keep)
    else:
        PAGE.write_text(written())

"""No figure about a paper stands in the docs that is not in the result that its section links to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page for page in (ROOT / "docs" / "papers").glob("*.md") if "studies/results/" in page.read_text("utf-8")
)
# Where there are so many numbers that some of them is always near.
UNREAD = {"curves", "provenance", "cost", "domains"}
NUMBER = r"[-+−]?\d+\.\d+"
FIGURE = re.compile(rf"(?<![\w.:/])({NUMBER})(?![\w.]|%|/)")
INTERVAL = re.compile(rf"(?:({NUMBER})\s+)?\[({NUMBER}), ({NUMBER})\]")


def records_in(value: Any) -> Iterator[list[float]]:
    """The numbers of each mapping of a report, and of what it says in words."""
    if isinstance(value, dict):
        own = [each for each in value.values() if isinstance(each, int | float)]
        own += [float(each.replace("−", "-")) for text in value.values() for each in said(text)]
        yield own + [each for kept in value.values() if isinstance(kept, list) for each in kept if is_number(each)]
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from records_in(each)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def said(text: Any) -> list[str]:
    """The numbers in a text, none in anything else."""
    return re.findall(NUMBER, text) if isinstance(text, str) else []


@cache
def published_by(paper: str) -> list[list[float]]:
    """The figures that a paper prints, as far as a study is held against them."""
    file = ROOT / "studies" / "published" / f"{paper}.yaml"
    tree = yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}
    return [*records_in(tree)]


@cache
def records_of(name: str) -> list[list[float]]:
    """Those of a committed result, or of the lines of a benchmark's."""
    if name.endswith(".jsonl"):
        lines = (ROOT / "benchmarks" / "results" / name).read_text("utf-8").splitlines()
        return [*records_in([json.loads(line) for line in lines])]
    report = json.loads((ROOT / "studies" / "results" / f"{name}.json").read_text("utf-8"))
    told = {key: value for key, value in report.items() if key not in UNREAD}
    notes = [float(each.replace("−", "-")) for note in told["notes"] for each in said(note)]
    return [*records_in(told), notes]


def is_in(record: list[float], figure: str) -> bool:
    """Whether a record has a number that is printed so, maybe from a table that was rounded before; the sign is a
    matter of words."""
    printed, digits = abs(float(figure.replace("−", "-"))), len(figure.partition(".")[2])
    return any(abs(abs(each) - printed) <= 0.55 * 10**-digits for each in record)


def unsupported(text: str, records: list[list[float]]) -> list[str]:
    """The figures of a section that no record has, and intervals whose ends are in none together."""
    found = [match[0] for match in FIGURE.finditer(text) if not any(is_in(each, match[1]) for each in records)]
    for match in INTERVAL.finditer(text):
        parts = [each for each in match.groups() if each is not None]
        if not any(all(is_in(each, part) for part in parts) for each in records):
            found.append(match[0])
    return found


def sections(page: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(heading, prose, results that it links to, or else the page) of each section."""
    text = page.read_text("utf-8")
    linked = re.compile(r"results/([a-z0-9-]+)\.md|(?<=benchmarks/results/)([a-z0-9_-]+\.jsonl)")
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        names = ["".join(found) for found in linked.findall(part) or linked.findall(text)]
        prose = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`|(?<=%) ± [\d.]+", "", part, flags=re.DOTALL)
        yield part.partition("\n")[0], prose, names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_is_in_the_result_that_its_section_links_to(page: Path) -> None:
    wrong, paper = {}, published_by(page.stem.replace("-", "_").removesuffix("_models").removesuffix("_figures"))
    for linked in re.findall(r"studies/published/(\w+)\.yaml", page.read_text("utf-8")):
        paper = [*paper, *published_by(linked)]
    for heading, prose, names in sections(page):
        records = [*paper, *(record for name in names for record in records_of(name))]
        if found := unsupported(prose, records):
            wrong[heading] = found
    assert wrong == {}


def test_the_page_of_recipes_is_what_its_script_makes_of_the_results() -> None:
    script = run_path(str(ROOT / "benchmarks" / "recipes_matter.py"))
    assert script["PAGE"].read_text("utf-8") == script["written"](), "python benchmarks/recipes_matter.py"


def test_the_slopes_of_the_ladder_are_what_their_script_makes_of_its_result() -> None:
    script = run_path(str(ROOT / "benchmarks" / "rung_slopes.py"))
    report = json.loads((ROOT / "studies/results/three-claims.json").read_text("utf-8"))
    kept = (ROOT / "benchmarks/results/three-claims.jsonl").read_text("utf-8").splitlines()
    assert [*script["slopes"](report)] == [json.loads(line) for line in kept]


def test_the_trends_of_the_ladder_of_tokens_are_what_their_script_makes_of_its_result() -> None:
    script = run_path(str(ROOT / "benchmarks" / "measure_trends.py"))
    report = json.loads((ROOT / "studies/results/sinks.json").read_text("utf-8"))
    values = {"massive_activations": 1053.0, "first_token_attention": 0.467}
    kept = [json.loads(line) for line in (ROOT / "benchmarks/results/sinks.jsonl").read_text("utf-8").splitlines()]
    for found, known in zip(script["trends"](report, values), kept, strict=True):
        assert found == pytest.approx(known)


def test_a_figure_that_no_result_has_is_found() -> None:
    records = [[0.0384, -0.0702, -0.0066], [1.25]]
    assert unsupported("gains 0.038 [0.007, 0.070] and 1.25", records) == []
    assert unsupported("gains 0.039, or 1.3", records) == ["0.039"]
    assert unsupported("gains 1.25 [0.007, 0.070]", records) == ["1.25 [0.007, 0.070]"]

"""Several studies beside each other: which changes they share, what each found of them, and what the studies differ in.

Nothing is pooled and nothing is tested across studies: a difference is that of a variant to the baseline of its own
study, under its own recipe, on its own batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archlab.search.comparison.side_by_side import side_by_side
from archlab.search.results.comparable import lossy_of, objective_of, spec_of, tested_on

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison

Record = dict[str, Any]
DECIDED = ("better", "worse")
_OPEN = ("equivalent", "within noise", "undecided")
"""Verdicts on a difference that is known and tells neither; all others say why there is none."""


@dataclass(frozen=True)
class Finding:
    """What one study found of a change: the difference of a row to its own baseline, in `unit`."""

    study: str
    variant: str
    cell: str
    n: int
    delta: float
    low: float
    high: float
    unit: str
    verdict: str

    @property
    def place(self) -> str:
        """The study, with the cell of its grid or recipes."""
        return f"{self.study} [{self.cell}]" if self.cell else self.study


@dataclass(frozen=True)
class Change:
    """The same change of a baseline in several studies: what it is called there, and what each found."""

    name: str
    found: tuple[Finding, ...]

    @property
    def kind(self) -> str:
        """better, worse, reversed (some better, some worse), mixed (some decided, others open), or open."""
        said = {each.verdict for each in self.found if each.verdict in (*DECIDED, *_OPEN)}
        if {*DECIDED} <= said:
            return "reversed"
        decided = said & {*DECIDED}
        return "open" if not decided else "mixed" if said - decided else decided.pop()

    def sentence(self) -> str:
        """Whether the verdict holds: `gated: better in all 4 comparisons of 2 studies`."""
        places: dict[str, list[str]] = {}
        for each in self.found:
            places.setdefault(each.verdict, []).append(each.place)
        if len(places) == 1:
            (verdict,) = places
            studies = len({each.study for each in self.found})
            return f"{self.name}: {verdict} in all {len(self.found)} comparisons of {studies} studies"
        lead = "reversed: " if self.kind == "reversed" else ""
        return f"{self.name}: {lead}" + "; ".join(f"{verdict} in {', '.join(own)}" for verdict, own in places.items())


def shared_changes(studies: Mapping[str, tuple[Record, Comparison]]) -> tuple[list[Change], dict[str, list[str]]]:
    """(the changes that at least two of the studies have, the other variants of each study by its name)."""
    found: dict[tuple[tuple[str, str], ...], list[Finding]] = {}
    for name, (record, comparison) in studies.items():
        rows = {row["variant"]: row for row in comparison.table.to_dict("records")}
        by_name = {variant["name"]: variant for variant in record["variants"]}
        for variant in by_name.values():
            row = rows.get(variant["name"])
            if row is None or row["baseline"] == variant["name"] or row["baseline"] not in by_name:
                continue
            key = change_of(variant, by_name[row["baseline"]])
            if key:
                found.setdefault(key, []).append(_finding(name, row, comparison.noise["unit"]))
    shared, alone = [], {name: list[str]() for name in studies}
    for each in found.values():
        if len({one.study for one in each}) > 1:
            shared.append(Change(_called(each), tuple(each)))
        else:
            alone[each[0].study] += dict.fromkeys(one.variant.partition(" [")[0] for one in each)
    return shared, alone


def change_of(variant: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a variant has otherwise than its baseline, (path, value) by path; what was solved to match them is left out.
    Without changes of its own (a model of the zoo beside another) it is known by its name."""
    own, other = _changed(variant), _changed(baseline)
    solved = {*(variant.get("matched") or {}), *(baseline.get("matched") or {})}
    paths = [path for path in {**own, **other} if path not in solved and own.get(path) != other.get(path)]
    if not paths and not own and not other:
        return (("", str(variant["name"]).partition(" [")[0]),)
    return tuple(sorted((path, own.get(path, "as in the base")) for path in paths))


def settings(studies: Mapping[str, Record]) -> dict[str, list[tuple[str, list[str], bool]]]:
    """By part (model, recipe, machine) the rows (path, text of each study, whether they differ): the baseline's model,
    how it is trained, and how the study compares. The study's name and question are no settings."""
    return side_by_side([_made_of(record) for record in studies.values()])


def one_scale(records: Iterable[Record]) -> bool:
    """Whether perplexities of the studies' baselines compare: one objective, one test text, one tokenizer."""
    asked = []
    for record in records:
        base = next(v for v in record["variants"] if v["name"] == record["baseline"])
        ratio = round(base.get("bytes_per_token") or 0.0, 4)
        asked.append([objective_of(base), tested_on(record, base), lossy_of(base), ratio])
    return all(each == asked[0] for each in asked)


def _finding(study: str, row: Mapping[Any, Any], unit: str) -> Finding:
    return Finding(
        study=study,
        variant=row["variant"],
        cell=row["variant"].partition(" [")[2].removesuffix("]"),
        n=row["n"],
        delta=float(row["delta"]),
        low=float(row["delta_low"]),
        high=float(row["delta_high"]),
        unit=unit,
        verdict=row["verdict"],
    )


def _called(found: Sequence[Finding]) -> str:
    """The name that most of them have; others stand behind it."""
    names = [each.variant.partition(" [")[0] for each in found]
    first, *others = sorted(dict.fromkeys(names), key=lambda name: -names.count(name))
    return f"{first} ({', '.join(others)})" if others else first


def _changed(variant: Mapping[str, Any]) -> dict[str, str]:
    return {str(path): str(after) for path, _, after in variant.get("changes") or ()}


def _made_of(record: Record) -> Record:
    base = next(v for v in record["variants"] if v["name"] == record["baseline"])
    kept = ("tune", "match", "sequential", "prune", "screen", "recipes", "ladder")
    compared = {name: record[name] for name in kept if record.get(name)}
    counted = {"seeds": len(record["seeds"]), "variants": len(record["variants"]), "baseline": record["baseline"]}
    sizes = {name: base[name] for name in ("parameters", "flops_per_token") if name in base}
    return {
        "model": {**spec_of(base), **sizes},
        "recipe": {**record.get("recipe", {}), **compared, **counted, "prepared": record["data"]},
    }

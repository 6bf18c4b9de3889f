"""The `report.published` of a study: which table of which paper its variants are shown beside.

What a paper printed and what it claims of it are data in `published/*.yaml` near the studies. They stand beside our
numbers and are never mixed with them. A claim is a set of ordered pairs of rows, each of which says that the first has
the lower number, or that some rows are equal within a margin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError, unknown
from archlab.arch_dsl.language.parse import parse, parse_record
from archlab.arch_dsl.language.source import Node, read
from archlab.arch_dsl.language.spec import Positive, Spec
from archlab.search.evaluation.measures import Measure
from archlab.search.results.measured import OF_TABLE, PERPLEXITY
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.section import Section

FOLDER = "published"
Printed = bool | float | str | None  # a cell; None is not printed


class Source(Spec):
    """The paper, and where its figures were read."""

    title: str
    arxiv: str = ""
    printed: str = ""


class Ours(Spec):
    """Which of our numbers a published column prints: a column of the table, or `measure`, or `measure.number`; ours
    is multiplied by `times` to be in its unit."""

    number: str
    times: float = 1.0

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From the number alone too."""
        whole = node if isinstance(node.value, dict) else Node({"number": node}, node.mark)
        return parse_record(cls, whole, path, problems)


class Condition(Spec):
    """What must hold of our data for a claim to mean anything: a `number` of the row `of` is `at_least` so much, or so
    many `times` another number of it."""

    number: str
    of: str
    at_least: float
    times: str | None = None


class Claim(Spec):
    """What a paper says: all rows of `lower` have a lower number than all of `than`, or all of `equal` are within
    `margin` of each other. `on` is the number: the perplexity (differences in nats per token), or what was measured."""

    claim: str
    where: str = ""
    lower: tuple[str, ...] = ()
    than: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    margin: Positive | None = None
    on: str = PERPLEXITY
    testable: Condition | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The rows that it compares."""
        return list(combinations(self.equal, 2)) if self.equal else list(product(self.lower, self.than))


class Table(Spec):
    """A table as it was printed: each row has a value for each of the `columns`."""

    caption: str = ""
    columns: tuple[str, ...]
    measures: dict[str, Ours] = field(default_factory=dict)
    rows: dict[str, tuple[Printed, ...]]
    claims: tuple[Claim, ...] = ()


class Paper(Spec):
    """The tables of one paper."""

    source: Source
    tables: dict[str, Table]


class Published(Section):
    """The `table` that the study reproduces, as `FILE.TABLE`: the file published/FILE.yaml beside the study's file or
    in a folder above it, the nearest, and one of its tables. Several tables of one paper are shown as one, with the
    columns of all. `rows` says which row a variant is, or which ones; one that it does not name is the row of its own
    name. Rank correlations are given once more `without` some variants."""

    key = "published"
    within = "report"
    title: ClassVar[str] = "published"
    table: tuple[str, ...]
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """The tables as one name."""
        return ", ".join(self.table)

    def problems(self, study: Question) -> Iterator[Problem]:
        variants, cells = list(study.variants), study.cells
        alike = [*dict.fromkeys(map(of_any_recipe, cells))]
        path, known = "report.published", [*dict.fromkeys((*variants, *alike, *cells))]
        try:
            _, table = find_table(self, study.file)
        except SpecError as error:
            yield from error.problems
            return
        for variant, rows in self.rows.items():
            mark = self.mark(f"rows.{variant}")
            if variant not in known:
                yield Problem(f"{path}.rows", unknown(variant, "variant", known), mark)
            if not rows:
                yield Problem(f"{path}.rows.{variant}", f"must name a row of {self.named}, found nothing", mark)
            for row in rows:
                if row not in table.rows:
                    message = unknown(row, f"row of {self.named}", table.rows)
                    yield Problem(f"{path}.rows.{variant}", message, mark)
        for group in (variants, alike, cells):
            mine = [row for variant, rows in self.rows.items() if variant in group for row in rows]
            if twice := [row for place, row in enumerate(mine) if row in mine[:place]]:
                yield Problem(f"{path}.rows", f"gives the row '{twice[0]}' twice", self.mark("rows"))
        mapped = rows_of_variants(self, table, [*variants, *cells])
        if not mapped:
            message = f"no variant is a row of {self.named}; `rows` says which ({', '.join(table.rows)})"
            yield Problem(path, message, self.mark("table"))
        for variant in self.without:
            if mapped and variant not in mapped:
                message = unknown(variant, "variant with a row of the table", mapped)
                yield Problem(f"{path}.without", message, self.mark("without"))

    def record(self, planned: Planned) -> dict[str, Any]:
        """All of the table, and which variant is which row, so that reports need no file."""
        return published_record(self, [variant.name for variant in planned.variants], planned.study.file)


def find_table(options: Published, file: Path | None) -> tuple[Paper, Table]:
    """The paper and the table that options name, several as one. Raises SpecError."""
    found = [_find_table(name, file, options.mark(f"table.{place}")) for place, name in enumerate(options.table)]
    if not found:
        raise SpecError.of("report.published.table", "names no table", options.mark("table"))
    papers, tables = zip(*found, strict=True)
    if len({name.partition(".")[0] for name in options.table}) > 1:
        told = f"{options.named} are of several files; a study shows tables of one paper"
        raise SpecError.of("report.published.table", told, options.mark("table"))
    whole = _joined(tables)
    for place, column in enumerate(whole.columns):
        if column in whole.columns[:place]:
            told = f"the column '{column}' is in two of {options.named}"
            raise SpecError.of("report.published.table", told, options.mark("table"))
    return papers[0], whole


def _joined(tables: Sequence[Table]) -> Table:
    """Tables as one: a row has the columns of all, and nothing is printed where a table lacks it."""
    if len(tables) == 1:
        return tables[0]
    rows = {
        name: tuple(cell for table in tables for cell in table.rows.get(name, (None,) * len(table.columns)))
        for name in dict.fromkeys(name for table in tables for name in table.rows)
    }
    return Table(
        caption="; ".join(table.caption for table in tables if table.caption),
        columns=tuple(column for table in tables for column in table.columns),
        measures={column: ours for table in tables for column, ours in table.measures.items()},
        rows=rows,
        claims=tuple(claim for table in tables for claim in table.claims),
    )


def _find_table(named: str, file: Path | None, mark: Mark | None) -> tuple[Paper, Table]:
    """The paper and one of its tables. Raises SpecError."""
    folder = file.absolute().parent if file is not None and file.is_file() else Path.cwd()
    name, dot, table = named.partition(".")
    files: dict[str, Path] = {}  # the nearest of a name
    for place in (folder, *folder.parents):
        for path in sorted((place / FOLDER).glob("*.yaml")):
            files.setdefault(path.stem, path)
    if not dot or name not in files:
        what = f"file with published tables; it is {FOLDER}/FILE.yaml in {folder} or above, named as FILE.TABLE,"
        raise SpecError.of("report.published.table", unknown(name, what[:-1], files), mark)
    paper = read_published(files[name])
    if table not in paper.tables:
        raise SpecError.of("report.published.table", unknown(table, f"table of {files[name]}", paper.tables), mark)
    return paper, paper.tables[table]


def rows_of_variants(options: Published, table: Table, names: Iterable[str]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Name to (rows, group) of the variants that have a row. In a grid or a ladder every cell is a group of its own,
    but for what `rows` names with its cell, which is one group, or one for each recipe."""
    found, given = {}, {row for rows in options.rows.values() for row in rows}
    for name in names:
        base, _, cell = name.partition(" [")
        alike = of_any_recipe(name)
        if name in options.rows:
            found[name] = (options.rows[name], "")
        elif alike in options.rows:
            found[name] = (options.rows[alike], cell.partition(", ")[0])
        elif base in options.rows:
            found[name] = (options.rows[base], cell.removesuffix("]"))
        elif base in table.rows and base not in given:
            found[name] = ((base,), cell.removesuffix("]"))
    return found


def of_any_recipe(name: str) -> str:
    """What a variant in a cell of recipes and a grid is called without the recipe."""
    return re.sub(r" \[recipe=.*?, ([^\s,=]+=)", r" [\1", name)


def published_record(options: Published, names: Iterable[str], file: Path | None) -> dict[str, Any]:
    """What the store keeps of the table, so that reports need no file: all of it, and which variant is which row."""
    paper, table = find_table(options, file)
    mapped = rows_of_variants(options, table, names)
    claims = [{**asdict(claim), "pairs": claim.pairs} for claim in table.claims]
    record = {
        "table": options.named,
        "source": asdict(paper.source),
        **asdict(table),
        "claims": claims,
        "variants": {name: {"rows": rows, "group": group} for name, (rows, group) in mapped.items()},
        "without": [name for name in mapped if name in options.without or name.partition(" [")[0] in options.without],
    }
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain


def read_published(path: Path) -> Paper:
    """The tables of a file. Raises SpecError with everything that is wrong with it."""
    found = parse(Paper, read(path))
    if problems := [problem for name, table in found.tables.items() for problem in _wrong(table, f"tables.{name}")]:
        raise SpecError(problems)
    return found


def _wrong(table: Table, path: str) -> Iterator[Problem]:
    """What the parts of a table get wrong together."""
    if len(set(table.columns)) < len(table.columns):
        yield Problem(f"{path}.columns", "names a column twice", table.mark("columns"))
    for name, row in table.rows.items():
        if len(row) != len(table.columns):
            message = f"has {len(row)} values, and there are {len(table.columns)} columns"
            yield Problem(f"{path}.rows.{name}", message, table.mark(f"rows.{name}"))
    for column, ours in table.measures.items():
        if column not in table.columns:
            message = unknown(column, "column", table.columns)
            yield Problem(f"{path}.measures", message, table.mark(f"measures.{column}"))
        yield from _wrong_number(ours.number, f"{path}.measures.{column}", ours, "number")
    for place, claim in enumerate(table.claims):
        yield from _wrong_claim(claim, table, f"{path}.claims.{place}")


def _wrong_claim(claim: Claim, table: Table, path: str) -> Iterator[Problem]:
    known = [*table.rows]
    for part in ("lower", "than", "equal"):
        for row in getattr(claim, part):
            if row not in known:
                yield Problem(f"{path}.{part}", unknown(row, "row of the table", known), claim.mark(part))
    ordered, equal = bool(claim.lower and claim.than), len(claim.equal) > 1 and claim.margin is not None
    if ordered == equal or bool(claim.lower or claim.than) == bool(claim.equal or claim.margin):
        message = "says either `lower` and `than`, or `equal` (two rows or more) and a `margin`"
        yield Problem(path, message, claim.mark())
    elif both := [one for one, other in claim.pairs if one == other]:
        yield Problem(path, f"compares '{both[0]}' with itself", claim.mark())
    if claim.on != PERPLEXITY:
        if claim.on in OF_TABLE:
            message = f"must be {PERPLEXITY} or what was measured of each trial, found '{claim.on}'"
            yield Problem(f"{path}.on", message, claim.mark("on"))
        yield from _wrong_number(claim.on, f"{path}.on", claim, "on")
    if (needs := claim.testable) is not None:
        if needs.of not in known:
            yield Problem(f"{path}.testable.of", unknown(needs.of, "row of the table", known), needs.mark("of"))
        for key in ("number", "times"):
            if (number := getattr(needs, key)) in OF_TABLE:
                message = f"must be what was measured of each trial, found '{number}'"
                yield Problem(f"{path}.testable.{key}", message, needs.mark(key))
            elif number is not None:
                yield from _wrong_number(number, f"{path}.testable.{key}", needs, key)


def _wrong_number(number: str, path: str, owner: Spec, key: str) -> Iterator[Problem]:
    """A name of none of our numbers. What a measure calls its numbers is known only to what was measured."""
    if number not in OF_TABLE and number.partition(".")[0] not in Measure.members:
        message = unknown(number, "number of ours", [*OF_TABLE, *Measure.members])
        yield Problem(path, message, owner.mark(key))

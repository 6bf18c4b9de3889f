"""The `report.published` of a study: which table of which paper its variants are shown beside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, SpecError, unknown
from archlab.search.sections.published.paper import FOLDER, Paper, Table, files_from, read_published
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.section import Section


class Published(Section):
    """The `table` that the study reproduces, as `FILE.TABLE`: the file published/FILE.yaml beside the study's file or
    in a folder above it, the nearest, and one of its tables. `rows` says which row a variant is, or which ones; one
    that it does not name is the row of its own name. Rank correlations are given once more `without` some variants."""

    key = "published"
    within = "report"
    title: ClassVar[str] = "published"
    table: str
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def problems(self, study: Question) -> Iterator[Problem]:
        """Names that are none of the study's or of the table's."""
        variants, cells = list(study.variants), study.cells
        path, known = "report.published", [*variants, *cells]
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
                yield Problem(f"{path}.rows.{variant}", f"must name a row of {self.table}, found nothing", mark)
            for row in rows:
                if row not in table.rows:
                    message = unknown(row, f"row of {self.table}", table.rows)
                    yield Problem(f"{path}.rows.{variant}", message, mark)
        for group in (variants, cells):
            mine = [row for variant, rows in self.rows.items() if variant in group for row in rows]
            if twice := [row for place, row in enumerate(mine) if row in mine[:place]]:
                message = f"gives the row '{twice[0]}' twice"
                yield Problem(f"{path}.rows", message, self.mark("rows"))
        mapped = rows_of_variants(self, table, known)
        if not mapped:
            message = f"no variant is a row of {self.table}; `rows` says which ({', '.join(table.rows)})"
            yield Problem(path, message, self.mark("table"))
        for variant in self.without:
            if mapped and variant not in mapped:
                message = unknown(variant, "variant with a row of the table", mapped)
                yield Problem(f"{path}.without", message, self.mark("without"))

    def record(self, planned: Planned) -> dict[str, Any]:
        """All of the table, and which variant is which row, so that reports need no file."""
        return published_record(self, [variant.name for variant in planned.variants], planned.study.file)


def find_table(options: Published, file: Path | None) -> tuple[Paper, Table]:
    """The paper and the table that options name. Raises SpecError."""
    mark = options.mark("table")
    folder = file.absolute().parent if file is not None and file.is_file() else Path.cwd()
    name, dot, table = options.table.partition(".")
    files = files_from(folder)
    if not dot or name not in files:
        what = f"file with published tables; it is {FOLDER}/FILE.yaml in {folder} or above, named as FILE.TABLE,"
        raise SpecError.of("report.published.table", unknown(name, what[:-1], files), mark)
    paper = read_published(files[name])
    if table not in paper.tables:
        raise SpecError.of("report.published.table", unknown(table, f"table of {files[name]}", paper.tables), mark)
    return paper, paper.tables[table]


def rows_of_variants(options: Published, table: Table, names: Iterable[str]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Name to (rows, group) of the variants that have a row. In a grid or a ladder every cell is a group of its own,
    but for what `rows` names with its cell, which is one group."""
    found, given = {}, {row for rows in options.rows.values() for row in rows}
    for name in names:
        base, _, cell = name.partition(" [")
        if name in options.rows:
            found[name] = (options.rows[name], "")
        elif base in options.rows:
            found[name] = (options.rows[base], cell.removesuffix("]"))
        elif base in table.rows and base not in given:
            found[name] = ((base,), cell.removesuffix("]"))
    return found


def published_record(options: Published, names: Iterable[str], file: Path | None) -> dict[str, Any]:
    """What the store keeps of the table, so that reports need no file: all of it, and which variant is which row."""
    paper, table = find_table(options, file)
    mapped = rows_of_variants(options, table, names)
    claims = [{**asdict(claim), "pairs": claim.pairs} for claim in table.claims]
    record = {
        "table": options.table,
        "source": asdict(paper.source),
        **asdict(table),
        "claims": claims,
        "variants": {name: {"rows": rows, "group": group} for name, (rows, group) in mapped.items()},
        "without": [name for name in mapped if name in options.without or name.partition(" [")[0] in options.without],
    }
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain

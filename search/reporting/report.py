"""A comparison as text: what `archlab report` prints, for terminals, Markdown, papers and programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import inert, records
from archlab.search.formatting.tables import Block, Cell, Column, Page, number, printable
from archlab.search.reporting.latex import latex
from archlab.search.reporting.main_table import main_block, narrowed, table_page
from archlab.search.reporting.markdown import markdown
from archlab.search.reporting.page import page_of
from archlab.search.reporting.shape import Shape
from archlab.search.reporting.text import text
from archlab.search.results.told import Told, sections_of

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison


PAPER = ("variant", "perplexity", "delta", "interval", "verdict")
"""The columns of a paper's table, where no others are asked for."""


def report(comparison: Comparison, format: str = "text", shape: Shape | None = None, rates: bool = False) -> str:
    """The study's table in "text", "md", "latex", "csv" or "json". Raises ValueError for another format.

    text (at most 110 columns), md and latex hold the table, a search's best trials, and below them how the intervals
    were made, what the table could have resolved, notes and provenance; md, and with `rates` the others too, each
    variant's losses at the values that were tuned. text and md say what was found in sentences, latex has a paper's
    columns alone. csv holds the table alone with what else was measured and fitted to a ladder, json every frame; the
    numbers of both are exact. With a `shape` it is the table alone, in that shape, with what stands below it; csv and
    json then leave out rows alone.
    """
    if format not in FORMATS:
        near = get_close_matches(format, FORMATS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"'{format}' is not a report format{hint} ({', '.join(FORMATS)})")
    if format in PLAIN:
        return PLAIN[format](comparison if shape is None else narrowed(comparison, shape))
    if shape is not None:
        return PAGES[format](table_page(comparison, shape))
    page = build_page(comparison)
    if not rates and format != "md":
        page = without_details(page)
    return PAGES[format](for_paper(page, comparison.noise["unit"]) if format == "latex" else page)


def to_plain(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values: frames as lists of rows, missing numbers as None."""
    found = {
        "study": comparison.study,
        "question": comparison.question,
        "baseline": comparison.baseline,
        "table": comparison.table,
        "trials": [row | {"folder": _below_store(row["folder"])} for row in records(comparison.trials)],
        **{name: value for told in sections_of(comparison) for name, value in told.plain(comparison).items()},
        "noise": comparison.noise,
        "notes": comparison.notes,
        "cost": comparison.cost,
        "provenance": comparison.provenance,
    }
    plain: dict[str, Any] = _plain(found)
    return plain


def _below_store(folder: str | None) -> str | None:
    """The folder of a trial as it is called below a store: where that lies is the machine's own."""
    return "/".join(Path(folder).parts[-3:]) if folder else folder


def _plain(value: Any) -> Any:
    """Frames as lists of rows; JSON has no NaN."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "to_dict"):
        return _plain(records(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(comparison: Comparison) -> str:
    """The table, a column per component and what sections add to it; a missing number is an empty field.

    `mismatch` needs a `match`, and active parameters and the load of experts a model that has some."""
    rows = records(comparison.table)
    names = list(dict.fromkeys(name for row in rows for name in row["components"]))
    unmatched = comparison.table["mismatch"].isna().all()
    dense = (comparison.table["active_parameters"] == comparison.table["parameters"]).all()
    left_out = {"components", "varied", *(["mismatch"] if unmatched else [])}
    left_out |= {"active_parameters", "router_load_max"} if dense else set()
    plain = [column for column in comparison.table.columns if column not in left_out]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    more = {name: values for told in sections_of(comparison) for name, values in told.csv(comparison).items()}
    writer.writerow(map(inert, [*plain, *(f"component.{name}" for name in names), *more]))
    for row in rows:
        has = [bool(row["components"].get(name)) for name in names]
        told = [values.get(row["variant"]) for values in more.values()]
        writer.writerow(map(inert, _plain([*(row[column] for column in plain), *has, *told])))
    return out.getvalue()


def _json(comparison: Comparison) -> str:
    return json.dumps(to_plain(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


PAGES: dict[str, Callable[[Page], str]] = {"text": text, "md": markdown, "latex": latex}
PLAIN: dict[str, Callable[[Comparison], str]] = {"csv": _csv, "json": _json}
FORMATS = (*PAGES, *PLAIN)


ALL = "All variants"
"""The title of the main table where others stand before it."""


def build_page(comparison: Comparison) -> Page:
    """All that text, Markdown and LaTeX print."""
    first, then = (
        [block for each in sections_of(comparison) if each.heads is heads for block in each.blocks(comparison)]
        for heads in (True, False)
    )
    domains = [_by_domain(comparison)] if len(comparison.domains) else []
    main = main_block(comparison)
    return page_of(comparison, [*first, replace(main, title=ALL) if first else main, *domains, *then])


def without_details(page: Page) -> Page:
    """The page without its details, and with how they are asked for."""
    blocks = [block for block in page.blocks if not block.detail]
    more = [f"losses at the values that were tuned: archlab report {page.study} --rates"]
    return page if len(blocks) == len(page.blocks) else replace(page, blocks=blocks, notes=[*page.notes, *more])


def for_paper(page: Page, unit: str) -> Page:
    """The page with the few columns of a paper's table; `--columns` asks for others. Differences in bits/byte stand
    beside bits, as perplexities of several tokenizers do not compare."""
    kept = {*PAPER, "bits"} - {"perplexity"} if unit == "bits/byte" else {*PAPER}
    blocks = [replace(b, columns=[c for c in b.columns if not c.key or c.key in kept]) for b in page.blocks]
    return replace(page, blocks=blocks)


def section_report(comparison: Comparison, key: str) -> str:
    """The tables and notes of one section alone, as text."""
    told = Told.known[key]
    blocks, notes = [*told.blocks(comparison)], [printable(note) for note in told.notes(comparison)]
    return text(Page(printable(comparison.study), printable(comparison.question), blocks, [], notes, "", []))


def as_text(page: Page) -> str:
    """Any page for a terminal."""
    return text(page)


def _by_domain(comparison: Comparison) -> Block:
    """The test perplexity of each variant in each domain of a mixture."""
    frame = comparison.domains.pivot(index="variant", columns="domain", values="perplexity")
    variants = list(dict.fromkeys(comparison.domains["variant"]))
    columns = [Column("variant", [Cell(printable(name)) for name in variants], "l")]
    for domain in dict.fromkeys(comparison.domains["domain"]):
        cells = [Cell(number(float(frame.loc[name, domain]), ".4g")) for name in variants]
        columns.append(Column(printable(str(domain)), cells))
    tokens = comparison.provenance["tokens"][0]
    drawn = [
        f"{row['name']} {row['share']:.0%} of the rows, {tokens * row['share'] / row['train_tokens']:.2g} epochs"
        for row in comparison.provenance["data"].get("domains", ())
    ]
    return Block("Test perplexity by domain", columns, printable(f"{comparison.baseline}: {'; '.join(drawn)}"))

"""Reads the documentation: its tables, its blocks of code, its links, and the answers that it promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.model.model import resolve
from archlab.arch_dsl.patching.patch import apply
from archlab.search.recipe.fits import positions, refusals
from archlab.search.study.asked import asked_variants
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.training.parallel.rules import problems as divided
from archlab.search.variants.zoo import varied

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "search" / "study" / "template.yaml"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


class Table(NamedTuple):
    """A table of a page; the cells are without the backticks around them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Block(NamedTuple):
    """A fenced block: its language ("" for none), its text, and the line that it begins on."""

    language: str
    text: str
    line: int


def tables(text: str) -> list[Table]:
    """All tables of a page, outside of fenced blocks."""
    found: list[list[tuple[str, ...]]] = []
    fenced = inside = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        row = not fenced and line.startswith("| ")
        if row:
            if not inside:
                found.append([])
            found[-1].append(tuple(cell.strip() for cell in line.strip("|").split(" | ")))
        inside = row or (inside and line.startswith("|-"))
    return [Table(rows[0], tuple(rows[1:])) for rows in found]


def bare(cell: str) -> str:
    """A cell without the backticks around it."""
    return cell.strip().strip("`").strip()


def names(cell: str) -> list[str]:
    """The words in backticks of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    language, lines, start = None, [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines, start = line[3:].strip(), [], number + 1
        else:
            yield Block(language, "\n".join(lines) + "\n", start)
            language = None


def inline(text: str) -> Iterator[str]:
    """What stands in backticks on a page, outside of fenced blocks."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", outside)


@contextmanager
def plugins_of(page: Path, folder: Path) -> Iterator[None]:
    """Writes the Python blocks of a page that say their name (`my_gate.py: …`); unloads them at the end."""
    for block in blocks(page.read_text()):
        if block.language == "python" and (named := re.match(r'"""(\w+\.py): ', block.text)):
            (folder / named[1]).write_text(block.text)
    try:
        yield
    finally:
        for plugin in plugins.loaded():
            plugins.unload(plugin)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def examine(study: Study) -> int:
    """Makes the models of all variants, without data; how many. Raises SpecError for what makes no sense."""
    made = 0
    for made, asked in enumerate(asked_variants(study), 1):  # noqa: B007
        recipe = apply(study.train, [_below(s, "train.") for s in asked.settings if s.path.startswith("train.")])
        _, model = varied(study.model, [s for s in asked.settings if not s.path.startswith("train.")])
        if problems := recipe.problems("train"):
            raise SpecError(problems)
        model = resolve(model, vocab=recipe.vocab(257), max_positions=positions(recipe, model))
        if problems := list(refusals(recipe, model)) + divided(study.resources.parallel, model, recipe):
            raise SpecError(problems)
    return made


def _below(setting, prefix: str):
    return type(setting)(setting.path.removeprefix(prefix), setting.node, setting.source, setting.mark)


def answer(setting: str) -> str:
    """What is said when `path: value` is set in the template, without places in the file; '' when it is accepted."""
    try:
        examine(load_study(TEMPLATE, read_text(setting).plain()))
    except SpecError as error:
        return re.sub(r" on line \d+", "", "; ".join(map(_said, error.problems)))
    return ""


def _said(problem: Problem) -> str:
    return f"{problem.path}: {problem.message}"

"""A report as GitHub Markdown: the best is bold."""

from __future__ import annotations

from collections.abc import Iterator

from archlab.search.formatting.tables import IDENTITIES, Block, Page

ALIGN = {"l": ":--", "r": "--:", "c": ":-:"}


def markdown(page: Page) -> str:
    """The page, with everything that came from a file escaped."""
    lines = [f"### {escape(page.study)}", ""]
    if page.question:
        lines += [escape(page.question), ""]
    if page.findings:
        lines += [*(f"- {escape(sentence)}" for sentence in page.findings), ""]
    lines += [*_table(page.blocks[0]), "", *(escape(line) for line in page.lines)]
    for block in page.blocks[1:]:
        lines += ["", f"{escape(block.title)}:", "", *_table(block)]
    if page.notes:
        lines += ["", *(f"- {escape(note)}" for note in page.notes)]
    lines += ["", escape(page.provenance), ""]
    if page.identities:
        listed = (f"- {escape(name)}: {hashes}" for name, hashes in page.identities)
        lines += [f"<details><summary>{IDENTITIES}</summary>", "", *listed, "", "</details>", ""]
    return "\n".join(lines)


def escape(text: str) -> str:
    """Nothing in `text` is Markdown or HTML any more."""
    text = "".join(f"\\{c}" if c in "\\|*_`#~" else c for c in text.replace("&", "&amp;").replace("<", "&lt;"))
    return text.replace("](", "]\\(").replace("][", "]\\[")


def _table(block: Block) -> Iterator[str]:
    yield _row([escape(c.header) for c in block.columns])
    yield _row([ALIGN[c.align] for c in block.columns])
    for cells in zip(*(c.cells for c in block.columns), strict=True):
        yield _row([f"**{escape(cell.text)}**" if cell.strong else escape(cell.text) for cell in cells])
    if block.legend:
        yield ""
        yield escape(block.legend.replace("* ", "bold: "))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""A report for a paper: LaTeX tables with booktabs, the best bold."""

from __future__ import annotations

from collections.abc import Iterator

from archlab.search.formatting.tables import IDENTITIES, Block, Page

SYMBOLS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "Δ": r"$\Delta$",
    "✓": r"\checkmark",
    "\N{EN DASH}": "--",
    "[": "{[}",
    "…": r"\ldots{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def latex(page: Page) -> str:
    """One table environment per block; the question is the first one's caption, the lines below it its footnotes."""
    lines = [r"% needs \usepackage{booktabs,amssymb}"]
    footnotes = [*page.lines, *page.notes, page.provenance]
    lines += _table(page.blocks[0], page.question or page.study, f"tab:{_label(page.study)}", footnotes)
    for i, block in enumerate(page.blocks[1:], 2):
        lines += ["", *_table(block, f"{block.title}.", f"tab:{_label(page.study)}-{i}", [])]
    if page.identities:
        lines += ["", f"% {IDENTITIES}", *(f"% {name}: {hashes}" for name, hashes in page.identities)]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Every character stands for itself."""
    return "".join(SYMBOLS.get(c, c) for c in text)


def _label(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _table(block: Block, caption: str, label: str, footnotes: list[str]) -> Iterator[str]:
    yield r"\begin{table}"
    yield r"\centering"
    yield rf"\caption{{{escape(caption)}}}"
    yield rf"\label{{{label}}}"
    yield rf"\begin{{tabular}}{{{''.join(c.align for c in block.columns)}}}"
    yield r"\toprule"
    yield _row([escape(c.header) for c in block.columns])
    yield r"\midrule"
    for cells in zip(*(c.cells for c in block.columns), strict=True):
        texts = ((escape(cell.text), cell.strong) for cell in cells)
        yield _row([rf"\textbf{{{text}}}" if strong else text for text, strong in texts])
    yield r"\bottomrule"
    yield r"\end{tabular}"
    for line in [block.legend.replace("* ", "bold: "), *footnotes]:
        if line:
            yield rf"\par{{\footnotesize {escape(line)}\par}}"
    yield r"\end{table}"


def _row(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"

"""A figure of a paper: the numbers behind it, how they are drawn, and its files, which are the same bytes each time."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd

from archlab.dashboards.paper.inline import inline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("pdf", "svg", "png")
WIDTHS = (3.25, 6.75)
"""Inches of a column and of a page, as conferences have them."""
STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],  # they come with matplotlib; the first fits a text in Times
    "font.size": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "text.parse_math": False,  # names are names
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": "#e3e6e9",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # TrueType: what can be searched, and what conferences ask for
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "archlab",
    "savefig.dpi": 300,
}
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_LEGEND_ROW = 0.16  # inches
_NO_DATE: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Producer": "archlab", "Creator": "archlab"},
    "svg": {"Date": None, "Creator": "archlab"},
    "png": {"Software": "archlab"},
}


@dataclass(frozen=True)
class Look:
    """The colour and the line of each variant, the same as on the screen."""

    colours: dict[str, str]
    dashes: dict[str, str]

    def line(self, name: str) -> dict[str, Any]:
        """How a line of a variant is drawn."""
        return {"color": self.colours[name], "linestyle": DASHES[self.dashes[name]]}


@dataclass(frozen=True)
class Drawing:
    """A figure: `rows` are all numbers that are in it, `draw` puts them onto an empty figure that is `width` inches
    wide, `height` inches of its own for a width of a column."""

    name: str
    caption: str
    rows: pd.DataFrame
    draw: Callable[[Figure], None]
    height: float = 2.3

    def files(self, width: float, forms: Sequence[str] = FORMS, font: str | None = None) -> dict[str, bytes]:
        """The figure in each form."""
        import matplotlib
        from matplotlib.figure import Figure

        style = {**STYLE, **({"font.family": font} if font else {}), "backend": "agg"}
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style}):
            figure = Figure(figsize=(width, self.height))
            self.draw(figure)
            files = {form: io.BytesIO() for form in forms}
            for form, file in files.items():
                figure.savefig(file, format=form, metadata=_NO_DATE[form])
            return {form: file.getvalue() for form, file in files.items()}

    def html(self, mark: str, said: str = "") -> str:
        """The figure with its caption, after what is `said` of its number; `mark` tells its parts from those of others
        on the same page."""
        svg = inline(self.files(WIDTHS[1], ("svg",), "DejaVu Sans")["svg"], mark)
        return f"<figure>{svg}<figcaption>{said}{escape(self.caption)}</figcaption></figure>"

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return self.html(re.sub(r"[^a-z0-9]+", "-", self.name.lower()))


class Drawings(dict[str, Drawing]):
    """The figures of a study by name. A notebook shows all of them."""

    def _repr_html_(self) -> str:
        return "".join(each._repr_html_() for each in self.values())


def in_legend(name: str) -> str:
    """A name as a legend shows it: one that begins with an underscore it would leave out."""
    return f" {name}" if name.startswith("_") else name


def line_plot(axes: Axes, rows: pd.DataFrame, x: str, look: Look, **options: Any) -> None:
    """The lines and bands of `rows` {variant, `x`, mean, std}."""
    for name, own in rows.groupby("variant", sort=False):
        style = look.line(str(name))
        axes.plot(own[x], own["mean"], label=in_legend(str(name)), **style, **options)
        if own["std"].notna().any():
            low, high = own["mean"] - own["std"], own["mean"] + own["std"]
            axes.fill_between(own[x], low, high, color=style["color"], alpha=0.15, linewidth=0)


def finish(figure: Figure, axes: Axes, **properties: Any) -> None:
    """Sets titles and other properties of the axes, and the legend below them, in as few rows as its width gives. Many
    rows make the figure higher, and leave the axes their room."""
    axes.set(**properties)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        longest = max(map(len, labels))
        columns = max(1, min(6, len(labels), int(figure.get_figwidth() / (0.35 + 0.055 * longest))))
        rows = math.ceil(len(labels) / columns)
        figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * max(rows - 2, 0))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def count_axis(axis: Any) -> None:
    """Ticks as 200k, 1.5M, 1e15."""
    axis.set_major_formatter(lambda value, _: counted(value))


def log_axis(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of each power of ten, as counts; no formulas, which names that are text leave no room for."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())
    count_axis(axis)


def counted(value: float) -> str:
    """A count as short as it can be told."""
    if not value or abs(value) >= 1e12:
        return f"{value:.3g}".replace("e+", "e")
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def zoom(axes: Axes, values: pd.Series) -> None:
    """Ends the vertical axis a little beyond these values, not at the height from which a curve falls."""
    known = values.dropna()
    if len(known):
        axes.set_ylim(*late_range(float(known.min()), float(known.max())))


def late_range(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis with some room beyond its values."""
    room = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    return (low - room, high + room) if math.isfinite(room) else (0.0, 1.0)

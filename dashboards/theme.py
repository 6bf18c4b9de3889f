"""How everything looks: one colour per variant, the figures' paper-like layout, and the page's Mantine theme."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

BASELINE_COLOUR = "#3d4249"
# Okabe and Ito's colours without yellow and black (invisible on white, taken by the baseline), then four of Paul Tol's:
# told apart by colour-blind eyes, the most distant ones first.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#e69f00", "#56b4e9", "#882255", "#999933", "#332288", "#44aa99")
DASHES = ("solid", "dash", "dot", "dashdot")

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, MUTED, GREY, RULE = "#1f2328", "#667079", "#8b939c", "#e6e8eb"

MANTINE = {
    "fontFamily": FONT,
    "headings": {"fontFamily": FONT, "fontWeight": "650"},
    "primaryColor": "dark",
    "defaultRadius": "md",
    "black": INK,
}


def colours(variants: Sequence[str], baseline: str) -> dict[str, str]:
    """One colour per variant, by its place in the study, so that it never changes while trials finish."""
    others = cycle(PALETTE)
    return {name: BASELINE_COLOUR if name == baseline else next(others) for name in variants}


def dashes(variants: Sequence[str], baseline: str) -> dict[str, str]:
    """A line style per variant: solid until the colours are used up."""
    others = (dash for dash in cycle(DASHES) for _ in PALETTE)
    return {name: DASHES[0] if name == baseline else next(others) for name in variants}


def translucent(colour: str, alpha: float) -> str:
    """`#rrggbb` as an rgba() with that opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis: a thin line with ticks outside, a pale grid, the title in muted ink."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": MUTED}, "standoff": 10},
        "showline": True,
        "linecolor": "#b8bec5",
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#b8bec5",
        "tickfont": {"size": 11.5, "color": MUTED},
        "gridcolor": RULE,
        "zeroline": False,
        "automargin": True,
        **options,
    }


def layout(**options: Any) -> dict[str, Any]:
    """The layout that all figures share; `uirevision` keeps zoom and hidden lines when new data arrives."""
    return {
        "font": {"family": FONT, "size": 12.5, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        # without these a figure's buttons stand in a grey box, as its background is transparent
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": translucent(MUTED, 0.5), "activecolor": MUTED},
        "hoverlabel": {"font": {"family": FONT, "size": 12}, "bgcolor": "#ffffff", "bordercolor": "#c9ced4"},
        "legend": {
            "orientation": "h",
            "y": -0.2,
            "yanchor": "top",
            "x": 0,
            "font": {"size": 12},
            "itemsizing": "constant",
            "tracegroupgap": 0,
        },
        "uirevision": "keep",
        "template": None,
        **options,
    }

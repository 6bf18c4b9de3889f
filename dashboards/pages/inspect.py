"""What happens inside of each variant: where attention goes, what gates let through, what is forgotten, what grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dash
from dash import html
from dash.development.base_component import Component

from archlab.dashboards import figures_context, theme
from archlab.dashboards.figures import Figure
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.shell import INSPECT, Choice, Chosen, needs_comparison, register_tab
from archlab.dashboards.panels import Look, left_out, panels
from archlab.dashboards.parts import asks, block_table, graph, measuring, missing, section
from archlab.search.comparison.figure_frames import minus_baseline, over_rows, uniform_frame
from archlab.search.sections.evaluate.told import numbers_block

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

    from archlab.search.results.comparison import Comparison

Colours = Mapping[str, str]
ALL = ":all"
"""Of which variants, where that is not the name of one."""
ELSEWHERE = ("needle", "loss_by_position", "perplexity_by_context", "accuracy")  # on the page of the context


@dataclass(frozen=True)
class Kind:
    """A grid or curve that is known: under which topic it stands, what it is called, what it is, how it is drawn."""

    topic: str
    title: str
    said: str
    look: Look = field(default_factory=Look)
    log: bool = False  # of a curve


TOPICS = {
    "attention": "Attention",
    "gates": "Gates",
    "memory": "Forgetting",
    "size": "Sizes",
    "experts": "Experts",
    "other": "Other",
}
_SHARE, _WIDE = Look(low=0.0, form=".2g"), Look(log=True)
KINDS = {
    "first_token_attention": Kind(
        "attention", "Attention on the first token", "Share of the attention that goes to the first token.", _SHARE
    ),
    "local_attention": Kind("attention", "Local attention", "Share of the attention that stays near.", _SHARE),
    "attention_entropy": Kind("attention", "Entropy of attention", "In nats: how spread it is.", Look(low=0.0)),
    "strong_attention": Kind(
        "attention", "Strong attention", "Share of the attention that lies in single weights above the bound.", _SHARE
    ),
    "strong_attention_map": Kind(
        "memory",
        "Strong attention with distance",
        "Share of the attention in single weights above the bound, at the distances from one number to the next.",
        _SHARE,
    ),
    "gate_mean": Kind("gates", "Open gates", "Mean score of a gate after its activation.", _SHARE),
    "gate_below": Kind("gates", "Closed gates", "Share of scores whose magnitude is below the bound.", _SHARE),
    "gated_below": Kind("gates", "What is gated away", "Share of what leaves a gate that is below the bound.", _SHARE),
    "gate_histogram": Kind("gates", "Histogram of gate scores", "Share of scores by magnitude, in percent.", log=True),
    "forget_gate_half_life": Kind(
        "memory", "Half-life", "Tokens after which a head has forgotten half: ln 2 / mean(−ln f).", _WIDE
    ),
    "forget_gate_map": Kind("memory", "Decay with distance", "F(i, j) = f(j+1) … f(i), mean by i − j.", _SHARE),
    "forget_gate": Kind("memory", "Forget gate", "Mean of f, what is kept from one token to the next.", Look(high=1.0)),
    "massive_activations": Kind("size", "Massive activations", "The largest |h| after each layer.", log=True),
    "activation_norms": Kind("size", "Norms of activations", "Root mean square of what passes a node.", _WIDE),
    "gradient_norms": Kind("size", "Norms of gradients", "L2 norm of the gradient of a branch.", _WIDE),
    "effective_rank": Kind("size", "Effective rank", "Directions that the outputs of a head lie in.", Look(low=1.0)),
    "router_load": Kind("experts", "Load of experts", "Share of assignments times the experts: 1 is even.", _SHARE),
}  # fmt: skip
"""By the start of its name; the longest that fits is taken."""


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/inspect`."""
    register_tab(app, library, INSPECT, choices, content)


def kind_of(name: str) -> Kind:
    """What is known of a grid or a curve; of one that a plug-in measures, that it is called so."""
    return KINDS.get(_start(name)) or Kind("other", name.replace("_", " "), "")


def _start(name: str) -> str:
    """The key of `KINDS` that a name belongs to; of one that is not known, itself."""
    return max((start for start in KINDS if name.startswith(start)), key=len, default=name)


def choices(study: Study) -> Sequence[Choice]:
    """The topics that were measured, which variant, and whether beside the baseline."""
    found = study.comparison
    if found is None or not (topics := {kind_of(name).topic for name in _frames(found)}):
        return []
    measured = {*found.grids["variant"], *found.curves["variant"]}
    variants = {name: name for name in study.variants if name in measured}
    return [
        Choice("topic", "Show", {key: title for key, title in TOPICS.items() if key in topics}),
        Choice("variant", "Of", {ALL: "all variants", **variants}),
        Choice("as", "As", {"value": "Value", "difference": "Minus baseline"}),
    ]


@needs_comparison
def content(study: Study, found: Comparison, chosen: Chosen) -> list[Component]:
    """A section for each grid and curve of the topic."""
    if not (frames := _frames(found)):
        return [section("Inside", _nothing(study))]
    colours = theme.colours(study.variants, study.record["baseline"])
    variants = study.variants if chosen["variant"] == ALL else [chosen["variant"]]
    shown: dict[str, list[Component]] = {}
    for name, frame in frames.items():
        if kind_of(name).topic != chosen["topic"]:
            continue
        if chosen["as"] == "difference":
            frame = minus_baseline(frame, found.table)
        own = frame[frame["variant"].isin(variants)]
        part = _part(found, name, own, variants, colours, chosen["as"] == "difference")
        shown.setdefault(str(frame["measure"].iloc[0]) if len(frame) else name, []).append(part)
    return [part for measure, parts in shown.items() for part in _measure(found, measure, parts, colours)]


def _frames(found: Comparison) -> dict[str, pd.DataFrame]:
    """Grids and curves over layers and scores by their names, in the order of `KINDS`."""
    named = [(str(name), own) for each in (found.curves, found.grids) for name, own in each.groupby("name", sort=False)]
    frames = {name: own for name, own in named if not name.startswith(ELSEWHERE)}
    return {name: frames[name] for name in sorted(frames, key=lambda name: [*KINDS, _start(name)].index(_start(name)))}


def _measure(found: Comparison, measure: str, parts: list[Component], colours: Colours) -> list[Component]:
    """The parts of one measure, then its numbers; what uniform attention would have stands before them."""
    even = uniform_frame(found.measures)
    even = even[even["measure"] == measure]
    if len(even):
        places = list(dict.fromkeys(even["name"].str.replace("_", " ")))
        rows = even.assign(place=even["name"].str.replace("_", " "))
        bare = rows.assign(uniform=rows["uniform"].round(6))[["place", "uniform"]].drop_duplicates()  # masks may differ
        marks = [{"place": p, "value": u, "text": "uniform"} for p, u in bare.dropna().itertuples(index=False)]
        figure = figures_context.dots(rows, places, colours, "Mean over layers and heads", marks)
        figure["layout"]["showlegend"] = False
        parts = [*parts, graph(f"even-{measure}", figure, 100 + 13 * even["variant"].nunique())]
    if measure in set(found.measures["measure"]):
        parts = [*parts, block_table(numbers_block(found, measure))]
    return parts


def _part(
    found: Comparison, name: str, own: pd.DataFrame, variants: Sequence[str], colours: Colours, difference: bool
) -> Component:
    """A grid or a curve, of these variants."""
    kind = kind_of(name)
    said = kind.said
    if "row" in own:
        figure, height = panels(own, variants, colours, Look(signed=True) if difference else kind.look)
        drawn = [graph(name, figure, height)]
        if "distance" in set(own["column"]) and not difference:
            lines = _lines(over_rows(own), colours, found, "Distance (tokens)", kind, True)
            drawn.insert(0, graph(f"{name}-lines", lines, 320))
        said += f" Over {int(own['cases'].max())} windows, means over the seeds." if len(own) else ""
        said += f" {count} more variants are not drawn." if (count := left_out(own)) else ""
    else:
        over = "Layer" if "by_layer" in name else "|score| (%)" if "histogram" in name else "x"
        figure = _lines(own, colours, found, over, kind, False)
        if kind.log and not difference and figure["data"]:
            figure["layout"]["yaxis"] |= {"type": "log"}
        drawn = [graph(name, figure, 320)]
    return section(_title(name, difference), *drawn, html.P(said, className="muted small"))


def _lines(own: pd.DataFrame, colours: Colours, found: Comparison, over: str, kind: Kind, log: bool) -> Figure:
    figure = figures_context.by_position(own, colours, found.baseline, kind.title, (), log)
    if figure["data"]:
        figure["layout"]["xaxis"]["title"]["text"] = over
        figure["layout"]["yaxis"] |= {"autorange": True, "range": None}
    return figure


def _title(name: str, difference: bool) -> str:
    """What it is called; where a model has several places of a kind, or bounds, with the rest of its name."""
    rest = name.removeprefix(_start(name)).removeprefix("_by_layer").strip("_").replace("_", " ")
    return kind_of(name).title + (f": {rest}" if rest else "") + (", minus baseline" if difference else "")


def _nothing(study: Study) -> Component:
    asked = ("first_token_attention", "attention_entropy", "massive_activations", "activation_norms")
    said = "Where attention goes, what gates let through, what a head forgets and how large activations get, by layer."
    line, awaited = f"evaluate: [{', '.join(asked)}, gates, forget_gate]", any(asks(study, each) for each in asked)
    return missing(said, line, measuring(study, *asked), awaited)

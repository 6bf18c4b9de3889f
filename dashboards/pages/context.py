"""What each variant makes of its context: loss by position, domains, needles, recall and induction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import dash
from dash import html
from dash.development.base_component import Component

from archlab.dashboards import figures_context, theme
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.shell import CONTEXT, Choice, Chosen, needs_comparison, register_tab
from archlab.dashboards.panels import Look, left_out, panels
from archlab.dashboards.parts import asks, block_table, graph, measuring, missing, section
from archlab.dashboards.words import unlike_baseline
from archlab.search.comparison.figure_frames import WINDOWS, minus_baseline, probes_frame, smoothed, usual_window
from archlab.search.sections.evaluate.told import numbers_block

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

LOSS, PERPLEXITY = "loss_by_position", "perplexity_by_context"
SCORES = {
    "chosen": ("Choice", "share of texts where the right answer is the likeliest of the answers", 0.0, 1.0),
    "exact": ("Exact", "share of texts where greedy decoding gives the whole answer", 0.0, 1.0),
    "rank": ("Rank", "mean place of the right answer among the answers, 1 the best", 1.0, None),
    "loss": ("Loss", "mean loss of the right answer, nats/token", None, None),
}


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/context`."""
    register_tab(app, library, CONTEXT, choices, content)


def choices(study: Study) -> Sequence[Choice]:
    """What can be chosen depends on what was measured."""
    found = study.comparison
    if found is None:
        return []
    offered = []
    if lengths := _lengths(found):
        usual = str(usual_window(int(max(found.curves["x"], default=1))))
        if len(lengths) > 1:
            offered.append(Choice("window", "Windows of", lengths, _widest(found, lengths)))
        offered += [
            Choice("show", "Show", {"value": "Value", "difference": "Minus baseline"}),
            Choice(
                "smooth", "Mean over", {str(each): f"{each} tokens" if each > 1 else "1" for each in WINDOWS}, usual
            ),
            Choice("x", "Position", {"linear": "Linear", "log": "Logarithmic"}),
        ]
    if needles := _needles(found):
        offered.append(Choice("score", "Needle", {key: each[0] for key, each in SCORES.items()}))
        if len(needles) > 1:
            offered.append(Choice("needle", "of", {name: name for name in needles}))
    return offered


@needs_comparison
def content(study: Study, found: Comparison, chosen: Chosen) -> list[Component]:
    """The sections of the page; what was not measured says how it would be."""
    colours = theme.colours(study.variants, study.record["baseline"])
    shown = [part(study, found, chosen, colours) for part in (_positions, _needle, _probes)]
    if len(found.domains):
        figure = figures_context.by_domain(found.domains, colours, "perplexity", "Test perplexity")
        shown.append(section("Domains", graph("domains", figure, 90 + 46 * found.domains["domain"].nunique())))
    return shown


def _lengths(found: Comparison) -> dict[str, str]:
    """End of a curve's name: how long its windows are."""
    names = [str(name) for name in dict.fromkeys(found.curves["name"]) if str(name).startswith(LOSS)]
    ends = {name.removeprefix(LOSS): found.curves[found.curves["name"] == name]["x"].max() for name in names}
    return {end.strip("_") or "trained": f"{int(last)} tokens" for end, last in ends.items()}


def _widest(found: Comparison, lengths: Iterable[str]) -> str:
    """Of which windows most variants have a curve: another study may have measured a reused trial in others."""
    having = found.curves.groupby("name")["variant"].nunique()
    return max(lengths, key=lambda window: int(having[LOSS if window == "trained" else f"{LOSS}_{window}"]))


def _needles(found: Comparison) -> list[str]:
    measures = dict.fromkeys(map(str, found.grids["measure"]))
    return [name for name in measures if name.startswith("needle")]


def _positions(study: Study, found: Comparison, chosen: Chosen, colours: Mapping[str, str]) -> Component:
    lengths = _lengths(found)
    if not lengths:
        said = "The loss of each position of a window tells whether a model makes use of what it has read."
        absent = missing(said, "evaluate: [loss_by_position]", measuring(study, LOSS), asks(study, LOSS))
        return section("Loss by position", absent)
    window = chosen.get("window", next(iter(lengths)))
    end = "" if window == "trained" else f"_{window}"
    difference, over, log = chosen["show"] == "difference", int(chosen["smooth"]), chosen["x"] == "log"
    trained = sorted({variant.get("context", study.record["context"]) for variant in study.record["variants"]})
    titles = {LOSS: "L(i), test loss (nats/token)", PERPLEXITY: "P(l), test perplexity"}
    apart = unlike_baseline(study) if difference else []
    figures = []
    for name, title in titles.items():
        own = found.curves[found.curves["name"] == name + end]
        own = smoothed(own, over) if name == LOSS else own
        own = minus_baseline(own[~own["variant"].isin(apart)], found.table) if difference else own
        y_title = f"{title}, minus baseline" if difference else title
        figure = figures_context.by_position(own, colours, found.baseline, y_title, trained, log)
        figure["layout"]["uirevision"] = f"{window}{difference}{log}"
        figures.append(graph(name, figure, 400))
    return section(
        "Loss by position",
        html.Div(figures, className="pair"),
        html.P(_legend(over, difference), className="muted small"),
        html.P(f"Not drawn, as another objective, test text or tokenizer does not compare: {', '.join(apart)}.")
        if apart
        else None,
    )


def _legend(over: int, difference: bool) -> str:
    """What the lines of the losses are."""
    smooth = f", over {over} neighbouring positions" if over > 1 else ""
    told = f"L(i): the mean loss of the i-th token{smooth}; P(l): the perplexity of the first l tokens. "
    told += "Means over the seeds"
    if difference:
        return f"{told}, minus those of the baseline of each variant: below zero is better."
    return f"{told}; bands, where nothing is smoothed: ± one standard deviation over them."


def _needle(study: Study, found: Comparison, chosen: Chosen, colours: Mapping[str, str]) -> Component:
    import pandas as pd

    needles = _needles(found)
    if not needles:
        said = "A sentence that is hidden in the test text, and asked for after it."
        absent = missing(said, "evaluate: [needle]", measuring(study, "needle"), asks(study, "needle"))
        return section("Needle in a haystack", absent)
    label, score = chosen.get("needle", needles[0]), chosen["score"]
    title, said, low, high = SCORES[score]
    grids = found.grids[found.grids["name"] == f"{label}_{score}"]
    turned = grids.rename(columns={"y": "x", "x": "y", "row": "column", "column": "row"})
    turned = turned.sort_values(["y", "x"], key=pd.to_numeric, kind="stable")
    look = Look(title, low, high, upwards=False, split=study.record["context"], form=".2g", across=3)
    figure, height = panels(turned, study.variants, colours, look)
    cases = int(grids["cases"].min())
    note = f"Cells: {said}; means over {cases} texts and the seeds. Rows: how deep in the text it lies, in %."
    if more := left_out(grids):
        note += f" {more} more variants are not drawn."
    return section(
        "Needle in a haystack",
        graph("needle", figure, height),
        html.P(note, className="muted small"),
        block_table(numbers_block(found, label)),
    )


def _probes(study: Study, found: Comparison, _: Chosen, colours: Mapping[str, str]) -> Component:
    rows = probes_frame(found.measures)
    if not len(rows):
        said = "Whether a model finds again what stood beside a token, and goes on as before."
        asked, command = "evaluate: [recall, induction]", measuring(study, "recall", "induction")
        return section("Recall and induction", missing(said, asked, command, asks(study, "recall")))
    rows = rows.assign(place=rows["name"].str.replace("_", " "))
    places = list(dict.fromkeys(rows["place"]))
    marks = [
        {"place": place, "value": value, "text": what}
        for place in places
        for what in ("chance", "ceiling")
        if (value := rows[rows["place"] == place][what].max()) == value
    ]
    figure = figures_context.dots(rows, places, colours, "Share of right answers", marks)
    figure["layout"]["xaxis"] |= {"range": [-0.02, 1.02]}
    height = 90 + max(46, 15 * rows["variant"].nunique()) * len(places)
    note = "Points: means over the seeds, ± one standard deviation. Ticks: chance, and a variant's highest ceiling."
    return section("Recall and induction", graph("probes", figure, height), html.P(note, className="muted small"))

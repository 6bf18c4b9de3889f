"""How a variant is built: its block as a diagram, what it changes in another one, and what each node costs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import dash
import flask
from dash import html
from dash.development.base_component import Component

from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.pages.shell import (
    ARCHITECTURE,
    Choice,
    Chosen,
    address,
    downloads,
    non_defaults,
    refusal,
    register_tab,
)
from archlab.dashboards.parts import card, command_line, here, section
from archlab.search.store.store import StoreError

OWN, ALONE = ":baseline", ":nothing"
"""Beside what a variant is shown, where that is not the name of one."""
MEDIA = {
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
    "png": "image/png",
    "dot": "text/vnd.graphviz",
    "yaml": "application/yaml",
}
STATES = {"changed": "other", "added": "new", "removed": "gone"}
SAFE = "default-src 'none'; style-src 'unsafe-inline'; sandbox allow-top-navigation-by-user-activation"
"""An SVG is a document: this one may show itself and follow a reader's click, and nothing else."""
_SCALE = 1.05  # pixels for a point of the drawing, whose text is of 11 points
_SIZE = re.compile(rb'width="([\d.]+)pt" height="([\d.]+)pt"')


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/architecture` and the drawings below `/diagram/`."""
    register_tab(app, library, ARCHITECTURE, choices, content)

    @app.server.get("/diagram/<name>.<ending>")
    def diagram(name: str, ending: str) -> flask.Response:
        """The drawing of a variant, to be shown or, with `download`, to be kept."""
        from archlab.arch_dsl.inspection.dot import NoDot
        from archlab.arch_dsl.language.errors import SpecError

        if ending not in MEDIA:
            return refusal(f"there is no .{ending}: {', '.join(MEDIA)}", 404)
        try:
            study = library.summary(name)
            chosen = {each.key: flask.request.args.get(each.key, each.default) for each in choices(study)}
            if wrong := [each.key for each in choices(study) if chosen[each.key] not in each.values]:
                return refusal(f"the address asks for a {wrong[0]} that does not exist", 404)
            keep = "download" in flask.request.args
            response = flask.Response(_file(study, chosen, ending, keep), mimetype=MEDIA[ending])
        except (NotFound, StoreError) as error:
            return refusal(str(error), 404)
        except (NoDot, SpecError) as error:
            return refusal(str(error), 409)
        response.headers["Content-Security-Policy"] = SAFE
        if keep:
            file = re.sub(r"[^\w.-]+", "-", f"{name}-{chosen['variant']}", flags=re.ASCII)  # a header has no more
            response.headers["Content-Disposition"] = f"attachment; filename={file}.{ending}"
        return response


def choices(study: Study) -> Sequence[Choice]:
    """Which variant, beside which one, and the kernels of which device."""
    from archlab.search.models.graphs import DEVICES

    names = study.variants
    others = {OWN: "its baseline", ALONE: "nothing", **{name: name for name in names}}
    first = next((name for name in names if name != study.record["baseline"]), names[0])
    return [
        Choice("variant", "Variant", {name: name for name in names}, first),
        Choice("against", "Beside", others),
        Choice("device", "Kernels for", DEVICES),
    ]


def _against(study: Study, chosen: Chosen) -> str | None:
    """The variant that another is shown beside; None where it is shown alone."""
    if chosen["against"] == ALONE:
        return None
    own = next(each for each in study.record["variants"] if each["name"] == chosen["variant"])
    other = own.get("baseline") or study.record["baseline"] if chosen["against"] == OWN else chosen["against"]
    return None if other == chosen["variant"] else str(other)


def _graph(study: Study, chosen: Chosen) -> Any:
    from archlab.search.models.graphs import graph_of

    return graph_of(study.record, chosen["variant"], _against(study, chosen), chosen["device"])


def _file(study: Study, chosen: Chosen, ending: str, keep: bool) -> bytes:
    """The file of a drawing. What is shown leads to the table below it and fills its frame; what is kept does not."""
    from archlab import arch_dsl
    from archlab.arch_dsl.inspection.dot import dot
    from archlab.search.models.graphs import drawing, model_of

    if ending == "yaml":
        own = next(each for each in study.record["variants"] if each["name"] == chosen["variant"])
        return arch_dsl.dump(model_of(own)).encode()
    link = "" if keep else address(study.name, ARCHITECTURE.step, **non_defaults(choices(study), chosen)) + "#"
    text = dot(_graph(study, chosen), link)
    if ending == "dot":
        return text.encode()
    made = drawing(text, ending)
    return made if keep or ending != "svg" else _SIZE.sub(b'width="100%" height="100%"', made, count=1)


def content(study: Study, chosen: Chosen) -> list[Component]:
    """The drawing with what it says in numbers, and every node in a table."""
    from archlab.arch_dsl.inspection.dot import NoDot, dot
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.search.models.graphs import as_text, drawing, rows_of

    try:
        found = _graph(study, chosen)
    except SpecError as error:
        return [_unreadable(chosen["variant"], error)]
    against = _against(study, chosen)
    query = urlencode(non_defaults(choices(study), chosen))
    try:
        drawn: list[Component] = [_frame(drawing(dot(found)), study, chosen, query)]
    except NoDot as error:
        drawn = [
            html.P(f"There is no drawing: {error}. The same as text:", className="muted small"),
            html.Pre(as_text(found), className="as-text"),
        ]
    links = downloads(f"/diagram/{study.name}", MEDIA, f"?{query}&download")
    rows = rows_of(found)
    return [
        html.P(_summary(found, against), className="lead"),
        section("Block", _legend(rows, against), *drawn, aside=["Download ", *links]),
        section("Nodes", _table(rows, against), aside=f"below a block: one layer; forward, {found.tokens} tokens"),
        section("Print", command_line(_command(study, chosen))),
    ]


def _frame(svg: bytes, study: Study, chosen: Chosen, query: str) -> Component:
    """The drawing as a document of its own, as large as it is, or as wide as the page."""
    size = _SIZE.search(svg)
    wide, high = (float(size[1]), float(size[2])) if size else (800.0, 800.0)
    return html.Iframe(
        src=f"/diagram/{study.name}.svg?{query}",
        title=f"Diagram of {chosen['variant']}",
        className="diagram",
        sandbox="allow-top-navigation-by-user-activation",
        style={"width": f"{wide * _SCALE:.0f}px", "aspectRatio": f"{wide} / {high}"},
    )


def _unreadable(name: str, error: Exception) -> Component:
    return card(
        "This variant can't be drawn",
        html.P(str(error)[:500]),
        html.P(
            f"{name} is made of primitives that this dashboard does not know: those of a plug-in, which it never runs, "
            "or of another version of archlab. The command line draws it with the plug-in:",
            className="muted",
        ),
        command_line("archlab show STUDY.yaml --variant NAME --allow-plugins --dot"),
        kind="missing",
    )


def _summary(found: Any, against: str | None) -> str:
    """The size of the model, and how it differs from that of the other."""
    costs = [cost for cost in (found.total, found.before) if cost is not None]
    sizes = {
        "parameters": [cost.parameters for cost in costs],
        "FLOPs per token": [cost.flops_model // found.tokens for cost in costs],
        "bytes of cache per token in float32": [4 * cost.cache // found.tokens for cost in costs],
    }
    said = []
    for name, both in sizes.items():
        more = _difference(*both) if len(both) > 1 else ""
        said.append(f"{both[0]:,} {name}" + (f" ({more})" if more else ""))
    return f"{', '.join(said)}{f'; in brackets against {against}' if against else ''}."


def _difference(now: float, before: float) -> str:
    """+1,024, +0.1%; "" where they are equal."""
    if now == before:
        return ""
    share = f", {(now / before - 1):+.2%}" if before else ""
    return f"{now - before:+,.0f}{share}".replace("-", "\N{MINUS SIGN}")


def _legend(rows: Sequence[Mapping[str, Any]], against: str | None) -> Component:
    """What the colours mean, and how many nodes have each."""
    if against is None:
        return html.P("Point at a node for its kernels; a click leads to its row below.", className="muted small")
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    marks = [
        html.Span([html.Span(className=f"state state-{state}"), f"{counts[state]} {word}"], className="legend-item")
        for state, word in STATES.items()
    ]
    return html.P([f"Beside {against}: ", *marks], className="muted small")


def _table(rows: Sequence[Mapping[str, Any]], against: str | None) -> Component:
    """A row per node, at which a click on the drawing arrives."""
    heads = ["Node", "What", "Shape", "Parameters", "FLOPs/token", "Kernel"]
    if against is not None:
        heads.insert(4, "Difference")
    right = ("Parameters", "FLOPs/token", "Difference")
    header = html.Tr([html.Th(head, className="to-r" if head in right else "to-l") for head in heads])
    body = [html.Tr(_cells(row, against), id=row["path"], className=f"node-{row['state']}") for row in rows]
    return html.Div(html.Table([html.Thead(header), html.Tbody(body)], className="searched nodes"), className="wide")


def _cells(row: Mapping[str, Any], against: str | None) -> list[Component]:
    name = html.Span(row["name"], style={"paddingLeft": f"{16 * row['depth']}px"})
    state = html.Span(STATES[row["state"]], className="muted small node-state") if row["state"] in STATES else None
    numbers = [f"{row['parameters']:,}" if row["parameters"] else ""]
    numbers += [_difference(row["parameters"], row["parameters_before"])] if against is not None else []
    numbers.append(f"{row['flops_per_token']:,.0f}" if row["flops_per_token"] else "")
    cells = [html.Td([name, state]), html.Td(row["what"]), html.Td(row["shape"], className="muted")]
    cells += [html.Td(number, className="to-r") for number in numbers]
    return [*cells, html.Td(row["kernels"], className="muted")]


def _command(study: Study, chosen: Chosen) -> str:
    words = ["archlab", "show", study.file, "--variant", chosen["variant"], "--dot", *here()]
    return f"{shlex.join(words)} | dot -Tpdf > model.pdf"

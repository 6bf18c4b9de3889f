"""A graph of a model as DOT text, and what Graphviz makes of it: SVG, PDF, PNG."""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from urllib.parse import quote

from archlab.arch_dsl.inspection.diagram import Graph, Node
from archlab.arch_dsl.inspection.text_tree import Line
from archlab.arch_dsl.inspection.wiring import Edge

FORMS = ("svg", "pdf", "png")
_TIMEOUT_S = 60
_NARROW, _WIDE = 32, 48  # characters on a line of a node, and of the box around a branch
_MEMBER = re.compile(r"\{type: ([\w-]+), ([^{}]*)\}")
_MUTED, _RIM, _GROUNDS = "#667079", "#d5d9dd", ("#f2f2ee", "#faf9f7")
_LOOK = {
    "same": ("#ffffff", "#8b939c", "solid"),
    "changed": ("#fbf1db", "#c98500", "solid"),
    "added": ("#e4f3ea", "#12713f", "solid"),
    "removed": ("#fbe9e5", "#a8321f", "dashed"),
}
"""How a node looks by its state: (fill, line, style); changed is amber, added green, removed red and dashed."""
_EDGES = {
    "flow": 'color="#59636e"',
    "stream": 'color="#b8bec5", penwidth=2.2',
    "read": 'color="#59636e", style=dashed, constraint=false',
}


class NoDot(RuntimeError):
    """Graphviz is not on this machine, or could not draw."""


def dot(graph: Graph, link: str = "") -> str:
    """The DOT text of a graph. With `link` each node leads to that address with the node's path at its end.

    Nodes hold what stands there, its shape and parameters; what it was before, where that differs. Their tooltips say
    the FLOPs too, and which kernels compute them.
    """
    states = {node.path: node.state for _, node in graph.places()}
    lines = [
        "digraph model {",
        'graph [rankdir=TB, compound=true, nodesep=0.22, ranksep=0.3, fontname="Helvetica", fontsize=12,'
        ' bgcolor="transparent", pad=0.1];',
        'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11, margin="0.12,0.06", height=0.3];',
        "edge [arrowsize=0.55];",
        *(line for node in graph.nodes for line in _drawn(node, link, 1, graph.tokens)),
        *(_edge(edge, states) for edge in graph.edges),
        "}",
    ]
    return "\n".join(lines) + "\n"


def rendered(text: str, form: str = "svg") -> bytes:
    """What `dot` makes of DOT text. Raises NoDot where it is not installed, or fails."""
    program = shutil.which("dot")
    if program is None:
        raise NoDot("Graphviz is not installed: `apt-get install graphviz` (or `brew install graphviz`) brings `dot`")
    try:
        done = subprocess.run([program, f"-T{form}"], input=text.encode(), capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NoDot(f"dot took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        raise NoDot(f"dot failed: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def _drawn(node: Node, link: str, depth: int, tokens: int) -> Iterator[str]:
    """A node; where it has parts, a box around them."""
    indent, (fill, line, style) = "  " * depth, _LOOK[node.state]
    about = [f"id={_quoted(node.path)}", f"tooltip={_quoted(tooltip(node, tokens))}"]
    about += [f"URL={_quoted(link + quote(node.path))}", 'target="_top"'] if link else []
    if node.nodes:
        ground = _GROUNDS[depth % 2] if node.state == "same" else fill
        look = f'style="rounded,filled,{style}"; fillcolor="{ground}"; color="{_RIM if node.state == "same" else line}"'
        yield f"{indent}subgraph {_quoted(f'cluster_{node.path}')} {{"
        yield f"{indent}  label=<{_label(node)}>; labeljust=l; {look}; {'; '.join(about)};"
        for part in node.nodes:
            yield from _drawn(part, link, depth + 1, tokens)
        yield f"{indent}}}"
        return
    shape = f"label=<{_label(node)}>"
    if node.path.endswith(".join") and all(each is None or each.what == "add" for each in (node.now, node.before)):
        shape = 'label="+", shape=circle, width=0.24, margin=0, fixedsize=true'
    look = f'fillcolor="{fill}", color="{line}", style="rounded,filled,{style}"'
    yield f"{indent}{_quoted(node.path)} [{shape}, {look}, {', '.join(about)}];"


def _label(node: Node) -> str:
    """What is written in a node, as Graphviz' own markup: its name, what stands there, what stood there, its size."""
    line = node.line
    wide = _WIDE if node.nodes else _NARROW
    lines = [f"<B>{_text(line.name)}</B>", *(_text(text) for text in _wrapped(_plain(line.what), wide))]
    if node.state == "changed" and node.before is not None:
        lines += [f'<FONT COLOR="#8a5a00">{_text(text)}</FONT>' for text in _wrapped(_was(line, node.before), wide)]
    facts = " · ".join(fact for fact in ("" if node.nodes else line.shape, _size(line)) if fact)
    lines += [f'<FONT POINT-SIZE="9" COLOR="{_MUTED}">{_text(facts)}</FONT>'] if facts else []
    return '<BR ALIGN="LEFT"/>'.join(lines) + '<BR ALIGN="LEFT"/>' if node.nodes else "<BR/>".join(lines)


def _was(now: Line, before: Line) -> str:
    """What stood here before, as far as it differs."""
    if now.what == before.what:
        return f"was {before.shape if now.shape != before.shape else _size(before) or 'without parameters'}"
    kind, _, facts = before.what.partition(": ")
    if now.what.partition(": ")[0] == kind and facts:
        kept = now.what.partition(": ")[2].split(", ")
        return f"was {', '.join(fact for fact in facts.split(', ') if fact not in kept) or kind}"
    return f"was {_plain(before.what) or 'empty'}"


def _plain(text: str) -> str:
    """Primitives as people say them: `{type: gate, activation: silu}` is gate (activation silu)."""
    return _MEMBER.sub(lambda found: f"{found[1]} ({found[2].replace(': ', ' ')})", text)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _size(line: Line) -> str:
    many = line.cost.parameters
    return f"{short(many)} parameter{'s' if many > 1 else ''}" if many else ""


def short(number: float) -> str:
    """A count in three digits: 16.5k, 1.02M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def tooltip(node: Node, tokens: int) -> str:
    """A node in words, for who points at it."""
    line = node.line
    said = [f"{node.path}: {node.state}" if node.state != "same" else node.path]
    said += [text for text in (line.what, line.shape) if text]
    if line.cost.parameters:
        said.append(f"{line.cost.parameters:,} parameters")
    if line.cost.flops_model:
        said.append(f"{short(line.cost.flops_model / tokens)} FLOPs per token")
    if node.state == "changed" and node.before is not None:
        said.append(f"before: {node.before.what or node.before.shape}, {node.before.cost.parameters:,} parameters")
    said += [f"{choice.op}: {choice.implementation} ({choice.reason})" for choice in node.kernels]
    return "\n".join(said)


def _edge(edge: Edge, states: Mapping[str, str]) -> str:
    """An arrow; to or from a place that is gone or new, in the colour of that."""
    ends = {states[edge.start], states[edge.end]}
    look = _EDGES[edge.kind]
    if edge.kind != "stream" and ends & {"added", "removed"}:
        line = _LOOK["removed" if "removed" in ends else "added"][1]
        look = look.replace("#59636e", line) + (", style=dashed" if "removed" in ends else "")
    return f"  {_quoted(edge.start)} -> {_quoted(edge.end)} [{look}];"


def _quoted(text: str) -> str:
    """A DOT string, in which every character stands for itself."""
    return f'"{_text(text)}"'


def _text(text: str) -> str:
    """Text as entities, which Graphviz hands on as they are: not all that it writes into an SVG does it escape itself,
    and it takes a backslash for the start of a name of its own."""
    return escape(text).replace("\\", "&#92;").replace("\n", "&#10;")

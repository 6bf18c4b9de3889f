"""Diagrams hold every part of a model once, connected as it computes, and say what differs from another model."""

import shutil
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from archlab import arch_dsl, kernels
from archlab.arch_dsl import zoo
from archlab.arch_dsl.inspection.diagram import Graph, Node, graph
from archlab.arch_dsl.inspection.dot import NoDot, dot, rendered
from archlab.arch_dsl.inspection.text_tree import Line
from archlab.arch_dsl.parts.context import Cost

BASE = {
    "d_model": 32,
    "n_layers": 3,
    "vocab": 64,
    "max_positions": 32,
    "block": {"norm": "rmsnorm", "attention": {"heads": 4, "positional": "rope"}, "ffn": "swiglu"},
}
SOURCES = {"embedding", "mask", "scores", "weights", "decay", "memory", "query_table", "table"}
"""What may read nothing: tables, masks, and biases of positions."""
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="dot is not installed: apt-get install graphviz")


def model(**changes):
    return arch_dsl.resolve(arch_dsl.patch(arch_dsl.load(BASE), changes))


def leaves(found):
    return {node.path: node for _, node in found.places() if not node.nodes}


@pytest.mark.parametrize("name", zoo.names())
def test_every_part_of_a_published_model_is_on_the_way_to_its_logits(name):
    spec = zoo.load(name)
    spec = arch_dsl.resolve(spec.replace(vocab=spec.vocab or 256, max_positions=spec.max_positions or 1024))
    found = graph(spec, tokens=64)
    places = leaves(found)
    ends, starts = {edge.end for edge in found.edges}, {edge.start for edge in found.edges}
    assert ends | starts == set(places)
    last = "logits" if "logits" in places else "unembedding"
    assert {path for path in places if path not in starts} <= {
        last,
        "exit",
        *(p for p in places if p.endswith(".balance")),
    }
    assert {path.rpartition(".")[2] for path in places if path not in ends} <= SOURCES
    assert {node.state for node in places.values()} == {"same"}


@pytest.mark.parametrize("name", zoo.names())
def test_parameters_of_the_parts_add_up_to_those_of_the_model(name):
    spec = zoo.load(name)
    spec = arch_dsl.resolve(spec.replace(vocab=spec.vocab or 256, max_positions=spec.max_positions or 1024))

    def inside(nodes):
        return sum(
            node.now.cost.parameters if node.path.split(".")[-1][:5] == "block" else below(node) for node in nodes
        )

    def below(node):
        return inside(node.nodes) if node.nodes else node.now.cost.parameters

    prompts = sum((stack.prompt or 0) * spec.d_model for stack in spec.stacks().values())
    found = graph(spec, tokens=64)
    assert inside(found.nodes) + prompts == arch_dsl.cost(spec, 64).parameters
    for _, node in found.places():
        if node.nodes and "." in node.path and node.path.split(".")[-1][:5] != "block":
            assert sum(part.now.cost.parameters for part in node.nodes) == node.now.cost.parameters


def test_a_variant_tells_what_is_new_gone_and_other():
    before = model()
    found = graph(model(**{"block.attention.positional": "forget_gate", "block.ffn.width": 40}), before, 32)
    states = {path: node.state for path, node in leaves(found).items()}
    assert {path for path, state in states.items() if state == "added"} == {"block.attention.scores"}
    assert {path for path, state in states.items() if state == "removed"} == {
        "block.attention.query",
        "block.attention.key",
    }
    ffn = {f"block.ffn.{part}" for part in ("gate_projection", "input_projection", "activation", "output_projection")}
    assert {path for path, state in states.items() if state == "changed"} == ffn
    edges = {(edge.start, edge.end) for edge in found.edges}
    assert ("block.attention.query_projection", "block.attention.attend") in edges
    assert ("block.attention.query", "block.attention.attend") in edges  # of the baseline, drawn as gone
    assert found.before.parameters == arch_dsl.cost(before, 32).parameters != found.total.parameters


def test_a_gate_reads_the_branch_and_a_removed_branch_stays_visible():
    gated = model(**{"block.attention.gate": {"position": "sdpa"}})
    found = graph(gated, model(), 32)
    read = [edge for edge in found.edges if edge.kind == "read"]
    assert [(edge.start, edge.end) for edge in read] == [("block.attention.pre", "block.attention.sdpa")]
    without = graph(model(**{"block.ffn": None}), model(), 32)
    gone = {path for path, node in leaves(without).items() if node.state == "removed"}
    assert gone and all(path.startswith("block.ffn.") for path in gone)
    streams = [edge.start for edge in without.edges if edge.end == "final"]
    assert streams == ["block.attention.join", "block.ffn.join"]


def test_layers_that_differ_stand_in_groups_and_others_are_drawn_once():
    mixed = model(overrides={"1": {"block.attention.mask": {"type": "window", "size": 4}}})
    found = graph(mixed, model(), 32)
    groups = [node for node in found.nodes if node.path.startswith("block")]
    assert [(node.path, node.line.what) for node in groups] == [("block[0,2]", "2 layers"), ("block[1]", "1 layer")]
    changed = [path for path, node in leaves(found).items() if node.state == "changed"]
    assert changed == ["block[1].attention.mask"]
    deeper = graph(model(n_layers=4), model(), 32)
    assert {path.split(".")[0] for path, node in leaves(deeper).items() if node.state == "added"} == {"block[3]"}


def test_kernels_stand_at_the_places_that_they_compute():
    spec = model(**{"block.attention.gate": {"position": "sdpa"}})
    choices = arch_dsl.kernel_choices(spec, kernels.Device.parse("sm_90"))
    places = leaves(graph(spec, tokens=32, kernels=choices))
    asked = {path: [choice.op for choice in node.kernels] for path, node in places.items() if node.kernels}
    assert asked["block.attention.attend"] == ["attention"] and asked["block.ffn.activation"] == ["glu"]
    assert asked["block.attention.sdpa"] == ["gate"] and asked["block.attention.query"] == ["rotary"]


@needs_dot
def test_whatever_a_model_is_called_is_drawn_as_text():
    bad = '<img src=x onerror="alert(1)"> & \\n \\N "quoted" ]]>'
    node = Node(f"block.{bad}", Line(0, bad, bad, bad, Cost(parameters=3)), None)
    text = dot(Graph((node,), (), Cost(), None, 1), link="/study/x?variant=a&b#")
    tree = ElementTree.fromstring(rendered(text))
    assert {element.tag.rpartition("}")[2] for element in tree.iter()} <= {
        "svg",
        "g",
        "a",
        "title",
        "path",
        "text",
        "polygon",
    }
    shown = " ".join("".join(tree.itertext()).replace("\N{NO-BREAK SPACE}", " ").split())
    assert '<img src=x onerror="alert(1)">' in shown and "]]>" in shown
    (link,) = [element for element in tree.iter() if element.tag.endswith("}a")]
    assert link.get("{http://www.w3.org/1999/xlink}href") == f"/study/x?variant=a&b#{quote(f'block.{bad}')}"
    assert any(element.get("id") == f"block.{bad}" for element in tree.iter())


@needs_dot
@pytest.mark.parametrize(("form", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_graphviz_draws_what_differs_in_colour(form, start):
    text = dot(graph(model(**{"block.attention.gate": {"position": "sdpa"}}), model(), 32))
    drawn = rendered(text, form)
    assert drawn.startswith(start)
    if form == "svg":
        assert b"#12713f" in drawn and b"#a8321f" not in drawn and b"block.attention.sdpa" in drawn


def test_without_graphviz_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoDot, match="apt-get install graphviz"):
        rendered("digraph {}")

"""A model as a tree for the terminal: sites, shapes, parameters and FLOPs of every node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.spec import Family, Spec, fields_of
from archlab.arch_dsl.model.model import Model, cost, exit_of
from archlab.arch_dsl.model.stack import Stack
from archlab.arch_dsl.parts.context import Cost
from archlab.arch_dsl.primitives.branch import OUTER
from archlab.arch_dsl.primitives.heads import MultiHead
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import brief_text, canonical


@dataclass(frozen=True)
class Line:
    """One node of the tree: its depth, its name, what it is, the shape it acts on, and what it costs."""

    depth: int
    name: str
    what: str
    shape: str
    cost: Cost


def tree(model: Model, tokens: int = 1024) -> list[Line]:
    """The lines of a resolved model; costs are forward, for a sequence of `tokens` tokens."""
    total = cost(model, tokens)
    stacks = model.stacks()
    depths = ", ".join(f"{name or 'n_layers'} {stack.n_layers}" for name, stack in stacks.items())
    summary = f"d_model {model.d_model}, {depths}, vocab {model.vocab}"
    if model.constraint is not None:
        summary += f", constraint {brief_text(canonical(model.constraint, brief=True))}"
    lines = [Line(0, "model", summary, "", total)]
    width = model.embedding.width
    table = f"table [{model.vocab}, {width or model.d_model}]" + (f", then to {model.d_model}" if width else "")
    many = "" if getattr(model.embedding, "shared", True) else "one for each stack: "
    lines.append(Line(1, "embedding", f"{many}{table}", "[B,T,D]", _part(total, "embedding")))
    for name, stack in stacks.items():
        if name:
            said = ", positions after_source" if getattr(stack, "positions", "own") != "own" else ""
            lines.append(Line(1, name, f"x {stack.n_layers}{said}", "[B,T,D]", _part(total, name)))
        lines += _stack(stack, 2 if name else 1, _part(total, name) if name else total)
    tied = "tied to the embedding" if model.unembedding.tied else f"table [{model.vocab}, {model.d_model}]"
    lines.append(Line(1, "unembedding", tied, "[B,T,V]", _part(total, "unembedding")))
    lines += _site(model.logits, "logits", "[B,T,V]", 1, _part(total, "logits"))
    if predict := getattr(model, "predict", None):
        what = f"{brief_text(canonical(predict, brief=True))}, in training alone"
        lines.append(Line(1, "predict", what, "[B,T,V]", _part(total, "predict")))
    if (out := exit_of(model)) is not None:
        what = brief_text(canonical(out, brief=True)) + (", in training alone" if out.only_trained else "")
        lines.append(Line(1, "exit", what, "[B,T]", _part(total, "exit")))
    return lines


def _stack(stack: Stack, depth: int, cost: Cost) -> Iterator[Line]:
    """What acts on one stream, in order."""
    yield from _site(stack.embed, "embed", "[B,T,D]", depth, _part(cost, "embed"))
    shape = "[B,T,D]"
    if stack.streams is not None:
        shape = f"[B,T,{stack.streams.n},D]"
        what = brief_text(canonical(stack.streams, brief=True))
        yield Line(depth, "streams", what, shape, _part(cost, "streams"))
    yield from _site(stack.skips, "skips", shape, depth, _part(cost, "skips"))
    if stack.loop is not None:
        yield Line(depth, "loop", brief_text(canonical(stack.loop, brief=True)), shape, _part(cost, "loop"))
    if stack.depths is not None:
        yield Line(depth, "depths", brief_text(canonical(stack.depths, brief=True)), shape, Cost())
    layers = _part(cost, "stack")
    if len(layers.children) > 1:
        yield from _layers(stack, depth, layers)
    else:
        yield Line(depth, "block", f"x {stack.n_layers}", "[B,T,D]", layers)
        one = next(iter(layers.children.values()), Cost())
        yield from (*block_lines(stack.block, depth + 1, one), *_router(depth + 1, one))
    yield from _site(stack.final, "final", "[B,T,D]", depth, _part(cost, "final"))


def layer_costs(cost: Cost) -> dict[int, Cost]:
    """What each layer costs, by its number, from what all layers of a stack cost; {0: …} stands for equal ones."""
    found: dict[int, Cost] = {}
    for name, part in cost.children.items():
        if not name.startswith("layers "):
            return {0: part}
        for run in name.removeprefix("layers ").split(","):
            first, _, last = run.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), _part(part, "each"))
    return found


def _layers(stack: Stack, depth: int, cost: Cost) -> Iterator[Line]:
    """Each distinct block under the layers that have it; the first layer apart where it shares something with all."""
    alike = len({stack.turns_of(depth) for depth in range(stack.n_layers)}) == 1
    why = "of which the first shares something with all" if alike else "not all in the loop"
    why = "of which some choose their tokens" if stack.depths else why
    why = "not all equal" if stack.overrides else why
    yield Line(depth, "block", f"{stack.n_layers} layers, {why}", "[B,T,D]", cost)
    blocks = stack.layers()
    for name, part in cost.children.items():
        first = int(name.removeprefix("layers ").split(",")[0].split("-")[0])
        yield Line(depth + 1, name, "", "[B,T,D]", part)
        one = _part(part, "each")
        yield from (*block_lines(blocks[first], depth + 2, one), *_router(depth + 2, one))


def _router(depth: int, layer: Cost) -> Iterator[Line]:
    """The line of the router of a layer that chooses its tokens."""
    if "depths" in layer.children:
        yield Line(depth, "depths", "router", "[B,T]", layer.children["depths"])


def block_lines(block: Block, depth: int, layer: Cost) -> Iterator[Line]:
    """The lines of one layer, its branches at `depth`."""
    for name, branch in block.items():
        yield from _branch(name, branch, depth, _part(layer, name))


def _part(cost: Cost, name: str) -> Cost:
    return cost.children.get(name, Cost())


def _branch(name: str, branch: Any, depth: int, cost: Cost) -> Iterator[Line]:
    sites = {field: getattr(branch, field) for field in fields_of(type(branch)) if _is_site(getattr(branch, field))}
    plain = {
        field: getattr(branch, field)
        for field, item in fields_of(type(branch)).items()
        if field not in sites
        and not isinstance(getattr(branch, field), Mapping | Spec)
        and not (item.added and getattr(branch, field) == item.default)
    }
    given = ", ".join(f"{key} {value}" for key, value in plain.items() if value is not None and value is not False)
    yield Line(depth, name, f"{branch.type}: {given}" if given else branch.type, "[B,T,D]", cost)
    shown = set()
    for part, child in _ordered(branch, cost):
        shown.add(part)
        if part in sites:
            yield from _site(sites[part], part, _shape(branch, part), depth + 1, child)
        elif isinstance(members := getattr(branch, "branches", None), Mapping) and part in members:
            yield from _branch(part, members[part], depth + 1, child)
        elif isinstance(own := getattr(branch, part, None), Family):
            yield Line(depth + 1, part, brief_text(canonical(own, brief=True)), "", child)
        else:
            yield Line(depth + 1, part, own if isinstance(own, str) else "", _shape(branch, part), child)


def _is_site(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, Family) for item in value)


def _ordered(branch: Any, cost: Cost) -> Iterator[tuple[str, Cost]]:
    """The parts in the order in which they act: `pre`, what the branch does, `post`, `join`."""
    given = [
        name
        for name, item in fields_of(type(branch)).items()
        if not (item.added and getattr(branch, name) == item.default)
        and (isinstance(getattr(branch, name), Family) or (_is_site(getattr(branch, name)) and getattr(branch, name)))
    ]
    inner = [name for name in cost.children if name not in OUTER]
    at = inner.index("attend") if "attend" in inner else len(inner)
    inner[at:at] = [name for name in given if name not in (*inner, *OUTER)]
    for name in ("pre", *inner, "post", "join"):
        if name in cost.children or name in given:
            yield name, _part(cost, name)


def _shape(branch: Any, part: str) -> str:
    """The tensor that a part makes; "" where it is plain from its neighbours."""
    heads, head_dim = (getattr(branch, name, None) for name in ("heads", "head_dim"))
    of_keys = getattr(branch, "kv_heads", None) or getattr(branch, "key_heads", None)
    values = getattr(branch, "value_dim", None)  # of linear attention, whose values have heads and a size of their own
    grids = {"query": (heads if values is None else of_keys, head_dim), "key": (of_keys, head_dim)}
    grids |= {"value": (of_keys, head_dim) if values is None else (heads, values), "sdpa": (heads, values or head_dim)}
    if isinstance(branch, MultiHead) and branch.kv_heads and branch.head_dim:
        grids |= branch.grids()
        heads, _ = grids.pop("scores")
    if part in grids:
        return "" if None in grids[part] else f"[B,T,{grids[part][0]},{grids[part][1]}]"
    if part in ("scores", "attend"):
        return f"[B,{heads},T,T]"
    if part in ("activation", "preactivation", "linear", "inner") and hasattr(branch, "width"):
        return f"[B,T,{branch.width}]"
    if part in ("query_inner", "kv_inner"):
        return f"[B,T,{getattr(branch, part.replace('inner', 'latent'))}]"
    return "" if part.endswith("projection") or part in ("dt", "lora", "switch") else "[B,T,D]"


def _site(items: tuple[Any, ...], name: str, shape: str, depth: int, cost: Cost) -> Iterator[Line]:
    if items:
        yield Line(depth, name, ", ".join(brief_text(canonical(item, brief=True)) for item in items), shape, cost)

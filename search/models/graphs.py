"""The models of a stored study as graphs, and as a row per node: what each costs, and what it is beside another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from archlab import arch_dsl, kernels
from archlab.arch_dsl.inspection.diagram import Graph, Node, graph
from archlab.arch_dsl.inspection.dot import rendered, short
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.context import NodeChoice
from archlab.search.results.comparable import spec_of

DEVICES = {"cpu": "CPU", "sm_80": "A100", "sm_90": "H100", "sm_100": "B200"}
"""Whose kernels can be told, none of which need be present: name, what people call it."""


def model_of(variant: Mapping[str, Any]) -> Model:
    """The resolved model of a variant as a study's record keeps it. Raises SpecError where this installation cannot
    read it: it may be made of a plug-in's primitives."""
    return _loaded(json.dumps(spec_of(variant)))


@lru_cache(maxsize=128)
def _loaded(spec: str) -> Model:
    return arch_dsl.load(json.loads(spec))


def graph_of(record: Mapping[str, Any], name: str, against: str | None = None, device: str = "cpu") -> Graph:
    """A variant of a study, beside another one or alone, over its context, with its kernels on a device. Raises
    SpecError where a model cannot be read, or gets no kernel that is forced."""
    variants = {variant["name"]: variant for variant in record["variants"]}
    one, other = (json.dumps(spec_of(variants[each])) if each else None for each in (name, against))
    assert one is not None
    context = variants[name].get("context") or record["context"]
    return _graph(one, other, context, device, record.get("recipe", {}).get("precision") == "bf16")


@lru_cache(maxsize=64)
def _graph(spec: str, other: str | None, context: int, device: str, half: bool) -> Graph:
    model, before = _loaded(spec), None if other is None else _loaded(other)
    dtype = torch.bfloat16 if half else torch.float32
    return graph(model, before, context, kernels_of(model, kernels.Device.parse(device), dtype))


def kernels_of(model: Model, device: kernels.Device, dtype: torch.dtype) -> list[NodeChoice]:
    """Which implementation each node gets. Raises SpecError where the one that ARCHLAB_KERNELS forces serves none."""
    try:
        return arch_dsl.kernel_choices(model, device, dtype)
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError.of("ARCHLAB_KERNELS", str(error)) from error


def rows_of(found: Graph) -> list[dict[str, Any]]:
    """A row per node: `path`, `depth`, what stands there, `state`, parameters and FLOPs per token now and before."""
    rows = []
    for depth, node in found.places():
        now, before = node.now, node.before if found.before is not None else None
        rows.append(
            {
                "path": node.path,
                "depth": depth,
                "name": node.line.name,
                "what": node.line.what,
                "shape": node.line.shape,
                "state": node.state,
                "parameters": now.cost.parameters if now else 0,
                "parameters_before": before.cost.parameters if before else 0,
                "flops_per_token": now.cost.flops_model / found.tokens if now else 0.0,
                "cache_per_token": now.cost.cache / found.tokens if now else 0.0,
                "kernels": ", ".join(dict.fromkeys(f"{c.op}: {c.implementation}" for c in node.kernels)),
            }
        )
    return rows


MARKS = {"same": " ", "changed": "~", "added": "+", "removed": "-"}


def as_text(found: Graph) -> str:
    """The graph as an indented list, for where nothing can draw: + is new, - is gone, ~ is other."""
    return "\n".join(f"{MARKS[node.state]} {'  ' * depth}{_said(node)}" for depth, node in found.places()) + "\n"


def _said(node: Node) -> str:
    size = f"{short(node.line.cost.parameters)} parameters" if node.line.cost.parameters else ""
    return "  ".join(part for part in (node.line.name, node.line.what, node.line.shape, size) if part)


@lru_cache(maxsize=128)
def drawing(text: str, form: str = "svg") -> bytes:
    """What Graphviz makes of DOT text, once. Raises NoDot."""
    return rendered(text, form)

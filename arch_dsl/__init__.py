"""arch_dsl: what a model is. A typed, immutable spec that is loaded, patched, hashed, costed, drawn and compiled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archlab.arch_dsl import (
    primitives,  # noqa: F401  # which registers every primitive
    zoo,  # noqa: F401  # which registers `{zoo: …}` with Model
)
from archlab.arch_dsl.compiler.modules import Decoder, EncoderDecoder, compile, kernel_choices
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import Node, read
from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.parts.context import Call, Cost
from archlab.arch_dsl.patching.patch import patch
from archlab.arch_dsl.plain import to_python
from archlab.arch_dsl.tree.identity import Change, canonical, diff, dump, identity

__all__ = [
    "Call",
    "Change",
    "Cost",
    "Decoder",
    "EncoderDecoder",
    "Model",
    "Problem",
    "SpecError",
    "canonical",
    "compile",
    "cost",
    "diff",
    "dump",
    "identity",
    "kernel_choices",
    "load",
    "patch",
    "resolve",
    "to_python",
]


def load(source: str | Path | Mapping[str, Any] | Node) -> Model:
    """A model spec from a YAML file, or from plain data (its canonical form, or what the YAML would say).

    Raises SpecError with every problem of the file, each with its line and column.
    """
    node = read(source) if isinstance(source, str | Path) else Node.of(source)
    return parse(Model, node)

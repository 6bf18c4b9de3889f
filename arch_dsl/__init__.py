"""arch_dsl: what a model is. A typed, immutable spec that is loaded, patched, hashed, costed, drawn and compiled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arch_dsl import primitives as primitives
from arch_dsl import zoo as zoo  # which registers `{zoo: …}` with Model
from arch_dsl.context import Call, Cost
from arch_dsl.errors import Problem, SpecError
from arch_dsl.identity import Change, canonical, diff, dump, identity
from arch_dsl.model import Model, cost, resolve
from arch_dsl.modules import Decoder, EncoderDecoder, compile, kernel_choices
from arch_dsl.parse import parse
from arch_dsl.patch import patch
from arch_dsl.plain import to_python
from arch_dsl.source import Node, read

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

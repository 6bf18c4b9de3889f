"""The `seeds:` of a study: how many each variant gets, a number, or as many as its comparison takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import Problem, shorten
from archlab.arch_dsl.language.parse import INVALID, parse_record, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Positive, Range, Spec

MAX_SEEDS = 1000


class Sequential(Spec):
    """Every variant gets `min` seeds; those whose difference to the baseline is not resolved get more, up to `max`.

    Resolved is a difference whose interval excludes zero, or lies within ±`margin` (nats per token; bits per byte where
    tokenizers differ): better, worse, or equivalent. The interval holds at every number of seeds at once.
    """

    title: ClassVar[str] = "seeds"
    min: Annotated[int, Range(min=2, max=MAX_SEEDS)] = 2
    max: Annotated[int, Range(min=2, max=MAX_SEEDS)]
    until: Literal["resolved"] = "resolved"
    margin: Positive | None = None


@dataclass(frozen=True)
class _Seeds:
    """Reads `seeds`: a number, or a mapping as of Sequential."""

    def parse_node(self, node: Node, path: str, problems: list[Problem]) -> Any:
        """An int or a Sequential."""
        if isinstance(node.value, list) or (isinstance(node.value, str) and "," in node.value):
            count = len(node.value if isinstance(node.value, list) else node.value.split(","))
            told = f"{count} trains with the first {count}, from 0"
            message = f"must be how many seeds, not which: {told}; found {shorten(node.plain())}"
            return refuse(problems, path, message, node.mark)
        if not isinstance(node.value, dict):
            return parse_value(Annotated[int, Range(min=1, max=MAX_SEEDS)], node, path, problems)
        found = parse_record(Sequential, node, path, problems)
        if found is not INVALID and found.max < found.min:
            message = f"must be at least min, {found.min}, found {found.max}"
            problems.append(Problem(f"{path}.max", message, node.value["max"].mark))
            return INVALID
        return found

    def schema(self) -> dict[str, Any]:
        """For editors."""
        whole = {"type": "integer", "maximum": MAX_SEEDS}
        options = {
            "min": {**whole, "minimum": 2, "default": 2},
            "max": {**whole, "minimum": 2},
            "until": {"enum": ["resolved"], "default": "resolved"},
            "margin": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
        }
        told = {"type": "object", "description": " ".join((Sequential.__doc__ or "").split()), "properties": options}
        return {"anyOf": [{**whole, "minimum": 1}, {**told, "required": ["max"], "additionalProperties": False}]}


Seeds = Annotated[int | Sequential, _Seeds()]


def most(seeds: int | Sequential) -> int:
    """How many seeds a variant gets at most."""
    return seeds if isinstance(seeds, int) else seeds.max


def sequential_record(seeds: int | Sequential) -> dict[str, Any]:
    """What the record of a study keeps beside `seeds`, the list of those wanted at most; nothing for a fixed number."""
    if isinstance(seeds, int):
        return {}
    return {"sequential": {"min": seeds.min, "max": seeds.max, "until": seeds.until, "margin": seeds.margin}}

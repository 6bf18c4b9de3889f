"""`ablate: {from: A, to: B}`: every slot in which two models differ becomes a component."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from archlab.arch_dsl.inspection.slots import Slot
from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.model.model import Model

KEYS = ("from", "to")


@dataclass(frozen=True)
class Ablate:
    """The model at the other end; the first one is the base of the study."""

    after: Model
    slots: tuple[Slot, ...] = ()

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping with two models."""
        if not isinstance(node.value, dict):
            problems.append(
                Problem(path, f"must be a mapping with the models from and to, found {node.kind}", node.mark)
            )
            return INVALID
        before = len(problems)
        for name in node.value:
            if name not in KEYS:
                message = unknown(name, "key of ablate", KEYS)
                problems.append(Problem(f"{path}.{name}", message, node.key_marks.get(name, node.mark)))
        for name in KEYS:
            if name not in node.value:
                problems.append(Problem(f"{path}.{name}", "is missing: ablate needs it", node.mark))
        if len(problems) > before:
            return INVALID
        after = parse_value(Model, node.value["to"], f"{path}.to", problems)
        return INVALID if after is INVALID else cls(after)

    def with_slots(self, slots: tuple[Slot, ...]) -> Ablate:
        """With what was found between the two."""
        return replace(self, slots=slots)


def with_base(node: Node, problems: list[Problem]) -> Node:
    """A study's node with the model that `ablate` starts from as its base."""
    assert isinstance(node.value, dict)
    ablate = node.value.get("ablate")
    if ablate is None or not isinstance(ablate.value, dict) or "from" not in ablate.value:
        return node
    if "model" in node.value:
        message = "stands beside `ablate`, whose `from` is the base; give one of them"
        problems.append(Problem("model", message, node.key_marks.get("model")))
        return node
    return Node({**node.value, "model": ablate.value["from"]}, node.mark, node.key_marks)

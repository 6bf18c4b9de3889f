"""Repair: a model whose parts make no sense together, changed where they leave no doubt what was meant."""

from __future__ import annotations

from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.model.places import places
from archlab.arch_dsl.model.rules import RULES


def repaired(model: Model) -> tuple[Model, list[str]]:
    """The model after the repairs of all rules that it breaks, and what they are called. The rest stays broken."""
    names: dict[str, None] = {}
    for where in model.stacks():
        for rule in RULES:
            stack = model.stacks()[where]
            found = places(stack, model.place(model.context(), where), stack.layers())
            if rule.repair and any(rule.broken(stack, found)):
                model = model.with_stack(where, rule.repair(stack))
                names[rule.name] = None
    return model, list(names)

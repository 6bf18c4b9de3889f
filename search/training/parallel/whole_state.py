"""The state of an optimizer over a divided model, in the format that one process writes, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from archlab.search.training.parallel.division import Division

Entries = dict[str, dict[str, Any]]  # of each parameter, by path


def whole_optimizer_state(division: Division, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What one process would have as its optimizer's state; complete at the leader alone."""
    entries: Entries = {}
    for part, order in _parts(optimizer, division.local):
        state = part.state_dict()["state"]
        for number, path in enumerate(order):
            if number in state:
                entries[path] = {name: _whole(division, path, value) for name, value in state[number].items()}
    entries = division.merged(entries)
    whole = division.recipe.optimizer.build(division.stand_ins, division.recipe.lr)
    parts = [
        part.state_dict() | {"state": {number: entries[path] for number, path in enumerate(order) if path in entries}}
        for part, order in _parts(whole, division.stand_ins)
    ]
    return {"parts": parts} if hasattr(whole, "parts") else parts[0]


def load_optimizer_state(division: Division, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Takes of what `whole_optimizer_state` gave the part of this process."""
    whole = division.recipe.optimizer.build(division.stand_ins, division.recipe.lr)
    entries: Entries = {}
    given = state["parts"] if hasattr(whole, "parts") else [state]
    for (_, order), part in zip(_parts(whole, division.stand_ins), given, strict=True):
        entries |= {path: part["state"][number] for number, path in enumerate(order) if number in part["state"]}
    for mine, order in _parts(optimizer, division.local):
        own = {
            number: {name: _piece(division, path, value) for name, value in entries[path].items()}
            for number, path in enumerate(order)
            if path in entries
        }
        mine.load_state_dict(mine.state_dict() | {"state": own})


def _parts(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> list[tuple[torch.optim.Optimizer, list[str]]]:
    """The optimizers that one is made of, each with the paths of its parameters in the order of its numbers."""
    paths = {id(value): path for path, value in named}
    return [
        (part, [paths[id(value)] for group in part.param_groups for value in group["params"]])
        for part in getattr(optimizer, "parts", [optimizer])
    ]


def _whole(division: Division, path: str, value: Any) -> Any:
    return division.whole(path, value) if _divided(division, path, value) else value


def _piece(division: Division, path: str, value: Any) -> Any:
    return division.piece(path, value) if _divided(division, path, value) else value


def _divided(division: Division, path: str, value: Any) -> bool:
    """Whether a tensor of a parameter's state lies as the parameter does: moments do, a count of steps does not."""
    return isinstance(value, Tensor) and value.ndim == division.own[path].ndim > 0

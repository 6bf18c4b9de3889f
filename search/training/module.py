"""The module of a trial as its seed starts it, and what that seed splits into."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl.compiler.slower import fallbacks
from archlab.arch_dsl.model.stack import StackModule
from archlab.search.recipe.recipe import Recipe
from archlab.search.trial.trial import Trial


class Seeds(NamedTuple):
    """What a trial's seed splits into: initial weights, order of the batches, noise of the forward pass (dropout)."""

    init: int
    data: int
    noise: int


def split_seed(seed: int) -> Seeds:
    """Three independent seeds of 63 bits: the first 8 bytes of sha256("archlab:<name>:<seed>"), shifted by one."""
    words = (hashlib.sha256(f"archlab:{name}:{seed}".encode()).digest() for name in Seeds._fields)
    return Seeds(*(int.from_bytes(word[:8], "big") >> 1 for word in words))


def seeds_of(trial: Trial, recipe: Recipe) -> Seeds:
    """What the trial's seed splits into, but for what the recipe holds fixed."""
    found = split_seed(trial.seed)
    if recipe.init_seed is not None:
        found = found._replace(init=split_seed(recipe.init_seed).init)
    if recipe.data_seed is not None:
        found = found._replace(data=split_seed(recipe.data_seed).data)
    return found


def build_model(trial: Trial, recipe: Recipe, device: torch.device) -> nn.Module:
    """The trial's spec compiled for a device, with the initial values of its seed."""
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    seed = seeds_of(trial, recipe).init
    model = arch_dsl.compile(arch_dsl.load(trial.model), seed=seed, device=device.type, dtype=dtype)
    for stack in model.modules():
        if isinstance(stack, StackModule):
            stack.recompute = recipe.recompute == "layers"
    return model


def slower(model: nn.Module) -> dict[str, str]:
    """What a fingerprint says of nodes that fell back from the kernels that their ops have for the device."""
    found = fallbacks(getattr(model, "choices", []))
    return {"slower_kernels": ", ".join(f"{op} by {found[op].implementation}" for op in sorted(found))} if found else {}

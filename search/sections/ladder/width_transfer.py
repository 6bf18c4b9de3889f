"""muP along a ladder: every variant's rungs parametrised as its first one, and checked before anything is trained."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from archlab.arch_dsl.compiler.width_transfer import Transfer, transferred
from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.recipe.optimizers import Adam, AdamW, Group, Optimizer
from archlab.search.sections.ladder.coordinates import GROWS, SEEDS, Coordinates, coordinates
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    from archlab.search.variants.variant import Variant

WIDEST = 1024  # of the widths that are checked
WIDTHS = 3
_PLACE = "ladder.transfer"


def transfer_rungs(
    variants: Sequence[Variant], store: Path, mark: Mark | None
) -> tuple[list[Variant], dict[str, Coordinates]]:
    """Variants with the parametrisation of muP, the first rung of a series being its base, and what the check found.

    Raises SpecError where there are no rules for a variant, or its coordinates grow with the width.
    """
    series: dict[str, list[Variant]] = {}
    for variant in variants:
        series.setdefault(variant.series, []).append(variant)
    found: dict[str, Variant] = {}
    checked: dict[str, Coordinates] = {}
    problems: list[Problem] = []
    for name, rungs in series.items():
        try:
            found |= {each.name: _with(each, rungs[0]) for each in rungs}
            checked[name] = _checked(rungs, store)
        except SpecError as error:
            problems += [Problem(_PLACE, f"{name}: {each.message}", mark) for each in error.problems]
            continue
        if growing := checked[name].growing:
            told = ", ".join(f"{site} as width^{power:.2f}" for site, power in list(growing.items())[:3])
            widths = ", ".join(map(str, checked[name].widths))
            message = f"'{name}' fails the coordinate check: over the widths {widths} grow {told}, of {GROWS:g} allowed"
            message += "; without `transfer` each rung may have its own rate, by `train: {lr: A to B}` or `tune`"
            problems.append(Problem(_PLACE, message, mark))
    if problems:
        raise SpecError(problems)
    return [found[variant.name] for variant in variants], checked


def _with(variant: Variant, base: Variant) -> Variant:
    """A variant as its base is at the base's width. Raises SpecError."""
    if variant.recipe.stages:
        raise SpecError.of(_PLACE, "training in stages does not transfer")
    made = transferred(variant.model, base.model)
    recipe = variant.recipe.replace(optimizer=with_rates(variant.recipe.optimizer, made))
    return replace(variant, model=made.model, recipe=recipe)


def with_rates(optimizer: Optimizer, made: Transfer) -> Optimizer:
    """The optimizer with the rates of a transfer; AdamW's decay acts on weights as strongly as at the base: its product
    with the rate is kept. Raises SpecError for an optimizer whose rules are not known."""
    if not isinstance(optimizer, AdamW | Adam):
        raise SpecError.of(_PLACE, f"knows how the rates of adamw and adam follow the width, not {optimizer.type}'s")
    if optimizer.groups:
        raise SpecError.of(_PLACE, "makes groups of parameters, and the optimizer has some of its own")
    by_factor: dict[float, list[str]] = {}
    for pattern, factor in made.rates:
        by_factor.setdefault(factor, []).append(pattern)
    decay = optimizer.weight_decay if isinstance(optimizer, AdamW) else 0.0
    groups = (
        Group(parameters=tuple(patterns), lr_factor=factor, weight_decay=decay / factor if decay else None)
        for factor, patterns in by_factor.items()
    )
    return optimizer.replace(groups=tuple(groups))


def _checked(rungs: Iterable[Variant], store: Path) -> Coordinates:
    """The coordinates of a series over three of its widths, at its first rung's depth; measured once in a store."""
    widths = {each.model.d_model: each for each in rungs if each.model.d_model <= WIDEST}
    small = [widths[width] for width in sorted(widths)]
    if len(small) < WIDTHS:
        raise SpecError.of(_PLACE, f"is checked at three widths up to {WIDEST:,}, found {len(small)}")
    chosen = [small[0], small[len(small) // 2], small[-1]]
    base = chosen[0].model
    made = [transferred(_as_deep(each.model, base), base) for each in chosen]
    models = [(each.model, with_rates(rung.recipe.optimizer, each)) for rung, each in zip(chosen, made, strict=True)]
    asked = canonical_json([SEEDS, *([canonical(model), canonical(optimizer)] for model, optimizer in models)])
    file = store / "coordinates" / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    if file.exists():
        kept = json.loads(file.read_text())
        return Coordinates(kept["powers"], kept["least"], tuple(kept["widths"]))
    found = coordinates(models)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}.part")
    fresh.write_text(json.dumps({"powers": found.powers, "least": found.least, "widths": found.widths}))
    fresh.replace(file)
    return found


def _as_deep(model: Model, base: Model) -> Model:
    """A model with as many layers as the base; one whose layers differ stays as it is."""
    for name, stack in model.stacks().items():
        if not stack.overrides:
            model = model.with_stack(name, stack.replace(n_layers=base.stacks()[name].n_layers))
    return model

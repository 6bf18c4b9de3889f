"""muP along a ladder: every variant's rungs parametrised as its first one, and checked before anything is trained.

The coordinate check asks whether what passes a model's sites keeps its size when the model grows wider (Yang et al.,
arXiv:2203.03466, appendix D.1): a few steps of training at several widths. In a correct parametrisation of width
transfer no coordinate's size grows with the width; in the standard one it does, from the first steps on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its special is imported when it is used: an eighth of a second
import torch

from archlab import arch_dsl
from archlab.arch_dsl.compiler.width_transfer import Transfer, transferred
from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.watching import Sight, Watch
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.recipe.optimizers import Adam, AdamW, Optimizer
from archlab.search.recipe.parameter_groups import Group
from archlab.search.store.kept import COORDINATES
from archlab.search.utils.canonical import canonical_json
from archlab.search.utils.files import read_json, write_whole

if TYPE_CHECKING:
    from archlab.search.variants.variant import Variant

log = logging.getLogger(__name__)

WIDEST = 1024  # of the widths that are checked
WIDTHS = 3
_PLACE = "ladder.transfer"
STEPS, BATCH, TIME = 8, 4, 32
RATE = 0.02  # at the base, so that a few steps tell; a smaller one hides what grows
SEEDS = 5
GROWS = 0.4  # power of the width beyond which a size counts as growing; what is scaled wrongly has 0.5 or more
LEVEL = 0.95
_KINDS = frozenset({"stream", "update", "site", "heads", "attention"})


@dataclass(frozen=True)
class Coordinates:
    """By site the power of the width with which coordinates grow, the largest first, and what it is at least."""

    powers: dict[str, float]
    least: dict[str, float]
    widths: tuple[int, ...]

    @property
    def growing(self) -> dict[str, float]:
        """The sites whose coordinates grow, by more than the seeds scatter."""
        return {site: power for site, power in self.powers.items() if self.least[site] > GROWS}


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
    follows = isinstance(optimizer, AdamW) and not optimizer.independent_decay
    decay = optimizer.weight_decay if follows else 0.0
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
    if (kept := read_json(file)) is not None and not COORDINATES(kept):
        return Coordinates(kept["powers"], kept["least"], tuple(kept["widths"]))
    if file.exists():
        log.warning("%s is damaged: the coordinates are measured again", file)
    found = coordinates(models)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(asdict(found)), durable=False)
    return found


def _as_deep(model: Model, base: Model) -> Model:
    """A model with as many layers as the base; one whose layers differ stays as it is."""
    for name, stack in model.stacks().items():
        if not stack.overrides:
            model = model.with_stack(name, stack.replace(n_layers=base.stacks()[name].n_layers))
    return model


def coordinates(models: Sequence[tuple[Model, Optimizer]]) -> Coordinates:
    """Of resolved models of one depth at several widths, each with its optimizer, on random tokens.

    Two sizes count, mean |x_0| at the start and mean |x_t - x_0| after a few steps. A site's power of d_model is the
    mean over seeds, at least the lower end of a one-sided t interval at 95%, of that size whose end is the larger one.
    """
    sizes = [[_trained(model, optimizer, seed) for seed in range(SEEDS)] for model, optimizer in models]
    widths = tuple(model.d_model for model, _ in models)
    found = {
        site: max(_power(widths, [[each[site][kind] for each in seeds] for seeds in sizes]) for kind in range(2))
        for site in sizes[0][0]
        if all(site in seeds[0] for seeds in sizes)
    }
    order = sorted(found, key=lambda site: -found[site][1])
    return Coordinates({site: found[site][1] for site in order}, {site: found[site][0] for site in order}, widths)


def _power(widths: Sequence[int], sizes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of sizes ~ width^power by width and seed: what it is at least, and its mean. 0 where they are 0, as maps that
    start at 0 make them."""
    if np.min(sizes) <= 0:
        return 0.0, 0.0
    each = np.polyfit(np.log(widths), np.log(sizes), 1)[0]  # of every seed
    half = float(scipy.special.stdtrit(len(each) - 1, LEVEL)) * float(each.std(ddof=1)) / math.sqrt(len(each))
    return float(each.mean()) - half, float(each.mean())


def _trained(model: Model, optimizer: Optimizer, seed: int) -> dict[str, tuple[float, float]]:
    """The mean |x_0| and |x_t - x_0| at each site, t being a few steps on one random batch."""
    module = arch_dsl.compile(model, backend="reference", seed=seed)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.vocab or 1, (BATCH, TIME + 1), generator=draw)
    update = optimizer.build(module.named_parameters(), RATE)
    for group in update.param_groups:
        group["lr"] = RATE * group.get("lr_factor", 1.0)
    before = _seen(module, tokens[:, :-1])
    for _ in range(STEPS):
        update.zero_grad()
        module.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        update.step()
    after = _seen(module, tokens[:, :-1])
    return {site: (float(x.abs().mean()), float((after[site] - x).abs().mean())) for site, x in before.items()}


def _seen(module: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What passes the sites, and the logits of attention and of tokens."""
    found: dict[str, torch.Tensor] = {}

    def see(sight: Sight) -> None:
        place = f"{sight.stack}.{sight.path}" if sight.stack else sight.path
        site = f"{sight.kind} {place} [layer {sight.layer}]" if sight.layer is not None else f"{sight.kind} {place}"
        if sight.kind != "attention":
            found[site] = sight.tensors["output"].detach().clone()
            return
        query, key = sight.tensors["query"], sight.tensors["key"]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        found[site] = (query @ key.transpose(-1, -2) * sight.tensors["given"].get("scale", 1.0)).detach()

    with torch.no_grad():
        found["logits"] = module(tokens, Call(watch=Watch(_KINDS, see)))
    return found

"""What a plan tells before anything is trained: where a start is likely to be rough, and which masks hide nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from archlab.arch_dsl.parts.families import Mask
from archlab.arch_dsl.tree.identity import brief_text, canonical
from archlab.kernels.attention import CAUSAL, FULL
from archlab.search.objectives import Paired, has_encoder
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.schedules import AUTO
from archlab.search.variants.variant import Variant

FEW_STEPS = 500
LARGE_RATE = 0.3  # a step of Adam moves each weight by about the rate
SMALL = 0.5  # of the standard deviation that `init: {std: small}` gives
_MOST = 3  # variants that a line names


def foreseen(variants: Iterable[Variant]) -> Iterator[str]:
    """A line for each thing to be told, with the variants that it is told of."""
    told: dict[str, list[str]] = {}
    count = 0
    for variant in variants:
        count += 1
        rough = _of(variant) if variant.start is None else ()  # what starts from weights has been trained already
        for line in chain((f"rough start? {line}" for line in rough), _idle_masks(variant)):
            told.setdefault(line, []).append(variant.name)
    for line, names in told.items():
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        yield line + ("" if len(names) == count else f": {', '.join(names[:_MOST])}{more}")


def _of(variant: Variant) -> Iterator[str]:
    yield from _short_warmup(variant.recipe)
    if (rate := variant.recipe.lr) > LARGE_RATE:
        yield f"a learning rate of {rate:g} is large: an update moves each weight by about so much"
    width, std = variant.model.d_model, variant.model.init.std
    small = (2 / (5 * width)) ** 0.5
    if std != "small" and float(std) < SMALL * small:
        yield f"init.std {std:g} is little for d_model {width}; `small` is {small:.2g} there"
    if (steps := variant.recipe.all_steps) < FEW_STEPS:
        yield f"{steps:,} steps are few; smaller batches make more of the same tokens"


def _short_warmup(recipe: Recipe) -> Iterator[str]:
    """A warm-up that is shorter than the optimizer's second moment takes to settle."""
    warm, needed = recipe.warmed.warm(recipe.steps), 2 * recipe.optimizer.memory
    auto = recipe.schedule.replace(warmup=AUTO).settled(recipe.steps, recipe.optimizer.memory).warm(recipe.steps)
    if warm < min(needed, auto):
        yield (
            f"a warm-up of {warm} steps, and the optimizer's second moment takes {needed:.0f} to settle at its beta2; "
            f"`warmup: auto` takes {auto}"
        )


def _idle_masks(variant: Variant) -> Iterator[str]:
    """Masks that hide nothing in training beside what all causal attention hides, such as a window of the whole
    context: variants that differ in them alone are equal."""
    context = max(own.context for own in variant.recipe.whole)
    masks = {
        (".".join(path), branch.mask): None
        for name, stack in variant.model.stacks().items()
        for block in dict.fromkeys(stack.layers())
        for path, branch in block.walk(*filter(None, [name]), "block")
        if isinstance(getattr(branch, "mask", None), Mask)
    }
    objectives = [own.objective for own in variant.recipe.whole]
    has_prefix = any(isinstance(each, Paired) for each in objectives) and not has_encoder(variant.model)
    for path, mask in masks:
        if mask.type == "prefix" and not has_prefix:
            yield f"{path}.mask: prefix is causal here: the objective {objectives[0].type} gives a text no prefix"
        seen = FULL if mask.looks_ahead else CAUSAL
        if mask.pattern() not in (FULL, CAUSAL) and mask.pairs(context) == seen.pairs(context, context):
            written = brief_text(canonical(mask, brief=True))
            yield f"{path}.mask: {written} hides nothing in a context of {context:,} tokens"

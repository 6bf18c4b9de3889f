"""Which recipes a model can be trained by: what its masks let it read, whether it reads a source, its constraint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from archlab.arch_dsl.language.errors import Mark, Problem
from archlab.arch_dsl.language.spec import walk
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.families import Mask
from archlab.arch_dsl.primitives.moe import MoE
from archlab.search.objectives.denoising import Denoising
from archlab.search.objectives.family import has_encoder

if TYPE_CHECKING:
    from archlab.search.recipe.recipe import Recipe

_WITHOUT_SOURCE = ("answers", "causal", "masked")  # which have nothing to give to an encoder
_SOURCE_ONLY = ("masked_encoder",)


def positions(recipe: Recipe, model: Model) -> int:
    """The positions that a model needs for what the objective makes of a window."""
    lengths = recipe.objective.lengths(recipe.context, has_encoder(model))
    goes_on = getattr(getattr(model, "decoder", None), "positions", "own") == "after_source"
    return sum(lengths) if goes_on else max(lengths)


def refusals(recipe: Recipe, model: Model, path: str = "train") -> Iterator[Problem]:
    """Why a model cannot be trained on the objective of a recipe, or by its optimizer."""
    objective, encoder = recipe.objective, has_encoder(model)
    place, mark = f"{path}.objective", objective.mark() or recipe.mark("objective") or model.mark()
    if encoder and objective.type in _WITHOUT_SOURCE:
        message = f"{objective.type} gives an encoder nothing to read; take prefix, span_corruption or masked_encoder"
        yield Problem(place, message, mark)
    if not encoder and objective.type in _SOURCE_ONLY:
        yield Problem(place, f"{objective.type} needs a model with an encoder; this one has none", mark)
    if getattr(model, "predict", None) is not None and objective.type != "causal":
        message = f"predicts further tokens under causal, not under {objective.type}; set `predict: null`"
        yield Problem("predict", message, model.mark("predict"))
    if model.constraint is not None and recipe.optimizer.averages:
        message = f"{model.constraint.type} holds for the weights that are trained, not for the mean that is evaluated"
        yield Problem(f"{path}.optimizer", message, recipe.optimizer.mark() or recipe.mark("optimizer"))
    masks = list(_masks(model))
    predicts = "decoder.block" if encoder else "block"
    ahead = [each for each in masks if each[1].looks_ahead]
    if objective.type == "masked":
        if not ahead and not encoder:
            message = "masked predicts a token from both sides, and no mask of this model looks ahead; take a mask full"
            yield Problem(place, message, mark)
    else:
        for where, mask, at in ahead:
            if where.startswith(predicts):
                message = f"{mask.type} reads the tokens that {objective.type} predicts; take causal, window or prefix"
                yield Problem(where, message, at)
        for where, part in _choosing_experts(model):
            if where.startswith(predicts):
                message = f"experts that choose tokens look at those that {objective.type} predicts; take `token`"
                yield Problem(f"{where}.choice", message, part.mark("choice"))
    if isinstance(objective, Denoising):
        for where, mask, at in masks:
            if mask.documents:
                message = f"cannot tell apart the documents of a text that {objective.type} has taken to pieces"
                yield Problem(f"{where}.documents", message, mask.mark("documents") or at)


def _choosing_experts(model: Model) -> Iterator[tuple[str, MoE]]:
    """The mixtures whose experts choose their tokens, with their paths; those of equal layers once."""
    for name, stack in model.stacks().items():
        for block in dict.fromkeys(stack.layers()):
            for inner, part in walk(block):
                if isinstance(part, MoE) and part.looks_ahead:
                    yield ".".join(filter(None, (name, "block", inner))), part


def _masks(model: Model) -> Iterator[tuple[str, Mask, Mark | None]]:
    """The masks of self-attention with their paths and marks, those of equal layers once."""
    for name, stack in model.stacks().items():
        for block in dict.fromkeys(stack.layers()):
            for branch, spec in block.items():
                if spec.type == "cross_attention":
                    continue
                for inner, part in walk(spec):
                    mask = getattr(part, "mask", None)
                    if isinstance(mask, Mask):
                        where = ".".join(filter(None, (name, "block", branch, inner, "mask")))
                        yield where, mask, mask.mark() or part.mark("mask")

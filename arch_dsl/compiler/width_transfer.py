"""Width transfer: a model parametrised so that what is best at a base width stays best at others (muP).

Maximal update parametrization, arXiv:2203.03466, table 8, relative to a base: of every parameter the sides that are
longer than in the base have grown, and the rest follows from which these are. At the base's width nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from archlab.arch_dsl.compiler.shapes import unallocated
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.model.initial_values import InitGroup
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.primitives.heads import MultiHead
from archlab.arch_dsl.primitives.scales import Factor, logit_form

_LAYER = re.compile(r"\.[0-9]+\.")


@dataclass(frozen=True)
class Transfer:
    """A model with initial values, attention and logits scaled for its width; `rates` are factors of Adam's learning
    rate by patterns of parameters' paths."""

    model: Model
    rates: tuple[tuple[str, float], ...]


def transferred(model: Model, base: Model) -> Transfer:
    """A resolved model parametrised as its base is at the base's width. Raises SpecError.

    By table 8, with r the growth of a parameter's inputs: hidden maps start r^-1/2 as large and learn at 1/r of the
    rate; maps to what does not grow start 1/r as large and learn at 1/r; everything else (tables, norms, biases, maps
    of what does not grow) stays. Logits are divided by the growth of what they are made of. Attention scores are scaled
    by 1/head_dim: by the base's scale times its head_dim over this one's.
    """
    ours, theirs = dict(unallocated(model)), dict(unallocated(base))
    starts: dict[str, float] = {}
    rates: dict[str, float] = {}
    for path, value in ours.items():
        before = _counterpart(path, value, theirs)
        if not _is_map(value) or (inputs := value.shape[-1] / before.shape[-1]) == 1:
            continue
        starts[path] = inputs**-0.5 if value.shape[-2] != before.shape[-2] else 1 / inputs
        rates[path] = 1 / inputs
    if not rates:
        return Transfer(model, ())
    by_factor: dict[float, list[str]] = {}
    for pattern, start in sorted(_patterns(starts).items()):
        by_factor.setdefault(start, []).append(pattern)
    groups = tuple(InitGroup(parameters=tuple(paths), factor=start) for start, paths in by_factor.items())
    init = model.init.replace(std=base.context().std, groups=(*model.init.groups, *groups))
    if model.init.residual == "wang":
        raise SpecError.of("init.residual", "wang follows the width by a rule of its own; take another one to transfer")
    if model.constraint is not None:
        message = f"{model.constraint.type} sets the size of weights itself, which transfer has follow the width"
        raise SpecError.of("constraint", message)
    changed = apply(model.replace(init=init), _attention(model, base))
    for name, stack in changed.stacks().items():
        # Factors that follow the width (Gemma's root) stay as they are in the base.
        embed = tuple(
            Factor(by=item.by * float(base.d_model**item.width_power)) if type(item) is Factor else item
            for item in stack.embed
        )
        changed = changed.with_stack(name, stack.replace(embed=embed))
    table = "unembedding.weight" if "unembedding.weight" in ours else "embedding"
    factor = theirs[table].shape[-1] / ours[table].shape[-1]
    scales = [logit_form(each.logits, each.d_model) for each in (base, model)]
    if scales[0] and scales[1]:
        factor *= scales[0][0] / scales[1][0]
    logits = (Factor(by=factor), *model.logits) if factor != 1 else model.logits
    return Transfer(changed.replace(logits=logits), tuple(sorted(_patterns(rates).items())))


def _is_map(value: Tensor) -> bool:
    """Whether a parameter is a map of hidden vectors: no table, whose rows are looked up or are logits of a token, and
    no vector or learned constant."""
    return value.ndim >= 2 and bool(getattr(value, "decay", True)) and not getattr(value, "table", False)


def _counterpart(path: str, value: Tensor, base: Mapping[str, Tensor]) -> Tensor:
    """The same parameter of the base; of a layer that it lacks that of another layer. Raises SpecError."""
    found = base.get(path)
    if found is None:
        like = _LAYER.sub(".*.", path)
        found = next((each for name, each in base.items() if _LAYER.sub(".*.", name) == like), None)
    if found is None or found.ndim != value.ndim:
        raise SpecError.of("ladder.transfer", f"{path} is no parameter of the base: transfer changes sizes alone")
    return found


def _patterns(factors: dict[str, float]) -> dict[str, float]:
    """The factors by pattern, one for all layers where they share it."""
    found: dict[str, set[float]] = {}
    for path, factor in factors.items():
        found.setdefault(_LAYER.sub(".*.", path), set()).add(factor)
    shared = {pattern: values.pop() for pattern, values in found.items() if len(values) == 1}
    single = {path: factor for path, factor in factors.items() if _LAYER.sub(".*.", path) not in shared}
    return {**shared, **single}


def _attention(model: Model, base: Model) -> list[Setting]:
    """The scale of every branch of attention whose heads have grown. Raises SpecError where layers differ in them."""
    found: list[Setting] = []
    for name, stack in model.stacks().items():
        prefix = f"{name}." if name else ""
        for layers, node in stack.overrides.items():
            if any("head" in path for path in _keys(node.plain())):
                raise SpecError.of(f"{prefix}overrides", f"'{layers}' sets heads of its own, which do not transfer")
        theirs = dict(base.stacks()[name].block.walk())
        for steps, branch in stack.block.walk():
            before = theirs.get(steps)
            if not (isinstance(branch, MultiHead) and isinstance(before, MultiHead)):
                continue
            old, new = before.sizes().head_dim, branch.sizes().head_dim
            if old != new:
                scale = (before.scale or old**-0.5) * old / new
                path = f"{prefix}block.{'.'.join(steps)}.scale"
                found.append(Setting(path, Node.of(scale), "transfer"))
    return found


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in _keys(item))]
    return [key for item in value for key in _keys(item)] if isinstance(value, list) else []

"""Which parameters an optimizer treats alike: hidden matrices, what decays, and groups that a recipe names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from archlab.arch_dsl.language.spec import Positive, Range, Spec

if TYPE_CHECKING:
    from torch import nn

Decay = Annotated[float, Range(min=0)]
Named = Iterable[tuple[str, "nn.Parameter"]]


class Group(Spec):
    """Parameters that are treated otherwise: those whose path matches one of the patterns of `parameters`.

    `*` in a pattern stands for any part of a path: `embedding`, `block.*.attention.*`, `*.bias`. Their rate is
    `lr_factor` times the recipe's, their decay `weight_decay`, by default what it would be without the group. Of
    several groups that match, the first counts.
    """

    title: ClassVar[str] = "group"
    parameters: tuple[str, ...]
    lr_factor: Positive = 1.0
    weight_decay: Decay | None = None

    def matches(self, path: str) -> bool:
        """Whether the parameter at this path belongs to the group."""
        return any(fnmatchcase(path, pattern) for pattern in self.parameters)


def divided(parameters: Named) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Hidden matrices, which map hidden vectors, and all other parameters."""
    hidden: list[tuple[str, nn.Parameter]] = []
    other: list[tuple[str, nn.Parameter]] = []
    for path, parameter in parameters:
        matrix = parameter.ndim == 2 and getattr(parameter, "decay", True)
        (hidden if matrix and not getattr(parameter, "table", False) else other).append((path, parameter))
    return hidden, other


def decay_groups(
    parameters: Named, weight_decay: float, groups: Sequence[Group] = (), rate: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for torch: matrices decay; norms, biases and learned constants do not.

    A matrix has at least two dimensions. A parameter of another nature says so itself: `parameter.decay = False`
    (a gate's learned constant for each head and channel) or True; one that is `constrained` never decays. Shared
    parameters are entered once. What a group says of its own parameters goes first. With the peak `rate` decays are
    divided by it, so that they do not follow it.
    """
    found: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, weight_decay): [], (1.0, 0.0): []}
    seen: set[int] = set()
    for path, parameter in parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        own = next((group for group in groups if group.matches(path)), None)
        constrained = hasattr(parameter, "constrained")
        decays = getattr(parameter, "decay", parameter.ndim >= 2) and not constrained
        decay = weight_decay if decays else 0.0
        factor = 1.0
        if own is not None:
            factor, decay = own.lr_factor, decay if own.weight_decay is None or constrained else own.weight_decay
        found.setdefault((factor, decay), []).append(parameter)
    return [
        {
            "params": params,
            "weight_decay": decay if rate is None else decay / (rate * factor),
            **({"lr_factor": factor} if factor != 1.0 else {}),
        }
        for (factor, decay), params in found.items()
        if params
    ]


def unmatched(groups: Sequence[Group], paths: Iterable[str]) -> list[str]:
    """The patterns of groups that match no parameter."""
    names = list(paths)
    patterns = (pattern for group in groups for pattern in group.parameters)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]

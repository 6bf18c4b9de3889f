"""Constraints on the weights: where an optimizer step leads away from it, the weights are put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Family
from archlab.arch_dsl.parts.layers import Stepped


class Constraint(Family):
    """What weights must satisfy: from their initial values on, and again after every optimizer step.

    Weight decay leaves constrained parameters alone.
    """

    noun: ClassVar[str] = "constraint"

    def places(self, parameters: Iterable[tuple[str, Tensor]], d_model: int) -> dict[str, int]:
        """The parameters that it constrains, by path, each with a dimension. Raises SpecError for none."""
        raise TypeError(f"{type(self).__name__} constrains nothing")

    def project(self, value: Tensor, dim: int) -> None:
        """Puts a parameter back, in place."""
        raise TypeError(f"{type(self).__name__} constrains nothing")


@Constraint.register("unit_norm")
class UnitNorm(Constraint):
    """w / |w| for every vector w of d_model channels in a matrix: nGPT (arXiv:2410.01131, section 2.6, step 2).

    These are the rows of tables of tokens and of maps that read the stream, and the columns of maps that write to it.
    Of all such matrices those count whose path matches one of the patterns of `parameters`, in which `*` stands for any
    part of a path. Norms, biases and learned scales stay as they are, and a vector of zeros until its first gradient.
    """

    parameters: tuple[str, ...] = ("*",)

    def places(self, parameters: Iterable[tuple[str, Tensor]], d_model: int) -> dict[str, int]:
        matrices = {path: dim for path, value in parameters if (dim := stream_dim(value, d_model)) is not None}
        if not self.parameters:
            raise SpecError.of("constraint.parameters", "names none; leave it out for all", self.mark("parameters"))
        for pattern in self.parameters:
            if not any(fnmatchcase(path, pattern) for path in matrices):
                message = f"'{pattern}' matches no matrix that reads the stream or writes to it"
                raise SpecError.of("constraint.parameters", message, self.mark("parameters"))
        return {
            path: dim
            for path, dim in matrices.items()
            if any(fnmatchcase(path, pattern) for pattern in self.parameters)
        }

    def project(self, value: Tensor, dim: int) -> None:
        length = torch.linalg.vector_norm(value, dim=dim, keepdim=True)
        value.div_(length.masked_fill(length == 0, 1))


def stream_dim(value: Any, d_model: int) -> int | None:
    """The dimension of a parameter `[outputs, inputs]`, or `[experts, outputs, inputs]`, along which the stream's
    channels lie; None without one."""
    if value.ndim not in (2, 3) or not getattr(value, "decay", True):
        return None
    dim = -2 if getattr(value, "writes", False) else -1
    return dim if value.shape[dim] == d_model else None


class Constrained(Stepped):
    """A model whose weights may be constrained. Those that are say so: `parameter.constrained` is their dimension."""

    constraint: Constraint | None = None

    def mark_constrained(self, constraint: Constraint | None, d_model: int) -> None:
        """Called once all parameters are there."""
        self.constraint = constraint
        if constraint is not None:
            named = dict(self.named_parameters())
            for path, dim in constraint.places(named.items(), d_model).items():
                named[path].constrained = dim  # type: ignore[attr-defined]  # as `decay` and `table` are told

    @torch.no_grad()
    def constrain(self) -> None:
        """Puts the weights back."""
        if self.constraint is not None:
            for value in self.parameters():
                if (dim := getattr(value, "constrained", None)) is not None:
                    self.constraint.project(value, dim)

    def after_step(self, measures: Mapping[str, Tensor]) -> None:
        self.constrain()

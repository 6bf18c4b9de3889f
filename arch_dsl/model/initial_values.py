"""The initial values of a model: how widely they are drawn, and which parameters start otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.notation import WordOr
from archlab.arch_dsl.language.spec import Positive, Spec, added


class InitGroup(Spec):
    """Parameters whose initial values are `factor` times what they would be: those whose path matches one of the
    patterns of `parameters`, in which `*` stands for any part of a path. Of several groups that match, all count."""

    title: ClassVar[str] = "group"
    parameters: tuple[str, ...]
    factor: Positive


class Init(Spec):
    """Initial values: N(0, std^2) with std a number, or `small`: sqrt(2 / (5 d_model)) (arXiv:1910.05895, section 2.2),
    which is 0.02 at d_model 1000, and right below that too, where 0.02 is too small (docs/concepts/recipes.md).

    `residual` says what maps back to the stream get, n_layers being those that a token passes in their stack:
    `depth_scaled` std / sqrt(2 n_layers) (GPT-2), `plain` std, `wang` 2 / (n_layers sqrt(d_model)) (GPT-J), `deepnorm`
    std (8 n_layers)^(-1/4), as do value and feed-forward maps then (arXiv:2203.00555, figure 2).
    """

    title: ClassVar[str] = "init"
    std: Annotated[float | str, WordOr("small", Positive, "> 0", {"exclusiveMinimum": 0}, 0.05)] = "small"
    residual: Literal["depth_scaled", "plain", "wang", "deepnorm"] = "depth_scaled"
    groups: tuple[InitGroup, ...] = added(default=())

    def factors(self, paths: Iterable[str]) -> dict[str, float]:
        """What the initial values of parameters are multiplied by. Raises SpecError for a pattern without any."""
        found: dict[str, float] = {}
        names = list(paths)
        for index, group in enumerate(self.groups):
            for pattern in group.parameters:
                mine = [path for path in names if fnmatchcase(path, pattern)]
                if not mine:
                    where = f"init.groups.{index}.parameters"
                    raise SpecError.of(where, f"'{pattern}' matches no parameter", group.mark("parameters"))
                found |= {path: found.get(path, 1.0) * group.factor for path in mine}
        return found


def residual_std(init: Init, n_layers: int, d_model: int, std: float) -> tuple[float, float]:
    """The std of maps back to the stream, and the factor on the std of value and feed-forward maps."""
    if init.residual == "depth_scaled":
        return std * float((2 * n_layers) ** -0.5), 1.0
    if init.residual == "wang":
        return 2 / (n_layers * float(d_model**0.5)), 1.0
    if init.residual == "deepnorm":
        return std * float((8 * n_layers) ** -0.25), float((8 * n_layers) ** -0.25)
    return std, 1.0

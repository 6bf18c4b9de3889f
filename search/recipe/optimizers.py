"""How weights are updated: a family of optimizers, and which parameters the weight decay acts on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from archlab.arch_dsl.language.spec import Family, Positive, Range, Spec, added

if TYPE_CHECKING:
    import torch
    from torch import nn

Beta = Annotated[float, Range(min=0, below=1)]
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


class Optimizer(Family):
    """An optimizer; `build` makes it for a model's parameters."""

    noun = "optimizer"
    default_type = "adamw"
    by_element: ClassVar[bool] = False  # whether an element's update depends on no other one

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        """A torch optimizer over named parameters at rate `lr`. A group's own factor of it is its `lr_factor`."""
        raise NotImplementedError

    @property
    def moments(self) -> int:
        """How many numbers it keeps for each parameter of a hidden matrix; fewer than one are none."""
        return 2

    @property
    def memory(self) -> float:
        """Over how many steps its running mean of squared gradients looks back, 1 / (1 - beta2); 0 without such a
        mean, or with one whose memory grows."""
        return 0.0

    def complaint(self) -> str | None:
        """What is wrong with the fields taken together, or None."""
        betas = getattr(self, "betas", (0.0, 0.0))
        return None if len(betas) == 2 else f"{self.type} has two betas, found {len(betas)}"


@Optimizer.register("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101): w <- w - lr (m / (sqrt(v) + eps) + weight_decay w).

    m and v are the bias-corrected running means of g and g^2 with `betas`; the decay acts on matrices only.
    Fused: on a CPU a step of 3 million parameters takes 3 ms, 12 ms in a loop and 21 ms with foreach, and every
    run gives the same bits.
    """

    by_element = True
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Decay = 0.1
    eps: Positive = 1e-8
    groups: tuple[Group, ...] = added(default=())

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        import torch

        groups = decay_groups(parameters, self.weight_decay, self.groups)
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True)


@Optimizer.register("adam")
class Adam(Optimizer):
    """Adam (arXiv:1412.6980, algorithm 1): w <- w - lr m / (sqrt(v) + eps), with g + weight_decay w for g.

    So the decay is that of an L2 penalty, which m and v see; it acts on matrices only.
    """

    by_element = True
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: Decay = 0.0
    eps: Positive = 1e-8
    groups: tuple[Group, ...] = ()

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        import torch

        groups = decay_groups(parameters, self.weight_decay, self.groups)
        return torch.optim.Adam(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True)


@Optimizer.register("adafactor")
class Adafactor(Optimizer):
    """Adafactor (arXiv:1804.04235, algorithms 4 and 5): w <- w - a u / max(1, RMS(u) / threshold), u = g / sqrt(v).

    v is the running mean of g^2 with 1 - t^(-decay) at step t; `factored` keeps of a matrix's its row and column means
    alone, `false` all of it (PaLM, RedLLM). a is lr max(1e-3, RMS(w)), or lr where `relative` is false. `beta1` above
    0 keeps a running mean of the updates. The decoupled weight decay, lr weight_decay w, acts on matrices only.
    """

    factored: bool = True
    decay: Annotated[float, Range(min=0, max=1)] = 0.8
    beta1: Beta = 0.0
    threshold: Positive = 1.0
    relative: bool = True
    weight_decay: Decay = 0.0
    groups: tuple[Group, ...] = ()

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        from archlab.search.recipe.optimizer_steps import AdafactorUpdate

        groups = decay_groups(parameters, self.weight_decay, self.groups)
        return AdafactorUpdate(groups, lr, self.factored, self.decay, self.beta1, self.threshold, self.relative)

    @property
    def moments(self) -> int:
        return (not self.factored) + (self.beta1 > 0)


@Optimizer.register("lion")
class Lion(Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2): w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w).

    Then m <- b2 m + (1 - b2) g. The decay acts on matrices only.
    """

    by_element = True
    moments = 1
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: Decay = 0.1
    groups: tuple[Group, ...] = ()

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        from archlab.search.recipe.optimizer_steps import LionUpdate

        return LionUpdate(decay_groups(parameters, self.weight_decay, self.groups), lr, self.betas)


@Optimizer.register("muon")
class Muon(Optimizer):
    """Muon on hidden matrices: their momentum, orthogonalised by Newton-Schulz steps (Jordan 2024, Muon).

    The update is scaled by 0.2 sqrt(max(rows, columns)) to the size of AdamW's (arXiv:2502.16982, section 2.2), so
    that rates carry over; everything else (tables of tokens and positions, stacked matrices of experts, vectors) is
    AdamW's with `betas` and `eps`. The decoupled weight decay acts on all matrices.
    """

    moments = 1
    momentum: Beta = 0.95
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Decay = 0.1
    eps: Positive = 1e-8
    groups: tuple[Group, ...] = ()

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        import torch

        from archlab.search.recipe.optimizer_steps import Together

        hidden: list[tuple[str, nn.Parameter]] = []
        other: list[tuple[str, nn.Parameter]] = []
        for path, parameter in parameters:
            matrix = parameter.ndim == 2 and getattr(parameter, "decay", True)
            (hidden if matrix and not getattr(parameter, "table", False) else other).append((path, parameter))
        parts: list[torch.optim.Optimizer] = []
        if groups := decay_groups(hidden, self.weight_decay, self.groups):
            parts.append(torch.optim.Muon(groups, lr, momentum=self.momentum, adjust_lr_fn="match_rms_adamw"))
        if groups := decay_groups(other, self.weight_decay, self.groups):
            parts.append(torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True))
        return Together(parts)


def decay_groups(parameters: Named, weight_decay: float, groups: Sequence[Group] = ()) -> list[dict[str, Any]]:
    """Parameter groups for torch: matrices decay; norms, biases and learned constants do not.

    A matrix has at least two dimensions. A parameter of another nature says so itself: `parameter.decay = False`
    (a gate's learned constant for each head and channel) or True. Shared parameters are entered once. What a group
    says of its own parameters goes first.
    """
    found: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, weight_decay): [], (1.0, 0.0): []}
    seen: set[int] = set()
    for path, parameter in parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        own = next((group for group in groups if group.matches(path)), None)
        decay = weight_decay if getattr(parameter, "decay", parameter.ndim >= 2) else 0.0
        factor = 1.0
        if own is not None:
            factor, decay = own.lr_factor, decay if own.weight_decay is None else own.weight_decay
        found.setdefault((factor, decay), []).append(parameter)
    return [
        {"params": params, "weight_decay": decay, **({"lr_factor": factor} if factor != 1.0 else {})}
        for (factor, decay), params in found.items()
        if params
    ]


def unmatched(groups: Sequence[Group], paths: Iterable[str]) -> list[str]:
    """The patterns of groups that match no parameter."""
    names = list(paths)
    patterns = (pattern for group in groups for pattern in group.parameters)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]

"""How weights are updated: a family of optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from archlab.arch_dsl.language.spec import Count, Family, Positive, Range, added
from archlab.search.recipe.parameter_groups import Decay, Group, Named, decay_groups, divided

if TYPE_CHECKING:
    import torch

    from archlab.arch_dsl.model.model import Model

Beta = Annotated[float, Range(min=0, below=1)]


class Optimizer(Family):
    """An optimizer; `build` makes it for a model's parameters."""

    noun = "optimizer"
    default_type = "adamw"
    averages: ClassVar[bool] = False  # whether a mean of the weights is evaluated, in place of a rate that decays

    @property
    def by_element(self) -> bool:
        """Whether an element's update depends on no other one."""
        return False

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        """A torch optimizer over named parameters at rate `lr`. A group's own factor of it is its `lr_factor`."""
        raise NotImplementedError

    @property
    def moments(self) -> int:
        """How many numbers it keeps for each parameter of a hidden matrix; fewer than one are none."""
        return 2

    def kept(self, model: Model, parameters: int) -> int:
        """How many numbers it keeps for all `parameters` of a resolved model."""
        return parameters * self.moments

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
    `independent_decay` takes schedule weight_decay w in place of lr weight_decay w (its algorithm 2; arXiv:2309.14322,
    section 3.2), so that a decay means the same at every rate. `cautious` leaves out what m and g disagree on in sign,
    and multiplies the rest, but not the decay, by n / (kept + 1) in a tensor of n elements (arXiv:2411.16085).
    Fused: on a CPU a step of 3 million parameters takes 3 ms, 12 ms in a loop and 21 ms with foreach, and every
    run gives the same bits.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Decay = 0.1
    eps: Positive = 1e-8
    groups: tuple[Group, ...] = added(default=())
    cautious: bool = added(default=False)
    independent_decay: bool = added(default=False)

    @property
    def by_element(self) -> bool:
        return not self.cautious

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        import torch

        from archlab.search.recipe.optimizer_steps import CautiousAdamW

        groups = decay_groups(parameters, self.weight_decay, self.groups, lr if self.independent_decay else None)
        if self.cautious:
            return CautiousAdamW(groups, lr, self.betas, self.eps)
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

    Then m <- b2 m + (1 - b2) g. The decay acts on matrices only. `cautious` and `independent_decay` as in adamw: signs
    are left out where they are not those of g.
    """

    moments = 1
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: Decay = 0.1
    groups: tuple[Group, ...] = ()
    cautious: bool = added(default=False)
    independent_decay: bool = added(default=False)

    @property
    def by_element(self) -> bool:
        return not self.cautious

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        from archlab.search.recipe.optimizer_steps import LionUpdate

        groups = decay_groups(parameters, self.weight_decay, self.groups, lr if self.independent_decay else None)
        return LionUpdate(groups, lr, self.betas, self.cautious)


@Optimizer.register("muon")
class Muon(Optimizer):
    """Muon on hidden matrices: their momentum, orthogonalised by Newton-Schulz steps (Jordan 2024, Muon).

    With `scaling` match_rms_adamw the update is multiplied by 0.2 sqrt(max(rows, columns)), to the size of AdamW's
    (arXiv:2502.16982, section 2.2), so that rates carry over; with `original` by sqrt(max(1, rows / columns)), which
    takes larger rates. With `nesterov` the gradient is mixed once more into the momentum, before `ns_steps` steps.
    Everything else (tables of tokens and positions, stacked matrices of experts, vectors) is AdamW's with `betas` and
    `eps`. The decoupled weight decay acts on all matrices (arXiv:2502.16982, eq. 3; Jordan's Muon has none).
    """

    version = 2
    moments = 1
    momentum: Beta = 0.95
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Decay = 0.1
    eps: Positive = 1e-8
    groups: tuple[Group, ...] = ()
    scaling: Literal["match_rms_adamw", "original"] = added(default="match_rms_adamw")
    nesterov: bool = added(default=True)
    ns_steps: Annotated[int, Range(min=1, below=100)] = added(default=5)

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        import torch

        from archlab.search.recipe.muon import MuonUpdate
        from archlab.search.recipe.optimizer_steps import Together

        hidden, other = divided(parameters)
        parts: list[torch.optim.Optimizer] = []
        if groups := decay_groups(hidden, self.weight_decay, self.groups):
            parts.append(MuonUpdate(groups, lr, self.momentum, self.nesterov, self.ns_steps, self.scaling))
        if groups := decay_groups(other, self.weight_decay, self.groups):
            parts.append(torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True))
        return Together(parts)


@Optimizer.register("soap")
class SOAP(Optimizer):
    """SOAP on hidden matrices: Adam in the eigenbasis of Shampoo (arXiv:2409.11321, algorithm 3).

    w <- w - lr (Q_L (m' / (sqrt(v) + eps)) Q_R^T + weight_decay w), with m' = Q_L^T m Q_R; m and v are the
    bias-corrected running means of g and of (Q_L^T g Q_R)^2 with `betas`. Q_L and Q_R are the eigenvectors of the
    running means of g g^T and g^T g with beta2, which follow these by a QR step every `frequency` steps; the first step
    only begins them. A side of more than `max_dimension` is not rotated; with `one_sided` neither is the longer side.
    Everything else is AdamW's, as under muon. The decay is AdamW's too, as in the paper, and acts on all matrices.
    """

    betas: tuple[Beta, Beta] = (0.95, 0.95)
    weight_decay: Decay = 0.1
    eps: Positive = 1e-8
    frequency: Count = 10
    max_dimension: Count = 10_000
    one_sided: bool = False
    groups: tuple[Group, ...] = ()

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def kept(self, model: Model, parameters: int) -> int:
        from archlab.arch_dsl.compiler.shapes import unallocated

        hidden, _ = divided(unallocated(model))
        sides = (side for _, matrix in hidden for side in self.rotated(*matrix.shape) if side)
        return super().kept(model, parameters) + sum(2 * side**2 for side in sides)

    def rotated(self, rows: int, columns: int) -> tuple[int, int]:
        """The sides of a matrix that are rotated, 0 in place of those that are not."""
        left, right = (side if side <= self.max_dimension else 0 for side in (rows, columns))
        if self.one_sided and left and right:
            return (0, right) if columns < rows else (left, 0)
        return left, right

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        import torch

        from archlab.search.recipe.optimizer_steps import Together
        from archlab.search.recipe.soap import SOAPUpdate

        hidden, other = divided(parameters)
        parts: list[torch.optim.Optimizer] = []
        if groups := decay_groups(hidden, self.weight_decay, self.groups):
            parts.append(SOAPUpdate(groups, lr, self.betas, self.eps, self.frequency, self.rotated))
        if groups := decay_groups(other, self.weight_decay, self.groups):
            parts.append(torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True))
        return Together(parts)


@Optimizer.register("schedule_free")
class ScheduleFree(Optimizer):
    """Schedule-free AdamW (arXiv:2405.15682, algorithm 1): gradients at y = (1 - b1) z + b1 x, x is evaluated.

    z <- z - a (g / (sqrt(v) + eps) + weight_decay y), then x <- (1 - c) x + c z, with a = lr sqrt(1 - b2^t), v the
    running mean of g^2 and c = a^2 / (sum of all a^2 so far). Validation, test and saved weights are x's. The rate may
    not decay: say `schedule: constant`. The decay acts at y, as in the paper, and on matrices only.
    """

    averages = True
    by_element = True
    betas: tuple[Annotated[float, Range(above=0, below=1)], Beta] = (0.9, 0.95)
    weight_decay: Decay = 0.1
    eps: Positive = 1e-8
    groups: tuple[Group, ...] = ()

    @property
    def memory(self) -> float:
        return 1 / (1 - self.betas[1])

    def build(self, parameters: Named, lr: float) -> torch.optim.Optimizer:
        from archlab.search.recipe.schedule_free import ScheduleFreeUpdate

        return ScheduleFreeUpdate(decay_groups(parameters, self.weight_decay, self.groups), lr, self.betas, self.eps)

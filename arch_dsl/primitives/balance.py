"""Balancing: losses that keep a router from sending all tokens to the same few experts."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from archlab.arch_dsl.language.spec import Positive
from archlab.arch_dsl.parts.families import Primitive


class Balance(Primitive):
    """A loss of the router of a mixture of experts, which training adds to its own."""

    noun: ClassVar[str] = "balance"

    def loss(self, assigned: Tensor, shares: Tensor, kept: Tensor | None, earlier: Tensor | None) -> Tensor:
        """The weighted loss from the shares of each token's assignments and of the router's probability.

        Both are `[batch, time, experts]` and add up to 1 for a token. `kept` `[batch, time]` is False at padding;
        `earlier` `[experts]` is the sum of the loads of the step's micro-batches before this one, None at the first.
        """
        raise TypeError(f"{type(self).__name__} has no loss")


@Balance.register("switch")
class Switch(Balance):
    """coefficient experts sum_e f_e P_e with f_e the share of assignments to e and P_e its mean probability.

    As in Switch Transformers (arXiv:2101.03961, eq. 4-6), for any number of chosen experts: the loss is `coefficient`
    where all are used alike. f and P are means over the tokens of the micro-batch (`batch`) or of each sequence
    (`sequence`, arXiv:2412.19437, eq. 17-20); `global_batch` takes f over the micro-batches of the step so far
    (arXiv:2501.11873, section 3).
    """

    coefficient: Positive = 0.01
    over: Literal["batch", "global_batch", "sequence"] = "batch"

    def loss(self, assigned: Tensor, shares: Tensor, kept: Tensor | None, earlier: Tensor | None) -> Tensor:
        over = (1,) if self.over == "sequence" else (0, 1)
        load, probability = average(assigned, kept, over), average(shares, kept, over)
        if self.over == "global_batch" and earlier is not None:
            load = (load + earlier) / (1 + earlier.sum())
        return self.coefficient * load.shape[-1] * (load * probability).sum(-1).mean()


def average(x: Tensor, kept: Tensor | None, over: tuple[int, ...]) -> Tensor:
    """The mean of x `[batch, time, …]` over dimensions, of the tokens that are kept alone."""
    if kept is None:
        return x.mean(over)
    weights = kept.to(x.dtype).unsqueeze(-1)
    return (x * weights).sum(over) / weights.sum(over).clamp_min(1)

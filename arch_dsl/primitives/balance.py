"""Balancing: what keeps a router from sending all tokens to the same few experts, a loss or a bias of the choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from archlab.arch_dsl.language.spec import Positive
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Primitive
from archlab.arch_dsl.parts.layers import Stepped


class Balance(Primitive):
    """Evens out the load of the experts of a mixture: by a loss that training adds to its own, or without one."""

    noun: ClassVar[str] = "balance"

    @property
    def penalty(self) -> Balance | None:
        """The member whose loss is added; None where there is none."""
        return self

    @property
    def reads_earlier(self) -> bool:
        """Whether its loss depends on the step's micro-batches before."""
        return True

    def loss(self, assigned: Tensor, shares: Tensor, kept: Tensor | None, earlier: Tensor | None) -> Tensor:
        """The weighted loss from the shares of each token's assignments and of the router's probability.

        Both are `[batch, time, experts]` and add up to 1 for a token. `kept` `[batch, time]` is False at padding;
        `earlier` `[experts]` is the sum of the loads of the step's micro-batches before this one, None at the first.
        """
        raise TypeError(f"{type(self).__name__} has no loss")

    def correction(self, experts: int, ctx: BuildContext) -> Stepped | None:
        """The module that changes scores `[tokens, experts]` for the choice alone; None where nothing does."""
        return None


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

    @property
    def reads_earlier(self) -> bool:
        return self.over == "global_batch"

    def loss(self, assigned: Tensor, shares: Tensor, kept: Tensor | None, earlier: Tensor | None) -> Tensor:
        over = (1,) if self.over == "sequence" else (0, 1)
        load, probability = average(assigned, kept, over), average(shares, kept, over)
        if self.over == "global_batch" and earlier is not None:
            load = (load + earlier) / (1 + earlier.sum())
        return self.coefficient * load.shape[-1] * (load * probability).sum(-1).mean()


@Balance.register("bias")
class Bias(Balance):
    """b_e, added to the scores for the choice alone; after each optimizer step b_e += rate sign(mean load - load_e):
    balancing without a loss (arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, eq. 16).

    The weights of the chosen experts are made of the scores without it. b starts at 0, has no gradient, is a part of
    checkpoints, and stays as it is in evaluation. A load counts the assignments of all of the step's micro-batches but
    those of padding, so it does not depend on how a batch is divided. `auxiliary` is a loss beside it, for example
    `{type: switch, over: sequence, coefficient: 1e-4}` as in DeepSeek-V3.
    """

    examples = ({}, {"auxiliary": {"type": "switch", "over": "sequence"}})

    rate: Positive = 0.001
    auxiliary: Balance | None = None

    @property
    def penalty(self) -> Balance | None:
        return self.auxiliary

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if isinstance(self.auxiliary, Bias):
            yield "auxiliary", "is a loss beside the bias; a second bias has none (switch)"

    def correction(self, experts: int, ctx: BuildContext) -> Stepped | None:
        return _Bias(self.rate, experts, ctx.path)


class _Bias(Stepped):
    bias: Tensor

    def __init__(self, rate: float, experts: int, path: str) -> None:
        super().__init__()
        self.rate, self.experts, self.path = rate, experts, path
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.bias

    def after_step(self, measures: Mapping[str, Tensor]) -> None:
        """In integers, so that a load is over or under the mean whatever its sums were taken over."""
        counts = measures[f"{self.path}.assigned"]
        below = torch.sign(counts.sum() - self.experts * counts)
        self.bias += self.rate * below.to(self.bias.dtype)


def average(x: Tensor, kept: Tensor | None, over: tuple[int, ...]) -> Tensor:
    """The mean of x `[batch, time, …]` over dimensions, of the tokens that are kept alone."""
    if kept is None:
        return x.mean(over)
    weights = kept.to(x.dtype).unsqueeze(-1)
    return (x * weights).sum(over) / weights.sum(over).clamp_min(1)

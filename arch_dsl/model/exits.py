"""Exits of a loop: after which turn each token is read, which a gate learns from the losses of all turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import NotNegative, Range, Spec
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.layers import Linear
from archlab.kernels.activations import at_least_float32

_BESIDE = {  # keys of a stack, and why no token can exit beside them
    "streams": "the streams become one only after the last turn",
    "prompt": "the vectors before the tokens have no exit",
}


class Exit(Spec):
    """A token exits after turn t with the probability p_t = lambda_t prod_{s<t} (1 - lambda_s), and after the last turn
    with what is left: lambda_t = sigmoid(w^T h_t + b), h_t being what logits are made of after turn t (LoopLM,
    arXiv:2510.25741, section 3).

    Training takes the mean over targets of sum_t p_t L_t - `entropy` H(p), L_t being the cross-entropy after turn t.
    Evaluation and decoding go through all turns, and read each token after the first turn with p_1 + … + p_t >=
    `threshold`. With 1 that is the last one, without a look at the gate. Measures of training are `turn`, the mean of
    sum_t t p_t, and `loss.1`, `loss.2`, …, the means of L_t.
    """

    title: ClassVar[str] = "exit"
    entropy: NotNegative
    threshold: Annotated[float, Range(above=0, max=1)] = 1.0

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping, or from the weight of the entropy alone."""
        if not isinstance(node.value, dict):
            node = Node({"entropy": node}, node.mark)
        return parse_record(cls, node, path, problems)

    @property
    def only_trained(self) -> bool:
        """Whether evaluation never looks at the gate."""
        return self.threshold == 1

    def cost(self, ctx: BuildContext, tokens: int, turns: int, held: bool) -> Cost:
        """The gate, after all turns but the last, and what its losses keep. With `held` the next turn keeps the stream
        that is read after a turn."""
        gate = Cost.product(tokens, ctx.d_model, 1, bias=True).repeated(turns - 1)
        kept = 4 * (turns - 1) + 3 * turns  # of a token: logits, and what log p is made of; p, log p and losses
        return gate.keeping(tokens * (kept - (ctx.d_model * (turns - 1) if held else 0)))

    def check(self, others: Iterable[str]) -> Iterator[Problem]:
        """Why a loop cannot have it in a stack; `others` are keys that the stack has beside the loop."""
        for name in others:
            if name in _BESIDE:
                yield Problem("loop.exit", f"cannot stand beside {name}: {_BESIDE[name]}", self.mark())


class ExitModule(nn.Module):
    """The gate, the weight of the entropy, and with what is left above which a token goes on: `still`."""

    def __init__(self, spec: Exit, ctx: BuildContext) -> None:
        super().__init__()
        self.entropy, self.still = spec.entropy, 1 - spec.threshold
        self.gate = Linear(ctx.d_model, 1, std=ctx.std, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the exit of each token `[batch, time, 1]`, in at least float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            found: Tensor = self.gate(at_least_float32(hidden))
        return found

    def log_probabilities(self, hidden: Sequence[Tensor]) -> Tensor:
        """log p_t `[turns, batch, time]`."""
        logits = torch.stack([self.logits(each).squeeze(-1) for each in hidden[:-1]])
        left = F.pad(F.logsigmoid(-logits).cumsum(0), (0, 0, 0, 0, 1, 0))
        return left + F.pad(F.logsigmoid(logits), (0, 0, 0, 0, 0, 1))

    def read(self, hidden: Sequence[Tensor]) -> Tensor:
        """What logits are made of `[batch, time, d_model]`, of that after each turn."""
        found = hidden[0]
        left = torch.sigmoid(-self.logits(found))
        for later in hidden[1:-1]:
            found = torch.where(left > self.still, later, found)
            left = left * torch.sigmoid(-self.logits(later))
        return torch.where(left > self.still, hidden[-1], found)

    def expected_loss(
        self,
        hidden: Sequence[Tensor],
        found: Sequence[tuple[Tensor, Tensor | None]],
        targets: Tensor,
        call: Call,
        z_loss: float,
    ) -> Tensor:
        """The mean over targets that are not -100 of sum_t p_t L_t, from the losses `[batch, time]` after each turn, 0
        where there is no target, and log^2 Z.

        `call.losses` gets -entropy H(p) and the z-loss, which is weighted as the losses are, `call.measures` what the
        spec says.
        """
        log_p = self.log_probabilities(hidden)
        p, losses, scored = log_p.exp(), torch.stack([loss for loss, _ in found]), targets != -100
        count = scored.sum()
        call.losses["loop.exit.entropy"] = self.entropy * (p * log_p).sum(0).masked_fill(~scored, 0).sum() / count
        squares = [square for _, square in found if square is not None]
        if squares:
            call.losses["z_loss"] = z_loss * (p * torch.stack(squares).view_as(p)).sum() / count
        numbers = torch.arange(1, len(p) + 1, device=p.device, dtype=p.dtype)
        of_turns = p.masked_fill(~scored, 0).sum((1, 2)) / count
        call.measures["loop.exit.turn"] = (of_turns * numbers).sum().detach()
        for turn, loss in enumerate(losses.detach(), 1):
            call.measures[f"loop.exit.loss.{turn}"] = loss.sum() / count
        return (p * losses).sum() / count

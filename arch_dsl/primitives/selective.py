"""Selective attention: a token that was needed once can be masked for all that come later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Score
from archlab.arch_dsl.parts.state import recent
from archlab.kernels.activations import at_least_float32


@Score.register("selective")
class Selective(Score):
    """s_ij - F_ij with F_ij the sum of S_lj over j < l < i, and S = relu(scale q k^T) of head 0: selective attention,
    in which a query masks keys for all later ones (arXiv:2410.02703, section 3).

    No token selects itself or the first one, that of its document where the mask keeps documents apart. S is of the
    scaled products alone, before caps and other biases. All heads subtract the same F, of which decoding holds a number
    for each key. No key is dropped from memory: the paper's context pruning is left out.
    """

    fading: ClassVar[bool] = True
    of_pairs: ClassVar[bool] = True
    gapless: ClassVar[bool] = True

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        pairs, seen = tokens * tokens, tokens * (tokens + 1) // 2
        kept = pairs + 2 * tokens * ctx.width  # the selections; head 0's queries and keys
        return Cost(flops_matmul=2 * pairs * ctx.width, flops_model=2 * seen * ctx.width, activations=kept)

    def per_key(self, ctx: BuildContext) -> int:
        return 1

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.ahead:
            yield "", "masks keys for later queries, and the mask reads ahead"


class _Selective(Module, of=Selective):
    # B batch, T time, S keys (those that decoding holds, and T)
    def __init__(self, spec: Selective, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.path, self.window, self.documents = ctx.path, ctx.window, ctx.documents
        self.scale = ctx.logit_scale

    def forward(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        q_BTD, k_BSD = q[:, :, 0].contiguous(), k[:, :, 0] * self.scale
        logits = at_least_float32(q_BTD @ k_BSD.transpose(1, 2))
        selected = (logits + torch.where(self.selectable(q, k, call), 0.0, float("-inf"))).relu()
        masked = F.pad(selected[:, :-1], (0, 0, 1, 0)).cumsum(1)
        if call.held is not None:
            before = call.held.get(self.path, masked.new_zeros(len(masked), 0))
            before = F.pad(before, (0, masked.shape[2] - before.shape[1]))
            masked = masked + before[:, None]
            call.held[self.path] = (before + selected.sum(1))[:, -(self.window or k.shape[1]) :].clone()
        return -masked[:, None]

    def selectable(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Which keys a query may select, `[B or 1, T, S]`."""
        queries, keys = q.shape[1], k.shape[1]
        earlier = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries - 1)
        real = ~call.padding if call.padding is not None else torch.ones_like(q[:, :, 0, 0], dtype=torch.bool)
        able = earlier & real[..., None] & ~self.first(real, call)[:, None]
        if self.documents and call.documents is not None:
            able = able & (call.documents[:, :, None] == call.documents[:, None])
        return able

    def first(self, real: Tensor, call: Call) -> Tensor:
        """Which of all keys `[B, S]` begins a text: the first of a row that is no padding, or of its document."""
        count = real.cumsum(1)
        if call.held is not None:
            begun = call.held.get(f"{self.path}.begun", torch.zeros_like(real[:, :1]))
            count = count + begun
            call.held[f"{self.path}.begun"] = begun | real.any(1, keepdim=True)
        opening = real & (count == 1)
        if self.documents and call.documents is not None:
            changes = call.documents[:, 1:] != call.documents[:, :-1]
            opening = opening | F.pad(changes, (1, 0))
        return recent(call, self.path, opening, self.window, ".first")

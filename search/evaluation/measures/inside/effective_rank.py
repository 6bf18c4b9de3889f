"""In how many directions the outputs of a head lie."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.parts.watching import Sight
from archlab.arch_dsl.primitives.branch import Headed
from archlab.search.evaluation.by_layer import grids, mean_of
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, at_tokens, spot


@Measure.register("effective_rank")
class EffectiveRank(Diagnostic):
    """exp(- sum_k p_k ln p_k), p_k = s_k / sum s, with s the singular values of a head's outputs `[tokens, head_dim]`,
    not centred, before the site `sdpa`: per layer and head, and the mean over these (Roy and Vetterli, 2007; RankMe,
    arXiv:2210.02885, eq. 1). Between 1 and the head's dimension."""

    needs = (Headed,)
    lacks = "no mixer with heads"


class _Outputs(Observer, of=EffectiveRank):
    kinds: ClassVar[frozenset[str]] = frozenset({"heads"})

    def __init__(self) -> None:
        self.squares: dict[tuple[str, int], Tensor] = {}

    def see(self, sight: Sight) -> None:
        output, key = at_tokens(sight, "output"), spot(sight)
        rows = output.reshape(-1, *output.shape[-2:]).double()
        squares = torch.einsum("thd,the->hde", rows, rows)
        self.squares[key] = self.squares[key] + squares if key in self.squares else squares

    def found(self, windows: int) -> Found:
        ranks = {key: rank_of(squares).tolist() for key, squares in self.squares.items()}
        return Found({"effective_rank": mean_of(ranks)}, grids=grids(ranks, "effective_rank", "head", windows))


def rank_of(squares: Tensor) -> Tensor:
    """The effective rank `[heads]` of matrices from the products X^T X `[heads, channels, channels]`."""
    singular = torch.linalg.eigvalsh(squares).clamp(min=0).sqrt()
    shares = singular / singular.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(shares).sum(-1)
    return entropy.exp()

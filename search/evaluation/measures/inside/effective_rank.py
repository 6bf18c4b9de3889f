"""In how many directions the outputs of a head lie."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from archlab.arch_dsl.parts.watching import Sight
from archlab.arch_dsl.primitives.branch import Headed
from archlab.search.evaluation.by_layer import grids, mean_of
from archlab.search.evaluation.family import About, Found, Measure
from archlab.search.evaluation.sample import Diagnostic, Observer, counted, parts_of, place_of


@Measure.register("effective_rank")
class EffectiveRank(Diagnostic):
    """exp(- sum_k p_k ln p_k), p_k = s_k / sum s, with s the singular values of a head's outputs `[tokens, head_dim]`,
    not centred, before the site `sdpa`: per layer and head, and the mean over these (Roy and Vetterli, 2007; RankMe,
    arXiv:2210.02885, eq. 1). Between 1 and the head's dimension."""

    def refusal(self, about: About) -> str | None:
        found = any(isinstance(part, Headed) for part in parts_of(about))
        return None if found else "the model has no mixer with heads"

    def observer(self) -> Observer:
        return _Outputs()


class _Outputs(Observer):
    kinds: ClassVar[frozenset[str]] = frozenset({"heads"})

    def __init__(self) -> None:
        self.squares: dict[tuple[str, int], Tensor] = {}

    def see(self, sight: Sight) -> None:
        output = sight.tensors["output"]
        kept = counted(sight, output.shape)
        rows = (output.flatten(0, 1) if kept is None else output[kept]).double()
        assert sight.layer is not None
        key = place_of(sight), sight.layer
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

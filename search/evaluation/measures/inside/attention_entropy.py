"""How spread attention is."""

from __future__ import annotations

from typing import ClassVar

import torch

from archlab.search.evaluation.by_layer import ByLayer
from archlab.search.evaluation.family import Found, Measure
from archlab.search.evaluation.measures.inside.first_token_attention import OfProbabilities
from archlab.search.evaluation.sample import Observer, Weighed


@Measure.register("attention_entropy")
class AttentionEntropy(OfProbabilities):
    """- sum_j a_(i, j) ln a_(i, j) in nats, the mean over queries i, per layer and head, and over these
    (arXiv:2303.06296, section 3). What a sink gets is one of the terms.

    Beside it `attention_entropy_uniform`, the most that there could be: the mean of ln of how many keys a query may
    read.
    """


class _Entropy(Observer, of=AttentionEntropy):
    weighs: ClassVar[bool] = True

    def __init__(self) -> None:
        self.entropy, self.most = ByLayer(), ByLayer()

    def weigh(self, weighed: Weighed) -> None:
        rows = weighed.counts[:, None].expand_as(weighed.visible)
        entropy, choices = torch.special.entr(weighed.probabilities).sum(-1), weighed.visible
        if weighed.sink is not None:
            entropy, choices = entropy + torch.special.entr(weighed.sink), choices + 1
        self.entropy.heads(weighed.place, weighed.layer, entropy, rows)
        self.most.heads(weighed.place, weighed.layer, choices.double().log(), rows)

    def found(self, windows: int) -> Found:
        name = "attention_entropy"
        values = {name: self.entropy.mean, f"{name}_uniform": self.most.mean}
        return Found(values, grids=self.entropy.grids(name, "head", windows))

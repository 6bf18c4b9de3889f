"""Sparse activations: of a vector only what lies above a threshold is passed on, and the rest is 0."""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated

from torch import Tensor

from archlab.arch_dsl.language.spec import Range
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Module, Scale


@Scale.register("statistical_topk")
class StatisticalTopK(Scale):
    """relu(x - t) with t = mean(x) + std(x) Q(sparsity), over the channels of a token, Q being the quantile function of
    a normal distribution: statistical top-k (Spark Transformer, arXiv:2506.06644).

    Of channels that are distributed normally the share `sparsity` becomes 0, without sorting them. At the site
    `preactivation` of a `glu` it is the activation sparsity of Gemma 3n, whose first ten layers have 0.95; as there
    (transformers' modeling_gemma3n.py, `_gaussian_topk`) the std divides by the number of channels. Where there are
    heads, each has a threshold of its own.
    """

    examples = ({"sparsity": 0.3},)

    sparsity: Annotated[float, Range(above=0, below=1)] = 0.95

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        logits = ctx.site == "logits"
        rows = tokens * (1 if logits or ctx.heads is None else ctx.heads)
        elements = tokens * ctx.vocab if logits else ctx.elements(tokens)
        # x and the std for its gradient, and the result for relu's, which what follows mostly keeps and counts itself
        added = elements if ctx.site in ("post", "embed") else 0
        return Cost(activations=elements + rows + added)


class _StatisticalTopK(Module, of=StatisticalTopK):
    def __init__(self, spec: StatisticalTopK, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.quantile = NormalDist().inv_cdf(spec.sparsity)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        spread = x.std(-1, correction=0, keepdim=True)
        return (x - (x.mean(-1, keepdim=True) + self.quantile * spread)).relu()

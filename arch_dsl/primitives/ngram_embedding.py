"""Embeddings of n-grams: what the last few tokens are together, looked up by a hash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.language.spec import Count, Range
from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Carry, Module
from archlab.arch_dsl.parts.layers import normal, table
from archlab.arch_dsl.parts.state import recent

PRIME = 1_000_000_007  # of 10 digits: the first one of the published code

Size = Annotated[int, Range(min=2)]


@Carry.register("ngram_embedding")
class NgramEmbedding(Carry):
    """(x_i + sum over n of E_n[h_n(i)]) / (count of n + 1), h_n(i) being the sum over j = 1 … n of b_(i-j+1) a^(j-1)
    modulo `rows`: hash n-gram embeddings of the Byte Latent Transformer (arXiv:2412.09871, section 3.2.1).

    b are token ids, a is the prime 1000000007, and n goes from `shortest` to `longest`: each has a table `[rows,
    d_model]`, in which lookups have no FLOPs. Before the first token stands 0, and before that of a document where the
    masks of the stack keep documents apart. The published code has several hash functions, and does not divide.
    """

    examples = ({"rows": 40, "longest": 4}, {"rows": 7, "shortest": 2, "longest": 3})
    reads_tokens: ClassVar[bool] = True
    rows: Count
    shortest: Size = 3
    longest: Size = 8

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        size = (self.longest - self.shortest + 1) * self.rows * ctx.width
        return Cost(parameters=size, embeddings=size)  # decoding holds ids alone, which do not count

    def wrong(self, ctx: BuildContext) -> Iterator[tuple[str, str]]:
        if ctx.site != "embed":
            yield "", f"is added to the embeddings of tokens; it stands at embed, not at {ctx.site}"
        if self.longest < self.shortest:
            yield "longest", f"must be at least shortest {self.shortest}, found {self.longest}"


class _NgramEmbedding(Module, of=NgramEmbedding):
    def __init__(self, spec: NgramEmbedding, ctx: BuildContext) -> None:
        super().__init__(spec, ctx)
        self.rows, self.shortest, self.count = spec.rows, spec.shortest, spec.longest - spec.shortest + 1
        self.powers = [pow(PRIME, j, spec.rows) for j in range(spec.longest)]
        self.table = table((self.count * spec.rows, ctx.width), normal(ctx.std))
        self.path, self.documents = ctx.path, ctx.documents

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return (x + F.embedding(self.hashes(call), self.table).sum(2)) / (self.count + 1)

    def hashes(self, call: Call) -> Tensor:
        """Rows of the table `[batch, time, count]`, from the ids of the tokens and of those before them."""
        tokens, before = call.across["tokens"], len(self.powers) - 1
        if call.padding is not None:
            tokens = tokens.masked_fill(call.padding, 0)
        time = tokens.shape[1]
        ids = F.pad(recent(call, self.path, tokens, most=before), (before, 0))[:, -time - before :]
        numbers = None
        if self.documents and call.documents is not None:
            documents = recent(call, self.path, call.documents, before, ".documents")
            numbers = F.pad(documents, (before, 0), value=-1)[:, -time - before :]
        found: list[Tensor] = []
        hashed = torch.zeros_like(tokens)
        for j, power in enumerate(self.powers):
            own = ids[:, before - j : before - j + time]
            if numbers is not None:
                own = own.masked_fill(numbers[:, before - j : before - j + time] != numbers[:, before:], 0)
            hashed = (hashed + own * power) % self.rows
            if j + 1 >= self.shortest:
                found.append(hashed + len(found) * self.rows)
        return torch.stack(found, 2)

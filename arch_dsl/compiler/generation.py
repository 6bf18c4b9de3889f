"""Generation: text that a model continues token by token, and how each token is drawn."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from archlab.arch_dsl.compiler.modules import LanguageModel
from archlab.arch_dsl.parts.context import Call, State


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits l of the last one.

    Temperature 0 takes the likeliest. Else p = softmax(l / temperature), of which the `top_k` likeliest tokens stay
    (arXiv:1805.04833, section 5), and of these the fewest likeliest that have `top_p` of their probability (the
    nucleus, arXiv:1904.09751, section 3.1); p of what stays is drawn from.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def draw(self, logits: Tensor, chance: Tensor) -> Tensor:
        """The token `[batch]` for each row of `logits` `[batch, vocab]` by a number of [0, 1) `[batch]`, which does not
        matter at temperature 0."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p, order = (logits.double() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        if self.top_k is not None:
            p = p[:, : self.top_k]
        if self.top_p is not None:
            before = p.cumsum(-1) - p
            p = p.masked_fill(before >= self.top_p * p.sum(-1, keepdim=True), 0)
        ends = p.cumsum(-1)
        place = (ends <= chance.to(ends)[:, None] * ends[:, -1:]).sum(-1, keepdim=True)
        place = torch.minimum(place, (p > 0).sum(-1, keepdim=True) - 1)
        return order.gather(-1, place).squeeze(-1)


GREEDY = Sampling()


@torch.no_grad()
def stream(
    model: LanguageModel,
    tokens: Tensor,
    call: Call | None = None,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """What follows `tokens` `[batch, time]`, one token `[batch]` after another without an end, each read once; where
    attention keeps documents apart that a token opens, which all tokens tell at once, all are read for each.

    Row i is drawn by `seeds[i]` alone, whatever the other rows are. `call` says what else is read, such as the source
    of an encoder.
    """
    parts = (part for part in model.modules() if hasattr(part, "looks_ahead"))
    anew = model.separator is not None and any(getattr(part, "documents", False) for part in parts)
    call = call or Call() if anew else replace(call or Call(), state=State())
    seeds = range(len(tokens)) if seeds is None else seeds
    chances = [random.Random(seed) for seed in seeds] if sampling.temperature else []
    while True:
        logits = model(tokens, call)[:, -1].float()
        chance = torch.tensor([each.random() for each in chances], dtype=torch.float64, device="cpu")
        drawn = sampling.draw(logits, chance.to(logits.device))
        tokens = torch.cat([tokens, drawn[:, None]], 1) if anew else drawn[:, None]
        yield drawn


def generate(
    model: LanguageModel,
    tokens: Tensor,
    count: int,
    call: Call | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Tensor:
    """`tokens` `[batch, time]` continued by `count` more, each read once: `[batch, time + count]`.

    A temperature of 0 takes the likeliest token, a higher one draws, as `Sampling` says; a row by `seed` and its place.
    """
    seeds = [seed_of(seed, row) for row in range(len(tokens))]
    found = stream(model, tokens, call, Sampling(temperature, top_k, top_p), seeds)
    return torch.cat([tokens, *(each[:, None] for each in islice(found, count))], 1)


def seed_of(*parts: object) -> int:
    """A seed of 64 bits from whatever tells draws apart."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, ("archlab", *parts))).encode()).digest()[:8], "big")

"""What generating costs on this device: tokens per second, and the memory that each token leaves behind."""

from __future__ import annotations

import statistics
import time
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree

from archlab import arch_dsl
from archlab.arch_dsl.compiler.modules import LanguageModel
from archlab.arch_dsl.language.spec import Count, added, walk
from archlab.arch_dsl.parts.context import Call, State
from archlab.arch_dsl.parts.families import Mask
from archlab.search.evaluation.downstream.text_model import not_continued
from archlab.search.evaluation.family import About, Found, Measure, Subject
from archlab.search.training.held_out import autocast, evaluating

_ROUNDS = 3  # the fastest counts


@Measure.register("decoding")
class Decoding(Measure):
    """`batch` rows read a prompt of `prompt` tokens (half the context without it) and are continued by `tokens` more,
    one at a time, with what decoding holds of those before (incremental inference, arXiv:1911.02150, section 2.4).

    Told are the time of the prompt and of a token, tokens per second of all rows, and the bytes that are held for each
    token that a row has read when all have been, beside those that the spec says (float32).
    """

    in_all = False
    timed = True
    prompt: Count | None = added(default=None)
    tokens: Count = added(default=16)
    batch: Count = added(default=1)

    @property
    def ending(self) -> str:
        return self.unusual("prompt", "tokens", "batch")

    def refusal(self, about: About) -> str | None:
        if about.dataset.has_text and (why := not_continued(about)):
            return why
        if any(isinstance(spec, Mask) and spec.documents for _, spec in walk(about.model)):
            return "attention that keeps documents apart can't hold what was read: all of it is read for each token"
        most = self._prompt(about) + self.tokens
        return about.refusal(most) if most > about.recipe.context else None

    def _prompt(self, about: About) -> int:
        return self.prompt or max(1, min(about.recipe.context // 2, about.recipe.context - self.tokens))

    def compute(self, subject: Subject) -> Found:
        about, count = subject.about, self._prompt(subject.about)
        whole = count + self.tokens
        model = cast(LanguageModel, subject.at(max(whole, about.recipe.context)))
        stream = torch.from_numpy(about.dataset.split("test")[:whole].astype("int64"))
        read = stream.repeat(-(-whole // len(stream)))[:whole].expand(self.batch, whole).to(subject.device)
        rounds = []
        with evaluating(model), autocast(subject.device, about.recipe.precision):
            for _ in range(_ROUNDS):
                subject.tick()
                rounds.append(_decoded(model, read, count))
        prompt_s, token_s = (min(each) for each in list(zip(*rounds, strict=True))[:2])
        values = {
            "prompt_ms": 1e3 * prompt_s,
            "ms_per_token": 1e3 * token_s,
            "decoding_tokens_per_s": self.batch / token_s,
            "cache_bytes_per_token": rounds[0][2] / self.batch / whole,
            "cache_bytes_per_token_by_spec": 4 * arch_dsl.cost(about.long(whole), whole).cache / whole,
        }
        return Found(values).with_ending(self.ending)


def _decoded(model: LanguageModel, tokens: Tensor, prompt: int) -> tuple[float, float, int]:
    """Seconds of the prompt, the median of those of a token, and the bytes that are held in the end."""
    state, seconds = State(), []
    for piece in (tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)):
        started = time.perf_counter()
        model(piece, Call(state=state))[:, -1].argmax(-1).tolist()  # which waits for the device
        seconds.append(time.perf_counter() - started)
    leaves = _pytree.tree_leaves(state.layers)
    held = sum(each.numel() * each.element_size() for each in leaves if isinstance(each, Tensor))
    return seconds[0], statistics.median(seconds[1:]), held

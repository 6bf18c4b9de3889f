"""Loss, perplexity and bits per byte of a model on a held-out split, with the sums of every document.

A model is asked what it was trained on: windows of the split become batches of the same objective, with the same noise
for all variants and trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from archlab.search.data.batches import IGNORE, Batch, windows
from archlab.search.data.dataset import Dataset
from archlab.search.data.examples import read
from archlab.search.hardware.peaks import Precision
from archlab.search.objectives import Causal, Objective, has_encoder
from archlab.search.training.routers import KINDS, health
from archlab.search.training.team import ALONE, Team

Arrays = dict[str, npt.NDArray[Any]]

_CAUSAL = Causal()
_NOISE = 0  # the seed of the noise that held-out text gets


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    split: str,
    context: int,
    batch: int,
    precision: Precision = "fp32",
    tick: Callable[[], None] | None = None,
    objective: Objective = _CAUSAL,
    team: Team = ALONE,
) -> tuple[dict[str, float], Arrays]:
    """What the model makes of a split, read in windows of `context` tokens, `batch` of them at a time.

    Under the causal objective every token but the end-of-document token that opens the stream is scored exactly once,
    ends of documents among them; a token sees what precedes it in its window. Other objectives are asked about whole
    windows alone; what they score depends on their noise. Returns

    * loss (nats per target, L = sum nll / targets), perplexity (exp L), and where every byte is known and predicted
      bits_per_byte (sum nll / (ln 2 * bytes of text));
    * of a model with experts router_load_max, router_entropy and router_dropped (search/training/routers.py);
    * per document: nll (nats, float64), tokens (those scored, the end of the document among them) and bytes (of the
      whole document, int64), `[documents]` each, and of a mixture domain, its place among the domains. A sentinel
      counts where the span begins that it stands for.

    `tick` is called before each batch; what it raises ends the evaluation.
    """
    asked = held_out(dataset, split, context, objective, has_encoder(model))
    scored = asked.targets != IGNORE
    told: dict[str, Tensor] = {}
    nll = losses(model, asked, batch, precision, tick, told, team)[scored]
    documents = dataset.documents(split)
    count = len(documents.tokens)
    rows = np.arange(len(asked))[:, None]
    if objective.of_examples:
        owner = np.broadcast_to(rows, scored.shape)[scored]
    else:
        place = (rows * context + asked.places)[scored]  # in the stream, after its first token
        owner = np.repeat(np.arange(count), documents.tokens)[place]
    arrays: Arrays = {
        "nll": np.bincount(owner, weights=nll, minlength=count),
        "tokens": np.bincount(owner, minlength=count),
        "bytes": documents.bytes,
    }
    if dataset.domains:
        sizes = [end - first for first, end in (domain.documents[split] for domain in dataset.domains)]
        arrays["domain"] = np.repeat(np.arange(len(sizes)), sizes)
    size = int(documents.bytes.sum()) if objective.every and dataset.has_text else None
    of_all = [f"router_{kind}" for kind in KINDS]
    routers = {name: float(value) for name, value in health(told, len(asked)).items() if name in of_all}
    return summary(float(nll.sum()), len(nll), size) | routers, arrays


def summary(nll: float, tokens: int, size: int | None) -> dict[str, float]:
    """loss, perplexity (infinite where it overflows) and bits_per_byte of `nll` nats over tokens and bytes, if told."""
    loss = nll / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
    found = {"loss": loss, "perplexity": perplexity}
    return found if size is None else found | {"bits_per_byte": nll / math.log(2) / size}


def losses(
    model: nn.Module,
    asked: Batch,
    batch: int,
    precision: Precision = "fp32",
    tick: Callable[[], None] | None = None,
    told: dict[str, Tensor] | None = None,
    team: Team = ALONE,
) -> npt.NDArray[np.float64]:
    """The loss of each target in nats, float64 `[windows, time]`, 0 where the target is -100, `batch` rows at once.

    `told` gets the measures of all calls, each times its rows, summed.
    """
    device = next(model.parameters()).device
    rows: list[npt.NDArray[np.float64]] = []
    sums = {} if told is None else told
    with evaluating(model):
        for part in asked.parts(batch):
            if tick is not None:
                tick()
            with autocast(device, precision):
                found, measures = team.score(model, part, device)
            rows.append(found.double().cpu().numpy())
            for name, value in measures.items():
                sums[name] = sums.get(name, 0) + len(part) * value.double()
    return np.concatenate(rows)


def held_out(
    dataset: Dataset, split: str, context: int, objective: Objective, encoder: bool, count: int | None = None
) -> Batch:
    """What a model is asked about the windows or the examples of a split, or about at most `count` of them, evenly
    spaced over it."""
    if objective.of_examples:
        rows = read(dataset, split, np.arange(len(dataset.documents(split).tokens)), context)
    else:
        inputs, targets = windows(dataset.split(split), context)
        rows = np.concatenate([inputs[:, :1], targets], axis=1)
        if not objective.every:
            rows = rows[(targets != IGNORE).all(1)]
    if count is not None:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))]
    return objective.batch(rows, _NOISE, 0, dataset.vocab, encoder, dataset.eod)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which losses are computed: bf16 where that is asked for, else as the weights are."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; neither the mode nor the random state is different afterwards."""
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(training)

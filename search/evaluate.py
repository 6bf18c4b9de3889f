"""Loss, perplexity and bits per byte of a model on a held-out split, with the sums of every document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from search.data.batches import IGNORE, Ints, windows
from search.data.dataset import Dataset

Precision = Literal["fp32", "bf16"]
Arrays = dict[str, npt.NDArray[Any]]

HELD_OUT = ("validation", "test")


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    split: str,
    context: int,
    batch: int,
    precision: Precision = "fp32",
    tick: Callable[[], None] | None = None,
) -> tuple[dict[str, float], Arrays]:
    """What the model makes of a split, read in windows of `context` tokens, `batch` of them at a time.

    Every token but the end-of-document token that opens the stream is scored exactly once, ends of documents among
    them; a token sees what precedes it in its window. Returns

    * loss (nats per token, L = sum nll / tokens), perplexity (exp L), bits_per_byte (sum nll / (ln 2 * bytes of text));
    * per document: nll (nats, float64), tokens (with the end of the document) and bytes (int64), `[documents]` each.

    `tick` is called before each batch; what it raises ends the evaluation.
    """
    inputs, targets = windows(dataset.split(split), context)
    nll = losses(model, inputs, targets, batch, precision, tick).ravel()[(targets != IGNORE).ravel()]
    documents = dataset.documents(split)
    owner = np.repeat(np.arange(len(documents.tokens)), documents.tokens)
    arrays: Arrays = {
        "nll": np.bincount(owner, weights=nll, minlength=len(documents.tokens)),
        "tokens": documents.tokens,
        "bytes": documents.bytes,
    }
    return summary(float(nll.sum()), int(documents.tokens.sum()), int(documents.bytes.sum())), arrays


def summary(nll: float, tokens: int, size: int) -> dict[str, float]:
    """loss, perplexity (infinite where it overflows) and bits_per_byte of `nll` nats over tokens and bytes."""
    loss = nll / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": nll / math.log(2) / size}


def losses(
    model: nn.Module,
    inputs: Ints,
    targets: Ints,
    batch: int,
    precision: Precision = "fp32",
    tick: Callable[[], None] | None = None,
) -> npt.NDArray[np.float64]:
    """The loss of each target in nats, float64 `[windows, context]`, 0 where the target is -100."""
    device = next(model.parameters()).device
    rows: list[npt.NDArray[np.float64]] = []
    with _evaluating(model):
        for start in range(0, len(inputs), batch):
            if tick is not None:
                tick()
            chunk = (torch.from_numpy(part[start : start + batch]).to(device) for part in (inputs, targets))
            with autocast(device, precision):
                found: Tensor = model.loss(*chunk, reduction="none")  # type: ignore[operator]
            rows.append(found.double().cpu().numpy())
    return np.concatenate(rows)


def some_windows(dataset: Dataset, split: str, context: int, count: int) -> tuple[Ints, Ints]:
    """At most `count` windows of a split, evenly spaced over it: inputs and targets `[windows, context]`."""
    inputs, targets = windows(dataset.split(split), context)
    chosen = np.unique(np.linspace(0, len(inputs) - 1, min(count, len(inputs))).round().astype(np.int64))
    return inputs[chosen], targets[chosen]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which losses are computed: bf16 where that is asked for, else as the weights are."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; neither the mode nor the random state is different afterwards."""
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(training)

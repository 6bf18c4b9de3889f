"""What a model says where it is asked: the loss of each target, and whether it is the likeliest token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from archlab.search.data.batches import IGNORE, Batch
from archlab.search.data.documents.draws import Bools, Ints
from archlab.search.evaluation.family import About, Subject
from archlab.search.objectives import has_encoder
from archlab.search.training.held_out import autocast, evaluating


@dataclass(frozen=True)
class Replies:
    """Of every target of a batch, `[rows, time]`: its loss in nats, and whether no token is likelier; 0 and False where
    there is none."""

    nll: npt.NDArray[np.float64]
    right: Bools


def replies(subject: Subject, model: nn.Module, asked: Batch) -> Replies:
    """What a model says to a batch, as many rows at once as in training; logits are held in chunks, as by the loss."""
    nll = np.zeros(asked.targets.shape)
    right = np.zeros(asked.targets.shape, dtype=bool)
    size, done = subject.rows(asked.tokens.shape[1]), 0
    most: int = model.rows_at_once  # type: ignore[assignment]
    with evaluating(model):
        for part in asked.parts(size):
            subject.tick()
            tokens, targets, call = part.tensors(subject.device)
            places = targets != IGNORE
            with autocast(subject.device, subject.about.recipe.precision):
                hidden: torch.Tensor = model.hidden(tokens, call)[places]  # type: ignore[operator]
                told = [
                    _told(model, *pair) for pair in zip(hidden.split(most), targets[places].split(most), strict=True)
                ]
            own = slice(done, done + len(part))
            nll[own][part.targets != IGNORE] = torch.cat([loss for loss, _ in told]).double().cpu().numpy()
            right[own][part.targets != IGNORE] = torch.cat([same for _, same in told]).cpu().numpy()
            done += len(part)
    return Replies(nll, right)


def _told(model: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits: torch.Tensor = model.logits(hidden).float()  # type: ignore[operator]
    return nn.functional.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def asking(rows: Ints, scored: Bools) -> Batch:
    """The batch of rows `[rows, time + 1]` that asks for those of their tokens after the first that are `scored`,
    `[rows, time]`."""
    targets = np.where(scored, rows[:, 1:], IGNORE)
    return Batch(rows[:, :-1], targets, np.broadcast_to(np.arange(scored.shape[1]), scored.shape))


def no_next_token(about: About) -> str | None:
    """Why a model cannot be asked how a text of any tokens goes on, or None."""
    if has_encoder(about.model) or not about.recipe.objective.every:
        return f"{about.recipe.objective.type} does not predict the next token of any text"
    return None

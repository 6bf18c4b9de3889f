"""What a trial asks of the processes that train it together. With one process, `Team` itself, all of it is nothing.

Several are `parallel.team.Together`: the trial is the same, of the same batches, but for the order of its sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from archlab.search.trial.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

    from archlab.search.data.batches import Batch
    from archlab.search.recipe.recipe import Recipe

T = TypeVar("T")
Noted = list[dict[str, Tensor]]  # what is logged beside the loss: of every micro-batch, by name
Sums = tuple[Tensor, Noted, dict[str, Tensor]]  # of a batch: its loss, the others, the measures


class Team:
    """One process, which leads and has everything."""

    leads = True
    shares_stages = True  # whether other trials may go on from what it trained

    @property
    def facts(self) -> dict[str, str]:
        """What the fingerprint says of it."""
        return {}

    def journal(self, path: Path, attempt: int, step: int) -> Journal:
        """Where this process writes its lines."""
        return Journal(path, attempt, step)

    def divide(self, model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Parameter]]:
        """Leaves in the model what this process computes with; the named parameters that it updates."""
        return list(model.named_parameters())

    def begin(self, seed: int, step: int) -> None:
        """Called before the forward passes of a step."""

    def share(self, batch: Batch) -> Batch:
        """The rows of a micro-batch that this process computes."""
        return batch

    def backward(self, own: Callable[[Batch], Sums], whole: Batch) -> Sums:
        """Leaves the gradients of a batch in the parameters, and sums what `own`, which leaves a process's, gives."""
        return own(whole)

    def settle(self, parameters: list[nn.Parameter]) -> Tensor:
        """Makes the gradients those of the whole batch; their global L2 norm."""
        return nn.utils.get_total_norm([value.grad for value in parameters if value.grad is not None])

    def score(self, model: nn.Module, part: Batch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every target of some rows, `[rows, time]`, 0 where there is none, and the call's measures."""
        tokens, targets, call = part.tensors(device)
        found: Tensor = model.loss(tokens, targets, call, reduction="none")  # type: ignore[operator]
        return found, call.measures

    def read_again(self, model: nn.Module) -> None:
        """Called when parameters were changed otherwise than by a step: what was gathered of them is no longer so."""

    def agree(self, *asked: bool) -> tuple[bool, ...]:
        """What all processes do, where the clock or the disk may tell each something else: what the leader says."""
        return asked

    def given(self, state: T) -> T:
        """What the leader has: plain data and tensors."""
        return state

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights of the whole model, as one process has them. Of use to the leader alone."""
        return model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of the optimizer, as one process has it. Of use to the leader alone."""
        return optimizer.state_dict()

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Takes what `model_state` gave."""
        model.load_state_dict(state)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes what `optimizer_state` gave."""
        optimizer.load_state_dict(state)

    def leave(self) -> None:
        """Called at the end, whatever it was."""


ALONE = Team()

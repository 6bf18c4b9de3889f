"""A team of several processes: the trial of one process, with rows, weights, heads or layers divided among them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from archlab.arch_dsl.compiler.modules import Decoder
from archlab.search.data.batches import Batch
from archlab.search.executors.process_group import Gang
from archlab.search.recipe.recipe import Recipe
from archlab.search.training.parallel.division import Division
from archlab.search.training.parallel.meeting import Meeting
from archlab.search.training.team import Sums, Team
from archlab.search.trial.journal import Journal

T = TypeVar("T")
COPIES = "shard", "data"  # the dimensions that divide rows, from the inside out


class Silent(Journal):
    """The journal of a process that does not lead: what it would write, the leader writes."""

    def __init__(self) -> None: ...

    def write(self, step: int, **measures: float | None) -> None: ...

    def pulse(self) -> None: ...

    def sync(self) -> None: ...

    def lines(self, after: int, upto: int) -> list[dict[str, Any]]:
        return []

    def close(self) -> None: ...


class Together(Team):
    """One process of several. All of them call the same methods in the same order."""

    shares_stages = False

    def __init__(self, gang: Gang, device: torch.device) -> None:
        """Waits until all are there."""
        self.gang, self.leads = gang, gang.leads
        self.meeting = Meeting(gang, device)
        self.copies = gang.parallel.copies
        self.copy = self.meeting.place["data"] * gang.parallel.shard + self.meeting.place["shard"]

    @property
    def facts(self) -> dict[str, str]:
        return {"parallel": str(self.gang.parallel)}

    def journal(self, path: Path, attempt: int, step: int) -> Journal:
        return Journal(path, attempt, step) if self.leads else Silent()

    def divide(self, model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Parameter]]:
        self.division = Division(model, recipe, self.meeting)
        self.pipeline = None
        if self.gang.parallel.pipeline > 1:
            from archlab.search.training.parallel.pipeline import Pipeline

            self.pipeline = Pipeline(cast(Decoder, model), recipe, self.meeting)
        return self.division.local

    def begin(self, seed: int, step: int) -> None:
        """Noise of the forward passes is a pure function of the seed, the step, the rows and the layers."""
        words = f"archlab:noise:{seed}:{step}:{self.copy}:{self.meeting.place['pipeline']}"
        digest = hashlib.sha256(words.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def share(self, batch: Batch) -> Batch:
        start, stop = bounds(len(batch), self.copies)[self.copy]
        return batch.rows(start, stop)

    def backward(self, own: Callable[[Batch], Sums], whole: Batch) -> Sums:
        if self.pipeline is None:
            total, noted, measures = own(whole)
        else:
            parts = [self.share(part) for part in whole.parts(self.division.recipe.micro_batch)]
            total, noted, measures = self.pipeline.backward(parts, whole)
        flat = [total, *(value for added in noted for value in added.values())]
        sums = iter(self.meeting.sum(torch.stack([value.double() for value in flat]), (*COPIES, "pipeline")))
        total = next(sums).to(total.dtype)
        # Means of copies with equally many rows; what is counted in integers adds up.
        told = {name: value / self.copies if value.is_floating_point() else value for name, value in measures.items()}
        self.meeting.sum_all(list(told.values()), COPIES)
        return total, [{name: next(sums) for name in added} for added in noted], told

    def settle(self, parameters: list[nn.Parameter]) -> Tensor:
        return self.division.settle(parameters)

    def score(self, model: nn.Module, part: Batch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        places = bounds(len(part), self.copies)
        start, stop = places[self.copy]
        mine = part.rows(start, stop) if start < stop else part.rows(0, 1)
        own, told = super().score(model, mine, device) if self.pipeline is None else (self.pipeline.score(mine), {})
        block = own.new_zeros(-(-len(part) // self.copies), own.shape[1])
        block[: stop - start] = own[: stop - start]
        for dimension in COPIES:
            block = torch.cat(self.meeting.gathered(block, dimension))
        blocks = block.chunk(self.copies)
        found = torch.cat([rows[: end - first] for rows, (first, end) in zip(blocks, places, strict=True)])
        share = (stop - start) / len(part)
        measures = {name: value * share for name, value in told.items()}
        self.meeting.sum_all(list(measures.values()), COPIES)
        return found, measures

    def read_again(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def agree(self, *asked: bool) -> tuple[bool, ...]:
        return tuple(map(bool, self.meeting.said([int(one) for one in asked])))

    def given(self, state: T) -> T:
        return self.meeting.given(state)  # type: ignore[no-any-return]

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        return self.division.model_state()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self.division.optimizer_state(optimizer)

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        self.division.load_model(state)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self.division.load_optimizer(optimizer, state)

    def leave(self) -> None:
        self.meeting.leave()


def bounds(rows: int, copies: int) -> list[tuple[int, int]]:
    """The first row of every copy, and the one after its last; some have none where there are fewer rows."""
    ends = [rows * index // copies for index in range(copies + 1)]
    return list(itertools.pairwise(ends))

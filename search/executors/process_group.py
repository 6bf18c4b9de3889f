"""A gang is the processes that train one trial together: how many share what (`parallel:`), and who a process is.

This file is all that plans and launchers need; what a process does with it is in `archlab.search.training.parallel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from archlab.arch_dsl.language.spec import Count, Spec

DIMENSIONS = ("pipeline", "data", "shard", "tensor")  # from the outside in: neighbours talk most


class Parallel(Spec):
    """How the processes of one trial divide its work; their number is the product.

    `data` and `shard` divide the rows of every batch; with `shard` each process also keeps only its part of weights,
    gradients and optimizer state (FSDP, arXiv:2304.11277). `tensor` divides heads and feed-forward channels
    (arXiv:1909.08053, section 3), `pipeline` the layers (arXiv:1811.06965), with as many micro-batches under way as
    the recipe accumulates.
    """

    title: ClassVar[str] = "parallel"
    data: Count = 1
    shard: Count = 1
    tensor: Count = 1
    pipeline: Count = 1

    @property
    def world(self) -> int:
        """How many processes a trial takes."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Every dimension with its size, from the outside in."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def copies(self) -> int:
        """How many parts the rows of a batch are divided into."""
        return self.data * self.shard

    def __str__(self) -> str:
        """The dimensions that divide anything: `data 2, shard 2`; `none`."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "none"


@dataclass(frozen=True)
class Gang:
    """One process of those that train a trial: `rank` of `world`, who meet at `address` (host:port; rank 0 listens)."""

    rank: int
    world: int
    address: str
    parallel: Parallel

    def __post_init__(self) -> None:
        if self.world != self.parallel.world:
            raise ValueError(f"parallel ({self.parallel}) takes {self.parallel.world} processes, found {self.world}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is none of {self.world} processes")
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"the address of a gang is host:port, found {self.address!r}")

    @property
    def leads(self) -> bool:
        """Whether this process writes what the trial leaves."""
        return self.rank == 0

    @property
    def place(self) -> dict[str, int]:
        """The coordinate of this process in every dimension."""
        found, rest = {}, self.rank
        for name, size in reversed(self.parallel.sizes.items()):
            rest, found[name] = divmod(rest, size)
        return found

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Gang:
        """From its fields as JSON has them."""
        return cls(**fields | {"parallel": Parallel(**fields["parallel"])})

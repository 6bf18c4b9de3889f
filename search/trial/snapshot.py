"""A copy of a state in host memory, which stays as it is while training goes on.

Tensors that share memory share it in the copy too, so that a checkpoint of the copy has the bytes of one of the state.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a state: of mappings, lists and tuples in one another."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def bytes_of(state: Any) -> int:
    """Bytes that a copy of a state takes: its tensors, what they share counted once."""
    return sum({_place(each): each.untyped_storage().nbytes() for each in tensors_in(state)}.values())


class Snapshot:
    """A copy of a state. From a CUDA device it is taken by the stream that trains, while this process goes on.

    So the next step's updates come after the copy, on the device as on the CPU. The host's memory is pinned then.
    Raises RuntimeError where there is no memory for it. On CUDA this class has not been run.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._copies: dict[tuple[torch.device, int], UntypedStorage] = {}
        device = next((each.device for each in tensors_in(state) if each.is_cuda), None)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device else []
        self._stream = torch.cuda.current_stream(device) if device else None
        self._mark(0)
        self.state: dict[str, Any] = self._copied(state)
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record(self._stream)

    def ready(self) -> float:
        """Waits until all is copied; seconds that the device took for it, 0 on a CPU, where all is copied at once."""
        if not self._events:
            return 0.0
        first, last = self._events
        while not last.query():  # asked for, as waiting for it would keep the interpreter from the training thread
            time.sleep(0.001)
        return float(first.elapsed_time(last)) / 1e3

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            found = copy.copy(value)  # with the attributes that a module's state has
            found.update((name, self._copied(each)) for name, each in value.items())
            return found
        if isinstance(value, list):
            return [self._copied(each) for each in value]
        if isinstance(value, tuple):
            parts = tuple(self._copied(each) for each in value)
            return value if all(one is other for one, other in zip(parts, value, strict=True)) else parts
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in self._copies:
            self._copies[place] = _host(tensor.untyped_storage())
        there = torch.empty(0, dtype=tensor.dtype)
        return there.set_(self._copies[place], tensor.storage_offset(), tensor.size(), tensor.stride())


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _host(storage: UntypedStorage) -> UntypedStorage:
    """A copy of a storage in host memory."""
    there = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    there.copy_(source, non_blocking=True)
    return there.untyped_storage()

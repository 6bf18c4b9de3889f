"""How the processes of a gang meet, and what they tell each other: sums, what the leader says, bytes."""

from __future__ import annotations

import io
import ipaddress
import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from archlab.search.executors.process_group import DIMENSIONS, Gang

WAIT = timedelta(minutes=10)  # for the others to come, and for any one exchange


class Meeting:
    """The processes of a gang, in a mesh with the dimensions pipeline, data, shard and tensor.

    On one machine (an address of its own loopback) no socket listens elsewhere. What is said goes between these
    processes as numbers, or tensors that are read with `weights_only`.
    """

    def __init__(self, gang: Gang, device: torch.device) -> None:
        """Waits until all are there."""
        self.gang, self.device = gang, device
        self.sizes, self.place = gang.parallel.sizes, gang.place
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_store(gang),
            rank=gang.rank,
            world_size=gang.world,
            timeout=WAIT,
            device_id=device if device.type == "cuda" else None,
        )
        self.mesh = init_device_mesh(device.type, tuple(self.sizes.values()), mesh_dim_names=DIMENSIONS)
        self._stride = gang.world // self.sizes["pipeline"]  # from one stage to the next
        last = gang.world - self._stride
        lines = range(self._stride) if last else ()
        groups = [dist.new_group([line, line + last]) for line in lines]  # all processes make all of them
        self._ends = groups[gang.rank % self._stride] if groups else None

    def leave(self) -> None:
        """Ends what the processes have in common."""
        dist.destroy_process_group()

    def sum(self, value: Tensor, dimensions: Iterable[str]) -> Tensor:
        """Sums a contiguous tensor in place over dimensions of the mesh, one after another: always in one order."""
        for name in dimensions:
            if self.sizes[name] > 1:
                dist.all_reduce(value, group=self.mesh.get_group(name))
        return value

    def sum_all(self, values: list[Tensor], dimensions: Iterable[str]) -> None:
        """Sums several tensors in place over dimensions of the mesh, as one where they have one dtype."""
        wanted = [name for name in dimensions if self.sizes[name] > 1]
        if not wanted or not values:
            return
        for dtype in dict.fromkeys(value.dtype for value in values):
            alike = [value for value in values if value.dtype == dtype]
            flat = self.sum(torch.cat([value.reshape(-1) for value in alike]), wanted)
            for value, part in zip(alike, flat.split([value.numel() for value in alike]), strict=True):
                value.copy_(part.view_as(value))

    def sum_ends(self, value: Tensor) -> None:
        """Sums a tensor in place over the first and the last stage of the pipeline, which both call this."""
        flat = value.contiguous()
        dist.all_reduce(flat, group=self._ends)
        value.copy_(flat)

    def gathered(self, value: Tensor, dimension: str) -> list[Tensor]:
        """The equally large tensors of all processes along a dimension, in their order."""
        if self.sizes[dimension] == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.sizes[dimension])]
        dist.all_gather(found, value.contiguous(), group=self.mesh.get_group(dimension))
        return found

    def said(self, numbers: list[int]) -> list[int]:
        """The integers that the leader has, on all processes, whatever theirs are."""
        value = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(value, 0)
        return value.tolist()

    def given(self, state: Any) -> Any:
        """The plain data with tensors that the leader has, on all processes, on the CPU."""
        data = pack(state) if self.gang.leads else b""
        (size,) = self.said([len(data)])
        buffer = _buffer(data, size)
        dist.broadcast(buffer, 0)
        return state if self.gang.leads else unpack(buffer.numpy().tobytes())

    def to_leader(self, state: Any) -> list[Any]:
        """What the first process of every pipeline stage has, in the order of the stages, at the leader; else []."""
        first = not any(index for name, index in self.place.items() if name != "pipeline")
        if not first:
            return []
        if not self.gang.leads:
            self._send(pack(state), 0)
            return []
        others = [unpack(self._receive(stage * self._stride)) for stage in range(1, self.sizes["pipeline"])]
        return [state, *others]

    def _send(self, data: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(data)]), rank)
        dist.send(_buffer(data, len(data)), rank)

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank)
        buffer = _buffer(b"", int(size))
        dist.recv(buffer, rank)
        return buffer.numpy().tobytes()


def pack(state: Any) -> bytes:
    """Plain data with tensors as bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` was given. Raises for anything but plain data and tensors."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _buffer(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)


def _store(gang: Gang) -> TCPStore:
    """Where the processes find each other: at the leader, who listens at the gang's address alone."""
    host, _, number = gang.address.rpartition(":")
    host, port = host.strip("[]"), int(number)
    if _is_loopback(host):
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])  # else gloo listens where the host's name leads
    if not gang.leads:
        return TCPStore(host, port, gang.world, False, timeout=WAIT)
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound = listener.getsockname()[1]
    descriptor = listener.detach()
    return TCPStore(host, bound, gang.world, True, timeout=WAIT, wait_for_workers=False, master_listen_fd=descriptor)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

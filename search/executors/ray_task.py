"""What Ray runs for a trial: a thin task that has the trial trained in fresh processes and waits for them."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import Any

from archlab.search.executors import shipping
from archlab.search.executors.executor import SERVERLESS
from archlab.search.executors.forkserver import ForkServer
from archlab.search.executors.group_end import ask, free_port

_own: ForkServer | None = None


def warm() -> None:
    """Nothing: that Ray finds it here has imported this module."""


def meeting_point() -> str:
    """An address of this machine at which the ranks of a trial can meet, as they are on several machines."""
    import ray

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"{host}:{free_port()}"


def run_attempt(job: dict[str, Any], address: str, meeting: str = "", rank: int | None = None) -> dict[str, Any]:
    """{"outcome": result} or {"failure": kind, "message"}. `address` is the driver's fork server where it is local.

    On other machines each Ray worker has a fork server of its own, which dies with it. The worker itself imports
    neither torch nor the trainer, and so stays clean for the next trial. With `rank` this is one process of those
    that `meet`; without it all of them are on this machine. A fork server that dies is no fault of its trials.
    """
    if wrong := shipping.differs(job.get("ours")):
        return {"failure": "infra", "message": wrong}
    jobs = _jobs(job, meeting, rank)
    try:
        if address:
            with suppress(ConnectionRefusedError):  # none came up: a server of our own does as well
                return ask(address, jobs)
        return ask(_own_server(job).address, jobs)
    except ConnectionError as error:
        return {"failure": "node", "message": f"{SERVERLESS}: {error}"}


def _jobs(job: dict[str, Any], meeting: str, rank: int | None) -> list[dict[str, Any]]:
    """What each process of the trial on this machine is asked to do, and with which GPUs."""
    world, devices = math.prod(job["parallel"].values()), _devices(job["gpus"])
    if job["ours"]:
        job = {**job, "node": _node()}
    if world == 1:
        return [{**job, "environment": _environment(devices)}]
    alone = rank is None  # on this machine, where nobody else needs to reach them
    meeting = meeting or f"127.0.0.1:{free_port()}"
    each = int(job["gpus"])
    found = []
    for place, mine in enumerate(range(world) if rank is None else [rank]):
        environment = _environment(devices[place * each : (place + 1) * each], loopback=alone)
        gang = {"rank": mine, "world": world, "address": meeting, "parallel": job["parallel"]}
        found.append({**job, "environment": environment, "gang": gang})
    return found


def _own_server(job: dict[str, Any]) -> ForkServer:
    global _own
    if _own is None:
        _own = ForkServer(job["entry"], job["cpus"])
    _own.revive()
    return _own


def _node() -> str:
    """Ray's number for this machine."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _devices(gpus: float) -> list[str]:
    import ray

    return [str(each) for each in ray.get_gpu_ids()] if gpus else []


def _environment(devices: list[str], loopback: bool = False) -> dict[str, str]:
    """A process sees its own devices, and no other; what talks on this machine alone does so on loopback."""
    name = "lo" if sys.platform == "linux" else "lo0"
    inside = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), name) if loopback else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), **inside}

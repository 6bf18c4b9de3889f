"""What Ray runs for a trial: a thin task that has the trial trained in a fresh process and waits for it."""

from __future__ import annotations

from typing import Any

from search.forkserver import ForkServer, ask

_own: ForkServer | None = None


def warm() -> None:
    """Nothing: that Ray finds it here has imported this module."""


def run_attempt(job: dict[str, Any], address: str, gpus: float) -> dict[str, Any]:
    """{"outcome": result} or {"failure": kind, "message"}. `address` is the driver's fork server where it is local.

    On other machines each Ray worker has a fork server of its own, which dies with it. The worker itself imports
    neither torch nor the trainer, and so stays clean for the next trial.
    """
    job = {**job, "environment": _environment(gpus)}
    if address:
        try:
            return ask(address, job)
        except ConnectionRefusedError:
            pass  # it died: a server of our own does as well
        except ConnectionError as error:
            return {"failure": "crash", "message": str(error)}
    try:
        return ask(_own_server(job).address, job)
    except ConnectionError as error:
        return {"failure": "crash", "message": str(error)}


def _own_server(job: dict[str, Any]) -> ForkServer:
    global _own
    if _own is not None and not _own.alive():
        _own.stop()
        _own = None
    if _own is None:
        _own = ForkServer(job["entry"], job["cpus"])
    return _own


def _environment(gpus: float) -> dict[str, str]:
    """The trial sees the devices that Ray gave it, and no other."""
    import ray

    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids())) if gpus else ""}

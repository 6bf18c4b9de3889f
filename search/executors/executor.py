"""Where trials run: the protocol that the driver needs, and the words for how an attempt ends."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

FailureKind = Literal["user", "crash", "oom", "hang", "disk", "interrupted", "cancelled", "node", "busy", "infra"]
LOST = "lost another process of the trial"  # how the message begins of one that was not the first to die
SERVERLESS = "lost its fork server"  # how the message begins of one that had none to start it, or whose server died


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended without a result.

    user: the trainer raised. crash, oom: its process died. disk: no space left, or damaged data. interrupted: it was
    asked to stop and left a checkpoint. cancelled: it was killed on request. busy: another process still writes to its
    folder. node, infra: not the trial's fault.
    """

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class Finished:
    """An attempt's end: the result as in result.json, what a paused trial tells, or a failure."""

    key: str
    attempt: int
    outcome: dict[str, Any] | Failure


class ExecutorError(Exception):
    """The executor can't run anything; no trial is to blame."""


class ResourcesError(Exception):
    """A trial asks for more than there is; it would wait for ever. The message has the number available."""


class Executor(Protocol):
    """Runs attempts in `slots` places. A submitted attempt ends in exactly one Finished."""

    @property
    def slots(self) -> int:
        """How many trials run at once."""

    @property
    def gpus(self) -> float:
        """How many GPUs each trial has."""

    def start(self) -> None:
        """Gets ready, in the background where that takes long. Harmless when started. Raises ResourcesError."""

    def submit(self, key: str, folder: Path, attempt: int, until: int | None = None, entry: str | None = None) -> None:
        """Starts an attempt, to pause after step `until`, with the trainer of another `entry` if one is given.

        Raises ExecutorError when the executor is out of order.
        """

    def wait(self, timeout: float) -> list[Finished]:
        """What ended, as soon as something did or after `timeout` seconds. Raises ExecutorError."""

    def cancel(self, key: str) -> None:
        """Kills an attempt; its Finished still comes, a Failure("cancelled") unless it ended before."""

    def close(self) -> None:
        """Kills what runs and frees everything, within seconds."""


def stop_flag(folder: Path, attempt: int) -> Path:
    """While this file exists, that attempt is asked to write a checkpoint and stop."""
    return folder / f"stop-{attempt}"


def request_stop(folder: Path, attempt: int) -> None:
    """Asks an attempt to write a checkpoint and stop."""
    stop_flag(folder, attempt).touch(mode=0o600)


def named(entry: str) -> Any:
    """What stands behind "module:name", imported only now."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)

"""How a trial's loop ends before the last step."""

from __future__ import annotations


class Interrupted(Exception):
    """The trial was asked to stop and left a checkpoint."""


class Paused(Exception):
    """The trial is at the step where it was to wait, and left a whole checkpoint."""


class Diverged(Exception):
    """A loss or a gradient is not finite; `step` is the optimizer step, counted from 1, that had it first."""

    def __init__(self, step: int, reason: str = "the loss or a gradient is not finite") -> None:
        super().__init__(reason)
        self.step = step
        self.reason = reason

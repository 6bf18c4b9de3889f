"""The trackers as a driver needs them: woken, waited for at the end, left behind where there is no time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from archlab.search.trackers.shipper import CLOSE_S, Shipper
from archlab.search.trackers.shipper_process import ShipperProcess

_SAY_S = 2.0  # after which the trackers are said to be waited for
_STOPPED_S = 2.0  # for the trackers, of a run that was asked to stop

AnyShipper = Shipper | ShipperProcess


class Shipping:
    """One run's use of a shipper, if it has one. `finishing` while nothing else is left to do."""

    def __init__(self, shipper: AnyShipper | None) -> None:
        self.shipper = shipper
        self.finishing = False

    def start(self) -> None:
        if self.shipper is not None:
            self.shipper.start()

    def notice(self, *keys: str) -> None:
        if self.shipper is not None:
            for key in keys:
                self.shipper.notice(key)

    def leave(self) -> None:
        """The trackers are not waited for."""
        if self.shipper is not None:
            self.shipper.leave()
        self.shipper = None

    def finish(self, stopped: bool, say: Callable[[], None]) -> None:
        """Waits for the trackers, briefly if the run was stopped; a signal leaves what has not arrived to the next run.

        `say` is called when that takes long.
        """
        if self.shipper is None:
            return
        said = threading.Timer(_SAY_S, say)
        said.daemon = True
        try:
            self.finishing = True
            said.start()
            self.shipper.close(_STOPPED_S if stopped else CLOSE_S)
        except KeyboardInterrupt:
            self.shipper.leave()
        finally:
            self.finishing = False
            said.cancel()

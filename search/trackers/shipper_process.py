"""Ships a study from a process of its own, which takes no core from a trial: MLflow and Optuna take seconds to import.

It is as nice as can be while trials run. Where they leave it no time, or it dies, another one sends what is left when
they are done, at the driver's own priority.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from archlab.search.trackers.shipper import CLOSE_S, Shipper, left_for_sync
from archlab.search.utils.children import die_with, python_path

NICEST = 19
_GIVES_WAY_S = 10.0  # how long the nice process may take for what is left
_IN_ALL_S = 600.0  # who started it has a shorter limit

_log = logging.getLogger("archlab.track")


class ShipperProcess:
    """Does what `track.Shipper` does, in a child. It dies with us."""

    def __init__(self, store_root: Path, study: str) -> None:
        self._root, self._study = Path(store_root).absolute(), study
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begins to ship."""
        self._process = self._launched(nice=True)

    def notice(self, trial: object = None) -> None:
        """A trial changed its state: look now."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it ended, or has notices enough that it has not read
                os.write(self._process.stdin.fileno(), b"\n")

    def close(self, timeout: float = CLOSE_S) -> int | None:
        """Sends what is left, for `timeout` seconds, and a few more where these are many. Returns how many points and
        news are left for `sync`; None where the store can't say, as on a full disk."""
        if not self._ends_well(min(timeout, _GIVES_WAY_S)) and timeout > _GIVES_WAY_S:
            self.leave()
            self._process = self._launched(nice=False)
            self._ends_well(timeout)
        self.leave()
        return left_for_sync(self._root, self._study)

    def leave(self) -> None:
        """Ends it at once; the next run ships what is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            _hang_up(self._process)
            self._process = None

    def _launched(self, nice: bool) -> subprocess.Popen[bytes] | None:
        """A child that ships; None where the machine has no process to give, which ends no run."""
        arguments = [str(self._root), self._study, str(os.getpid()), str(NICEST if nice else 0)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "archlab.search.trackers.shipper_process", *arguments],
                stdin=subprocess.PIPE,  # a line is a notice, its end of file that the trials are done
                stdout=subprocess.DEVNULL,  # standard output is the command's
                start_new_session=True,  # Ctrl-C in a terminal is for the driver
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        except OSError as error:
            later = "the end of the run" if nice else "the next run, or `archlab sync`,"
            _log.warning("nothing is sent to the trackers for now: %s; %s tries again", error, later)
            return None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _ends_well(self, timeout: float) -> bool:
        """Whether it came to its own end within so many seconds, told that nothing more comes."""
        if self._process is None:
            return False
        _hang_up(self._process)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode == 0


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def give_way(niceness: int) -> None:
    """Leaves the cores to the others; also where Linux shares them out by session first (autogroup)."""
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def main(root: str, study: str, parent: str, niceness: str) -> None:
    """Ships until standard input ends, and then what is left."""
    die_with(int(parent))
    give_way(int(niceness))
    shipper = Shipper(Path(root), study)
    shipper.start()
    while os.read(0, 4096):
        shipper.notice()
    shipper.close(_IN_ALL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])

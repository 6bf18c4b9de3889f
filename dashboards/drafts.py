"""Studies that are being written, checked by a process of its own: the server itself loads no torch."""

from __future__ import annotations

import os
import signal
import threading
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
"""So long a plan may take here; one of thousands of variants takes longer."""


class Drafts:
    """Checks the text of a study as it stands, one at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._worker: tuple[BaseProcess, Connection] | None = None
        self._checking, self._counting = threading.Lock(), threading.Lock()
        self._sent: dict[str, int] = {}  # how many texts each writer has sent

    def newest(self, text: str, file: str, writer: str) -> dict[str, Any] | None:
        """As `check`; None where the same `writer` has sent another text before this one's turn came."""
        with self._counting:
            mine = self._sent[writer] = self._sent.get(writer, 0) + 1
        with self._checking:
            return self._answer(text, file) if self._sent[writer] == mine else None

    def check(self, text: str, file: str) -> dict[str, Any]:
        """What `archlab.search.running.draft.draft` says of a text."""
        with self._checking:
            return self._answer(text, file)

    def _answer(self, text: str, file: str) -> dict[str, Any]:
        if self._worker is None:
            self._worker = self._start()
        _, ours = self._worker
        try:
            ours.send((text, file))
            if ours.poll(PATIENCE_S):
                found: dict[str, Any] = ours.recv()
                return found
            said = f"The plan takes longer than {PATIENCE_S:.0f} s here: archlab plan {file} makes it."
        except (EOFError, OSError):
            said = "The process that checks studies has died; the next letter starts another."
        self.close()
        return {"name": None, "problems": [{"line": 0, "column": 0, "message": said}], "plan": None}

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self._worker is not None:
            process, ours = self._worker
            process.kill()
            process.join()
            ours.close()
            self._worker = None

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._folder, self._root), daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _serve(asked: Connection, folder: Path, root: Path) -> None:
    """Answers until the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    os.chdir(folder)
    draft = import_module("archlab.search.running.draft").draft
    while True:
        try:
            text, file = asked.recv()
        except EOFError:
            return
        asked.send(draft(text, file, root))

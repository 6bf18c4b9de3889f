"""A running study in a notebook: one output that is written anew, with what must be read below it."""

from __future__ import annotations

import sys
import time
from html import escape
from importlib import import_module
from typing import Any

from archlab.search.running.progress import Progress, line_of

_SECONDS = 0.5  # between two drawings
_STYLE = "font-family: monospace; white-space: pre"


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell else None
    return found is not None and hasattr(found, "kernel")


class NotebookProgress(Progress):
    """The study's headline and a line per running trial; when it ends, how many trials have a result."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._next = 0.0

    def __enter__(self) -> NotebookProgress:
        shown = import_module("IPython.display")  # which a notebook's kernel brings
        self._html: Any = shown.HTML
        self._output: Any = shown.display(self._html(""), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.clear()
        self._draw(f"{self.study}: {self.done} trials have a result" if self.study else "")

    def event(self, event: dict[str, Any]) -> None:
        """See Progress; what goes wrong stays below the trials."""
        name = self.name_in(event)
        super().event(event)
        if told := line_of(event, name, quiet=True):
            self._lines += told.splitlines()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            self._draw(self.headline())

    def _draw(self, headline: str) -> None:
        rows = ["  ".join(filter(None, trial.cells())) for trial in self.running.values()]
        text = "".join(f"<div>{escape(line)}</div>" for line in [*rows, *self._lines])
        self._output.update(self._html(f'<div style="{_STYLE}"><b>{escape(headline)}</b>{text}</div>'))

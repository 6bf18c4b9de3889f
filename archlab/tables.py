"""Sends the table of a study to the trackers that show one."""

from __future__ import annotations

from pathlib import Path


def send(root: Path, study: str) -> None:
    """Sends the table of a stored study to Weights & Biases and TensorBoard, where these are asked for."""
    from archlab.search.trackers.shipper import send_table, shows_tables

    if not shows_tables():
        return
    from archlab.search.comparison.compare import load_comparison
    from archlab.search.reporting.report import report
    from archlab.search.store.store import Store

    with Store.open(root, create=False) as store:
        found = load_comparison(store, study)
    send_table(root, study, {form: report(found, form) for form in ("md", "csv")})

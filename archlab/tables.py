"""Sends the table of a study to the trackers that show one."""

from __future__ import annotations

import logging
from pathlib import Path


def send(root: Path, study: str) -> None:
    """Sends the table of a stored study to Weights & Biases and TensorBoard, where these are asked for. Results that do
    not compare are a warning."""
    from archlab.search.trackers.shipper import send_table, shows_tables

    if not shows_tables():
        return
    from archlab.search.comparison.compare import load_comparison
    from archlab.search.reporting.report import report
    from archlab.search.store.store import Store, StoreError

    try:
        with Store.open(root, create=False) as store:
            found = load_comparison(store, study)
    except (StoreError, ValueError) as error:
        logging.getLogger("archlab.track").warning("no tracker has got the table of %s: %s", study, error)
        return
    send_table(root, study, {form: report(found, form) for form in ("md", "csv")})

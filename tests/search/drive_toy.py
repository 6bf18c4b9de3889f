"""Drives one study of toy trials as a job says, and exits with the summary's code: what the driver of a test does."""

import json
from pathlib import Path

from archlab.search.executors.inline import InlineExecutor
from archlab.search.running.driver import drive
from archlab.search.running.ending import EXIT_TRY_AGAIN
from archlab.search.store import database, postgres
from archlab.search.store.store import StoreError
from archlab.search.trial.trial import Trial
from archlab.search.utils.exits import leave
from tests.search.study_kit import ENTRY, make_store, rows_of


def main(job):
    folder, study = Path(job["folder"]), job.get("study", "s")
    rows = rows_of(*map(Trial.from_json, job["trials"]), until=job.get("until"))
    postgres.PATIENCE_S = job.get("patience_s", postgres.PATIENCE_S)
    database.BUSY_TIMEOUT_S = job.get("busy_timeout_s", database.BUSY_TIMEOUT_S)
    try:
        store = make_store(folder, study)
    except StoreError as error:  # as the command line does
        print(error)
        return EXIT_TRY_AGAIN
    if job["executor"] == "inline":
        executor = InlineExecutor(ENTRY, folder)
    else:
        from archlab.search.executors.ray_executor import RayExecutor

        executor = RayExecutor(ENTRY, folder, **job.get("ray", {}))
    try:
        summary = drive(store, study, lambda _: rows, executor, **job.get("options", {}))
    except StoreError as error:
        print(error)
        return EXIT_TRY_AGAIN
    finally:
        executor.close()
    print(json.dumps({"exit_code": summary.exit_code, "counts": summary.counts, "message": summary.message}))
    return summary.exit_code


def run(job):
    """To the end of the process."""
    leave(main(job))

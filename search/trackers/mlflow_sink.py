"""Sends trials to MLflow: an experiment per study, a run per trial, each point once however often it is sent.

A point is identified by run, name, step, time and value, and its time is the one that was recorded while training: to
send it again changes nothing. What was acknowledged is remembered after the acknowledgement.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.store.addresses import MLFLOW, address
from archlab.search.trackers.acknowledged import Shipped, Spool, news_of, pending_of, unsent_of
from archlab.search.trackers.database import create_whole
from archlab.search.trackers.run_facts import (
    final_metrics,
    measured_points,
    params_of,
    run_name,
    standing_tags,
    state_tags,
)
from archlab.search.trackers.tracked import Line, Position, Tracked, new_lines, span_s, values_of

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

MAX_BATCH = 1000  # metrics per request, MLflow's limit
MAX_FAILURES = 2  # trials in one go
MAX_PARAMS = 100  # params per request, MLflow's limit
# Read by mlflow when it is imported or makes a request; what the user has set stands. Its own defaults for a server
# that is down (7 retries of up to 120 s) would hold the sink for minutes per request.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is the command's
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_STATUS = {
    "running": "RUNNING",
    "paused": "SCHEDULED",
    "complete": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
}


class MlflowSink:
    """One study's way to MLflow: `mlflow.db` in the store, or the server of ARCHLAB_MLFLOW or `mlflow.url`.

    "off" for a URL: nothing is sent.
    """

    name = "MLflow"

    def __init__(self, store_root: Path, study: str, spool: Spool, record: dict[str, Any]) -> None:
        self._root, self._study, self._spool, self._record = store_root, study, spool, record
        self._local = store_root / "mlflow.db"
        self._uri = address(store_root, MLFLOW) or f"sqlite:///{self._local}"
        self._target = "mlflow:" + hashlib.sha256(self._uri.encode()).hexdigest()[:16]  # a URI may hold a password
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._runs: dict[str, Run] = {}
        self._checked: set[str] = set()
        self._failed: set[str] = set()

    def pending(self, trials: Sequence[Tracked]) -> int:
        """How many points and news of states were not acknowledged yet."""
        return pending_of(self._unsent(trials))

    def _unsent(self, trials: Sequence[Tracked]) -> list[tuple[Tracked, Shipped]]:
        return [] if self._uri == "off" else unsent_of(trials, self._known())

    def _known(self) -> dict[str, Shipped]:
        """What was acknowledged; nothing, when the database that did is gone."""
        if self._uri.endswith(str(self._local)) and not self._local.exists():
            self._spool.forget(self._target)
        return self._spool.all(self._target, self._study)

    def ship(self, trials: Sequence[Tracked]) -> None:
        """Sends what is new. Raises what MLflow raises; the next call goes on from what was acknowledged."""
        unsent = self._unsent(trials)
        if not unsent:
            return
        client = self._client or self._open()
        failures: dict[str, Exception] = {}
        for trial, shipped in sorted(unsent, key=lambda each: each[0].key in self._failed):
            try:
                self._ship(client, trial, shipped)
            except Exception as error:  # one trial may be refused; several mean that MLflow is away
                failures[trial.key] = error
                if len(failures) == MAX_FAILURES:
                    break
        self._failed = set(failures)
        if failures:
            self._client = None  # what is there is looked up again: a run may have been made without our learning of it
            raise next(iter(failures.values()))

    def _ship(self, client: MlflowClient, trial: Tracked, shipped: Shipped) -> None:
        """Metrics first, the state last: a run that is finished at the tracker is complete there."""
        run = self._runs.get(trial.key)
        if run is None:
            shipped, run = Shipped(), self._create(client, trial)
        shipped = replace(shipped, place=run.info.run_id)
        if trial.key not in self._checked:
            self._complete_params(client, run, trial)
            shipped = replace(shipped, position=_not_behind(shipped.position, client, run))
            self._checked.add(trial.key)
        lines = new_lines(trial.metrics, shipped.position)
        for metrics, position, finite in _batches(lines):
            tags = [] if finite else _tags({"archlab.nonfinite": "true"})
            client.log_batch(run.info.run_id, metrics=metrics, tags=tags)
            shipped = replace(shipped, position=position)
            self._spool.put(self._target, self._study, trial.key, shipped)
        if shipped.told != news_of(trial):
            self._tell(client, run, trial)
            self._spool.put(self._target, self._study, trial.key, replace(shipped, told=news_of(trial)))

    def _create(self, client: MlflowClient, trial: Tracked) -> Run:
        """The tags come with the run, so that a run without its key never exists."""
        span = span_s(trial.metrics)
        run = client.create_run(
            self._experiment,
            start_time=round(span[0] * 1000) if span else None,
            tags=standing_tags(trial, self._study),
            run_name=run_name(trial),
        )
        self._runs[trial.key] = run
        return run

    def _complete_params(self, client: MlflowClient, run: Run, trial: Tracked) -> None:
        """Logs the params that are not there; MLflow's params never change, what may change is a tag as well."""
        from mlflow.entities import Param

        missing = [Param(k, v) for k, v in params_of(trial, self._record).items() if k not in run.data.params]
        for start in range(0, len(missing), MAX_PARAMS):
            client.log_batch(run.info.run_id, params=missing[start : start + MAX_PARAMS])

    def _tell(self, client: MlflowClient, run: Run, trial: Tracked) -> None:
        """Final measures, tags and the run's status."""
        from mlflow.entities import Metric

        span = span_s(trial.metrics)
        end_ms = round(span[1] * 1000) if span else None
        final, step = final_metrics(trial)
        metrics = [Metric(name, value, end_ms or 0, step) for name, value in final.items()]
        client.log_batch(run.info.run_id, metrics=metrics, tags=_tags(state_tags(trial)))
        points = [Metric(name, value, round(when * 1000), at) for name, value, when, at in measured_points(trial, step)]
        for start in range(0, len(points), MAX_BATCH):
            client.log_batch(run.info.run_id, metrics=points[start : start + MAX_BATCH])
        status = _STATUS.get(trial.state, "KILLED")
        if status in ("RUNNING", "SCHEDULED"):
            client.update_run(run.info.run_id, status=status)
        else:
            client.set_terminated(run.info.run_id, status, end_ms)

    def _open(self) -> MlflowClient:
        """Imports mlflow (two seconds), opens the database or server, and finds the runs there by their key."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # It logs each error of its database with a traceback, and raises it: it is told in a line by who catches it.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        if self._uri.endswith(str(self._local)):
            create_whole(self._local, _make_mlflow)
        client = MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._study)
        if experiment is None:
            # A server keeps artifacts where it likes; without one, never in the current folder.
            place = f"file://{self._root}/mlartifacts" if self._uri.startswith("sqlite:") else None
            tags = {"archlab.question": str(self._record.get("question") or ""), "archlab.store": str(self._root)}
            self._experiment = client.create_experiment(self._study, artifact_location=place, tags=tags)
        else:
            self._experiment = experiment.experiment_id
            if experiment.lifecycle_stage == "deleted":
                client.restore_experiment(self._experiment)
        self._runs = {run.data.tags["archlab.key"]: run for run in _runs(client, self._experiment)}
        self._checked.clear()
        self._client = client
        return client


def _make_mlflow(url: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = Path(url.removeprefix("sqlite:///")).parent / "mlartifacts"
    SqlAlchemyStore(url, f"file://{folder}").engine.dispose()  # type: ignore[no-untyped-call]


def _runs(client: MlflowClient, experiment: str) -> Iterator[Run]:
    """All runs of ours in an experiment."""
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        yield from (run for run in page if "archlab.key" in run.data.tags)
        token = page.token
        if not token:
            return


def _not_behind(position: Position, client: MlflowClient, run: Run) -> Position:
    """The position, and the steps that MLflow has: a kill may have come between its answer and our note of it.

    Steps that a resumed trial writes again have new times, and would be second points.
    """

    def last(name: str) -> int:
        if name not in run.data.metrics:
            return -1
        return max(metric.step for metric in client.get_metric_history(run.info.run_id, name))

    return position._replace(
        training=max(position.training, last("loss")), validation=max(position.validation, last("validation_loss"))
    )


def _batches(lines: Iterator[Line]) -> Iterator[tuple[list[Metric], Position, bool]]:
    """Metrics of whole lines, at most MAX_BATCH; the position after them; whether all are finite."""
    from mlflow.entities import Metric

    metrics: list[Metric] = []
    position: Position | None = None
    for line in lines:
        moment = round(line.record["time"] * 1000), line.record["step"]
        own = [Metric(name, value, *moment) for name, value in values_of(line.record).items()]
        if position is not None and len(metrics) + len(own) > MAX_BATCH:
            yield metrics, position, all(math.isfinite(metric.value) for metric in metrics)
            metrics = []
        metrics, position = metrics + own, line.position
    if position is not None:
        yield metrics, position, all(math.isfinite(metric.value) for metric in metrics)


def _tags(tags: dict[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in tags.items()]

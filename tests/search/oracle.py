"""What must hold after every fault and the run that goes on from it, in one place: `assert_whole`."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from archlab.search.comparison.compare import load_comparison
from archlab.search.reporting.report import report
from archlab.search.store.store import TERMINAL, Store
from archlab.search.trackers.tracked import values_of
from archlab.search.trial.checkpoint import steps_in

# What depends on the clock, the machine or the place, by part of the report. All else must agree to the last digit.
TIMINGS = {
    "table": {"tokens_per_s", "peak_memory_bytes"},
    "trials": {"train_s", "tokens_per_s", "peak_memory_bytes"},
}
PLACES = {"trials": {"folder"}}
HISTORY = {"trials": {"attempt"}}  # how often a trial was started: more than once only after an interruption
CLOCK = {"time", "attempt", "tokens_per_s"}  # of a line of metrics.jsonl


def table_of(root, *ignored, study="tiny"):
    """The report as JSON without the keys named in `ignored`."""
    with Store.open(root) as store:
        found = json.loads(report(load_comparison(store, study), "json"))
    for keys in ignored:
        for part, names in keys.items():
            for row in found[part]:
                for name in names:
                    del row[name]
    del found["cost"]  # it counts what was repeated, and time; tests/search/test_training_cost.py has it
    return found


def lines_of(folder):
    """The lines of a trial's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def rows_of_store(root, study="tiny"):
    """The rows of a study by key; a trial in two roles is there once."""
    with Store.open(root) as store:
        return {row["key"]: row for row in store.study_trials(study)}


def curves_of(root, study="tiny"):
    """Per trial all lines of metrics.jsonl without what the clock says, and the loss of every test document."""
    found = {}
    for key, row in rows_of_store(root, study).items():
        kept = [{k: v for k, v in line.items() if k not in CLOCK} for line in lines_of(row["folder"])]
        with np.load(Path(row["folder"]) / "test_documents.npz") as documents:
            found[key] = kept, {name: documents[name].tolist() for name in documents}
    return found


def same(one, other, study="tiny"):
    """Whether two stores hold the same table, curves and documents, whatever it took to get there."""
    ignored = TIMINGS, PLACES, HISTORY
    return table_of(one, *ignored, study=study) == table_of(other, *ignored, study=study) and curves_of(
        one, study
    ) == curves_of(other, study)


def weights_of(root, study="tiny"):
    """The sha256 of the final weights by trial."""
    found = {}
    for key, row in rows_of_store(root, study).items():
        folder = Path(row["folder"])
        state = torch.load(folder / f"checkpoint-{steps_in(folder)[0]}.pt", weights_only=True)["model"]
        digest = hashlib.sha256()
        for name in sorted(state):
            digest.update(name.encode() + state[name].numpy().tobytes())
        found[key] = digest.hexdigest()
    return found


def whole_of(root, study="tiny"):
    """All that a study has come to but timings and places: table, curves, documents, weights."""
    table = table_of(root, TIMINGS, PLACES, HISTORY, study=study)
    return {"table": table, "curves": curves_of(root, study), "weights": weights_of(root, study)}


def assert_whole(root, calm, study="tiny"):
    """A study after its faults is the one that nothing happened to, whose `whole_of` is `calm`."""
    rows = rows_of_store(root, study)
    assert {row["state"] for row in rows.values()} <= set(TERMINAL)
    with Store.open(root) as store:
        ends = Counter(event["key"] for event in store.events(study) if event["kind"] in TERMINAL)
    assert ends == dict.fromkeys(rows, 1)  # each trial ended exactly once
    for row in rows.values():
        steps = [line["step"] for line in lines_of(row["folder"]) if "loss" in line]
        assert steps == sorted(set(steps)) and steps[-1] == row["result"]["step"]
    found = whole_of(root, study)
    for part, expected in calm.items():
        assert found[part] == expected, part


def journal_points(root, study="tiny"):
    """{(key, name, step): value} of everything that the trials of a study have logged."""
    return {
        (key, name, line["step"]): value
        for key, row in rows_of_store(root, study).items()
        for line in lines_of(row["folder"])
        for name, value in values_of(line).items()
    }


def mlflow_points(uri, study="tiny"):
    """The same as MLflow has it; of a point that it has twice, as a step was trained again, the last one."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(uri), {}
    for run in client.search_runs([client.get_experiment_by_name(study).experiment_id], max_results=1000):
        for name in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, name):
                found[run.data.tags["archlab.key"], name, point.step] = point.value
    return found


def assert_sent(sent, logged):
    """MLflow has every point of the journals and no other, with their values but for the speed of repeated steps.

    What it has beside these are the measures of a trial that ended.
    """
    names = {name for _, name, _ in logged}
    sent = {place: value for place, value in sent.items() if place[1] in names}
    assert sent.keys() == logged.keys(), (len(sent), len(logged), sorted(sent.keys() ^ logged.keys())[:5])
    wrong = {
        key: (sent[key], value) for key, value in logged.items() if key[1] != "tokens_per_s" and sent[key] != value
    }
    assert not wrong, (len(wrong), list(wrong.items())[:5])

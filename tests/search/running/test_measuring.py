"""Finished trials are measured anew at any time: without training, once, and whatever happens in between."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.comparison.compare import load_comparison
from archlab.search.evaluation.job import evaluate
from archlab.search.evaluation.job import final_weights as last_weights
from archlab.search.evaluation.measures.loss_by_position import LossByPosition
from archlab.search.evaluation.measures.perplexity import Perplexity
from archlab.search.executors.process_group import Gang, Parallel
from archlab.search.running.garbage import final_weights
from archlab.search.running.run import run
from archlab.search.running.stop_and_retry import _request
from archlab.search.store.findings import findings
from archlab.search.store.store import Store
from archlab.search.trackers.tracked import tracked
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.study_files import write_study
from tests.search.study_kit import ROOT

MEASURES = "evaluate: [perplexity, loss_by_position, {perplexity: {context: [8, 32, 48]}}]"
RECIPE = """\
train:
  data: {text: corpus.txt}
  tokens: 256
  context: 32
  batch: 4
  lr: 1e-3"""
LABELS = ["loss_by_position", "perplexity_8_32_48"]
Event = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As every trial has under Ray: the number of threads is allowed to change bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that asks for perplexity alone, and its store with four finished trials."""
    folder = tmp_path_factory.mktemp("trained")
    summary = run(write_study(folder, train=RECIPE), folder / "store", executor="inline", track=False)
    assert (summary.exit_code, summary.message, summary.counts["complete"]) == (0, "every trial has a result", 4)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it whose study asks for more."""
    shutil.copytree(trained, tmp_path / "copy")
    write_study(tmp_path / "copy", train=RECIPE, evaluate=MEASURES)
    return tmp_path / "copy"


def again(folder: Path, **options: Any) -> tuple[Any, list[Event]]:
    """Runs the study of a folder; how it ended, and what it told."""
    events: list[Event] = []
    options = {"on_event": events.append, "executor": "inline", "track": False, **options}
    return run(folder / "study.yaml", folder / "store", **options), events


def cli(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and errors."""
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def training(folder: Path) -> dict[str, tuple[bytes, int, Any]]:
    """What training left of every trial: its lines, its attempts, its result in the table."""
    with Store.open(folder / "store", create=False) as store:
        rows = store.study_trials("gates")
    return {
        row["key"]: ((Path(row["folder"]) / "metrics.jsonl").read_bytes(), row["attempt"], row["result"])
        for row in rows
    }


def known(folder: Path) -> dict[str, list[Event]]:
    """All findings, by trial."""
    with Store.open(folder / "store", create=False) as store:
        return findings(store, [row["key"] for row in store.study_trials("gates")])


def test_a_new_measure_is_evaluated_once_and_nothing_is_trained(folder: Path) -> None:
    before = training(folder)
    code, told, _ = cli("plan", folder / "study.yaml", "--store", folder / "store")
    assert code == 0
    assert "8 of these are missing for 4 finished trials: archlab run evaluates them and trains nothing" in told
    summary, events = again(folder)
    counts = Counter(event["event"] for event in events)
    assert (summary.exit_code, summary.message) == (0, "every trial has a result; 8 measures evaluated")
    told = [event["message"] for event in events if event["event"] == "summary"]
    assert told == [summary.message] and events[-1]["event"] == "summary"
    assert counts["evaluation"] == 4
    assert counts["launched"] == 0
    assert training(folder) == before
    found = known(folder)
    assert found.keys() == before.keys()
    assert all([each["measure"] for each in mine] == LABELS for mine in found.values())
    for key, (curve, numbers) in found.items():
        test = before[key][2]["test"]
        assert numbers["values"]["perplexity_32"] == test["perplexity"], "to the bit what training ended with"
        y, n = (curve["curves"]["loss_by_position"][name] for name in "yn")
        mean = sum(loss * count for loss, count in zip(y, n, strict=True)) / sum(n)
        assert mean == pytest.approx(test["loss"], rel=1e-9)
    summary, events = again(folder)
    assert summary.message == "every trial has a result"
    assert "evaluation" not in {event["event"] for event in events}
    assert known(folder) == found
    assert list((folder / "store" / "evaluations").iterdir()) == []

    with closing(sqlite3.connect(folder / "store" / "trials.db")) as table, table:
        place = "place LIKE 'measure %' LIMIT 1"
        table.execute(f"UPDATE memory SET value = '[]' WHERE rowid = (SELECT rowid FROM memory WHERE {place})")
    summary, _ = again(folder)
    assert summary.message == "every trial has a result; 1 measure evaluated", "what is damaged is measured again"
    assert known(folder).keys() == found.keys() and all(len(mine) == 2 for mine in known(folder).values())


def test_what_was_measured_is_in_every_report_and_in_the_result(folder: Path) -> None:
    again(folder)
    with Store.open(folder / "store", create=False) as store:
        comparison = load_comparison(store, "gates")
        rows = {row.key: row for row in tracked(store, "gates")}
    found = known(folder)
    for key, mine in found.items():
        result = json.loads((rows[key].folder / "result.json").read_text())
        assert result["measures"] == {each["measure"]: each["values"] for each in mine}
        assert result["test"] == (rows[key].result or {})["test"]
        assert rows[key].findings(key) == mine
        assert len(rows[key].measured) == 2
    table = comparison.measures.set_index(["variant", "name"])
    mine = [found[key][1]["values"]["perplexity_8"] for key, row in rows.items() if row.variant == "gated"]
    assert len(mine) == 2
    assert table.loc[("gated", "perplexity_8"), "mean"] == pytest.approx(sum(mine) / 2)
    assert table.loc[("gated", "perplexity_8"), "std"] == pytest.approx(abs(mine[0] - mine[1]) / math.sqrt(2))
    assert list(table["n"].unique()) == [2]
    curve = comparison.curves
    assert sorted(curve["name"].unique()) == ["loss_by_position", "perplexity_by_context"]
    assert len(curve) == 2 * 2 * 32
    shown = {name: cli("report", "gates", "--store", folder / "store", "--format", name)[1] for name in ("text", "csv")}
    assert "Measured: perplexity_8_32_48" in shown["text"]
    assert "17-32" in shown["text"]
    header, *lines = shown["csv"].splitlines()
    place = header.split(",").index("measure.perplexity_8_mean")
    assert float(lines[1].split(",")[place]) == pytest.approx(sum(mine) / 2)
    plain = json.loads(cli("report", "gates", "--store", folder / "store", "--json")[1])
    assert len(plain["measures"]) == 2 * 6
    assert [len(each["x"]) for each in plain["curves"]] == [32] * 4


def test_a_measure_is_no_part_of_a_trial_and_changes_no_bit_of_it(trained: Path, tmp_path: Path) -> None:
    write_study(tmp_path, train=RECIPE, evaluate="evaluate: [all, {perplexity: 8}]")
    summary, _ = again(tmp_path)
    assert re.fullmatch(r"every trial has a result; \d+ measures evaluated", summary.message)
    plain, measured = training(trained), training(tmp_path)
    assert measured.keys() == plain.keys()
    for key, (_, _, result) in measured.items():
        assert (result["test"], result["validation"]) == (plain[key][2]["test"], plain[key][2]["validation"])
        ours, theirs = (
            checkpoint.load(root / "store" / "trials" / key[:2] / key, result["step"])["model"]
            for root in (trained, tmp_path)
        )
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_trial_in_stages_is_measured_as_it_ended(tmp_path: Path) -> None:
    stages = "  stages: [{tokens: 128, lr: 1e-3, context: 16}]"
    measures = "evaluate: [{perplexity: [16, 32]}, loss_by_position]"
    one = {"variants": "variants: {baseline: {}}", "components": None, "seeds": "seeds: 1"}
    write_study(tmp_path, train=f"{RECIPE}\n{stages}", evaluate=measures, **one)
    assert again(tmp_path)[0].message == "every trial has a result; 2 measures evaluated"
    ((_, _, result),) = training(tmp_path).values()
    ((curve, numbers),) = known(tmp_path).values()
    assert numbers["values"]["perplexity_16"] == result["test"]["perplexity"]
    assert numbers["values"]["perplexity_32"] != result["test"]["perplexity"]
    assert len(curve["curves"]["loss_by_position"]["x"]) == 16


def test_of_several_processes_the_first_one_evaluates(folder: Path) -> None:
    gang = Gang(rank=1, world=2, address="127.0.0.1:1", parallel=Parallel(data=2))
    found = evaluate(folder, folder / "store" / "data", 1, lambda: False, gang=gang)
    assert found == {"state": "complete", "found": {}, "wrong": {}}


def test_only_what_is_new_is_evaluated_and_another_study_has_it_too(folder: Path) -> None:
    again(folder)
    found = known(folder)
    write_study(folder, train=RECIPE, evaluate=MEASURES[:-1] + ", {loss_by_position: 8}]", seeds="seeds: 3")
    summary, events = again(folder)
    assert summary.message == "every trial has a result; 10 measures evaluated", (
        "2 x 3 of new trials, 4 x 1 of old ones"
    )
    assert sum(event["event"] == "launched" for event in events) == 2
    assert all(each in known(folder)[key] for key, mine in found.items() for each in mine)
    path = write_study(folder, "twin.yaml", study="study: twin", train=RECIPE, evaluate=MEASURES)
    summary = run(path, folder / "store", executor="inline", track=False)
    assert summary.message == "every trial has a result"
    with Store.open(folder / "store", create=False) as store:
        assert set(load_comparison(store, "twin").measures["name"]) >= {"perplexity_8", "bits_per_byte_48"}


def test_a_trial_without_weights_is_said_and_never_trained_anew(folder: Path) -> None:
    before = training(folder)
    with Store.open(folder / "store", create=False) as store:
        row = next(row for row in store.study_trials("gates") if (row["variant"], row["seed"]) == ("gated", 1))
        trials, size = final_weights(store)
        for path in Path(row["folder"]).glob("checkpoint-*"):
            path.unlink()
        assert final_weights(store) == (trials - 1, pytest.approx(size * 3 / 4, rel=0.1))
    sentence = "not measured, as their weights are not kept any more: gated seed 1; they are never trained anew for it"
    code, told, _ = cli("plan", folder / "study.yaml", "--store", folder / "store")
    assert sentence in told
    assert "6 of these are missing for 3 finished trials" in told
    summary, _ = again(folder)
    assert (summary.exit_code, summary.message) == (0, f"every trial has a result; 6 measures evaluated; {sentence}")
    assert training(folder) == before
    assert row["key"] not in known(folder)
    code, _, told = cli("eval", "gates", "--store", folder / "store", "--no-track")
    assert code == 1
    assert sentence in told
    table = load_table(folder)
    assert set(table[table["variant"] == "gated"]["n"]) == {1}


def load_table(folder: Path) -> Any:
    with Store.open(folder / "store", create=False) as store:
        return load_comparison(store, "gates").measures


def test_one_that_is_stopped_goes_on_with_what_is_missing(folder: Path) -> None:
    def stop(event: Event) -> None:
        if event["event"] == "evaluation":
            _request(folder / "store", "gates").write_text("{}")

    summary, _ = again(folder, on_event=stop)
    assert summary.exit_code == 130
    assert "interrupted while measuring" in summary.message
    first = known(folder)
    assert len(first) == 1
    summary, _ = again(folder)
    assert summary.message == "every trial has a result; 6 measures evaluated"
    assert known(folder).items() >= first.items()


def test_asked_twice_to_stop_it_ends_at_once(folder: Path) -> None:
    def stop(event: Event) -> None:
        if event["event"] == "evaluation":
            _request(folder / "store", "gates").write_text('{"times": 2}')

    with pytest.raises(KeyboardInterrupt):
        again(folder, on_event=stop)
    assert len(known(folder)) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such position"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.OutOfMemoryError("full"), MemoryError())),
    ],
)
def test_a_measure_that_goes_wrong_leaves_the_others_and_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def wrong(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LossByPosition, "compute", wrong)
        summary, events = again(folder)
    assert summary.exit_code == 1
    told = f"baseline seed 0: loss_by_position: {type(error).__name__}: {error}"
    assert f"4 measures evaluated; 4 evaluations went wrong: {told}" in summary.message
    assert events[-1]["exit_code"] == 1
    assert {each["measure"] for mine in known(folder).values() for each in mine} == {"perplexity_8_32_48"}
    assert again(folder)[0].message == "every trial has a result; 4 measures evaluated"


def test_damaged_weights_are_not_measured(folder: Path) -> None:
    path = next((folder / "store" / "trials").glob("*/*/checkpoint-*.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    summary, _ = again(folder)
    assert summary.exit_code == 1
    assert "its sha256 is" in summary.message
    assert len(known(folder)) == 3


def test_eval_measures_a_study_or_a_trial_and_again_if_asked(folder: Path) -> None:
    store = ("--store", folder / "store", "--no-track")
    code, told, progress = cli("eval", "gates", *store, "--measure", "{perplexity: {context: [8]}}")
    assert code == 0
    assert told.count("perplexity_8") == 4
    assert progress.count("measured  ") == 4
    code, told, progress = cli("eval", "gates", *store, "--measure", "perplexity: 8", "--json")
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["event"] for line in lines] == ["measures"] * 4, "all of it is known"
    code, told, _ = cli("eval", "gates", *store, "--measure", "perplexity: 8", "--again", "--json")
    anew = [json.loads(line) for line in told.splitlines()]
    assert [line["event"] for line in anew] == ["evaluation"] * 4 + ["measures"] * 4
    for old, new in zip(lines, anew[4:], strict=True):
        assert new["measures"][0]["values"] == old["measures"][0]["values"]
        assert new["measures"][0]["time"] > old["measures"][0]["time"]
    code, told, progress = cli("eval", "gates/gated/1", *store)
    assert code == 0
    assert "loss_by_position" in told
    assert progress.count("measured  ") == 1
    found = load_table(folder).groupby("name")["variant"].apply(set)
    assert found["perplexity_8"] == {"baseline", "gated"}, "what is measured by hand is in the report"
    assert found["massive_activations"] == found["gate_mean"] == {"gated"}, "as is all of one trial"
    code, told, progress = cli("eval", folder / "study.yaml", *store)
    assert code == 0
    assert progress.count("measured  ") == 4, "the file asks for more than the study that ran"
    assert told.count("perplexity_48") == 4


def test_eval_finds_a_trial_by_the_start_of_its_key_in_the_table(folder: Path) -> None:
    store, key = ("--store", folder / "store", "--no-track"), next(iter(training(folder)))
    assert cli("eval", key[:8], *store, "--measure", "perplexity: 8")[0] == 0
    (folder / "store" / "trials" / "ab" / "abcdef0123").mkdir(parents=True)
    for start in ("abcdef0123", f"{key[:2]}*{key[3:8]}", f"{key[:7]}?"):
        code, _, errors = cli("eval", start, *store)
        assert (code, "not the start of one trial's key" in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nope"], "is no file, no folder, no STUDY/VARIANT"),
        (["gates/gatted"], "did you mean 'gated'"),
        (["gates", "--measure", "perplexty"], "'perplexty' is not a measure; did you mean 'perplexity'?"),
        (["gates", "--measure", "perplexity_by_domain"], "the data are no mixture"),
    ],
)
def test_eval_refuses_what_is_not_there(trained: Path, arguments: list[str], told: str) -> None:
    code, _, errors = cli("eval", *arguments, "--store", trained / "store")
    assert code == 2
    assert told in errors


def test_other_weights_than_the_final_ones_are_not_measured(folder: Path) -> None:
    path = next((folder / "store" / "trials").glob("*/*/checkpoint-*.pt"))
    for each in (path, path.with_name(f"{path.name}.sha256")):
        each.rename(each.with_name(each.name.replace(path.stem, "checkpoint-1")))
    summary, _ = again(folder)
    assert summary.message.startswith("every trial has a result; 6 measures evaluated; not measured, as their weights")
    assert path.parent.name not in known(folder)
    trial = Trial.from_json((path.parent / "trial.json").read_text())
    with pytest.raises(ValueError, match="has no checkpoint of step 2"):
        last_weights(path.parent, trial, 2)


def test_what_a_process_found_before_it_died_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(Perplexity, "compute", dies)
        summary, _ = again(folder)
    assert summary.exit_code == 1
    assert "4 measures evaluated; 4 evaluations went wrong: baseline seed 0: SystemExit: 9" in summary.message
    first = known(folder)
    assert [[each["measure"] for each in mine] for mine in first.values()] == [["loss_by_position"]] * 4
    assert again(folder)[0].message == "every trial has a result; 4 measures evaluated"
    assert all(known(folder)[key][0] == mine[0] for key, mine in first.items())


def test_what_comes_after_the_measure_a_process_died_at_is_evaluated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "the device is gone")  # as of a process that was killed: a crash

    monkeypatch.setattr(LossByPosition, "compute", dies)
    summary, events = again(folder)
    assert summary.exit_code == 1
    assert "4 measures evaluated; 4 evaluations went wrong: baseline seed 0: " in summary.message
    assert "the device is gone" in summary.message
    assert [[each["measure"] for each in mine] for mine in known(folder).values()] == [["perplexity_8_32_48"]] * 4
    assert len([event for event in events if event["event"] == "evaluation"]) == 8


@pytest.mark.slow
def test_what_went_wrong_before_a_process_died_is_told_and_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise ValueError("no such position")

    def dies(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "the device is gone")

    monkeypatch.setattr(LossByPosition, "compute", wrong)
    monkeypatch.setattr(Perplexity, "compute", dies)
    summary, events = again(folder)
    assert (summary.exit_code, known(folder)) == (1, {})
    told = [event["wrong"] for event in events if event["event"] == "evaluation"]
    assert len(told) == 4
    for each in told:
        assert each.startswith("loss_by_position: ValueError: no such position; perplexity_8_32_48: ")
        assert "the device is gone" in each


def test_findings_of_an_older_version_are_not_averaged_with_newer_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(folder)
    assert set(load_table(folder)["n"]) == {2}
    with monkeypatch.context() as patch:
        patch.setattr(LossByPosition, "version", LossByPosition.version + 1)
        code, _, _ = cli("eval", "gates/gated/1", "--store", folder / "store", "--no-track")
    assert code == 0
    with Store.open(folder / "store", create=False) as store:
        found = load_comparison(store, "gates")
        (key,) = (row["key"] for row in store.study_trials("gates") if (row["variant"], row["seed"]) == ("gated", 1))
    curve = found.curves[found.curves["name"] == "loss_by_position"]
    assert {(row.variant, row.n) for row in curve.itertuples()} == {("gated", 1)}
    (own,) = (each for each in known(folder)[key] if each["measure"] == "loss_by_position")
    assert curve["mean"].tolist() == own["curves"]["loss_by_position"]["y"]
    numbers = found.measures[found.measures["measure"] == "perplexity_8_32_48"]
    assert set(numbers["n"]) == {2}, "another measure's version is as it was"


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "ray"])
def test_a_run_killed_while_measuring_loses_only_the_evaluation_that_ran(folder: Path, executor: str) -> None:
    before = training(folder)
    command = [sys.executable, "-c", "from archlab.cli.main import main; main()", "run", str(folder / "study.yaml")]
    command += [
        "--store",
        str(folder / "store"),
        "--no-track",
        "--json",
        *(["--inline"] if executor == "inline" else []),
    ]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert first.stdout is not None
    for line in first.stdout:
        if json.loads(line)["event"] == "evaluation":
            first.send_signal(signal.SIGKILL)
            break
    first.communicate(timeout=120)
    kept = known(folder)
    assert kept
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, events[-1]["exit_code"]) == (0, 0)
    assert not [event for event in events if event["event"] == "launched"]
    assert training(folder) == before
    after = known(folder)
    assert {key: len(mine) for key, mine in after.items()} == dict.fromkeys(before, 2)
    for key, mine in kept.items():  # of one trial, perhaps only the first measure
        assert [each for each in after[key] if each in mine] == mine, "what was kept was not evaluated again"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore:.*noload")
@pytest.mark.filterwarnings("ignore:.*sqlite3.Connection:ResourceWarning")
def test_what_was_measured_joins_the_run_at_mlflow(folder: Path) -> None:
    from mlflow.tracking import MlflowClient

    from archlab.search.trackers.shipper import unsent

    assert again(folder, track=True)[0].exit_code == 0
    assert unsent(folder / "store", "gates") == 0
    client = MlflowClient(f"sqlite:///{folder}/store/mlflow.db")
    experiment = client.get_experiment_by_name("gates")
    assert experiment is not None
    found = known(folder)
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 4
    for each in runs:
        curve, numbers = found[each.data.tags["archlab.key"]]
        assert {name: each.data.metrics[name] for name in numbers["values"]} == numbers["values"]
        history = client.get_metric_history(each.info.run_id, "loss_by_position")
        points = sorted((point.step, point.value) for point in history)
        assert points == list(zip(*(curve["curves"]["loss_by_position"][name] for name in "xy"), strict=True))

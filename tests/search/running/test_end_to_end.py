"""Studies from YAML to table with the real trainer: again, interrupted and killed, they end with the same digits."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.reporting.report import FORMATS
from archlab.search.running.run import run
from archlab.search.store.lock import holder_of
from archlab.search.store.store import Store
from archlab.search.trackers.shipper import unsent
from tests.search.oracle import PLACES, TIMINGS, curves_of, same, table_of
from tests.search.processes import alive, descendants
from tests.search.study_kit import ROOT, until

STUDY = """\
study: tiny
question: Does a gate help?
model:
  d_model: 16
  n_layers: 1
  block:
    norm: rmsnorm
    attention: {heads: 2, positional: rope}
    ffn: {type: glu, activation: silu}
variants:
  baseline: {}
  gated: {block.attention.gate: {position: sdpa}}
train:
  data: {text: corpus.txt}
  tokens: 8k
  context: 32
  batch: 4
  lr: 1e-3
tune: {lr: [1e-3, 4e-3]}
seeds: 3
"""
TRIALS = 10  # 2 variants: 2 rates, a second seed of both, and a third at the better one
LONGER = {"train.tokens": 40_000}  # a trial takes a second or two, long enough to be hit

# Ray's agents look for its raylet, then for half a minute or more for someone to tell; they have no part in a trial.
AGENTS = "ray::DashboardAgent", "ray::RuntimeEnvAgent"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The study with its corpus: 70 kB of made-up words, some of them frequent."""
    folder = tmp_path_factory.mktemp("study")
    chance = random.Random(0)
    words = ["".join(chance.choices("bcdfglmnprst", k=2)) + chance.choice("aeiou") for _ in range(300)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    documents = [" ".join(chance.choices(words, weights, k=150)) for _ in range(120)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    assert (folder / "corpus.txt").stat().st_size > 60_000
    path = folder / "tiny.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As every trial has under Ray: the number of threads is allowed to change bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory):
    """A store in which the study ran without interruption."""
    root = tmp_path_factory.mktemp("whole")
    summary = run(study, root, executor="inline", track=False)
    assert (summary.exit_code, summary.counts) == (0, {"complete": TRIALS, "reused": 0})
    return root


def cli(*arguments):
    """Exit code and standard output of `archlab`, in this process."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


class Process:
    """`archlab run` as a user starts it, in a session of its own; --json so that its events can be followed."""

    def __init__(self, study, root, *options):
        code = "from archlab.cli.main import main; main()"
        command = [sys.executable, "-c", code, "run", str(study), "--store", str(root), "--no-track", "--json"]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), **threads},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def events(self):
        """Its events as they come; what is no JSON is shown when the test fails."""
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="")

    def until(self, kind):
        """Reads on to the next event of a kind."""
        for event in self.events():
            if event["event"] == kind:
                return event
        raise AssertionError(f"the run ended with {self.process.wait()} before its event '{kind}'")

    def end(self):
        """Its exit code and its last event."""
        last = {}
        for last in self.events():  # noqa: B007 (the last one is what is wanted)
            pass
        return self.process.wait(240), last

    def kill(self):
        """SIGKILL for the driver alone; what it started must end by itself."""
        children = [pid for pid, name in descendants(self.process.pid).items() if not name.startswith(AGENTS)]
        self.process.kill()
        self.process.wait()
        until(lambda: not any(map(alive, children)))


@pytest.fixture
def start():
    """Starts a Process that does not outlive the test."""
    started = []

    def begin(*arguments):
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stdout.close()


def states(root, study="tiny"):
    """(state, attempt) by key."""
    with Store.open(root) as store:
        return {row["key"]: (row["state"], row["attempt"]) for row in store.study_trials(study)}


def finished(root):
    """(state, attempt) of the trials that ended."""
    return {key: found for key, found in states(root).items() if found[0] == "complete"}


def training(root):
    """The folder of a trial that is in its loop and has no result, None while there is none."""
    for metrics in Path(root).glob("trials/*/*/metrics.jsonl"):
        if not (metrics.parent / "result.json").exists():
            return metrics.parent
    return None


@pytest.fixture(scope="module")
def tracked(study, tmp_path_factory):
    """A second store, in which the study was tracked as well."""
    root = tmp_path_factory.mktemp("tracked")
    assert run(study, root, executor="inline").exit_code == 0
    return root


def test_a_study_run_twice_gives_the_same_report_but_for_timings(whole, tracked):
    assert table_of(tracked, TIMINGS, PLACES) == table_of(whole, TIMINGS, PLACES)
    assert curves_of(tracked) == curves_of(whole)


def test_the_same_command_again_trains_nothing(study, whole):
    before = states(whole)
    code, out = cli("run", study, "--store", whole, "--inline", "--no-track", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert not [event for event in events if event["event"] == "launched"]
    assert events[-1]["counts"] == {"complete": TRIALS, "reused": TRIALS}
    assert states(whole) == before


def test_a_tracked_study_has_arrived_when_its_run_ends(tracked):
    assert unsent(tracked, "tiny") == 0
    assert {"mlflow.db", "optuna.db"} <= {path.name for path in tracked.iterdir()}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_report_names_each_variant(study, whole, name):
    code, out = cli("report", study, "--store", whole, "--format", name)
    assert code == 0
    assert "baseline" in out
    assert "gated" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "tiny"),
        ("status",),
        ("status", "tiny"),
        ("plan", "{study}"),
        ("show", "{study}", "--variant", "gated"),
    ],
    ids=" ".join,
)
def test_json_output_is_json_alone(study, whole, arguments):
    code, out = cli(*(each.format(study=study) for each in arguments), "--store", whole, "--json")
    assert code == 0
    assert json.loads(out)


def test_a_rate_that_diverges_is_a_result_and_a_dash_in_the_table(study, tmp_path):
    path = study.with_name("wild.yaml")
    wild = STUDY.replace("study: tiny", "study: wild").replace("  lr: 1e-3\n", "  lr: 1e-3\n  clip: null\n")
    path.write_text(wild.replace("tune: {lr: [1e-3, 4e-3]}\nseeds: 3", "tune: {lr: [4e-3, 1e6]}\nseeds: 1"))
    assert run(path, tmp_path, executor="inline", track=False).counts == {"complete": 2, "diverged": 2, "reused": 0}
    found = table_of(tmp_path, study="wild")
    assert [(row["lr"], row["state"], row["best"]) for row in found["rates"]] == 2 * [
        (4e-3, "complete", True),
        (1e6, "diverged", False),
    ]
    assert [(row["lr"], row["diverged"]) for row in found["table"]] == 2 * [(4e-3, 1)]

    path.write_text(wild.replace("tune: {lr: [1e-3, 4e-3]}\n", "").replace("lr: 1e-3", "lr: 1e6"))
    assert run(path, tmp_path, executor="inline", track=False).exit_code == 0
    table = table_of(tmp_path, study="wild")["table"]
    assert [(row["verdict"], row["perplexity_mean"], row["diverged"]) for row in table] == 2 * [("diverged", None, 3)]
    line = next(line for line in cli("report", "wild", "--store", tmp_path)[1].splitlines() if line[:5] == "gated")
    assert "\N{EN DASH}" in line


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("heads: 2", "heads: 3", "heads"),
        ("text: corpus.txt", "text: corpse.txt", "corpse.txt"),
        ("norm: rmsnorm", "norm: rmsnrom", "did you mean"),
        ("block.attention.gate", "block.attention.gaet", "gate"),
    ],
    ids=["impossible shape", "no such file", "unknown type", "patch without a place"],
)
def test_a_bad_study_leaves_nothing_in_the_store(study, tmp_path, before, after, told):
    path = study.with_name("bad.yaml")
    path.write_text(STUDY.replace(before, after))
    code, out = cli("run", path, "--store", tmp_path, "--inline", "--no-track")
    assert code == 2
    assert told in out
    assert "nothing was trained" in out
    with Store.open(tmp_path) as store:
        assert store.studies() == []
    assert not list(tmp_path.glob("trials/*"))


def test_data_that_a_disk_did_not_keep_train_nothing_and_the_same_command_ends_with_the_same_table(
    study, whole, tmp_path
):
    assert cli("plan", study, "--store", tmp_path)[0] == 0
    (tokens,) = tmp_path.glob("data/*/train.bin")
    held = bytearray(tokens.read_bytes())
    held[1234] ^= 1
    tokens.write_bytes(held)
    code, out = cli("run", study, "--store", tmp_path, "--inline", "--no-track")
    assert code == 75 and "train.bin are not those that were written" in out and "run the same command again" in out
    assert {state for state, _ in states(tmp_path).values()} == {"planned"}
    assert run(study, tmp_path, executor="inline", track=False).exit_code == 0
    assert same(tmp_path, whole)


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_the_same_command_ends_with_the_same_table(study, whole, tmp_path, start):
    first = start(study, tmp_path, "--inline")
    folder = until(lambda: training(tmp_path))
    first.process.send_signal(signal.SIGSTOP)  # it does not end while it is asked who holds the study
    holder = holder_of(tmp_path, "tiny")
    code, out = cli("run", study, "--store", tmp_path, "--inline", "--no-track")
    assert (code, holder["pid"]) == (3, first.process.pid)
    assert re.search(rf"already being run by process {holder['pid']} ", out)

    first.process.send_signal(signal.SIGINT)
    first.process.send_signal(signal.SIGCONT)
    code, last = first.end()
    assert (code, last["exit_code"]) == (130, 130)
    assert holder_of(tmp_path, "tiny") is None
    assert {state for state, _ in states(tmp_path).values()} <= {"complete", "planned"}
    assert list(folder.glob("checkpoint-*.pt"))
    before = finished(tmp_path)
    assert len(before) < TRIALS

    assert run(study, tmp_path, executor="inline", track=False).exit_code == 0
    assert before.items() <= states(tmp_path).items()
    assert same(tmp_path, whole)


@pytest.mark.slow
def test_ray_interrupted_once_and_killed_twice_ends_with_the_table_of_an_uninterrupted_run(study, tmp_path, start):
    calm, root = tmp_path / "calm", tmp_path / "killed"
    assert run(study, calm, overrides=LONGER, executor="inline", track=False).exit_code == 0
    with Store.open(calm) as opened:
        assert opened.study(opened.studies()[0]["name"])["overrides"] == LONGER
    longer = [f"--set={path}={value}" for path, value in LONGER.items()]

    interrupted = start(study, root, *longer)
    folder = until(lambda: training(root))
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.end()[0] == 130
    assert list(folder.glob("checkpoint-*.pt"))
    done = [finished(root)]

    during = start(study, root, *longer)
    during.until("launched")
    until(lambda: training(root))
    during.kill()
    assert "running" in {state for state, _ in states(root).values()}
    assert holder_of(root, "tiny") is None
    done.append(finished(root))

    between = start(study, root, *longer)
    between.until("finished")  # committed; the next trial is about to be launched
    between.kill()
    done.append(finished(root))

    code, last = start(study, root, *longer).end()
    assert (code, last["counts"]["complete"]) == (0, TRIALS)
    assert last["counts"]["reused"] >= len(done[-1])  # a worker may end its trial after its driver was killed
    after = states(root)
    assert [len(before) for before in done] == sorted(len(before) for before in done)
    assert all(before.items() <= after.items() for before in done)  # with the number of attempts that it had then
    assert max(attempt for _, attempt in after.values()) > 1
    with Store.open(root) as store:
        ended = [event["key"] for event in store.events("tiny") if event["kind"] == "complete"]
    assert sorted(ended) == sorted(after)
    assert any("resumed" in path.read_text() for path in root.glob("trials/*/*/events.jsonl"))
    assert same(root, calm)

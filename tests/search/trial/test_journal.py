"""What a trial writes while it runs: whole lines, each step once, from one attempt at a time."""

import json
import math

import pytest

from archlab.search.trial.fingerprint import commit, differences, fingerprint
from archlab.search.trial.journal import Journal, events, note_event


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_numbers_that_json_cannot_say_become_null(tmp_path):
    with Journal(tmp_path / "metrics.jsonl", 3, 0) as journal:
        journal.write(1, loss=math.nan, lr=math.inf, grad_norm=1.5)
        journal.sync()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("time") > 0
    assert line == {"step": 1, "attempt": 3, "loss": None, "lr": None, "grad_norm": 1.5}


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_new_attempt_drops_what_lies_past_its_checkpoint(tmp_path, step, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    Journal(path, 2, step).close()
    assert steps(path) == kept


def test_what_an_earlier_attempt_still_writes_goes_nowhere(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Journal(path, 1, 0) as stale, Journal(path, 2, 0) as current:
        stale.write(1, loss=1.0)
        stale.sync()
        current.write(1, loss=2.0)
        current.sync()
    assert [json.loads(line)["attempt"] for line in path.read_text().splitlines()] == [2]


def test_events_are_read_in_order_without_a_torn_one(tmp_path):
    assert events(tmp_path) == []
    note_event(tmp_path, 1, "discarded", checkpoint="checkpoint-3.pt", reason="empty")
    note_event(tmp_path, 2, "resumed", step=0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "resu')
    assert [(event["attempt"], event["event"]) for event in events(tmp_path)] == [(1, "discarded"), (2, "resumed")]


def test_fingerprint_says_what_may_change_bits(tmp_path):
    found = fingerprint()
    assert all(isinstance(value, str) and value for value in found.values())
    assert differences(found, found) == {}
    other = found | {"torch": "1.0", "platform": "elsewhere", "commit": "0", "gpu": "H200"}
    assert differences(found, other) == {"torch": [found["torch"], "1.0"], "gpu": ["", "H200"]}


def test_folder_that_is_no_checkout_has_no_commit(tmp_path):
    assert commit(tmp_path) == ""

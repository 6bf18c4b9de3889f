"""What a store keeps as JSON is told from other valid JSON, whatever that is, in one sentence that names the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from archlab.search.store import kept
from archlab.search.store.rows import event_row, parsed, trial_row
from archlab.search.trial.outcome_files import fault_of_result
from tests.search.study_kit import done

OTHERS: tuple[Any, ...] = ([], {}, "x", 1.5, True, None, [[1]], {"a": {"a": 1}}, 10**400, float("nan"), "\ud800")
ROW = {
    "key": "ab" * 32, "variant": "v", "role": "tune", "settings": '{"lr":0.1}', "seed": 0, "until": None, "study": "s",
    "state": "complete", "attempt": 1, "reason": None, "result": json.dumps(done()), "owner": "s", "updated": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_a_value_of_another_shape_anywhere_in_a_result_fails_its_trial_and_names_the_place(other: Any) -> None:
    assert trial_row(ROW, "f")["state"] == "complete"
    for name in ("validation", "test"):
        for result in (done(**{name: other}), done(**{name: {"loss": other}})):
            if result[name] == {"loss": 1.5}:
                continue
            row = trial_row({**ROW, "result": json.dumps(result)}, "f")
            assert (row["state"], row["result"]) == ("failed", None)
            assert f"result: its {name}" in row["reason"]


def test_a_result_is_of_another_study_only_where_that_is_known() -> None:
    assert [trial_row({**ROW, "owner": owner}, "f")["reused"] for owner in ("s", "t", None)] == [False, True, False]


def test_an_entry_that_is_missing_is_named() -> None:
    assert fault_of_result({"state": "complete", "validation": {"loss": 1.0}}, "complete") == "its test is missing"
    assert fault_of_result(None, "complete") == "it is missing"
    assert fault_of_result(None, "planned") is None
    assert fault_of_result({"step": 3}, "paused") is None
    told = fault_of_result(done(resumed_from=[1, "x"]), "complete")
    assert told == "its resumed_from[1] is 'x', not a whole number from 0 on"


def test_what_is_nested_deeper_than_it_can_be_written_again_is_told() -> None:
    for depth in (200, 900, 10_000, 200_000):
        text = '{"a":' * depth + "1" + "}" * depth
        assert parsed(text, dict)[1] is not None
        assert trial_row({**ROW, "settings": text}, "f")["state"] == "failed"
    flat = json.dumps({str(number): [] for number in range(500)})
    assert parsed(flat, dict)[1] is None


def test_a_proposal_has_a_number_and_a_rate_is_one() -> None:
    assert kept.fault_of_settings({}, "search") == "its number is missing"
    assert kept.fault_of_settings({"number": 1, "lr": "x"}, "search") == "its lr is 'x', not a finite number"
    assert kept.fault_of_settings({"width": ["any", {"json": None}]}, "tune") is None


def test_a_damaged_detail_is_empty_and_an_event_without_a_time_is_left_out() -> None:
    event = {"id": 1, "time": 1.0, "study": "s", "key": "k", "attempt": 1, "kind": "planned"}
    right = {"spent": {"tokens": 5, "gpu_s": 0.5}}
    assert event_row({**event, "detail": json.dumps(right)}) == {**event, "detail": right}
    for detail in ("[]", '{"spent": 5}', '{"spent": {"tokens": "many"}}', '{"values": []}'):
        assert event_row({**event, "detail": detail}) == {**event, "detail": {}}
    assert event_row({**event, "detail": "{}", "time": 1e300}) is None
    assert event_row({**event, "detail": "{}", "kind": 5}) is None


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("calibrated", {"train": {"lr": 0.1}, "asked": {"model": "ab"}, "of": "s", "study": "t"}),
        ("note study", {"text": "said", "tags": ["a"]}),
        ("measure abc", {"measure": "m", "version": 1, "values": {"x": None}, "curves": {}, "data": "d", "time": 1.0}),
    ],
)
def test_memories_of_all_kinds_are_held_to_what_writes_them(kind: str, right: dict[str, Any]) -> None:
    assert kept.fault_of("memory", kind, "name", right) is None
    assert all(kept.fault_of("memory", kind, "name", other) for other in OTHERS)
    for name in right.keys() & {"train", "asked", "text", "tags", "measure", "values", "version"}:
        assert kept.fault_of("memory", kind, "name", {**right, name: 1.5 if name != "version" else "1"})

"""A trial as trackers see it: the rows of the trial table merged by key, and the files in the trial's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from archlab.search.store.findings import findings, measured
from archlab.search.store.store import TERMINAL, Store
from archlab.search.trial.trial import Trial
from archlab.search.utils.files import NO_JSON

_TAIL = 160  # bytes before an offset that are remembered, to see that a file is still the one that was read


@dataclass(frozen=True)
class Tracked:
    """One trial of a study. It may have been wanted in several roles; `settings` are those of its first row.

    `state` is that of the trial table, except for "interrupted": it has been started, and nobody runs it now.
    """

    key: str
    folder: Path
    variant: str
    roles: tuple[str, ...]
    settings: dict[str, Any]
    seed: int
    state: str
    attempt: int
    reason: str | None
    result: dict[str, Any] | None
    reused: bool
    wanted: bool
    spec: Callable[[str], str]  # the text of trial.json by key, which has no file before the trial starts
    measured: tuple[tuple[str, float], ...] = ()  # digests of what was measured of it, and when (unix s)
    findings: Callable[[str], list[dict[str, Any]]] = lambda _: []  # these, by key: search/store/findings.py

    @cached_property
    def trial(self) -> Trial:
        """What is trained."""
        return Trial.from_json(self.spec(self.key))

    @property
    def metrics(self) -> Path:
        """The file that grows while the trial trains."""
        return self.folder / "metrics.jsonl"

    @property
    def finished(self) -> bool:
        """Whether the trial has ended for good."""
        return self.state in TERMINAL

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        rate: float = self.trial.recipe["lr"]
        return rate


def tracked(store: Store, study: str, closing: bool = False) -> list[Tracked]:
    """Every trial of a study once, in planned order. When `closing`, what runs elsewhere counts as interrupted too."""
    rows = [(row, True) for row in store.study_trials(study)]
    rows += [(row, False) for row in store.study_trials(study, orphaned=True)]
    alive: dict[str | None, bool] = {None: False}
    merged: dict[str, list[tuple[dict[str, Any], bool]]] = {}
    for row, wanted in rows:
        merged.setdefault(row["key"], []).append((row, wanted))
    known = measured(store, [key for key, group in merged.items() if group[0][0]["state"] == "complete"])
    found = []
    for key, group in merged.items():
        row = group[0][0]
        state, owner = row["state"], row["owner"]
        if owner not in alive:
            alive[owner] = store.holder(owner) is not None
        if (state == "planned" and row["attempt"] > 0) or (state == "running" and (closing or not alive[owner])):
            state = "interrupted"
        found.append(
            Tracked(
                key=key,
                folder=Path(row["folder"]),
                variant=row["variant"],
                roles=tuple(sorted({each["role"] for each, _ in group})),
                settings=row["settings"],
                seed=row["seed"],
                state=state,
                attempt=row["attempt"],
                reason=row["reason"],
                result=row["result"],
                reused=row["reused"],
                wanted=any(wanted for _, wanted in group),
                spec=store.spec,
                measured=tuple(sorted(known.get(key, {}).items())),
                findings=lambda key: findings(store, [key]).get(key, []),
            )
        )
    return found


class Position(NamedTuple):
    """How far a metrics.jsonl was sent: byte offset, the bytes before it, last training step, last validation step."""

    offset: int = 0
    tail: str = ""
    training: int = -1
    validation: int = -1


START = Position()
_LARGEST = 2**63  # of a step, of a time in seconds and of a whole number


class Line(NamedTuple):
    """One line of metrics.jsonl, with the position after it."""

    record: dict[str, Any]
    position: Position


def new_lines(path: Path, position: Position) -> Iterator[Line]:
    """The whole lines after a position whose steps were not sent. A last line without its newline waits; one that was
    damaged is left out, as a tracker has but a copy.

    When a trial goes on from its checkpoint, its file was cut there and steps are written again, to the same bits.
    The file is then read from its start, and a step that was sent once is not sent again with a later time.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        before = position.tail.encode()
        file.seek(max(0, position.offset - len(before)))
        if file.read(len(before)) != before:
            position = position._replace(offset=0, tail="")
            file.seek(0)
        for text in file:
            if not text.endswith(b"\n"):
                return
            record = _record(text)
            if record is None:
                position = position._replace(offset=position.offset + len(text), tail=_ascii(text))
                continue
            kind = "validation" if "validation_loss" in record else "training"
            sent = getattr(position, kind)
            step = record["step"]
            position = Position(
                offset=position.offset + len(text),
                tail=_ascii(text),
                training=max(step, position.training) if kind == "training" else position.training,
                validation=max(step, position.validation) if kind == "validation" else position.validation,
            )
            if step > sent:
                yield Line(record, position)


def _ascii(text: bytes) -> str:
    return text[-_TAIL:].decode("ascii", "replace")


def _record(text: bytes) -> dict[str, Any] | None:
    """What a line says; None of one that a trial never wrote so."""
    try:
        found = json.loads(text)
    except NO_JSON:
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int or type(found.get("time")) not in (int, float):
        return None
    return found if 0 <= found["step"] < _LARGEST and 0 <= found["time"] < _LARGEST else None  # NaN is neither


def position_of(text: str) -> Position | None:
    """The place that `text`, JSON, says; None where it is damaged."""
    try:
        found = json.loads(text)
    except (*NO_JSON, TypeError):
        return None
    if not isinstance(found, list) or [type(each) for each in found] != [int, str, int, int] or found[0] < 0:
        return None
    return Position(*found)


def _is_number(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def values_of(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by name; what was written as null was not finite and is NaN."""
    fixed = ("step", "time", "attempt")
    named = {name: value for name, value in record.items() if name not in fixed and _is_number(value)}
    return {
        name: float(value) if value is not None and math.isfinite(value) else math.nan for name, value in named.items()
    }


def validation_history(path: Path) -> dict[int, float]:
    """Step to validation loss of a trial so far."""
    lines = (line.record for line in new_lines(path, START))
    return {each["step"]: values_of(each)["validation_loss"] for each in lines if "validation_loss" in values_of(each)}


def span_s(path: Path) -> tuple[float, float] | None:
    """The times (unix s) of the first and the last line, None where nothing was written."""
    times = [line.record["time"] for line in new_lines(path, START)]
    return (times[0], times[-1]) if times else None

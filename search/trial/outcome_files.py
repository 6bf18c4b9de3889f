"""What a trial's process leaves for its driver: its result and the attempt it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archlab.search.utils import shapes
from archlab.search.utils.files import read_json
from archlab.search.utils.shapes import (
    Check,
    both,
    count,
    flag,
    list_of,
    mapping,
    mapping_of,
    maybe,
    number,
    one_of,
    plain,
    text,
    whole,
)

_SUMMARY: Check = both(mapping_of(maybe(number)), mapping({"loss": number}))
_OF_ANY = {  # a result that came to an end, however it did
    "reason": maybe(text),
    "parameters": count,
    "train_s": number,
    "evaluate_s": number,
    "tokens_per_s": maybe(number),
    "checkpoints": mapping({"count": count, "waited_s": number, "writing_s": number, "bytes": count}),
    "peak_memory_bytes": maybe(count),
    "fingerprint": mapping_of(plain),
    "bit_exact": flag,
    "resumed_from": list_of(count),
    "discarded_checkpoints": list_of(mapping({"name": text, "reason": text})),
    "continued": mapping({"step": count}),
    "stages": list_of(mapping({"stage": count, "step": count, "tokens": count})),
    "signs": list_of(text),
}
_PLACE = {"step": count, "tokens": count}
_RESULTS: dict[str, Check] = {
    "complete": mapping(
        {"state": one_of("complete"), "validation": _SUMMARY, "test": _SUMMARY}, {"step": whole(count, 1), **_OF_ANY}
    ),
    "diverged": mapping({"state": one_of("diverged")}, {**_PLACE, **_OF_ANY}),
    **dict.fromkeys(("pruned", "failed"), mapping({}, _PLACE)),
    "paused": mapping({"step": count}, {"tokens": count, "validation": mapping({"loss": maybe(number)})}),
}
_ATTEMPT: Check = mapping({}, {"attempt": count, "pid": count, "host": text, "started": number, "node": text})


def fault_of_result(result: Any, state: Any) -> str | None:
    """What is wrong with the result of a trial in a state; it is that of a pause until the trial has ended."""
    if result is None:
        return "it is missing" if state in ("complete", "diverged", "paused") else None
    return shapes.fault_of(result, _RESULTS.get(state, _RESULTS["paused"]))


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a trial that ended, None while there is none, or one that no trial writes. It is written whole, and
    last."""
    result = read_json(folder / "result.json")
    ended = result is not None and result.get("state") in ("complete", "diverged")
    return result if ended and result and fault_of_result(result, result["state"]) is None else None


def read_attempt(folder: Path) -> dict[str, Any]:
    """attempt, pid, host, started (unix s) of the newest attempt that got as far as starting; {} when none did, or
    where that can't be read.

    On a cluster also `node`, Ray's number for the machine.
    """
    found = read_json(folder / "attempt.json") or {}
    return {} if shapes.fault_of(found, _ATTEMPT) else found

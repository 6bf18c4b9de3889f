"""What of a report is less than it should be, and which kernels are not to be used because of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from archlab.kernels.verdicts import Verdict

Found = Mapping[str, Mapping[str, Any]]
SLOWER = 0.95  # of a kernel's time, in which what models would get without it is done: less is more than noise
CEILING = {"rms_norm": 0.85, "layer_norm": 0.85, "add_norm": 0.85}  # shares of the ceiling that norms should reach


def _rows(found: Found, name: str) -> list[dict[str, Any]]:
    return list(found[name]["rows"]) if name in found else []


def verdicts_of(found: Found) -> list[Verdict]:
    """The Triton kernels that are wrong in a dtype, and those slower, with their gradients, than what models would get
    without them."""
    wrong = [
        Verdict(row["op"], row["dtype"], True, row["wrong"])
        for row in _rows(found, "right")
        if row["family"] == "triton" and row["wrong"]
    ]
    slow = [
        Verdict(row["op"], row["dtype"], False, f"{row['other']} takes {row['other_full']} of its time", row["options"])
        for row in _rows(found, "ops")
        if row["implementation"] == "triton" and row["other_full"] < SLOWER
    ]
    return [*wrong, *slow]


def shortfalls(found: Found) -> list[str]:
    """A line for each."""
    return [*_of_parts(found), *_of_kernels(found), *_of_steps(found), *_of_studies(found)]


def _of_parts(found: Found) -> Iterator[str]:
    for name, part in found.items():
        if part["exit"] is None:
            yield f"{name}: ended after {part['seconds']:.0f} s, with {len(part['rows'])} rows"
        elif part["exit"]:
            yield f"{name}: failed with {part['exit']}"


def _of_kernels(found: Found) -> Iterator[str]:
    for row in _rows(found, "right"):
        if row["wrong"]:
            yield f"{row['op']} by {row['implementation']} in {row['dtype']} is wrong: {row['wrong']}"
    for row in _rows(found, "ops"):
        what = f"{row['op']} {row['case']} by {row['implementation']}"
        if row["other_full"] < SLOWER:
            yield f"{what}: {row['other']} takes {row['other_full']} of its time"
        if row["share_of_ceiling"] < (goal := CEILING.get(row["op"], 0.0)):
            yield f"{what}: {row['share_of_ceiling']:.0%} of what the card can do, where {goal:.0%} are the goal"


def _of_steps(found: Found) -> Iterator[str]:
    by_kernel = {row["model"]: row["ms"] for row in _rows(found, "steps") if row["way"] == "kernel by kernel"}
    for row in _rows(found, "steps"):
        if row["way"] != "kernel by kernel" and row["ms"] > by_kernel[row["model"]]:
            yield f"{row['model']}, {row['way']}: {row['ms']} ms, and {by_kernel[row['model']]} kernel by kernel"


def _of_studies(found: Found) -> Iterator[str]:
    for name in ("study", "cards"):
        for row in _rows(found, name):
            if row["exit"]:
                yield f"{name}: `archlab run` ended with {row['exit']} after {row['trials']} trials"

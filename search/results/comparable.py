"""Whether the losses of two rows may be compared: the texts and tokenizers that they were tested on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from archlab.search.results.selection import Selection

NO_DIFFERENCE = ("other objective", "other test text", "lossy tokenizer")  # verdicts that no more trials change


def tested_on(record: dict[str, Any], variant: dict[str, Any]) -> str:
    """The identity of the text that a variant is tested on; without one, that of the study's data."""
    return str(variant.get("test") or record["data"]["identity"])


def objective_of(variant: Mapping[str, Any]) -> Any:
    """What a variant is asked, unless that is the next token."""
    return variant.get("objective")


def lossy_of(variant: Mapping[str, Any]) -> str | None:
    """Which tokenizer a variant has, if that loses some of the text: with another one nothing compares."""
    return variant.get("lossy")


def apart(record: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why the losses of two variants say nothing about each other, one of NO_DIFFERENCE; None where they do."""
    if objective_of(one) != objective_of(other):
        return "other objective"
    if tested_on(record, one) != tested_on(record, other):
        return "other test text"
    return "lossy tokenizer" if lossy_of(one) != lossy_of(other) else None


def is_one_tokenizer(selections: list[Selection]) -> bool:
    """Whether all complete trials have the same tokens per byte, which is bits per byte over bits per token.

    Where not every byte is predicted there are no bits per byte, and nothing compares with another tokenizer's.
    """
    tests = [t["result"]["test"] for s in selections for t in s.complete.values()]
    ratios = [t["bits_per_byte"] * math.log(2) / t["loss"] for t in tests if t.get("bits_per_byte") is not None]
    return not ratios or max(ratios) <= min(ratios) * (1 + 1e-6)


def spec_of(variant: Mapping[str, Any]) -> dict[str, Any]:
    """The model of a variant as a study's record keeps it: without its defaults, but with how it starts, whose default
    was 0.02 when records left it out."""
    spec: dict[str, Any] = variant.get("spec") or {}
    return {**spec, "init": {"std": 0.02, **spec.get("init", {})}} if spec else {}


def paired_means(rows: Sequence[dict[str, Any]], mean: str) -> dict[str, float]:
    """The means of a table's rows, as their order should be read: that of the baseline plus the paired difference, so
    that a row with other seeds than its baseline owes nothing to them; its own where it has no difference."""
    own = {row["variant"]: row for row in rows}

    def of(row: dict[str, Any]) -> float:
        at_base = row["baseline"] != row["variant"] and math.isfinite(row["delta"])
        return of(own[row["baseline"]]) + float(row["delta"]) if at_base else float(row[mean])

    return {name: of(row) for name, row in own.items()}

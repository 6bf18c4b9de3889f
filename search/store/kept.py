"""What a store keeps as JSON beside results: settings of trials, details of events, decisions of studies, and what all
may use. For each of them what it has to be."""

from __future__ import annotations

from typing import Any

from archlab.search.utils import shapes
from archlab.search.utils.shapes import (
    Check,
    anything,
    both,
    count,
    deviation,
    flag,
    list_of,
    mapping,
    mapping_of,
    maybe,
    number,
    one_of,
    plain,
    positive,
    text,
    whole,
)

MEASURE = "measure "
"""How the kinds begin under which a store remembers what was measured of a trial, whose key follows."""
NOTES = ("note study", "note trial")
"""Under which kinds it remembers what people write."""

_SETTINGS: Check = mapping_of(plain)
_PROPOSED: Check = mapping({"number": count})
_RATED: Check = mapping({}, {"lr": maybe(number)})
_SPENT: Check = mapping({}, {"tokens": count, "gpu_s": number})
_DETAIL: Check = mapping(
    {},
    {
        "number": count,
        "values": mapping_of(plain),
        "spent": maybe(_SPENT),
        "gpus": number,
        "reason": maybe(text),
        "message": text,
        "variant": text,
    },
)
RATIO: Check = mapping({"ratio": positive})
"""A file of `timings/`: how many times as long a step of one model takes as one of another."""
COORDINATES: Check = mapping({"powers": mapping_of(number), "least": mapping_of(number), "widths": list_of(count)})
"""A file of `coordinates/`: how what passes the sites of a model grows with its width."""
_VARIANT: Check = mapping({"name": text, "baseline": text}, {"parameters": count, "flops_per_token": number})
_RECORD: Check = both(  # of an older archlab: a newer one keeps a digest of it
    mapping({"study": text, "seeds": list_of(count), "variants": list_of(_VARIANT)}),
    mapping({}, {"baseline": text, "question": maybe(text), "context": count, "tokens": count, "tune": plain}),
)
_DECISIONS: dict[str, Check] = {  # by how their names begin
    "precision and compile": mapping(
        {
            "precision": one_of("fp32", "bf16"),
            "compile": one_of("off", "blocks"),
            "why_precision": text,
            "why_compile": text,
        }
    ),
    "micro_batch": whole(count, 1),
    "tune_sd": deviation,
    "promotion": list_of(count),
    "known points": list_of(mapping_of(plain)),
    "seed_sd": deviation,
}
_NOISE: Check = mapping(
    {
        "variance": deviation,
        "df": whole(count, 1),
        "documents": maybe(deviation),
        "trials": count,
        "keys": list_of(text),
    }
)
_NUMBERS: Check = list_of(maybe(number))
_CURVE: Check = mapping({"x": list_of(number), "y": _NUMBERS, "n": list_of(number)})
_GRID: Check = mapping(
    {"rows": list_of(plain), "columns": list_of(plain), "row": text, "column": text, "values": list_of(_NUMBERS)}
)
_FINDING: Check = mapping(
    {"measure": text, "version": count, "values": mapping_of(maybe(number))},
    {"data": text, "curves": mapping_of(_CURVE), "grids": mapping_of(_GRID), "seconds": number, "time": number},
)
_ENTRY: Check = both(
    mapping({"number": count, "name": text, "changes": list_of(plain), "against": text, "verdict": text}),
    mapping(
        {"seeds": count, "level": positive, "near": list_of(text), "trials": count, "reason": text, "why": text},
        {
            "difference": maybe(number),
            "half_width": maybe(number),
            "test": maybe(number),
            "parts": list_of(text),
            "one_seed": flag,
        },
    ),
)
_MEMORIES: dict[str, Check] = {  # by their kinds, or how these begin
    "step_time": mapping({"seconds": positive}),
    "noise": mapping_of(_NOISE),
    "calibrated": mapping({"train": mapping_of(plain), "asked": mapping_of(text), "of": text}),
    "challenge": mapping({"first": text, "rows": mapping_of(_NUMBERS), "entries": list_of(_ENTRY)}, {"after": count}),
    "ticket": mapping(
        {"number": count, "name": text, "changes": list_of(plain), "state": text},
        {"why": text, "message": text, "entry": maybe(count)},
    ),
    MEASURE: _FINDING,
    **dict.fromkeys(NOTES, mapping({"text": text, "tags": list_of(text)})),
}


def fault_of(table: str, place: str, name: str, value: Any) -> str | None:
    """What is wrong with the value of a row of `decision` or `memory`; None where nothing is."""
    if table == "decision":
        check = next((each for word, each in _DECISIONS.items() if f"{name} ".startswith(f"{word} ")), anything)
    else:
        check = _FINDING if place.startswith(MEASURE) else _MEMORIES.get(place, anything)
    return shapes.fault_of(value, check)


def fault_of_settings(settings: Any, role: Any) -> str | None:
    """What is wrong with the settings of a row in a role."""
    return shapes.fault_of(settings, _PROPOSED if role == "search" else _SETTINGS) or shapes.fault_of(settings, _RATED)


def fault_of_detail(detail: Any) -> str | None:
    """What is wrong with the detail of an event."""
    return shapes.fault_of(detail, _DETAIL)


def fault_of_record(record: Any) -> str | None:
    """What is wrong with a study's record that has no digest."""
    return shapes.fault_of(record, _RECORD)

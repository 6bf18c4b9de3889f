"""The trials of a study as its pages list them, and one trial as its folder and the store have it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from archlab.dashboards.curves import stamp_of
from archlab.dashboards.library import Library, Study
from archlab.search.comparison.frames import trials_frame
from archlab.search.formatting.filters import parse_filter
from archlab.search.formatting.frames import records
from archlab.search.hardware.load import FILE as LOAD
from archlab.search.reporting.main_table import OF_TRIAL, row_values, trial_values
from archlab.search.sections.rooms import select
from archlab.search.store.notes import Note
from archlab.search.store.store import KEY
from archlab.search.utils.untrusted import open_regular

_OF_TRIAL = 2  # folders of a trial, which are no links
_TAIL_BYTES, _TAIL_LINES = 64 * 1024, 200


def trials_of(study: Study) -> list[dict[str, Any]]:
    """The study's trials, each with all of its roles, and what people wrote beside it."""
    known = study.comparison
    frame = known.trials if known else trials_frame(select(study.record, study.trials), study.trials)
    found: list[dict[str, Any]] = frame.to_dict("records")
    notes = {trial["key"]: trial["note"] for trial in study.trials}
    for trial in found:
        trial["note"] = notes[trial["key"]]
        if trial["state"] in ("running", "interrupted"):
            trial["step"] = study.curves[trial["key"]].last_step or trial["step"]
    return found


def kept(study: Study, trials: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The trials that a filter keeps, which may ask what a trial has and what the table says of its variant. Raises
    BadFilter."""
    if not where.strip():
        return [*trials]
    found = study.comparison
    of = {} if found is None else {row["variant"]: row for row in row_values(found, records(found.table))}
    values = [of.get(trial["variant"], {}) | trial_values(trial) | _written(trial["note"]) for trial in trials]
    asked = parse_filter(where, dict.fromkeys(name for each in [OF_TRIAL, *values] for name in each))
    return [trial for trial, each in zip(trials, values, strict=True) if asked.holds(each)]


def _written(note: Note) -> dict[str, Any]:
    """What a filter can ask of a note: `tag` is any of the tags."""
    return {"tag": note.tags, "note": note.text}


@dataclass(frozen=True)
class Trial:
    """`row` is that of the study which is shown, `wanted` all (study, variant, role) that want it, `spec` the content
    of trial.json, `events` what happened to it."""

    key: str
    study: Study
    row: dict[str, Any]
    wanted: list[tuple[str, str, str]]
    spec: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.row["folder"])

    @property
    def state(self) -> str:
        """Its state, `interrupted` where its driver is gone."""
        state: str = self.row["state"]
        return state

    @property
    def version(self) -> str:
        """What changes when the page of it does."""
        file = self.study.curves.get(self.key)
        told = [stamp_of(self.folder / name) for name in ("output.txt", LOAD)]
        return f"{self.state}:{self.row['attempt']}:{self.row['updated']}:{file.stamp if file else None}:{told}"

    def output(self) -> str:
        """The last lines that its process printed."""
        return tail(self.folder / "output.txt", folders=_OF_TRIAL)

    def traceback(self) -> str:
        """Where the trainer raised, if it did."""
        return tail(self.folder / "error.txt", folders=_OF_TRIAL) if self.row["state"] == "failed" else ""

    def checkpoints(self) -> list[tuple[int, int, float]]:
        """(optimizer step, bytes, when written in unix s) of each, the newest first."""
        named = [(re.fullmatch(r"checkpoint-(\d+)\.pt", file.name), file) for file in self.folder.glob("checkpoint-*")]
        found = [(int(match[1]), file.lstat()) for match, file in named if match and not file.is_symlink()]
        return sorted(((step, stat.st_size, stat.st_mtime) for step, stat in found), reverse=True)

    def model_yaml(self) -> str:
        """The resolved spec, every field of it."""
        return _yaml(self.spec.get("model", {}))

    def recipe_yaml(self) -> str:
        """How it was trained, with its data and its seed."""
        recipe = {name: value for name, value in self.spec.items() if name != "model"}
        return _yaml({**recipe.pop("recipe", {}), **recipe})


def find_trial(library: Library, key: str, study: str = "") -> Trial | list[str]:
    """The trial of a key or of its beginning, or the keys that begin so: none, or several.

    `study` is preferred of those that want it. Raises StoreError, NotFound.
    """
    if not KEY.fullmatch(key):
        return []
    with library.open() as store:
        keys = store.keys_from(key)
        if len(keys) != 1:
            return keys
        (whole,) = keys
        spec, events = json.loads(store.spec(whole)), store.events(key=whole)
    names = [each["name"] for each in library.listing()]
    rows = [(name, row) for name in names for row in library.rows(name) if row["key"] == whole]
    if not rows:
        return []
    wanted = [(name, row["variant"], row["role"]) for name, row in rows]
    found = library.study(next((name for name, *_ in wanted if name == study), wanted[0][0]))
    row = next(row for row in found.trials if row["key"] == whole)
    return Trial(whole, found, row, wanted, spec, events)


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)
    return text


def tail(path: Path, most: int = _TAIL_LINES, folders: int = 0) -> str:
    """The last lines of a text file; nothing of one that isn't there. No link is followed, `open_regular` says how."""
    try:
        with open_regular(path, folders) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path.name} can't be shown: {error.strerror}"
    return "\n".join(lines[-most:])

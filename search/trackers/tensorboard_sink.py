"""Writes trials as TensorBoard's event files: a folder per study and variant, a run per trial, the table as a text.

Files are only added to. After a kill the steps that they have are read back, so that no point is written twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.store.addresses import TENSORBOARD
from archlab.search.trackers.acknowledged import Shipped, Spool, news_of, pending_of, unsent_of
from archlab.search.trackers.run_facts import facts_of, final_metrics, measured_points, run_name
from archlab.search.trackers.tracked import Position, Tracked, new_lines, span_s, values_of
from archlab.search.utils.canonical import canonical_json

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_PREFIX = "events.out.tfevents."
_EXTENSION = ".archlab"
_SHOWN, _CHANGED = ("variant", "seed", "lr", "parameters"), ("settings.", "changes.")  # columns of hyperparameters


class TensorboardSink:
    """One study's event files below the folder that ARCHLAB_TENSORBOARD names."""

    name = "TensorBoard"

    def __init__(self, study: str, spool: Spool, record: dict[str, Any]) -> None:
        self._folder = Path(os.environ[TENSORBOARD]).absolute()
        self._study, self._spool, self._record = study, spool, record
        self._target = "tensorboard:" + hashlib.sha256(str(self._folder).encode()).hexdigest()[:16]
        self._files: dict[Path, Path] = {}  # by the run's folder, that of this process

    def pending(self, trials: Sequence[Tracked]) -> int:
        """How many points and news of states were not written yet."""
        return pending_of(unsent_of(trials, self._known()))

    def _known(self) -> dict[str, Shipped]:
        """What was written, of the runs that are still there."""
        known = self._spool.all(self._target, self._study)
        return {key: shipped for key, shipped in known.items() if shipped.place and Path(shipped.place).is_dir()}

    def ship(self, trials: Sequence[Tracked]) -> None:
        """Writes what is new. Raises OSError where the folder takes nothing; the next call goes on from there."""
        for trial, shipped in unsent_of(trials, self._known()):
            place = Path(shipped.place) if shipped.place else self._place(trial)
            if place not in self._files:
                shipped = replace(shipped, place=str(place), position=_not_behind(shipped.position, place))
            shipped = replace(shipped, position=self._write(place, trial, shipped))
            self._spool.put(self._target, self._study, trial.key, replace(shipped, told=news_of(trial)))

    def _place(self, trial: Tracked) -> Path:
        """The run's folder: TensorBoard shows it as the run's name, and selects runs by a pattern of it."""
        parts = (self._study, trial.variant, f"{run_name(trial).removeprefix(trial.variant).strip()} {trial.key[:8]}")
        return self._folder.joinpath(*(re.sub(r"[^\w\-.=+ ]", "_", part).lstrip(".") or "_" for part in parts))

    def _write(self, place: Path, trial: Tracked, shipped: Shipped) -> Position:
        """Adds the new points of a trial, and its facts and final measures; how far its metrics are written then."""
        position, events = shipped.position, []
        for line in new_lines(trial.metrics, position):
            events.append(_scalars(values_of(line.record), line.record["step"], line.record["time"]))
            position = line.position
        if shipped.told != news_of(trial):
            span = span_s(trial.metrics) or (time.time(), time.time())
            events += _facts(trial, self._record, *span)
        self._append(place, events)
        return position

    def _append(self, place: Path, events: Sequence[Event]) -> None:
        """Adds to this process's file of a run. One that was cut off is never added to: another one follows it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        file = self._files.pop(place, None)
        if file is None:
            place.mkdir(parents=True, exist_ok=True)
            file = place / f"{_PREFIX}{now:.6f}{_EXTENSION}"
            events = [Event(wall_time=now, file_version="brain.Event:2"), *events]
        with open(file, "ab") as opened:
            writer = RecordWriter(opened)
            for event in events:
                writer.write(event.SerializeToString())
            writer.flush()
            os.fsync(opened.fileno())
        self._files[place] = file

    def table(self, texts: Mapping[str, str]) -> None:
        """Writes the study's table, as Markdown, where it is another than before."""
        place = self._folder / self._study
        digest = hashlib.sha256(texts["md"].encode()).hexdigest()
        if self._spool.all(self._target, self._study).get("", Shipped()) != Shipped(str(place), told=digest):
            self._append(place, [_text("table", texts["md"], round(time.time()))])
            self._spool.put(self._target, self._study, "", Shipped(str(place), told=digest))


def _not_behind(position: Position, place: Path) -> Position:
    """The position, and the steps that the run's files have: a kill may have come between a file and our note of it."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    last = {"loss": position.training, "validation_loss": position.validation}
    for path in sorted(place.glob(f"{_PREFIX}*{_EXTENSION}")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for tag in [value.tag for value in event.summary.value if value.tag in last]:
                last[tag] = max(last[tag], event.step)
    return position._replace(training=last["loss"], validation=last["validation_loss"])


def _scalars(values: Mapping[str, float], step: int, when: float) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return Event(wall_time=when, step=step, summary=Summary(value=named))


def _text(tag: str, text: str, step: int) -> Event:
    """Markdown for TensorBoard's page of texts."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shown = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    value = Summary.Value(tag=f"{tag}/text_summary", metadata=shown, tensor=tensor)
    return Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))


def _facts(trial: Tracked, record: dict[str, Any], began: float, ended: float) -> Iterator[Event]:
    """Final measures, and for TensorBoard's page of hyperparameters what the trial is and how it stands (unix s)."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    final, step = final_metrics(trial)
    if final:
        yield _scalars(final, step, ended)
    for name, value, when, at in measured_points(trial, step):
        yield _scalars({name: value}, at, when)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=began)
    facts = facts_of(trial, record)
    for name, value in ((name, facts[name]) for name in facts if name in _SHOWN or name.startswith(_CHANGED)):
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        elif value is not None:
            start.hparams[name].string_value = value if isinstance(value, str) else canonical_json(value)
    status = api_pb2.STATUS_SUCCESS if trial.state == "complete" else api_pb2.STATUS_FAILURE
    status = status if trial.finished else api_pb2.STATUS_RUNNING
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    for tag, told in (
        (metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
        (metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end)),
    ):
        value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(told), tensor=metadata.NULL_TENSOR)
        yield Event(wall_time=ended, summary=Summary(value=[value]))

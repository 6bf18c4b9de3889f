"""Shows a running study: a live view on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from archlab.search.formatting.numbers import duration_in_words
from archlab.search.formatting.words import terse
from archlab.search.recipe.steps import total_steps
from archlab.search.results.selection import tuned_paths
from archlab.search.running.pace import Pace, Part, worker
from archlab.search.store.roles import ROLE
from archlab.search.trial.metrics import last_training_line

_LINES_S = 30.0  # between two looks of plain progress
_SHOWN = 16  # running trials that plain progress has a line for


@dataclass
class RunningTrial:
    """What is known of a trial that runs: from its launch, its recipe and the end of its metrics.jsonl."""

    name: str
    folder: Path
    steps: int | None
    variant: str = ""
    launched: float = field(default_factory=time.monotonic)
    started: float = 0.0  # when its first line was seen, at first_step
    first_step: int | None = None
    last: dict[str, Any] = field(default_factory=dict)

    def look(self) -> None:
        self.last = last_training_line(self.folder) or self.last
        if self.first_step is None and self.last:
            self.first_step, self.started = self.last["step"], time.monotonic()

    def step_s(self) -> float | None:
        """Seconds per step since the first look; before that as its last line says; None while that is unknown."""
        if self.first_step is None:
            return None
        if self.last["step"] > self.first_step:
            return (time.monotonic() - self.started) / (int(self.last["step"]) - self.first_step)
        rate, step = self.last.get("tokens_per_s"), int(self.last["step"])
        return float(self.last["tokens"] / step / rate) if rate and step else None

    def left_s(self) -> float | None:
        """Seconds to its last step, None while that is unknown."""
        pace = self.step_s()
        return None if self.steps is None or pace is None else pace * max(0, self.steps - int(self.last["step"]))

    def part(self) -> Part:
        """What it has done and what is left, for the study's own pace."""
        pace = self.step_s()
        if self.steps is None or pace is None:
            return Part(self.variant, 0.0, 1.0, 0.0)
        step = int(self.last["step"])
        return Part(self.variant, step / self.steps, max(0.0, 1.0 - step / self.steps), step * pace)

    def share(self, ended: bool) -> float:
        """The share of its steps that this attempt has done, all that were left if it has `ended`."""
        if not self.steps or self.first_step is None:
            return 1.0 if ended else 0.0
        return (self.steps if ended else int(self.last["step"])) / self.steps - self.first_step / self.steps

    def cells(self) -> list[str]:
        """What is shown of it: name, step, loss, tokens per second, time left."""
        last, left = self.last, self.left_s()
        return [
            f"  {self.name}",
            f"{last.get('step', 0)}/{self.steps or '?'}",
            "" if last.get("loss") is None else f"loss {last['loss']:.3f}",
            f"{last['tokens_per_s']:,.0f} tok/s" if last.get("tokens_per_s") else "starting",
            "" if left is None else f"{duration_in_words(left)} left",
        ]


class Progress:
    """Follows the driver's events. The base keeps the numbers; subclasses show them. Use it as a context manager."""

    def __init__(self) -> None:
        self.study, self.total = "", 0
        self.running: dict[str, RunningTrial] = {}
        self.states: dict[str, str] = {}
        self.before: dict[str, int] = {}
        self.pace = Pace()
        self.most: int | None = None  # trials that the budget lets start
        self.ends: float | None = None  # when the budget of time is spent, on the monotonic clock
        self.paused: dict[str, int] = {}  # the step from which each goes on that paused in this run
        self._launched: set[str] = set()
        self._record: dict[str, Any] = {}
        self._tuned: dict[str, set[str]] = {}  # the values that each variant tries
        self._probed: set[str] = set()  # keys of the probes that have begun
        self._left_out = 0  # variants

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def plan(self, record: dict[str, Any], trials: int, rows: Iterable[dict[str, Any]] = ()) -> None:
        """What is about to run: the study's record, how many trials it will have, and the rows that the store has."""
        self.study, self.total = record["study"], trials
        self.pace, self._record = Pace.of(record), record
        for row in rows:
            self._grow(row)
            if row["state"] == "complete" and row["result"].get("train_s"):
                took_s = row["result"]["train_s"] + row["result"].get("evaluate_s", 0.0)
                self.pace.ended(worker(row["variant"], row.get("role")), took_s)
        budget = record.get("budget") or {}
        self.most = budget.get("trials")
        self.ends = time.monotonic() + budget["wall_s"] if budget.get("wall_s") else None

    def event(self, event: dict[str, Any]) -> None:
        kind, key = event["event"], event.get("key", "")
        if kind == "study":
            self.study, self.before = event["study"], dict(event["counts"])
            if self.most is not None:
                self.most = max(0, self.most - event.get("started", 0))
        elif kind == "launched":
            self._launch(key, event)
        elif "left_out" in event:  # of a section that has decided
            self.total, self._left_out = event["trials"], event["left_out"]
        elif kind in ("finished", "paused", "retry"):
            gone = self.running.pop(key, None)
            self.paused.pop(key, None)
            if kind == "finished":
                self.states[key] = event["state"]
            elif kind == "paused":
                self.paused[key] = event["result"]["step"]
            if gone is not None and kind != "retry":
                self.pace.ended(gone.variant, time.monotonic() - gone.launched, gone.share(kind == "finished"))
        elif kind == "tick":
            for left in self.running.keys() - event["running"].keys():
                del self.running[left]
            for trial in self.running.values():
                trial.look()

    def name_in(self, event: dict[str, Any]) -> str:
        """The name of the running trial that an event is about; "" where it is about none."""
        trial = self.running.get(event.get("key", ""))
        if trial is None and event["event"] == "finished" and "variant" in event:  # it could not be started
            return _name(event)
        return trial.name if trial else ""

    def _grow(self, row: dict[str, Any]) -> None:
        """Counts a value beyond those of the plan, by which a variant's grid has grown, among the trials."""
        if row.get("role") == ROLE and row.get("state") != "planned":
            self._probed.add(row["key"])
        paths = tuned_paths(self._record)
        if row.get("role") != "tune" or not paths or self._record.get("search"):
            return
        planned = math.prod(map(len, paths.values()))
        self._tuned.setdefault(row["variant"], set()).add(json.dumps(row["settings"], sort_keys=True))
        grown = sum(max(0, len(values) - planned) for values in self._tuned.values())
        variants = self._record["variants"]
        least = (len(variants) - self._left_out) * (planned - 1 + len(self._record["seeds"]))
        least += sum("probe" in variant for variant in variants)
        self.total = max(self.total, least + grown)

    def _launch(self, key: str, event: dict[str, Any]) -> None:
        """A trial was launched, or was found running since `since` (unix s)."""
        self._grow(event)
        folder = Path(event["folder"])
        role, name = event.get("role"), _name(event)
        launched = time.monotonic() - max(0.0, time.time() - event.get("since", time.time()))
        self.running[key] = RunningTrial(name, folder, total_steps(folder), worker(event["variant"], role), launched)
        self.pace.width = max(self.pace.width, len(self.running))
        self._launched.add(key)

    @property
    def done(self) -> int:
        """Trials that have ended, in this run or before."""
        return self.before.get("reused", 0) + len(self.states)

    def left_s(self) -> float | None:
        """Seconds to the end of the study or of its budget; None before there is anything to go by."""
        waiting = max(0, self.total - self.done - len(self.running))
        if self.most is not None:
            waiting = min(waiting, max(0, self.most - len(self._launched)))
        probes = sum("probe" in variant for variant in self._record.get("variants", ()))
        cheap = min(waiting, probes - len(self._probed)) if probes else 0  # a probe is less than a whole trial
        work = waiting - cheap * (1 - self.pace.probes / max(probes, 1))
        left = self.pace.left_s(work, [trial.part() for trial in self.running.values()])
        return left if left is None or self.ends is None else min(left, max(0.0, self.ends - time.monotonic()))

    def headline(self) -> str:
        failed = sum(state == "failed" for state in self.states.values()) + self.before.get("failed", 0)
        diverged = sum(state == "diverged" for state in self.states.values()) + self.before.get("diverged", 0)
        parts = [f"{self.study}: {self.done}/{max(self.total, self.done + len(self.running))} trials"]
        parts += [f"{len(self.running)} running"] if self.running else []
        parts += [f"{failed} failed"] if failed else []
        parts += [f"{diverged} diverged"] if diverged else []
        left = self.left_s()
        return ", ".join(parts + ([f"about {duration_in_words(left)} left"] if left is not None else []))


def _name(event: dict[str, Any]) -> str:
    """A trial as the study says it: its variant, what differs, its seed."""
    said = (event["variant"], "probe" * (event.get("role") == ROLE), *terse(event["settings"]), f"seed {event['seed']}")
    return " ".join(filter(None, said))


class LiveProgress(Progress):
    """A line per running trial under the study's headline, redrawn in place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, event: dict[str, Any]) -> None:
        """See Progress; what must not scroll away is printed above the live view."""
        name = self.name_in(event)
        super().event(event)
        if told := line_of(event, name, quiet=True):
            self._console.print(Text(told))
        self._live.update(self.view(), refresh=True)

    def view(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for trial in self.running.values():
            table.add_row(*map(Text, trial.cells()))
        return Group(Text(self.headline(), style="bold"), table)


class LineProgress(Progress):
    """A line per event, and the headline now and then: for logs."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__()
        self._file, self._next = file, 0.0

    def event(self, event: dict[str, Any]) -> None:
        name = self.name_in(event)
        super().event(event)
        told = line_of(event, name or self.name_in(event), step=self.paused.get(event.get("key", "")))
        if event["event"] == "tick" and time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINES_S
            shown = [*self.running.values()][:_SHOWN]
            told = "\n".join([self.headline(), *("  ".join(filter(None, each.cells())) for each in shown)])
        if told:
            print(told, file=self._file, flush=True)


class JsonProgress(Progress):
    """Every event as a line of JSON, and the state of the running trials twice a minute."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__()
        self._file, self._next = file, 0.0

    def plan(self, record: dict[str, Any], trials: int, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().plan(record, trials, rows)
        self._print({"event": "plan", "study": record["study"], "trials": trials})

    def event(self, event: dict[str, Any]) -> None:
        super().event(event)
        if event["event"] != "tick":
            self._print(event)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINES_S
            running = {key: trial.last for key, trial in self.running.items()}
            self._print({"event": "progress", "done": self.done, "left_s": self.left_s(), "running": running})

    def _print(self, value: dict[str, Any]) -> None:
        print(json.dumps(value), file=self._file, flush=True)


def make_progress(as_json: bool = False) -> Progress:
    """JSON lines on stdout if asked; else on stderr, live where that is a terminal."""
    if as_json:
        return JsonProgress(sys.stdout)
    console = Console(stderr=True)
    return LiveProgress(console) if console.is_terminal else LineProgress(sys.stderr)


_LINES = {
    "retry": "retry     {name}: {event[kind]}: {event[message]}",
    "plugin": "plug-in   {event[message]}",
    "edited": "edited    {event[message]}",
    "settled": "{event[message]}",
    "shipping": "sending what is left to the trackers, MLflow among them (Ctrl-C leaves it to the next run)",
    "stop": "stopping: {event[message]} (trials write a checkpoint first; Ctrl-C stops at once)",
}


def line_of(event: dict[str, Any], name: str, quiet: bool = False, step: int | None = None) -> str:
    """An event in a line for people, "" for one that needs none; `quiet` leaves out what goes well.

    `step` is the one from which a trial goes on that paused.
    """
    kind = event["event"]
    if kind == "launched" and not quiet:
        return f"start     {name} (" + (f"attempt {event['attempt']})" if step is None else f"from step {step})")
    if kind == "finished":
        loss = ((event["result"] or {}).get("validation") or {}).get("loss")
        told = event["reason"] or ("" if loss is None else f"validation loss {loss:.4f}")
        ended = f"{event['state']:<9} {name}: {told}".rstrip(": ")
        rough = [f"rough     {name}: {sign}" for sign in event.get("signs", ())]
        return "\n".join([*([] if quiet and event["state"] == "complete" else [ended]), *rough])
    if kind == "smoke":
        figures = [f"{1000 * event['step_s']:.0f} ms a step"] if event["step_s"] else []
        figures += [f"{event['peak_memory_bytes'] / 1e9:.2f} GB"] if event["peak_memory_bytes"] else []
        told = ", ".join([f"{event['verdict']} in micro-batches of {event['micro_batch']}", *figures])
        return f"smoke     {event['variant']}: {told}" + (f": {event['reason']}" if event["reason"] else "")
    if kind == "evaluation":
        told = [f"measured  {event['name']}: {', '.join(event['found'])}"] if event["found"] and not quiet else []
        return "\n".join([*told, *([f"failed    {event['name']}: {event['wrong']}"] if event["wrong"] else [])])
    if "messages" in event:  # of a section, under its key
        return "\n".join(event["messages"])
    return _LINES.get(kind, "").format(name=name, event=event)

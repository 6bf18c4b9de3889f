"""What was trained for a study, and what it would have been without reuse, early ends, pruning, and the like.

All is counted in tokens. What is saved is what the trials of the study would have trained beside what they did: it is
counted once it is certain, so that a study on its way saves less than it will.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archlab.search.formatting.words import counted
from archlab.search.results.selection import Selection, is_lost, is_over
from archlab.search.store.roles import ROLE
from archlab.search.store.store import TERMINAL

SAVED = {
    "reuse": "reuse",
    "early": "early ends of tuned values",
    "pruned": "pruning",
    "seeds": "sequential seeds",
}
"""What saves, and how a sentence names it; a section by its key."""
_TOLD = 0.1  # of the seconds of training: a sentence tells an evaluation that took so long
_LINE = 1 / 400  # of a trial: how far the last line of its journal may be behind a step at which it pauses
_ENDS = (*TERMINAL, "paused", "planned")  # kinds of events that end an attempt


@dataclass(frozen=True)
class Share:
    """The tokens of one trial: trained by the study, trained by others, and not trained, by what saved them."""

    trained: int = 0
    reuse: int = 0
    early: int = 0
    pruned: int = 0

    @property
    def seen(self) -> int:
        """What its weights were trained on."""
        return self.trained + self.reuse


def training_cost(
    record: Mapping[str, Any],
    trials: Iterable[dict[str, Any]],
    selections: Sequence[Selection],
    spared: Mapping[str, int],
) -> dict[str, Any]:
    """The cost of a study from its record, all its rows, what was selected of them, and the tokens that sections of the
    study `spared`, by their keys, which are the roles of the trials that they took for it.

    `tokens` of `trials` were trained for it, repeated ones included, in `seconds` as far as its trials were timed:
    `timed_tokens`, on what `on` says, None where that differs; `evaluate_seconds` went to the evaluations at their
    ends. `saved` has the tokens of what saved any, by the keys of SAVED; `without` all of these it would have been that
    many tokens.

    A row's `spent` are the tokens that the study's own attempts at the trial took; without it, what follows from who
    finished the trial.
    """
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for trial in trials:
        rows[trial["key"]].append(trial)
    whole = _whole(record, rows.values())
    settled = {selection.variant for selection in selections if selection.settled}
    shares = {key: _share(mine, whole, settled) for key, mine in rows.items()}
    saved = {name: sum(getattr(share, name) for share in shares.values()) for name in ("reuse", "early", "pruned")}
    saved["pruned"] += _given_up(record, selections, whole)
    saved["seeds"] = _spare_seeds(record, selections, whole)
    for section, count in spared.items():
        own = sum(shares[key].seen for key, mine in rows.items() if mine[0]["role"] == section)
        saved[section] = max(0, count - own)
    tokens = sum(share.trained for share in shares.values())
    return {
        "tokens": tokens,
        "trials": sum(share.trained > 0 for share in shares.values()),
        **_time(rows, shares),
        "evaluate_seconds": _evaluation(rows, shares),
        "saved": {name: count for name, count in saved.items() if count},
        "without": tokens + sum(saved.values()),
    }


def spent_on(events: Iterable[Mapping[str, Any]]) -> dict[str, int | None]:
    """The tokens that a study's own attempts took by trial, from its events; None where one that ended did not say."""
    found: dict[str, int | None] = {}
    for event in events:
        key = event["key"]
        if event["kind"] == "running":
            found.setdefault(key, 0)
        elif key in found and event["kind"] in _ENDS:
            before, tokens = found[key], (event["detail"].get("spent") or {}).get("tokens")
            found[key] = None if before is None or tokens is None else before + tokens
    return found


def cost_sentence(cost: Mapping[str, Any]) -> str:
    """The cost for people: "Trained 34.2M tokens in 41 trials (0.9 h of one core); without reuse (12M) it would have
    been 46.2M."; "" where nothing was trained or saved yet."""
    from archlab.search.formatting.numbers import duration_in_words

    if not cost.get("without"):
        return ""
    told = "Trained nothing"
    if count := cost["trials"]:
        told = f"Trained {counted(cost['tokens'])} tokens in {count:,} trial{'s' if count > 1 else ''}"
    if seconds := cost["seconds"]:
        least = "" if cost["timed_tokens"] == cost["tokens"] else "more than "
        evaluated = cost.get("evaluate_seconds") or 0.0
        after = f", {duration_in_words(evaluated)} more to evaluate" if evaluated >= _TOLD * seconds else ""
        told += f" ({least}{duration_in_words(seconds)}{' of ' + cost['on'] if cost['on'] else ''}{after})"
    shares = [f"{SAVED.get(name, f'the {name}')} ({counted(count)})" for name, count in cost["saved"].items()]
    if shares:
        listed = " and ".join([*([", ".join(shares[:-1])] if shares[1:] else []), shares[-1]])
        unit = "" if count else " tokens"
        told += f"; without {listed} it would have been {counted(cost['without'])}{unit}"
    return f"{told}."


def _whole(record: Mapping[str, Any], rows: Iterable[Sequence[dict[str, Any]]]) -> dict[tuple[str, bool], int]:
    """By variant, and whether it is its probe, the tokens of a trial that comes to its end: those of one that did, as
    the last batch is a whole one, else those that were asked for."""
    found = {}
    for variant in record["variants"]:
        asked = variant.get("tokens", record["tokens"]) + sum(stage["tokens"] for stage in variant.get("stages", ()))
        found[variant["name"], False] = asked
        found[variant["name"], True] = (variant.get("probe") or {}).get("tokens", asked)
    for mine in rows:
        if mine[0]["state"] == "complete" and (tokens := mine[0]["result"].get("tokens")):
            found.update((_kind(each), tokens) for each in mine)
    return found


def _kind(trial: Mapping[str, Any]) -> tuple[str, bool]:
    return trial["variant"], trial["role"] == ROLE


def _share(mine: Sequence[dict[str, Any]], wholes: Mapping[tuple[str, bool], int], settled: set[str]) -> Share:
    """What became of one trial, given all of its rows."""
    trial, whole = mine[0], wholes.get(_kind(mine[0]), 0)
    spent = trial.get("spent")
    if trial["state"] not in ("complete", "diverged", "paused"):
        known = trial["state"] == "pruned" and spent is not None
        return Share(spent or 0, pruned=max(0, whole - (spent or 0)) if known else 0)
    seen = trial["result"].get("tokens", 0)
    missing = seen - (_own(trial, seen) if spent is None else spent)
    reuse = missing if missing > whole * _LINE else 0
    early = trial["state"] == "paused" and all(
        is_over(each) and not is_lost(each) and each["variant"] in settled for each in mine
    )
    return Share(max(spent or 0, seen - reuse), reuse, max(0, whole - seen) if early else 0)


def _own(trial: Mapping[str, Any], seen: int) -> int:
    """What a study trained of a trial that ended, where its attempts did not say: nothing of one that another study
    finished, and of one that went on from a shorter one the rest."""
    if trial["reused"]:
        return 0
    continued = trial["result"].get("continued")
    return round(seen * (1 - continued["step"] / trial["result"]["step"])) if continued else seen


def _given_up(record: Mapping[str, Any], selections: Iterable[Selection], whole: Mapping[tuple[str, bool], int]) -> int:
    """The seeds that never began as another one of their variant was pruned."""
    seeds = (record.get("sequential") or {}).get("min") or len(record["seeds"])
    pruned = (each for each in selections if each.pruned and not _is_searched(each))
    return sum(max(0, seeds - len(each.reported)) * whole[each.variant, False] for each in pruned)


def _spare_seeds(
    record: Mapping[str, Any], selections: Sequence[Selection], whole: Mapping[tuple[str, bool], int]
) -> int:
    """The seeds that no comparison needed, up to the most that the study asks for; once none is asked for any more."""
    wanted = [each for each in selections if not each.left_out]
    if not record.get("sequential") or any(s.missing_seeds or not s.settled for s in wanted if not s.has_no_mean):
        return 0
    grown = [each for each in wanted if each.reported and not each.has_no_mean and not _is_searched(each)]
    return sum(max(0, len(record["seeds"]) - len(each.reported)) * whole[each.variant, False] for each in grown)


def _is_searched(selection: Selection) -> bool:
    return any(trial["role"] == "search" for trial in selection.tuned)


def _time(rows: Mapping[str, Sequence[dict[str, Any]]], shares: Mapping[str, Share]) -> dict[str, Any]:
    """Seconds of training: of each trial at its own pace, of one that tells none at that of its variant."""
    paces: dict[tuple[str, bool], list[float]] = defaultdict(list)
    places = set()
    for mine in rows.values():
        result = mine[0]["result"] or {}
        if pace := result.get("tokens_per_s"):
            for kind in {_kind(each) for each in mine}:
                paces[kind].append(pace)
        if shares[mine[0]["key"]].trained and (found := result.get("fingerprint")):
            places.add(_place(found))
    timed, seconds = 0, 0.0
    for key, mine in rows.items():
        own = (mine[0]["result"] or {}).get("tokens_per_s")
        known = [own] if own else paces.get(_kind(mine[0]), [])
        if known:
            timed += shares[key].trained
            seconds += shares[key].trained / float(np.mean(known))
    on = places.pop() if len(places) == 1 else None
    return {"seconds": seconds or None, "timed_tokens": timed, "on": on}


def _evaluation(rows: Mapping[str, Sequence[dict[str, Any]]], shares: Mapping[str, Share]) -> float:
    """Seconds that the trials which were trained took to evaluate their held-out text at their end."""
    mine = [each[0]["result"] or {} for key, each in rows.items() if shares[key].trained]
    return float(sum(result.get("evaluate_s") or 0.0 for result in mine))


def _place(fingerprint: Mapping[str, str]) -> str | None:
    """What one trial had: its cores or its GPU; None where several processes shared it."""
    if "parallel" in fingerprint:
        return None
    if fingerprint.get("device", "cpu") != "cpu":
        return "one GPU"
    threads = fingerprint.get("threads")
    return None if threads is None else "one core" if threads == "1" else f"{threads} cores"

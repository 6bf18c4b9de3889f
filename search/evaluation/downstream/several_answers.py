"""Several answers to each question: pass@k and maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from archlab.arch_dsl.compiler.generation import Sampling, seed_of
from archlab.search.evaluation.downstream.harness import HarnessModel
from archlab.search.evaluation.downstream.sandbox import has_no_network, run

Rows = list[list[float]]  # a score for each document and sample


def pass_at(k: int, right: int, samples: int) -> float:
    """1 - C(n - c, k) / C(n, k): the unbiased chance that one of k samples is right, when c of n are
    (arXiv:2107.03374, equation 1). Raises ValueError for k > n."""
    if k > samples:
        raise ValueError(f"pass@{k} needs as many samples, there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(k: int, answers: Sequence[Hashable], scores: Sequence[float]) -> float:
    """The score of the most frequent of k answers, the earliest of several, as a mean over the first whole groups of k
    (arXiv:2203.11171, self-consistency; maj1@k of arXiv:2206.14858)."""
    found = []
    for start in range(0, len(answers) - k + 1, k):
        own = answers[start : start + k]
        winner = Counter(own).most_common(1)[0][0]  # of equals the first seen
        found.append(scores[start + own.index(winner)])
    return sum(found) / len(found)


def several(
    model: HarnessModel,
    task: Any,
    limit: int | None,
    samples: int,
    sampling: Sampling | None,
    ks: Sequence[int],
    majorities: Sequence[int],
) -> dict[str, float]:
    """The mean score of a task that generates, pass@k where answers are right or wrong, and maj@k.

    Every sample is filtered and scored by itself, as the task does a single one; a task with `unsafe_code` is scored by
    running answer and target in the sandbox (`no_network` says whether programs have none). `sampling` None is the
    task's own.
    """
    task.build_all_requests(limit=limit)
    requests = task.instances
    every = [(request, sample) for request in requests for sample in range(samples)]
    seeds = [seed_of("lm_eval", each.task_name, each.doc_id, each.idx, sample) for each, sample in every]
    said = model.answers([each.args[:2] for each, _ in every], seeds, sampling)
    answers = [said[place : place + samples] for place in range(0, len(said), samples)]
    scores: dict[str, Rows] = {}
    told: dict[str, list[list[Any]]] = {}
    for sample in range(samples):
        for request, own in zip(requests, answers, strict=True):
            request.resps, request.filtered_resps = [own[sample]], {}
        task.apply_filters()
        for row, request in enumerate(requests):
            model.text.tick()
            for kept, answer in request.filtered_resps.items():
                for metric, score in _scored(task, request.doc, answer).items():
                    name = metric if kept == "none" or task.config.unsafe_code else f"{metric}_{kept}"
                    scores.setdefault(name, [[] for _ in requests])[row].append(score)
                    told.setdefault(name, [[] for _ in requests])[row].append(str(answer))
    found = {"n": float(len(requests))}
    if task.config.unsafe_code:
        found["no_network"] = float(has_no_network())
    return found | _summary(scores, told, ks, () if task.config.unsafe_code else majorities)


def _scored(task: Any, doc: Any, answer: Any) -> dict[str, float]:
    """The numbers that a task gives one answer."""
    if task.config.unsafe_code:
        program = answer[0] if isinstance(answer, list) else answer
        return {"pass": float(run(f"{program}\n{task.doc_to_target(doc)}").passed)}
    found = task.process_results(doc, [answer])
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _summary(
    scores: dict[str, Rows], told: dict[str, list[list[Any]]], ks: Sequence[int], majorities: Sequence[int]
) -> dict[str, float]:
    values = {}
    for name, rows in scores.items():
        values[name] = _mean([sum(row) / len(row) for row in rows])
        if all(score in (0.0, 1.0) for row in rows for score in row):
            for k in ks:
                values[f"{name}_pass_at_{k}"] = _mean([pass_at(k, round(sum(row)), len(row)) for row in rows])
        for k in majorities:
            pairs = zip(told[name], rows, strict=True)
            values[f"{name}_maj_at_{k}"] = _mean([majority(k, own, row) for own, row in pairs])
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

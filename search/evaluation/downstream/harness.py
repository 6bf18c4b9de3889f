"""Tasks of EleutherAI's lm-evaluation-harness, asked of a compiled model. Only this file imports `lm-eval`.

The harness makes prompts, filters answers and scores them; how likely a text is and how it goes on is ours.
"""

from __future__ import annotations

import io
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from archlab.arch_dsl.compiler.generation import GREEDY, Sampling, seed_of
from archlab.search.evaluation.downstream.task_files import config, data_files, is_path, task_files
from archlab.search.evaluation.downstream.text_model import TextModel

PYTHON_SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234  # the harness's own: examples are those of everyone else
_BEAT_S = 20.0
_MOST = 256  # tokens of an answer, where a task does not say


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A text model as the harness's. An empty context is the end of a document, as documents begin in training."""

    def __init__(self, text: TextModel) -> None:
        super().__init__()
        self.text = text

    @property
    def eot_token_id(self) -> int:
        return self.text.codec.eod

    @property
    def max_length(self) -> int:
        return self.text.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The harness's rule: spaces at the end of a context belong to what follows, and the two are cut into tokens
        together. A tokenizer that then joins them across the seam leaves nothing to score: they are cut apart."""
        before, after = super()._encode_pair(context, continuation)
        if not after:
            before, after = self.tok_encode(context), self.tok_encode(continuation)
        return before or [self.prefix_token_id], after

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.text.scores([(before, after) for _, before, after in requests])

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """log p of each whole text after the end of a document, every token of it predicted once."""
        pairs = [([self.prefix_token_id], self.tok_encode(request.args[0])) for request in requests]
        return [total for total, _ in self.text.scores(pairs)]

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Answers as each request asks for them; copies of a request differ by their seed."""
        copies, seeds = Counter[tuple[Any, ...]](), []
        for request in requests:
            name = (request.task_name, request.doc_id, request.idx)
            seeds.append(seed_of("lm_eval", *name, copies[name]))
            copies[name] += 1
        return self.answers([request.args[:2] for request in requests], seeds)

    def answers(
        self, asked: Sequence[tuple[str, dict[str, Any]]], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> list[str]:
        """Answers to prompts as each asks for them, one for each seed; `sampling` None is their own."""
        alike: dict[str, list[int]] = {}
        for place, (_, said) in enumerate(asked):
            alike.setdefault(json.dumps(said, sort_keys=True, default=str), []).append(place)
        found = [""] * len(asked)
        for places in alike.values():
            said = asked[places[0]][1]
            until = said.get("until") or []
            until = [until] if isinstance(until, str) else until
            most = int(said.get("max_gen_toks") or said.get("max_new_tokens") or _MOST)
            prompts = [self.tok_encode(asked[place][0]) or [self.prefix_token_id] for place in places]
            own = [seeds[place] for place in places]
            texts = self.text.continued(prompts, most, until, sampling or sampling_of(said), own)
            for place, text in zip(places, texts, strict=True):
                found[place] = text
        return found


def sampling_of(asked: dict[str, Any]) -> Sampling:
    """How a task has its answers drawn; without `do_sample` they are the likeliest."""
    if not asked.get("do_sample"):
        return GREEDY
    top_k, top_p = asked.get("top_k"), asked.get("top_p")
    return Sampling(
        float(asked.get("temperature", 1.0)), int(top_k) if top_k else None, float(top_p) if top_p else None
    )


@lru_cache(maxsize=1)
def index() -> TaskManager:
    """The harness's own tasks; to read their files takes seconds."""
    with quiet():
        return TaskManager()


def names() -> list[str]:
    """All tasks, groups and tags that the harness has."""
    return list(index().all_tasks)


def says(task: str) -> list[dict[str, Any]]:
    """What the files of a task say, with nothing of it run; those of a group's members where it names them."""
    if is_path(task):
        return [said for file in task_files(Path(task)) if "task" in (said := config(file))]
    entry = index().task_index.get(task)
    if entry is None:
        return []
    said = entry.cfg or {}
    members = sorted(entry.tags) if entry.kind.name == "TAG" else said.get("task")
    if not isinstance(members, list):
        return [said]
    inner = [each if isinstance(each, str) else each.get("task") or each.get("group") for each in members]
    return [found for each in inner if isinstance(each, str) and each != task for found in says(each)]


def load(tasks: Sequence[str], shots: int | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, list[str]]]:
    """Tasks by name, groups by name, and for each name that is asked for the tasks or the group that it stands for.

    `shots` replaces how many examples stand before a question, but where a task says that it has none.
    """
    manager = index() if not all(map(is_path, tasks)) else TaskManager(include_defaults=False)
    found: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    asked: dict[str, list[str]] = {}
    for task in tasks:
        loaded = manager.load(_specs(task) if is_path(task) else [task])
        found |= loaded["tasks"]
        groups |= loaded["groups"]
        group = loaded["groups"].get(task)
        asked[task] = [task] if group is not None and group.has_aggregation else list(loaded["tasks"])
    for each in found.values():
        own = each.get_config("num_fewshot")
        each.set_config(key="num_fewshot", value=own or 0 if shots is None or own == 0 else shots)
        each.set_fewshot_seed(seed=FEWSHOT_SEED)
    return found, groups, asked


def _specs(task: str) -> list[dict[str, Any]]:
    """The tasks of a file or a folder, whose data files are looked for beside them."""
    found = []
    for file in task_files(Path(task)):
        if not isinstance(config(file).get("task"), str):
            continue  # what others include
        said = load_yaml(file, resolve_func=True)
        said = {name: value for name, value in said.items() if name not in ("tag", "group", "task_list")}
        kwargs = data_files(file)
        found.append(said | ({"dataset_kwargs": kwargs} if kwargs else {}))
    return found


def results(model: HarnessModel, tasks: dict[str, Any], groups: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """{name of a task or a group: {metric: number}}, and its documents as `n`, as the harness evaluates."""
    members = {name: group.child_names for name, group in groups.items()}
    loaded = {"tasks": tasks, "groups": groups, "group_map": members}
    told = evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    assert told is not None
    counts = {name: float(told["n-samples"][name]["effective"]) for name in tasks}
    for name, group in groups.items():
        counts[name] = sum(counts[task.task_name] for task in group.get_all_tasks())
    rows = {**told["results"], **told.get("groups", {})}
    return {name: {**_numbers(row), "n": counts[name]} for name, row in rows.items()}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """`acc,none` as acc, `exact_match,strict-match` as exact_match_strict-match."""
    found = {}
    for key, value in row.items():
        metric, comma, kept = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            found[metric if kept == "none" else f"{metric}_{kept}"] = float(value)
    return found


@contextmanager
def awake(tick: Callable[[], None], most_s: float = 1800.0) -> Iterator[None]:
    """Calls `tick` now and then, as data are loaded and prompts made without it; not for ever, so that what hangs is
    seen. A request to stop that it raises is heard at the next forward pass."""
    ended, until = threading.Event(), time.monotonic() + most_s

    def beat() -> None:
        with suppress(Exception):
            while time.monotonic() < until and not ended.wait(_BEAT_S):
                tick()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and notices of the libraries. Some tasks shuffle choices by Python's or NumPy's global
    generator: both begin here as the harness's own program begins them, all trials are asked the same. Their states are
    put back."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(PYTHON_SEED)
    np.random.seed(NUMPY_SEED)
    levels = {name: logging.getLogger(name).level for name in ("lm_eval", "datasets")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not bars:
            datasets.enable_progress_bars()

"""A small data set and an uneven model over it, and task files, for the tests of what is downstream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from archlab import arch_dsl
from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.evaluation.measures import About, Subject
from archlab.search.recipe.recipe import load_recipe

CONTEXT = 64
WORDS = [b"to be or not to be", b"that is the question", b"whether 'tis nobler", b"slings and arrows"]


def byte_data(root: Path, splits: dict[str, list[bytes]] | None = None) -> Dataset:
    """Documents of each split as bytes, by default the same few in all."""
    (root / "data").mkdir(parents=True)
    facts = {"tokenizer": {"type": "bytes"}}
    splits = splits or dict.fromkeys(("train", "validation", "test"), WORDS * 9)
    write(root / "data", Bytes().train([], "tokenizer"), splits, facts)
    return Dataset.open(root, "data")


def subject(dataset: Dataset, block: dict[str, Any] | None = None, **recipe: Any) -> Subject:
    """An untrained model of a data set's vocabulary, whose logits are made uneven."""
    attention = {"type": "attention", "heads": 2, "positional": "rope"}
    plain = {
        "d_model": 32,
        "n_layers": 2,
        "init": {"std": 0.02},
        "block": block or {"norm": "rmsnorm", "attention": attention},
    }
    model = arch_dsl.resolve(arch_dsl.load(plain), vocab=dataset.vocab, max_positions=CONTEXT)
    fields = {"tokens": 5000, "context": CONTEXT, "batch": 4, "lr": 1e-3, "precision": "fp32", **recipe}
    weights = {name: value.clone() for name, value in arch_dsl.compile(model, seed=3).state_dict().items()}
    weights["embedding"] = weights["embedding"] * 20
    return Subject(About(model, load_recipe(fields), dataset), torch.device("cpu"), weights, lambda: None)


def log_p(asked: Subject, read: list[int], after: list[int]) -> tuple[float, bool]:
    """log p of tokens after others, one token at a time, each from all that is before it in the window."""
    model, tokens, total, greedy = asked.at(CONTEXT).eval(), list(read), 0.0, True
    for token in after:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        greedy &= int(logits.argmax()) == token
        tokens.append(token)
    return total, greedy


def task(folder: Path, name: str, rows: list[dict[str, Any]], **said: Any) -> Path:
    """A task file with its documents beside it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        **said,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return folder / f"{name}.yaml"

"""Mixtures and tokens are trained on and reported: perplexity by domain, tokenizers by bytes per token, overlap."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archlab.search.comparison.compare import compare, load_comparison
from archlab.search.data import Dataset, rows
from archlab.search.formatting.tables import DASH
from archlab.search.reporting.report import report
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.training.loop import Loop
from tests.search.compare_kit import make_study

STUDY = """\
study: s
model:
  d_model: 16
  n_layers: 1
  block: {norm: rmsnorm, attention: {heads: 2, positional: rope}, ffn: {type: glu}}
variants: {baseline: {}, other: VARIANT}
seeds: 2
train:
  data: DATA
  tokens: 4k
  context: 32
  batch: 4
  lr: 3e-3
"""


def trained(folder: Path, data: str, variant: str) -> Store:
    (folder / "study.yaml").write_text(STUDY.replace("DATA", data).replace("VARIANT", variant))
    assert run(folder / "study.yaml", folder / "store", executor="inline", track=False).exit_code == 0
    return Store.open(folder / "store", create=False)


def test_a_mixture_is_trained_on_in_its_shares_and_reported_by_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} " + "ab" * (20 + n)}) + "\n" for n in range(60))
    )
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} " + "xyz" * (9 + n)}) + "\n" for n in range(60))
    )
    domains = "{mixture: {a: {jsonl: a.jsonl, weight: 3}, b: {jsonl: b.jsonl, weight: 1}}}"
    seen: list[Any] = []
    whole = Loop.gradients
    monkeypatch.setattr(Loop, "gradients", lambda self, step: (seen.append(self), whole(self, step))[1])
    with trained(tmp_path, domains, "{train.data.domains.b.weight: 3}") as store:
        comparison = load_comparison(store, "s")
        record = store.study("s")
    streams = seen[0].streams
    assert [share for share, _ in streams] == [0.75, 0.25]
    found = rows(streams, seen[0].seed, 0, 128, 32)
    first = [max(set(bytes(row[row < 256].astype(np.uint8)).decode()) & set("abxyz"), default="") for row in found]
    assert sum(letter in ("a", "b") for letter in first) == pytest.approx(96, abs=3)
    assert len({variant["test"] for variant in record["variants"]}) == 1, "weights touch training alone"
    assert [row["name"] for row in record["data"]["domains"]] == ["a", "b"]
    frame = comparison.domains.set_index(["variant", "domain"])["loss"]
    assert set(frame.index) == {(name, domain) for name in ("baseline", "other") for domain in "ab"}
    assert frame["other", "b"] < frame["baseline", "b"], "what is seen more often is learnt better"
    text = report(comparison, "text")
    assert "Test perplexity by domain" in text and comparison.noise["unpaired"] == ["other"]
    sizes = {row["name"]: row["train_tokens"] for row in record["data"]["domains"]}
    assert f"baseline: a 75% of the rows, {3000 / sizes['a']:.2g} epochs; b 25% of the rows" in " ".join(text.split())


def test_tokens_are_trained_on_and_have_no_bits_per_byte(tmp_path: Path) -> None:
    chance = random.Random(0)
    documents = [[*chance.choices(range(1, 40), k=chance.randrange(30, 90)), 0] for _ in range(80)]
    np.array([token for document in documents for token in document], dtype="<u2").tofile(tmp_path / "a.bin")
    tokens = "{tokens: a.bin, vocab: 40, eod: 0, dtype: uint16}"
    with trained(tmp_path, tokens, "{block.attention.heads: 4}") as store:
        comparison = load_comparison(store, "s")
        record = store.study("s")
    data = Dataset.open(tmp_path / "store" / "data", record["data"]["identity"])
    assert (data.vocab, data.eod) == (40, 0) and "bytes_per_token" not in record["data"]
    assert comparison.table["perplexity_mean"].between(10, 60).all()
    assert comparison.table["bits_per_byte_mean"].isna().all() and comparison.noise["unit"] == "nats/token"
    line = next(line for line in report(comparison, "md").splitlines() if line.startswith("| baseline"))
    assert DASH in line


def test_tokenizers_are_told_apart_by_their_bytes_per_token() -> None:
    record, trials = make_study({"bytes": 0.0, "bpe": 0.1})
    assert "bytes/token" not in report(compare(record, trials), "md")
    for variant, density in zip(record["variants"], (0.999, 3.25), strict=True):
        variant["bytes_per_token"] = density
    text = report(compare(record, trials), "md")
    assert "bytes/token" in text and "3.250" in text


@pytest.mark.parametrize(("shared", "told"), [(0.19, False), (0.31, True)])
def test_a_report_says_when_the_test_text_was_trained_on(shared: float, told: bool) -> None:
    record, trials = make_study({"base": 0.0, "other": 0.1})
    record["data"]["overlap"] = {"validation": 0.9, "test": shared}
    notes = [note for note in compare(record, trials).notes if "13-grams" in note]
    assert bool(notes) == told
    assert not told or notes[0].startswith("31% of the 13-grams of words of the test text are in the training text too")


def test_domains_average_over_seeds_and_need_whole_documents() -> None:
    record, trials = make_study({"base": 0.0, "other": 0.1}, seeds=3)
    record["data"]["domains"] = [{"name": "a"}, {"name": "b"}]
    for trial in trials:
        trial["documents"]["domain"] = np.repeat([0, 1], [30, 50])
    frame = compare(record, trials).domains
    mine = [t["documents"] for t in trials if t["variant"] == "other" and t["role"] == "repeat"]
    losses = [d["nll"][30:].sum() / d["tokens"][30:].sum() for d in mine]
    row = frame[(frame["variant"] == "other") & (frame["domain"] == "b")].iloc[0]
    assert row["loss"] == pytest.approx(np.mean(losses)) and row["perplexity"] == pytest.approx(np.mean(np.exp(losses)))
    record["variants"][1]["domains"] = ["c", "d"]
    assert [*compare(record, trials).domains["domain"]] == ["a", "b", "c", "d"], "a variant has its own data"
    del record["data"]["domains"], record["variants"][1]["domains"]
    assert compare(record, trials).domains.empty

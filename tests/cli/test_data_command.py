"""`archlab data` says of a study's text what became of it, and trains nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from archlab.cli.main import main
from archlab.search.data import Dataset

STUDY = """\
study: domains
model:
  d_model: 16
  n_layers: 1
  block: {norm: rmsnorm, attention: {heads: 2, positional: rope}, ffn: {type: glu}}
variants: {baseline: {}, other: {block.attention.heads: 4}}
train:
  data:
    mixture:
      prose: {text: {files: prose.txt, separator: "\\n==\\n"}, weight: 3, clean: [{quality: gopher}]}
      lists: {jsonl: lists.jsonl, weight: 1}
  tokens: 8k
  context: 32
  batch: 4
  lr: 1e-3
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chance = random.Random(0)
    words = ["the", "and", "of", *(f"word{number}" for number in range(60))]
    prose = [" ".join(["the", "of", *chance.choices(words, k=70)]) for _ in range(80)]
    (tmp_path / "prose.txt").write_text("\n==\n".join([*prose, "short"]))
    (tmp_path / "lists.jsonl").write_text(
        "".join(json.dumps({"text": f"a list: {n} {n * n}"}) + "\n" for n in range(90))
    )
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "study.yaml"


def said(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["data", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_show_says_what_became_of_the_text(study: Path) -> None:
    (told,) = json.loads(said("show", str(study), "--json").stdout)
    data = Dataset.open(study.parent / ".archlab" / "data", told["identity"])
    assert told["splits"] == data.header["splits"]
    assert told["bytes_per_token"]["train"] == data.bytes_per_token() == pytest.approx(1, abs=0.1)
    prose, lists = told["domains"]
    assert (prose["share"], lists["share"]) == (0.75, 0.25)
    assert prose["epochs"] == pytest.approx(8000 * 0.75 / prose["train_tokens"], rel=1e-3)
    assert told["cleaning"]["prose"][0]["documents"] == [81, 80]
    assert told["overlap"]["test"]["share"] >= 0
    text = said("show", str(study)).stdout
    assert f"data {data.identity}  prose (text: prose.txt) + lists (jsonl: lists.jsonl), bytes (257 tokens)" in text
    assert "clean of prose gopher: 81 → 80 documents" in text and "(1 fewer than 50 words)" in text
    assert "fewer than 50 words: short" in text and "75.0%" in text
    assert said("show", data.identity[:6]).stdout.splitlines()[0] == text.splitlines()[0]


def test_every_data_set_of_a_study_is_shown_once(study: Path) -> None:
    text = study.read_text().replace("{block.attention.heads: 4}", "{train.data.domains.prose.weight: 9}")
    study.write_text(text)
    assert len(json.loads(said("show", str(study), "--json").stdout)) == 2
    prepared = said("prepare", str(study)).stdout.splitlines()
    assert len(prepared) == 3 and prepared[-1] == "nothing was trained"


def test_other_files_are_compared_with_the_training_text(study: Path) -> None:
    (study.parent / "asked.txt").write_text((study.parent / "prose.txt").read_text().partition("\n==\n")[0])
    (told,) = json.loads(said("show", str(study), "--against", "asked.*", "--json").stdout)
    assert told["overlap"]["asked.txt"]["ngrams"] == 72 - 12
    assert "asked.txt: " in said("show", str(study), "--against", "asked.txt").stdout


def test_a_mistake_is_said_without_a_traceback(study: Path) -> None:
    assert "'nothing' is no study file (.yaml), and no data set in" in said("show", "nothing", code=2).stderr
    assert "--against: 'nowhere' matches no file" in said("show", str(study), "--against", "nowhere", code=2).stderr
    assert "data show needs a STUDY.yaml" in said("show", code=2).stderr
    assert "'enwik9' is not a corpus; did you mean 'enwik8'?" in said("get", "enwik9", code=2).stderr
    broken = study.read_text().replace("{jsonl: lists.jsonl, weight: 1}", "{jsonl: nothing.jsonl, weight: 1}")
    study.write_text(broken)
    assert "train.data.domains.lists.files: 'nothing.jsonl' matches no file" in said("show", str(study), code=2).stderr


def test_corpora_are_listed_and_fetched_by_name(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["name"]: row for row in json.loads(said("get", "--json").stdout)}
    assert set(rows) == {"enwik8", "text8", "wikitext-2", "wikitext-103", "tinyshakespeare"}
    assert "tinyshakespeare" in said("get").stdout
    asked: list[Any] = []

    def get(corpus: Any, folder: Path, tell: Any) -> list[Path]:
        asked.append((corpus.url, folder))
        return [folder / "input.txt"]

    monkeypatch.setattr("archlab.cli.data.get", get)
    assert 'data: {text: "data/tinyshakespeare/input.txt"}' in said("get", "tinyshakespeare").stdout
    assert json.loads(said("get", "enwik8", "-o", "here", "--json").stdout) == ["here/input.txt"]
    assert asked == [
        (rows["tinyshakespeare"]["url"], Path("data/tinyshakespeare")),
        (rows["enwik8"]["url"], Path("here")),
    ]

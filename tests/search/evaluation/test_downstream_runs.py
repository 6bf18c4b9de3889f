"""From a study to its report: tasks, texts and costs of trained models, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from click.testing import CliRunner, Result

from archlab.cli.main import main
from archlab.search.comparison.compare import load_comparison
from archlab.search.running.run import run
from archlab.search.sections.evaluate.told import ToldOfEvaluate
from archlab.search.store.findings import findings
from archlab.search.store.store import Store
from tests.search.downstream_kit import task
from tests.search.study_files import write_study

RECIPE = """\
train:
  data: {text: corpus.txt}
  tokens: 512
  context: 64
  batch: 4
  lr: 1e-3"""
ASKED = """\
evaluate:
  - {lm_eval: [tasks/choose.yaml]}
  - loss_spikes
  - {memorisation: {prompt: 16, continuation: 4, sequences: 8}}
  - {speed: {steps: 1}}
  - {decoding: {tokens: 4}}"""


def choose(folder: Path, **said: Any) -> None:
    rows = [{"q": "one", "choices": ["two", "three"], "gold": 0}, {"q": "a", "choices": ["b", "c"], "gold": 1}]
    plain = {
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    task(folder / "tasks", "choose", rows, output_type="multiple_choice", **plain, **said)


def cli(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.mark.slow
def test_a_study_is_asked_tasks_and_costs_and_goes_on_with_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    choose(tmp_path)
    study = write_study(tmp_path, train=RECIPE, evaluate=ASKED)
    store = tmp_path / "store"
    summary = run(study, store, executor="inline", track=False)
    assert (summary.exit_code, summary.counts["complete"]) == (0, 4), summary.message
    name = "gates"
    with Store.open(store, create=False) as opened:
        trials = {row["key"]: row for row in opened.study_trials(name)}
        for key, found in findings(opened, trials).items():
            labels = [each["measure"] for each in found]
            assert labels == [
                "decoding_tokens_4",
                "lm_eval_choose",
                "loss_spikes",
                "memorisation_prompt_16_for_4_of_8",
                "speed_steps_1",
            ], key
            values = {name: value for each in found for name, value in each["values"].items()}
            assert values["choose_n"] == 2 and values["choose_acc"] in (0, 0.5, 1)
            assert values["training_flops_steps_1"] > 0 and values["journal_lines"] == 2
        key, row = next(iter(trials.items()))
        titles = [block.title for block in ToldOfEvaluate().blocks(load_comparison(opened, name))]
    assert "Timed: speed_steps_1" in titles and "Measured: lm_eval_choose" in titles
    trial = f"{name}/{row['variant']}/{row['seed']}"
    asked = ("generate", "--store", str(store), "--tokens", "9", "--json")
    greedy = [json.loads(cli(*asked, trial, "--prompt", "one").output)["text"] for _ in range(2)]
    assert greedy[0] == greedy[1]
    drawn = cli(*asked, key[:12], "--temperature", "1.5", "--top-p", "0.9", "--samples", "3", "--seed", "4").output
    lines = [json.loads(line) for line in drawn.splitlines()]
    assert [line["sample"] for line in lines] == [0, 1, 2] and len({line["text"] for line in lines}) > 1
    cut = cli("generate", "--store", str(store), "--tokens", "99", trial, "--prompt", "one").stderr
    assert cut.startswith("at most 63 tokens") and "of the prompt's 3 tokens the last 1 are read" in cut
    refused = cli("generate", "--store", str(store), f"{name}/none")
    assert refused.exit_code == 2 and "is not a variant" in refused.output


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("{lm_eval: [tasks/none.yaml]}", "tasks/none.yaml is no task file and no folder with one"),
        ("{lm_eval: [tasks/choose.yaml]}", "choose runs programs that the model writes; `run_code: true` allows it"),
        ("{memorisation: {prompt: 99}}", "99 + 50 tokens are more than a window has, 64"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_trained(tmp_path: Path, asked: str, told: str) -> None:
    choose(tmp_path, unsafe_code=True)
    study = write_study(tmp_path, train=RECIPE, evaluate=f"evaluate: [{asked}]")
    found = cli("plan", str(study), "--store", str(tmp_path / "store"))
    assert found.exit_code == 2
    assert told in found.output and "nothing was trained" in found.output
    assert found.output.startswith(str(study)), "file, line and column"

"""What is known to separate architectures does: who can look for what stood before a token, and who has room for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from archlab.search.running.run import run
from archlab.search.store.findings import findings
from archlab.search.store.store import Store

STUDY = """\
study: separation
model:
  d_model: 64
  n_layers: 2
  block:
    norm: rmsnorm
    attention: {heads: 2, positional: rope, qk_norm: rmsnorm}
    ffn: swiglu
variants:
  two_layers: {}
  one_layer: {n_layers: 1}
"""
RECIPE = """\
train:
  data: DATA
  tokens: TOKENS
  context: LENGTH
  batch: 64
  optimizer: {type: muon, weight_decay: 0}
  lr: 1e-2
  schedule: {type: cosine, warmup: 0.25}
  precision: fp32
  compile: "off"
evaluate: [perplexity, accuracy]
seeds: 1
report: {baseline: two_layers}
"""
INDUCTION = {
    "DATA": "{induction: {segment: 8, tokens: 16, length: 20, sequences: 5000}}",
    "TOKENS": "250k",
    "LENGTH": "20",
}
RECALL = {
    "DATA": "{associative_recall: {pairs: 4, keys: 8, values: 8, sequences: 5000}}",
    "TOKENS": "140k",
    "LENGTH": "16",
}
DELTA = """\
  delta: {block.attention: {type: delta_net, heads: 2}}
  delta_of_4_numbers: {block.attention: {type: delta_net, heads: 1, head_dim: 2, value_dim: 2}}
"""


def accuracies(folder: Path, study: str, fields: dict[str, str]) -> tuple[dict[str, float], float]:
    """The accuracy of each variant and the chance level, of a study that was run to its end."""
    for name, value in fields.items():
        study = study.replace(name, value)
    (folder / "study.yaml").write_text(study)
    summary = run(folder / "study.yaml", folder / "store", executor="inline", track=False)
    assert summary.exit_code == 0, summary.message
    with Store.open(folder / "store", create=False) as store:
        trials = store.study_trials("separation")
        known = findings(store, [trial["key"] for trial in trials])
    found = {trial["variant"]: known[trial["key"]][0]["values"] for trial in trials}
    (chance,) = {values["accuracy_chance"] for values in found.values()}
    return {variant: values["accuracy"] for variant, values in found.items()}, chance


@pytest.mark.slow
def test_two_layers_of_attention_learn_induction_and_one_falls_short(tmp_path: Path) -> None:
    found, chance = accuracies(tmp_path, STUDY + RECIPE, INDUCTION)
    assert found["two_layers"] > 0.95, found
    assert chance < 0.4
    assert found["one_layer"] < 0.8, f"it knows about where, not what: {found}"


@pytest.mark.slow
def test_recall_needs_two_layers_of_attention_or_a_state_with_room_for_the_pairs(tmp_path: Path) -> None:
    found, chance = accuracies(tmp_path, STUDY + DELTA + RECIPE, RECALL)
    assert min(found["two_layers"], found["delta"]) > 0.95, found
    assert chance < 0.53
    assert max(found["one_layer"], found["delta_of_4_numbers"]) < 0.8, found

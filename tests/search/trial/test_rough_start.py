"""What a journal says against a recipe, and what a plan foresees of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archlab.search.comparison.compare import compare
from archlab.search.planning.foreseen import foreseen
from archlab.search.planning.plan import plan
from archlab.search.study.load import load_study
from archlab.search.trial.rough_start import read_signs, signs, signs_of
from tests.search.compare_kit import make_study, pick
from tests.search.study_files import write_study

STEPS = 400

Lines = list[dict[str, Any]]


def journal(**changed: dict[int, float]) -> Lines:
    """A calm trial of 400 steps, each logged, with ten points of the validation curve; `changed` numbers by step."""
    lines: Lines = []
    for step in range(1, STEPS + 1):
        numbers = {"loss": 2 + 3 / (1 + step / 20), "grad_norm": 1.0}
        lines.append({"step": step, **{name: changed.get(name, {}).get(step, v) for name, v in numbers.items()}})
        if step % 40 == 0:
            value = 2 + 3 / (1 + step / 20)
            lines.append({"step": step, "validation_loss": changed.get("validation_loss", {}).get(step, value)})
    return lines


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"loss": {20: 6.0}}, "the loss jumped up"),
        ({"loss": {200: 6.0}}, None),  # no start any more
        ({"grad_norm": {30: 11.0}}, "the gradient norm spiked"),
        ({"grad_norm": dict.fromkeys(range(1, 25), 5.0)}, "clipped to less than a 4th"),
        ({"grad_norm": dict.fromkeys(range(1, 401), 1.5)}, None),  # clipped all along, as small models are
        ({"validation_loss": {400: 1.0}}, "still fell by"),
    ],
)
def test_signs_of_a_rough_start(changed: dict[str, dict[int, float]], told: str | None) -> None:
    found = [*signs(journal(**changed), clip=1.0)]
    assert (len(found), told in found[0] if told and len(found) == 1 else found) == (0, []) or (
        told is not None and len(found) == 1 and told in found[0]
    )


def test_a_loss_that_falls_because_the_rate_cools_down_is_no_sign() -> None:
    falling = journal(validation_loss={400: 1.0})
    assert [*signs(falling, clip=1.0)] and not [*signs(falling, clip=1.0, cools=True)]


def test_without_clipping_nothing_is_clipped_and_a_short_journal_says_nothing() -> None:
    large = journal(grad_norm=dict.fromkeys(range(1, 25), 5.0))
    assert not [*signs(large, clip=None)] and not [*signs(large[:60], clip=1.0)] and not [*signs([], clip=1.0)]


def test_a_trial_is_read_from_its_folder(tmp_path: Path) -> None:
    assert read_signs(tmp_path / "gone") == ()
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "trial.json").write_text(json.dumps({"recipe": {"clip": 1.0}}))
    lines = journal(loss={20: 6.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    jumped = ("the loss jumped up in the first tenth of the steps",)
    assert read_signs(folder) == signs_of(folder, {"state": "complete"}) == jumped
    assert signs_of(folder, {"signs": ["as it was told at its end"]}) == ("as it was told at its end",)


def test_a_table_says_whose_recipe_its_verdicts_may_be() -> None:
    record, trials = make_study({"baseline": 0.0, "gated": 0.0})
    fell = "the validation loss still fell by {} in the last tenth of the steps"
    for trial in pick(trials, "gated", lr=1e-3)[:2] + pick(trials, "baseline", lr=1e-3):
        trial["signs"] = (fell.format(0.07 if trial["variant"] == "gated" else 0.05),)
    pick(trials, "gated", lr=1e-3)[1]["signs"] += ("the loss jumped up",)
    record["foreseen"] = ["rough start? 60 steps are few"]
    assert [note for note in compare(record, trials).notes if "rough" in note or "may be" in note] == [
        "rough start? 60 steps are few",
        f"{fell.format('up to 0.07')}: baseline (3 of 3 trials), gated (1 of 3 trials); verdicts may be the recipe's "
        "(docs/concepts/recipes.md)",
        "the loss jumped up: gated (1 of 3 trials); its difference may be the recipe's (docs/concepts/recipes.md)",
    ]


def test_a_plan_foresees_a_short_warmup_small_values_and_few_steps(tmp_path: Path) -> None:
    def told(**sections: str) -> list[str]:
        return [*foreseen(plan(load_study(write_study(tmp_path, **sections)), tmp_path / "data").variants)]

    long = "train: {data: {text: corpus.txt}, tokens: 200k, context: 32, batch: 4, lr: 1e-3"
    assert told(train=long + "}") == []
    (line,) = told(train=long + ", schedule: {warmup: 0.02}}")
    assert line.startswith("rough start? a warm-up of 31 steps") and line.endswith("`warmup: auto` takes 156")
    assert told(train=long + ", schedule: {warmup: 0}, optimizer: lion}") == [], "it has no second moment"
    (large,) = told(train=long.replace("1e-3", "4e3") + "}")
    assert large == "rough start? a learning rate of 4000 is large: an update moves each weight by about so much"
    small = "model: {d_model: 64, n_layers: 1, init: {std: 0.02}, block: {attention: {heads: 4}, ffn: glu}}"
    assert told(train=long + "}", model=small) == [
        "rough start? init.std 0.02 is little for d_model 64; `small` is 0.079 there"
    ]
    (few,) = told(
        variants="variants:\n  baseline: {}\n  gated: [gate, {train.batch: 8, train.tokens: 100k}]", train=long + "}"
    )
    assert few == "rough start? 391 steps are few; smaller batches make more of the same tokens: gated"


def test_a_plan_foresees_masks_that_hide_nothing(tmp_path: Path) -> None:
    """Their rows would be equal, but for the longest context of the stages."""
    masks = {
        "wide": "{type: window, size: 32}",
        "narrow": "{type: window, size: 31}",
        "chunks": "{type: chunked, stride: 32}",
        "strides": "{type: strided, stride: 8}",
        "prefix": "prefix",
    }
    rows = "".join(f"  {name}: {{block.attention.mask: {mask}}}\n" for name, mask in masks.items())
    train = "train: {data: {text: corpus.txt}, tokens: 200k, context: 32, batch: 4, lr: 1e-3"

    def told(more: str = "") -> list[str]:
        study = write_study(tmp_path, variants=f"variants:\n  baseline: {{}}\n{rows}", train=f"{train}{more}}}")
        return [*foreseen(plan(load_study(study), tmp_path / "data").variants)]

    no_prefix = "block.attention.mask: prefix is causal here: the objective causal gives a text no prefix: prefix"
    assert told() == [
        "block.attention.mask: {type: window, size: 32} hides nothing in a context of 32 tokens: wide",
        "block.attention.mask: {type: fixed, stride: 32, columns: 0} hides nothing in a context of 32 tokens: chunks",
        no_prefix,
    ]
    assert told(", stages: [{tokens: 0, context: 64}]") == [no_prefix]
    assert no_prefix not in told(", objective: prefix")

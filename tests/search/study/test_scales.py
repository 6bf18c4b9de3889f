"""One file, several scales: what a scale changes is what the study then says, in its place and under its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.cli.main import main
from archlab.search.planning.plan import plan
from archlab.search.study.load import load_study
from archlab.search.study.scales import merged
from tests.search.study_files import write_study

SCALES = """\
scales:
  small: {}
  large:
    model: {d_model: 128, block: {attention: {heads: 8}}}
    train: {tokens: 2k}
    seeds: 1
  renamed:"""


@pytest.mark.parametrize(
    ("said", "change", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": 1}, {"b": {"c": 2}}, {"a": 1, "b": {"c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": "cosine"}, {"a": {"type": "wsd", "decay": 0.1}}, {"a": {"type": "wsd", "decay": 0.1}}),
        ({"a": {"type": "cosine", "final": 0}}, {"a": {"type": "wsd"}}, {"a": {"type": "wsd"}}),
        (
            {"a": {"type": "wsd", "decay": 0}},
            {"a": {"type": "wsd", "x": 1}},
            {"a": {"type": "wsd", "decay": 0, "x": 1}},
        ),
        ({"model": {"zoo": "llama", "size": "7b"}}, {"model": {"zoo": "gpt2"}}, {"model": {"zoo": "gpt2"}}),
        ({"model": {"d_model": 8}}, {"model": {"zoo": "gpt2"}}, {"model": {"zoo": "gpt2"}}),
    ],
)
def test_a_change_is_merged_key_by_key(said: Any, change: Any, expected: Any) -> None:
    assert merged(Node.of(said), Node.of(change)).plain() == expected


def test_what_is_not_there_cannot_be_taken_out() -> None:
    with pytest.raises(SpecError, match=r"seds: 'seds' is not a key that is there to take out; did you mean 'seeds'\?"):
        merged(Node.of({"seeds": 2, "train": {}}), Node.of({"seds": None}))


@pytest.mark.parametrize(
    ("overrides", "name", "d_model", "tokens", "seeds"),
    [
        ({}, "gates-small", 64, 1000, 2),
        ({"scale": "renamed"}, "gates-renamed", 64, 1000, 2),
        ({"scale": "large"}, "gates-large", 128, 2000, 1),
        ({"scale": "large", "train.tokens": 500}, "gates-large", 128, 500, 1),
        ({"train.tokens": 500}, "gates-small", 64, 500, 2),
    ],
)
def test_a_scale_says_what_differs_and_its_name(
    overrides: dict[str, Any], name: str, d_model: int, tokens: int, seeds: int, tmp_path: Path
) -> None:
    study = load_study(write_study(tmp_path, scales=SCALES), overrides)
    planned = plan(study, tmp_path / "data")
    assert (study.study, planned.variants[0].model.d_model, study.train.tokens) == (name, d_model, tokens)
    assert len(planned.seeds) == seeds
    assert planned.record()["scale"] == study.scale == name.removeprefix("gates-")


def test_a_file_may_say_its_scale_and_a_scale_trains_what_the_same_study_without_scales_would(tmp_path: Path) -> None:
    at = load_study(write_study(tmp_path, "at.yaml", scales=f"{SCALES}\nscale: renamed"))
    plain = load_study(write_study(tmp_path, "plain.yaml"))
    keys = [
        [variant.trial(0, 1e-3).key for variant in plan(study, tmp_path / "data").variants] for study in (at, plain)
    ]
    assert at.study == "gates-renamed" and keys[0] == keys[1]


def test_a_study_without_scales_has_none_to_choose(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="scale: the study has no `scales`"):
        load_study(write_study(tmp_path), {"scale": "small"})


def test_plan_says_which_scales_there_are(tmp_path: Path) -> None:
    path = write_study(tmp_path, scales=SCALES)
    found = CliRunner().invoke(main, ["plan", str(path), "--store", str(tmp_path / "store"), "--set", "scale=large"])
    assert found.exit_code == 0, found.output
    assert (
        found.output.startswith("gates-large") and "scale large; `--set scale=NAME` for small, renamed" in found.output
    )

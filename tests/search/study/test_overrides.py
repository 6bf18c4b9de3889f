"""What `--set` does to a study, and what is said where several values were given for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node, read_text
from archlab.cli.kit import parsed
from archlab.cli.main import main
from archlab.search.planning.plan import plan
from archlab.search.study.load import load_study
from archlab.search.study.overrides import overridden
from tests.search.study_files import write_study

STUDY = {
    "train": {"lr": 1},
    "grid": {"train.batch": [1]},
    "variants": {
        "none": None,
        "gated": {"block.gate": {"position": "sdpa"}, "block.norm": "rmsnorm"},
        "listed": ["a", "b"],
    },
}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("train.lr", 2, {"train": {"lr": 2}}),
        ("train.clip", None, {"train": {"lr": 1, "clip": None}}),
        ("tune.lr", [1], {"tune": {"lr": [1]}}),
        ("tune.train.clip", [1], {"tune": {"train.clip": [1]}}),
        ("grid.train.batch", [2], {"grid": {"train.batch": [2]}}),
        ("grid.train.lr", [2], {"grid": {"train.batch": [1], "train.lr": [2]}}),
        ("space.train.lr", {"float": [1, 2]}, {"space": {"train.lr": {"float": [1, 2]}}}),
        ("space.train.lr.log", True, {"space": {"train.lr.log": True}}),
        ("components.wide.block.width", 8, {"components": {"wide": {"block.width": 8}}}),
        ("recipes.small.batch", 8, {"recipes": {"small": {"batch": 8}}}),
    ],
)
def test_a_value_is_set_at_its_path(path: str, value: Any, expected: dict[str, Any]) -> None:
    assert overridden(Node.of(STUDY), path, Node.of(value)).plain() == STUDY | expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("variants.new.block.heads", {"new": {"block.heads": 2}}),
        ("variants.none.block.heads", {"none": {"block.heads": 2}}),
        ("variants.gated.block.gate.position", {"gated": {"block.gate": {"position": 2}, "block.norm": "rmsnorm"}}),
        ("variants.gated.block.norm", {"gated": {"block.gate": {"position": "sdpa"}, "block.norm": 2}}),
        (
            "variants.gated.block.norm.eps",
            {"gated": {"block.gate": {"position": "sdpa"}, "block.norm": "rmsnorm", "block.norm.eps": 2}},
        ),
    ],
)
def test_a_path_of_a_variant_stays_a_path(path: str, expected: dict[str, Any]) -> None:
    found = overridden(Node.of(STUDY), path, Node.of(2)).plain()
    assert found == STUDY | {"variants": STUDY["variants"] | expected}


def test_a_path_into_what_has_no_parts_is_refused() -> None:
    with pytest.raises(SpecError, match=r"train\.lr\.first: leads into a value that has no parts"):
        overridden(Node.of(STUDY), "train.lr.first", Node.of(2))
    with pytest.raises(SpecError, match=r"variants\.listed\.2: leads into a list, of which the parts are 0 to 1"):
        overridden(Node.of(STUDY), "variants.listed.2", Node.of(2))


def test_a_part_of_a_list_is_set_by_its_place() -> None:
    study = {"train": {"stages": [{"tokens": 1, "lr": 1}, {"tokens": 2, "lr": 2}]}}
    found = overridden(Node.of(study), "train.stages.1.lr", Node.of(3)).plain()
    assert found == {"train": {"stages": [{"tokens": 1, "lr": 1}, {"tokens": 2, "lr": 3}]}}


SEVERAL = {
    "seeds=[0,1]": "seeds: must be how many seeds, not which: 2 trains with the first 2, from 0; found [0, 1]",
    "seeds=0,1": "seeds: must be how many seeds, not which: 2 trains with the first 2, from 0; found 0,1",
    "train.batch=8,16": "train.batch: must be an integer, found '8,16'; several values are "
    "`grid: {train.batch: [8, 16]}`, which trains every variant with each "
    "(for one command: --set 'grid.train.batch=[8, 16]')",
    "train.tokens=1M,2M": "--set 'grid.train.tokens=[1M, 2M]'",
    "train.tokens=[1M,2M]": "`grid: {train.tokens: [1M, 2M]}`",
    "model.block.ffn.width=[64,128]": "`grid: {block.ffn.width: [64, 128]}`",
    "model.block.norm=choice(rmsnorm, layernorm)": "`grid: {block.norm: [rmsnorm, layernorm]}`",
    "block.ffn.width=64,128": "block.ffn.width: is no key of a study; did you mean `model.block.ffn.width`?; "
    "several values are `grid: {block.ffn.width: [64, 128]}`",
    "batch=8": "batch: is no key of a study; did you mean `train.batch`?",
    "train.optimizer=[adamw,{type: muon}]": '`grid: {train.optimizer: [adamw, {"type": "muon"}]}`',
    "train.lr=1e-3,3e-3": "several rates are `tune: {lr: [1e-3, 3e-3]}`, of which each variant gets its best (for one "
    "command: --set 'tune.lr=[1e-3, 3e-3]')",
    "train.lr=[1e-3,3e-3]": "train.lr: must be a number, found a list; several rates are `tune: {lr: [0.001, 0.003]}`",
    "tune.lr=1e-3,3e-3": "several values stand in brackets: --set 'tune.lr=[1e-3, 3e-3]'",
    "scale=small,large": "a command takes one value: run it with --set 'scale=small', then with the next",
    "scale=[small,large]": "scale: must be the name of one scale, found a list (small, large); a command takes one",
    "resources.cpus=1,2": "--set 'resources.cpus=1', then with the next",
}


@pytest.mark.parametrize("said", SEVERAL)
def test_several_values_for_one_are_told_where_they_belong(said: str, tmp_path: Path) -> None:
    file = write_study(tmp_path, scales="scales: {small: {}, large: {seeds: 1}}")
    result = CliRunner().invoke(main, ["plan", str(file), "--store", str(tmp_path / "store"), "--set", said])
    assert result.exit_code == 2
    assert SEVERAL[said] in result.output


def test_what_a_study_tries_is_not_set_beside_it(tmp_path: Path) -> None:
    file = write_study(tmp_path, tune="tune: {lr: [1e-3, 3e-3]}")
    with pytest.raises(SpecError, match=r"train\.lr: would be ignored: every variant has .* `tune\.lr`") as refused:
        load_study(file, {"train.lr": 0.002})
    assert "--set 'tune.lr=[0.002]'" in str(refused.value)
    assert load_study(file, {"train.lr": 0.002, "tune": None}).train.lr == 0.002
    assert load_study(file, {"tune.lr": [0.002]}).tune is not None
    crossed = write_study(tmp_path, grid="grid: {train.batch: [4, 8], block.ffn.width: [32, 64]}")
    for path, own in {"train.batch": "train.batch", "model.block.ffn.width": "block.ffn.width"}.items():
        with pytest.raises(SpecError, match=rf"would be ignored: every variant has the values of `grid\.{own}`"):
            load_study(crossed, {path: 16})
    assert load_study(crossed, {"train.tokens": 2000}).train.tokens == 2000


AS_EVER = [
    "train.batch=eight",
    "question=1,2,3",
    "study=a,b",
    "trian.lr=1",
    "model.block.attention.gate=[{position: sdp}]",
    "train.data={type: stdlib, bytes: [1, 2]}",
]


@pytest.mark.parametrize("said", AS_EVER)
def test_other_mistakes_are_told_as_ever(said: str, tmp_path: Path) -> None:
    path, _, value = said.partition("=")
    try:
        load_study(write_study(tmp_path), {path: read_text(value).plain()})
    except SpecError as error:
        assert "several" not in str(error) and "a command takes" not in str(error)
    else:
        assert path == "question"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "variants.baseline.block.attention.heads=3",
            "<--set variants.baseline.block.attention.heads>: block.attention.heads",
        ),
        ("model.block.attention.heads=3", "<--set model.block.attention.heads>: block.attention.heads: 3 heads"),
        ("train.lr=fast", "train.lr: must be a number, found 'fast'"),
    ],
)
def test_a_value_that_was_set_is_wrong_where_it_was_set(said: str, told: str, tmp_path: Path) -> None:
    """And not on the line of the file that it took the place of."""
    with pytest.raises(SpecError) as caught:
        plan(load_study(write_study(tmp_path), parsed((said,))), tmp_path / "data")
    assert str(caught.value).startswith(told) and "study.yaml" not in str(caught.value)


def test_no_grid_is_set_by_null(tmp_path: Path) -> None:
    path = write_study(tmp_path, grid="grid: {block.norm: [rmsnorm, layernorm]}")
    assert len(plan(load_study(path), tmp_path / "data").variants) == 4
    assert len(plan(load_study(path, parsed(("grid=null",))), tmp_path / "data").variants) == 2


def test_several_values_of_a_search_are_an_axis_of_it(tmp_path: Path) -> None:
    search = (
        "search: {sampler: random, trials: 2, objective: validation_loss}\nspace: {train.lr: {float: [1e-3, 1e-2]}}"
    )
    file = write_study(tmp_path, search=search)
    with pytest.raises(SpecError, match=r"an axis of the search: `space: \{train.batch: \{choice: \[4, 8\]\}\}`"):
        load_study(file, {"train.batch": "4,8"})


@pytest.mark.parametrize("path", ["grid.train.batch", "tune.lr", "variants.gated"])
def test_what_the_errors_name_works(path: str, tmp_path: Path) -> None:
    value = {"grid.train.batch": [4, 8], "tune.lr": [1e-3, 3e-3], "variants.gated": {"block.attention.gate": "sdpa"}}
    assert load_study(write_study(tmp_path), {path: value[path]}).variants.keys() == {"baseline", "gated"}

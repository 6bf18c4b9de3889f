"""Study files: every mistake is told where it stands before anything is trained, and what is right is read as meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.study.asked import asked_variants
from archlab.search.study.checks import MAX_CELLS
from archlab.search.study.load import load_study, parse_study
from tests.search.study_files import study_text, write_study

WRONG = (Path(__file__).parents[1] / "wrong_studies.txt").read_text()


def wrong_studies() -> list[Any]:
    """(sections to replace, message) of every block `=== title`; `name: LEFT OUT` leaves a section out."""
    found = []
    for block in WRONG.removeprefix("=== ").split("\n=== "):
        title, _, rest = block.partition("\n")
        given, message = rest.split("\n---\n")
        sections = dict(re.findall(r"^(\w+)(:.*(?:\n[ ].*)*)", given, flags=re.M)) or {"study": given}
        texts = {name: None if text == ": LEFT OUT" else name + text for name, text in sections.items()}
        if not re.match(r"\w+:", given):  # no section at all: everything else is left out
            first, *others = given.split("\n")
            texts = {"study": first, **{line.split(":")[0]: None for line in others}}
        found.append(pytest.param(texts, message.rstrip("\n"), id=title))
    return found


@pytest.mark.parametrize(("sections", "message"), wrong_studies())
def test_wrong_study_is_told_where_and_leaves_nothing(
    sections: dict[str, str | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, **sections)
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(SpecError) as caught:
        run("study.yaml", "store", executor="inline", track=False)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == message
    if (tmp_path / "store").exists():
        with Store.open(tmp_path / "store", create=False) as store:
            assert store.studies() == []
        assert not list((tmp_path / "store").glob("trials/*"))


def test_long_name_is_shortened_in_its_message(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"study: 'a{40}…' \(600 characters\) is no study name") as caught:
        load_study(write_study(tmp_path, study=f"study: {'a' * 600}"))
    assert max(len(line) for line in str(caught.value).splitlines()) < 300


def test_grid_beyond_all_bounds_is_refused_before_it_is_expanded(tmp_path: Path) -> None:
    values = ", ".join(str(number) for number in range(1, 1001))
    grid = f"grid:\n  train.batch: [{values}]\n  train.tokens: [{values}]\n  train.context: [{values}]"
    with pytest.raises(SpecError, match=f"grid: makes 2,000,000,000 variants; at most {MAX_CELLS:,}"):
        load_study(write_study(tmp_path, grid=grid))


def test_missing_file_and_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read .*none\.yaml: No such file or directory"):
        load_study(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match=r"cannot read .*: Is a directory"):
        load_study(tmp_path)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("tune: {lr: [2e-3, 1e-3]}", (1e-3, 2e-3)),
        ("tune: {lr: 1e-3}", (1e-3,)),
        ("tune: {lr: {grid: 1-2-5, from: 5e-4, to: 2e-3}}", (5e-4, 1e-3, 2e-3)),
        ("tune: {lr: {grid: 1-3, from: 1e-4, to: 1e-2}}", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    ],
    ids=["list", "one", "1-2-5", "1-3"],
)
def test_rates_ascend(section: str, expected: tuple[float, ...]) -> None:
    tune = parse_study(read_text(study_text(tune=section))).tune
    assert tune is not None and tune.axes["train.lr"].values == expected


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5 h", 5400), ("2d", 172_800)])
def test_wall_budget_is_a_time(text: str, seconds: float) -> None:
    wall = parse_study(read_text(study_text(budget=f"budget: {{wall: {text}}}"))).budget.wall
    assert wall is not None and wall.seconds == seconds


def test_grid_crosses_the_variants_and_names_the_cells() -> None:
    grid = "grid:\n  block.norm.placement: [pre, sandwich]\n  train.batch: [2, 4]"
    study = parse_study(read_text(study_text(grid=grid)))
    assert [asked.name for asked in asked_variants(study)] == [
        f"{name} [placement={placement}, batch={batch}]"
        for placement in ("pre", "sandwich")
        for batch in (2, 4)
        for name in ("baseline", "gated")
    ]
    last = asked_variants(study)[-1]
    assert (last.base, last.cell, last.components) == ("gated", "placement=sandwich, batch=4", {"gate": True})


def test_values_of_a_grid_stand_in_the_rows_by_their_names() -> None:
    grid = "grid:\n  block.norm: {named: {before: rmsnorm, around: {type: rmsnorm, placement: sandwich}}}"
    study = parse_study(read_text(study_text(grid=grid)))
    assert [asked.cell for asked in asked_variants(study)[::2]] == ["norm=before", "norm=around"]
    assert asked_variants(study)[-1].settings[-1].node.plain() == {"type": "rmsnorm", "placement": "sandwich"}


def test_components_apply_in_the_order_given() -> None:
    variants = "variants:\n  baseline: {}\n  a: [gate, {block.attention.gate.granularity: headwise}, wide]"
    components = "components:\n  gate: {block.attention.gate: sdpa}\n  wide: {block.ffn.width: 200}"
    study = parse_study(read_text(study_text(variants=variants, components=components)))
    asked = asked_variants(study)[1]
    assert [setting.path for setting in asked.settings] == [
        "block.attention.gate",
        "block.attention.gate.granularity",
        "block.ffn.width",
    ]
    assert [setting.source for setting in asked.settings] == ["component gate", "variants.a", "component wide"]
    assert asked.components == {"gate": True, "wide": True}


def test_overrides_replace_values_by_path(tmp_path: Path) -> None:
    path = write_study(tmp_path, grid="grid:\n  train.batch: [2, 4]")
    changes = {"train.tokens": "2k", "seeds": 5, "grid.train.batch": [8], "variants.wide": {"block.ffn.width": 99}}
    study = load_study(path, changes)
    assert (study.train.tokens, study.seeds, list(study.variants)) == (2000, 5, ["baseline", "gated", "wide"])
    assert [node.value for node in study.grid["train.batch"].nodes] == [8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.tokens": -5}, "train.tokens: must be at least 1, found -5"),
        ({"trian.tokens": 5}, "trian: 'trian' is not a key of study; did you mean 'train'?"),
        ({"seeds.first": 5}, "seeds.first: leads into a value that has no parts"),
        ({"": 5}, "'' is not a key of study"),
    ],
    ids=["value", "section", "inside a number", "empty path"],
)
def test_wrong_overrides_are_told(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        load_study(write_study(tmp_path), changes)


def test_search_needs_no_variants() -> None:
    space = "space:\n  block.ffn.width: {int: [10, 20]}"
    study = parse_study(
        read_text(study_text(variants=None, components=None, search="search: {trials: 3}", space=space))
    )
    assert list(study.variants) == ["baseline"]


def test_mistakes_of_recipe_base_and_variant_are_said_at_once() -> None:
    text = """\
study: all
model: {d_model: 64, n_layers: 1, block: {attention: {heads: 3}, ffn: {type: glu}}}
variants:
  baseline: {}
  gated: {block.attention.gate: {position: sdp}}
train: {tokens: 1M, lr: 3e-3, bacth: 8}
"""
    with pytest.raises(SpecError) as refused:
        parse_study(read_text(text, "all.yaml"))
    places = [(problem.path, problem.mark.line) for problem in refused.value.problems if problem.mark]
    assert places == [("block.attention.heads", 2), ("block.attention.gate.position", 5), ("train.bacth", 6)]

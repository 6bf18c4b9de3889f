"""The tables in studies/results/ are those of the studies as they are: what has changed since shows as stale."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read
from archlab.search.comparison.compare import load_comparison
from archlab.search.planning.plan import Plan, plan
from archlab.search.reporting.report import report
from archlab.search.running.run import run
from archlab.search.sections.tune.spec import RATE
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.docs_kit import ROOT
from tests.search.study_files import write_study

STUDIES = ROOT / "studies"
TRAIN = "train: {data: {text: corpus.txt}, tokens: 256, context: 32, batch: 4, lr: 1e-3}"


class NoData(Exception):
    """What a study trains on is not on this machine."""


def named(studies: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """By the name that a store gives a study: its file and the scale to ask for."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in sorted([*studies.glob("*.yaml"), *studies.glob("search/*.yaml")]):
        node = {"study": "", **read(file).plain()}
        scales = {f"{node['study']}-{scale}": {"scale": scale} for scale in node.get("scales", ())}
        found |= {name: (file, scale) for name, scale in (scales or {node["study"]: {}}).items()}
    return found


def planned(file: Path, overrides: dict[str, Any], data_root: Path) -> Plan:
    """What the study plans today. Raises NoData where its text is elsewhere."""
    study = load_study(file, overrides)
    try:
        return plan(study, data_root)
    except SpecError as error:
        if all("data" in problem.path.split(".") for problem in error.problems):
            raise NoData(str(error)) from error
        raise


def complaints(result: Path, studies: Path, data_root: Path) -> Iterator[str]:
    """Why a result is none of the studies as they are. Raises NoData."""
    try:
        told = json.loads(result.read_text())
        name, origin, rates = told["study"], told["provenance"], {row["variant"]: row["lr"] for row in told["table"]}
        kept = origin["identities"]
    except (ValueError, KeyError, TypeError) as error:
        yield f"is no report as JSON: {type(error).__name__} {error}"
        return
    known = named(studies)
    if name not in known or result.stem != name:
        yield f"is called {result.stem} and of the study {name}; there are {', '.join(known)}"
        return
    file, scale = known[name]
    today = planned(file, {**scale, **origin.get("overrides", {})}, data_root)
    variants = {variant.name: variant for variant in today.variants}
    if lost := [*(variants.keys() - kept.keys()), *([] if today.study.search else kept.keys() - variants.keys())]:
        yield f"has other variants than {file.name}: {', '.join(sorted(lost))}"
    for name in variants.keys() & kept.keys():
        yield from (
            f"{name}: its {of} has changed"
            for of, digest in variants[name].identity.items()
            if digest != kept[name][of]
        )
        own = not today.study.search and RATE not in (today.study.tune.axes if today.study.tune else ())
        if own and rates[name] is not None and rates[name] != variants[name].recipe.lr:
            yield f"{name}: its learning rate was {rates[name]:g}, now it is {variants[name].recipe.lr:g}"


SLOW = {"fox-needle-small", "redllm-finetune-small", "zoo-decoders-small", "zoo-data-small"}  # data, or many models


def results() -> list[Any]:
    files = sorted((STUDIES / "results").glob("*.json"))
    return [pytest.param(file, id=file.name, marks=[pytest.mark.slow] if file.stem in SLOW else []) for file in files]


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the studies' text is prepared, once."""
    return tmp_path_factory.mktemp("results") / "data"


@pytest.mark.parametrize("file", results())
def test_a_committed_result_is_of_a_study_as_it_is(file: Path, data_root: Path) -> None:
    try:
        assert [*complaints(file, STUDIES, data_root)] == [], "run the study again, or take the result away"
    except NoData as error:
        pytest.skip(str(error))


def test_a_result_is_a_table_and_its_data() -> None:
    pages, data = ({file.stem for file in (STUDIES / "results").glob(f"*{end}")} for end in (".md", ".json"))
    assert pages - {"README"} == data


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a study, and the report of it."""
    folder = tmp_path_factory.mktemp("studies")
    study = write_study(
        folder, seeds="seeds: 1", scales="scales:\n  small: {}\n  wide: {model: {d_model: 32}}", train=TRAIN
    )
    run(study, folder / "store", overrides={"train.clip": 2.0}, executor="inline", track=False)
    with Store.open(folder / "store") as store:
        return folder, json.loads(report(load_comparison(store, "gates-small"), "json"))


def set_in(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Makes a report say something else at a path."""

    def change(told: dict[str, Any]) -> None:
        for step in path[:-1]:
            told = told[step]
        if value is None:
            del told[path[-1]]
        else:
            told[path[-1]] = value

    return change


STALE: dict[str, tuple[str, Callable[[dict[str, Any]], None], list[str]]] = {
    "fresh": ("gates-small", lambda told: None, []),
    "a model that has changed": (
        "gates-small",
        set_in("provenance", "identities", "gated", "model", value="0" * 64),
        ["gated: its model has changed"],
    ),
    "a recipe that has changed": (
        "gates-small",
        set_in("provenance", "overrides", value={}),
        ["baseline: its recipe has changed", "gated: its recipe has changed"],
    ),
    "a rate that has changed": (
        "gates-small",
        lambda told: told["table"][0].update(lr=2e-3),
        ["baseline: its learning rate was 0.002, now it is 0.001"],
    ),
    "a variant that is gone": (
        "gates-small",
        set_in("provenance", "identities", "dropped", value={"model": "", "recipe": ""}),
        ["has other variants than study.yaml: dropped"],
    ),
    "a variant that is new": (
        "gates-small",
        set_in("provenance", "identities", "gated", value=None),
        ["has other variants than study.yaml: gated"],
    ),
    "another scale": (
        "gates-wide",
        set_in("study", value="gates-wide"),
        ["baseline: its model has changed", "gated: its model has changed"],
    ),
    "a study that is gone": (
        "gone",
        set_in("study", value="gone"),
        ["is called gone and of the study gone; there are gates-small, gates-wide"],
    ),
    "another name": (
        "other",
        lambda told: None,
        ["is called other and of the study gates-small; there are gates-small, gates-wide"],
    ),
    "another file": ("gates-small", set_in("provenance", value=None), ["is no report as JSON: KeyError 'provenance'"]),
}


@pytest.mark.parametrize("case", STALE)
def test_a_stale_result_is_told(case: str, example: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, told = example
    name, change, said = STALE[case]
    made = json.loads(json.dumps(told))
    change(made)
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(made))
    assert sorted(complaints(file, folder, folder / "store" / "data")) == said


def test_a_result_that_is_cut_off_or_whose_data_are_elsewhere_is_told(
    example: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, told = example
    file = tmp_path / "gates-small.json"
    file.write_text(json.dumps(told)[:-9])
    (said,) = complaints(file, folder, tmp_path / "data")
    assert said.startswith("is no report as JSON: JSONDecodeError")
    file.write_text(json.dumps(told))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "study.yaml").write_text((folder / "study.yaml").read_text())
    with pytest.raises(NoData, match=r"corpus\.txt"):
        list(complaints(file, tmp_path / "elsewhere", tmp_path / "data"))

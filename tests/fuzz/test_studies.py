"""A study or a model that is nearly right loads, or its error names the place. Nothing else is raised or written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from archlab import arch_dsl
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import MAX_NODES, nodes_in, read_text
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from tests.fuzz.fuzz_kit import bounded_work, examples, says_where, tried, values
from tests.fuzz.mutations import MODELS, changed_bytes, grafts, mutants, places, studies, text_of, words
from tests.golden import STUDIES, resolved
from tests.search.study_files import study_text, write_study

MOST_CALLS = 30_000_000
"""Function calls that one input may take: to load a committed study takes half a million at most."""
_MOST_LAYERS, _MOST_VARIANTS = 60, 6  # of a study whose variants are then resolved too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a small study, its corpus and the tables of papers, which is the current one."""
    path, before = tmp_path_factory.mktemp("studies"), Path.cwd()
    shutil.copytree(STUDIES / "published", path / "published")
    write_study(path, "other.yaml")
    (path / "study.yaml").touch()
    os.chdir(path)
    yield path
    os.chdir(before)


def answered(load: Callable[[], Study], folder: Path) -> None:
    """Loads a study and resolves its variants, or sees that the error says where. Either writes nothing."""
    before = sorted(folder.rglob("*"))
    try:
        with bounded_work(MOST_CALLS):
            study = load()
            assert nodes_in(read_text(study.text)) <= MAX_NODES
            if _layers(study) <= _MOST_LAYERS and len(study.variants) <= _MOST_VARIANTS:
                for _ in resolved(study):
                    pass
        tried(refused=False)
    except SpecError as error:
        says_where(error)
        tried(refused=True)
    assert sorted(folder.rglob("*")) == before


def _layers(study: Study) -> int:
    """About how many layers all its variants have."""
    count = sum(stack.n_layers for stack in study.model.stacks().values()) * max(len(study.variants), 1)
    for axis in study.axes:
        count *= len(axis)
    return count * (study.ladder.rungs if study.ladder else 1)


def small(**sections: str) -> dict[str, Any]:
    """The tree of a small study with these sections."""
    tree: dict[str, Any] = read_text(study_text(**sections)).plain()
    return tree


@examples(50)
@given(tree=mutants(st.deferred(lambda: st.sampled_from(studies()))))
@example(tree=small(tune="tune: {lr: {grid: {}, from: 1e-3, to: 1e-2}}"))
def test_a_study_that_is_nearly_right_loads_or_says_where(tree: Any, folder: Path) -> None:
    file = folder / "study.yaml"
    file.write_text(text_of(tree))
    answered(lambda: load_study(file, store=folder / "store"), folder)


@examples(60)
@given(data=changed_bytes())
@example(data=b"\xff")
@example(data=b"a: " + b"[" * 1000)
def test_a_file_with_changed_bytes_loads_or_says_where(data: bytes, folder: Path) -> None:
    file = folder / "study.yaml"
    file.write_bytes(data)
    answered(lambda: load_study(file, store=folder / "store"), folder)


_DEEP: list[Any] = []
_DEEP.append(_DEEP)  # which has no end
_ODD = (object(), b"bytes", {1, 2}, 10**5000, "\ud800", float("nan"), 1j, int, (1, 2), {3: 4}, {None: 1}, _DEEP)
"""What Python holds and a file does not, or not as such."""


@examples(50)
@given(
    tree=mutants(st.deferred(lambda: st.sampled_from(studies()))),
    odd=st.sampled_from(_ODD) | values,
    at=st.integers(0, 10**6),
)
@example(tree=small(), odd=object(), at=0)
@example(tree=small(), odd=10**5000, at=0)
@example(tree=small(), odd=_DEEP, at=0)
def test_a_study_of_python_values_loads_or_says_where(tree: Any, odd: Any, at: int, folder: Path) -> None:
    found = list(places(tree))
    if not isinstance(tree, dict) or not found:
        return
    part, key = found[at % len(found)]
    part[key] = odd
    answered(lambda: load_study(tree, store=folder / "store"), folder)


_STEPS = st.one_of(
    st.deferred(lambda: st.sampled_from(words())), st.sampled_from(["0", "*", "", "..", "a b", "9" * 30])
)
_PATHS = st.one_of(
    st.lists(_STEPS, min_size=1, max_size=4).map(".".join),
    st.sampled_from(["train.lr", "train.tokens", "tune.lr", "grid.d_model", "model.block.ffn", "seeds", "scale"]),
)


@examples(30)
@given(
    tree=st.deferred(lambda: st.sampled_from(studies())),
    overrides=st.dictionaries(_PATHS, st.one_of(values, st.deferred(lambda: st.sampled_from(grafts()))), max_size=3),
)
def test_a_value_that_is_set_for_one_command_fits_or_says_where(
    tree: Any, overrides: dict[str, Any], folder: Path
) -> None:
    text = text_of(tree)
    answered(lambda: load_study("study.yaml", overrides, store=folder / "store", text=text), folder)


@examples(100)
@given(tree=mutants(st.sampled_from(MODELS)))
@example(tree={**MODELS[0], "d_model": 10**5000})
@example(tree={**MODELS[0], "d_model": _DEEP})
def test_a_model_that_is_nearly_right_resolves_or_says_where(tree: Any) -> None:
    try:
        with bounded_work(MOST_CALLS):
            model = arch_dsl.load(tree)
            if sum(stack.n_layers for stack in model.stacks().values()) > _MOST_LAYERS:
                return
            found = arch_dsl.resolve(model, vocab=19, max_positions=64)
            assert arch_dsl.cost(found, 64).parameters >= 0
            assert arch_dsl.resolve(arch_dsl.load(arch_dsl.canonical(found))) == found
        tried(refused=False)
    except SpecError as error:
        says_where(error)
        tried(refused=True)


@examples(40)
@given(text=st.text(st.characters(), max_size=30))
@example(text="a: \ud800")
def test_a_text_of_any_characters_loads_or_says_where(text: str, folder: Path) -> None:
    answered(lambda: load_study("study.yaml", store=folder / "store", text=text), folder)


def test_the_committed_studies_take_no_more_work_than_is_allowed(folder: Path) -> None:
    for tree in studies():
        with bounded_work(MOST_CALLS):
            assert load_study("study.yaml", store=folder / "store", text=text_of(tree)).variants

"""The page of a search beside another of the same space: their table, and that it follows the other one."""

import json

import pytest

from archlab.dashboards.library import Library
from archlab.dashboards.pages import search
from archlab.dashboards.pages.shell import _read
from archlab.search.store.store import Store
from tests.dashboards.generate import make_store
from tests.dashboards.special_studies import SEARCH, finish, make_search

CHANCE = "search-chance"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / ".archlab"
    with make_store(root) as made:
        make_search(made)
    return root


def page_of(study):
    chosen, _ = _read(search.choices(study), {})
    return json.dumps(
        [part.to_plotly_json() for part in search.content(study, chosen)], default=lambda o: o.to_plotly_json()
    )


def test_another_search_of_the_space_stands_beside_and_is_followed(root):
    library = Library(root)
    alone = library.study(SEARCH)
    assert not len(alone.comparison.rivals) and "Searches of the same space" not in page_of(alone)
    with Store.open(root, create=False) as store:
        make_search(store, study=CHANCE, sampler="random", seed=6)
    both = library.study(SEARCH)
    assert both.version != alone.version and both.comparison.rivals["sampler"].tolist() == ["nsga2", "random"]
    assert "Searches of the same space" in page_of(both) and "common front" in page_of(both)
    with Store.open(root, create=False) as store:
        waiting = next(each for each in store.study_trials(CHANCE) if each["state"] == "planned")
        finish(store, CHANCE, waiting, 2.0)
    later = library.study(SEARCH)
    assert later.comparison.rivals["complete"].tolist() == [28, 29] and later.version != both.version

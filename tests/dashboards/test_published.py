"""A paper's table on the pages of a study: a block of its own, never among our rows."""

import json
import re

import pytest

from archlab.dashboards.library import Library
from archlab.dashboards.paper.page import page
from archlab.search.store.store import Store
from tests.dashboards.generate import Plan, make_store, make_study, record
from tests.dashboards.test_app import Client

TITLE = "Published: 15B parameters (Gated <Attention>, arXiv:2505.06708)"
CLAIM = "G1 beats every other position."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A finished study beside a table of its rows, with a printed perplexity that is nowhere among ours."""
    root = tmp_path_factory.mktemp("published") / ".archlab"
    plan = Plan()
    pairs = [["G1", name] for name in ("G2", "G3", "G4", "G5")]
    published = {
        "table": "gated_attention.table1",
        "source": {"title": "Gated <Attention>", "arxiv": "2505.06708", "printed": ""},
        "caption": "15B parameters",
        "columns": ["ppl"],
        "measures": {"ppl": {"number": "perplexity", "times": 1.0}},
        "rows": {name: [61.026 + place] for place, name in enumerate(plan.effects)},
        "claims": [
            {"claim": CLAIM, "where": "table 1", "on": "perplexity", "testable": None, "margin": None, "pairs": pairs}
        ],
        "variants": {name: {"rows": [name], "group": ""} for name in plan.effects},
        "without": [],
    }
    with make_store(root) as made:
        make_study(made, plan)
        made.save_study(plan.name, record(plan) | {"published": published}, f"study: {plan.name}\n")
    return root


def test_the_table_page_has_a_block_of_its_own_for_it(root):
    client = Client(root)
    parts = dict(components(json.loads(client.page("/study/gate-position/table"))))
    block, ours = (
        json.dumps(parts["published"], ensure_ascii=False),
        json.dumps(parts["ablation"]) + json.dumps(parts["ablation-notes"]),
    )
    for text in (TITLE, "61.026", CLAIM, "holds", "Spearman"):
        assert text in block and not any(text in part for part in ours), text
    found = json.loads(client.http.get("/download/gate-position/table.json").text)
    assert found["claims"][0]["verdict"] == "holds"


def components(tree):
    """(id, component) of everything in a page that has one."""
    if isinstance(tree, dict):
        if isinstance(name := tree.get("props", {}).get("id") if isinstance(tree.get("props"), dict) else None, str):
            yield name, tree
        tree = list(tree.values())
    for child in tree if isinstance(tree, list) else ():
        yield from components(child)


def test_the_report_page_has_it_open_and_apart(root):
    with Store.open(root, create=False):
        text = page(Library(root).study("gate-position"), "archlab report gate-position")
    section = re.search(r"<section class=published>(.*?)</section>", text, re.S)
    assert section is not None
    for said in ("61.026", CLAIM, "holds", "Gated &lt;Attention&gt;"):
        assert said in section[1]
    rest = text.replace(section[0], "")
    assert "61.026" not in rest and CLAIM not in rest


@pytest.mark.browser
def test_the_published_block_stands_apart_in_the_browser(root, served, visit):
    tab = visit.page
    tab.goto(f"{served(root)}/study/gate-position/table")
    tab.wait_for_selector("#published table")
    tab.wait_for_selector("#ablation .ag-row")
    assert TITLE in tab.inner_text("#published")
    assert tab.locator("#published .ag-row").count() == 0, "it is no part of the grid"
    assert "61.026" not in tab.inner_text("#ablation")
    top, bottom = (f"document.querySelector('#{name}').getBoundingClientRect()" for name in ("published", "ablation"))
    assert tab.evaluate(f"{top}.top >= {bottom}.bottom")
    assert "holds" in tab.inner_text("#published")

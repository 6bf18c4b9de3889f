"""Studies beside each other: which changes are the same, whether a verdict holds, and what is never claimed."""

from dataclasses import replace

import pytest

from archlab.search.comparison.across import Change, Finding, change_of, one_scale, settings, shared_changes
from archlab.search.comparison.compare import load_comparison
from archlab.search.store.store import Store
from tests.dashboards.generate import Plan, make_store, make_study

FIRST = Plan("first", effects={"baseline": 0.0, "G1": -0.3, "G2": 0.2, "G5": -0.2})
SECOND = Plan("second", effects={"baseline": 0.0, "G1": -0.3, "G2": -0.2, "G3": 0.0})


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    root = tmp_path_factory.mktemp("across") / ".archlab"
    with make_store(root) as made:
        for plan in (FIRST, SECOND):
            make_study(made, plan)
    with Store.open(root, create=False) as store:
        return {p.name: (store.study(p.name), load_comparison(store, p.name)) for p in (FIRST, SECOND)}


def test_each_change_has_what_each_study_found_against_its_own_baseline(studies):
    changes, alone = shared_changes(studies)
    assert [change.name for change in changes] == ["G1", "G2"] and alone == {"first": ["G5"], "second": ["G3"]}
    held, turned = changes
    assert held.kind == "better" and held.sentence() == "G1: better in all 2 comparisons of 2 studies"
    assert turned.kind == "reversed" and turned.sentence() == "G2: reversed: worse in first; better in second"
    for each in (*held.found, *turned.found):
        row = studies[each.study][1].table.set_index("variant").loc[each.variant]
        assert (each.delta, each.low, each.high, each.n) == (row.delta, row.delta_low, row.delta_high, row.n)


def test_a_change_is_known_by_what_it_does_not_by_its_name(studies):
    record, comparison = studies["second"]
    renamed = {**record, "variants": [{**v, "name": v["name"].replace("G1", "my gate")} for v in record["variants"]]}
    table = comparison.table.assign(variant=comparison.table["variant"].str.replace("G1", "my gate"))

    changes, _ = shared_changes({**studies, "second": (renamed, replace(comparison, table=table))})
    assert [change.name for change in changes] == ["G1 (my gate)", "G2"]


def test_what_was_solved_to_match_and_what_the_baseline_has_too_are_no_change():
    base = {"name": "b", "changes": [["block.norm", "pre", "post"]]}
    gated = {"name": "g", "changes": [["block.norm", "pre", "post"], ["block.gate", "[]", "[gate]"]]}
    matched = {**gated, "changes": [*gated["changes"], ["block.ffn.width", "176", "155"]]}
    matched["matched"] = {"block.ffn.width": 155}
    assert change_of(gated, base) == change_of(matched, base) == (("block.gate", "[gate]"),)
    undone = {"name": "u", "changes": []}
    assert change_of(undone, base) == (("block.norm", "as in the base"),)
    assert change_of({"name": "llama [size=1]", "changes": []}, {"name": "gpt2", "changes": []}) == (("", "llama"),)


@pytest.mark.parametrize(
    ("verdicts", "kind"),
    [
        (["better", "better"], "better"),
        (["better", "undecided"], "mixed"),
        (["undecided", "within noise"], "open"),
        (["worse", "better", "undecided"], "reversed"),
        (["worse", "incomplete"], "worse"),
        (["incomplete", "incomplete"], "open"),
    ],
)
def test_a_verdict_holds_only_where_all_that_are_known_agree(verdicts, kind):
    found = [Finding(f"s{i}", "v", "", 3, 0.1, 0.0, 0.2, "nats", v) for i, v in enumerate(verdicts)]
    assert Change("v", tuple(found)).kind == kind
    assert all(f"s{i}" in Change("v", tuple(found)).sentence() for i in range(len(verdicts))) or len({*verdicts}) == 1


def test_settings_and_perplexities_compare_only_what_is_alike(studies):
    first, second = (studies[name][0] for name in ("first", "second"))
    longer = {**second, "recipe": {**second["recipe"], "batch": 99}}
    rows = settings({"first": first, "second": longer})["recipe"]
    differs = {path: values for path, values, differs in rows if differs}
    assert differs["batch"][1] == "99" and "tokens" not in differs
    assert one_scale([first, second])
    other = {**second, "variants": [{**v, "test": "another text"} for v in second["variants"]]}
    assert not one_scale([first, other])

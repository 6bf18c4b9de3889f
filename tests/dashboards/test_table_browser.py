"""The ablation table and the trials in a real browser: choices, rows that open, addresses, links, and what moves."""

import re

import pytest

from archlab.search.store.store import Store
from tests.dashboards.generate import live, run_trial

pytestmark = pytest.mark.browser
ROWS = "[...document.querySelectorAll('#ablation .ag-pinned-left-cols-container .ag-row')]"
NAMES = (
    f"{ROWS}.sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index')).map(row => row.innerText.trim())"
)


def _names(page):
    """What stands in the first column, from above."""
    return [name.replace("▸", "").replace("▾", "").strip() for name in page.evaluate(NAMES)]


def test_the_table_is_filtered_opened_sorted_and_shared(address, store, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position/table")
    page.wait_for_selector("#ablation .ag-row")
    assert _names(page) == ["baseline", "G1", "G2", "G3", "G4", "G5"]
    page.fill("#ablation-q", "verdict=better")
    page.wait_for_function(f"{ROWS}.length == 2")
    page.fill("#ablation-q", "verdit=better")
    page.wait_for_selector("#ablation-problem >> text=did you mean 'verdict'")
    assert len(_names(page)) == 2, "the rows stay"
    page.fill("#ablation-q", "seed!=2 -variant=baseline")
    page.wait_for_function(f"{ROWS}.length == 5")
    page.locator('#ablation .ag-row[row-id="G1"] .opener').focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"{ROWS}.length == 9")
    assert _names(page)[:3] == ["G1", "seed 0", "seed 1"] and "seed 2" not in _names(page)
    page.click("#ablation .ag-header-cell:has-text('Δ loss')")
    page.click("#ablation .ag-header-cell:has-text('Δ loss')")
    page.wait_for_function("location.search.includes('sort=-c_delta')")
    shown = _names(page)
    assert shown[0] == "G5" and shown[shown.index("G1") + 1].startswith("seed 0"), "trials stay below their variant"
    page.click("#ablation-err >> text=95% interval")
    page.wait_for_function("location.search.includes('err=interval')")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_function(f"{ROWS}.length == 9")
    assert _names(page) == shown
    page.wait_for_selector("#ablation-err input:checked[value=interval]", state="attached")
    assert page.input_value("#ablation-q") == "seed!=2 -variant=baseline"
    with Store.open(store, create=False) as opened:
        key = next(
            t["key"]
            for t in opened.study_trials("gate-position")
            if (t["variant"], t["role"], t["seed"]) == ("G1", "repeat", 1)
        )
    page.click("#ablation a >> text=seed 1")
    page.wait_for_selector("text=G1 · seed 1")
    assert page.url == f"{address}/run/{key}?study=gate-position"
    page.wait_for_selector("#run-training .scatterlayer .trace")
    assert not re.search(r"\b(NaN|undefined|null|None)\b", page.inner_text("main"))
    page.go_back()
    page.wait_for_function(f"{ROWS}.length == 9")


@pytest.mark.slow
def test_every_page_of_trials_is_whole_in_both_widths(address, visit):
    page = visit.page
    for width in (800, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        for path, ready in (
            ("table?open=baseline&cols=perplexity,memory,trials,varied.block.attention.sdpa", "#ablation .ag-row"),
            ("runs?q=state!=planned", "#runs .ag-row"),
            ("compare?variants=baseline,qk_norm", "#compare-curves .scatterlayer .trace"),
            ("timeline?rows=variants", "#timeline-figure .scatterlayer .trace"),
        ):
            page.goto(f"{address}/study/qk-norm/{path}")
            page.wait_for_selector(ready)
            assert not re.search(r"\b(NaN|undefined|null)\b", page.inner_text("main")), path
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    types = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].flatMap(g => g.data.map(t => t.type))")
    assert types and set(types) == {"scatter"}


@pytest.mark.slow
def test_a_trial_that_ends_moves_its_row_and_its_page(tmp_path, served, visit):
    root = tmp_path / ".archlab"
    with live(root) as (made, plan, last):
        page, base = visit.page, served(root)
        page.goto(f"{base}/study/live/table?open=G1")
        page.wait_for_selector("#ablation .ag-row >> text=planned")
        runs = page.context.new_page()
        runs.goto(f"{base}/run/{last}")
        runs.wait_for_selector("text=It is trained by")
        run_trial(made, plan, last)
        page.wait_for_selector("#ablation .ag-row >> text=better", timeout=240_000)
        runs.wait_for_selector(".badge-complete", timeout=240_000)
        assert page.locator("#ablation .ag-row >> text=planned").count() == 0
        assert runs.locator("text=It is trained by").count() == 0
        runs.close()

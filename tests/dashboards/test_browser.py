"""The dashboard in a real browser: what a reader sees, and that nothing leaves the machine."""

import json
import re

import pytest

from archlab.search.comparison.compare import load_comparison
from archlab.search.reporting.report import report
from archlab.search.store.store import Store
from tests.dashboards.conftest import XSS
from tests.dashboards.generate import Plan, live, make_store, make_study, run_trial

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_studies_page_lists_searches_and_leads_to_a_study(address, visit):
    page = visit.page
    page.goto(f"{address}/")
    page.wait_for_selector(".study-card")
    assert page.locator(".study-card").count() == 2
    page.fill("#studies-search", "gated")
    page.wait_for_function("document.querySelectorAll('.study-card').length == 1")
    page.wait_for_function("location.search == '?q=gated'")
    page.reload()
    page.wait_for_selector(".study-card")
    assert page.locator(".study-card").count() == 1 and page.input_value("#studies-search") == "gated"
    page.click(".study-card")
    page.wait_for_selector(".ag-row")
    assert page.url == f"{address}/study/gate-position" and page.title() == "gate-position · archlab"
    page.go_back()
    page.wait_for_selector(".study-card")
    assert page.input_value("#studies-search") == "gated"


def test_study_page_shows_the_numbers_of_the_report(store, opened):
    with Store.open(store, create=False) as read:
        table = json.loads(report(load_comparison(read, "gate-position"), "json"))["table"]
    assert len(table) == 6
    for row in table:
        shown = opened.cells(row["variant"])
        values = " ".join(shown.values()).replace("\N{MINUS SIGN}", "-")
        assert f"{row['perplexity_mean']:.3f} ± {row['perplexity_std']:.3f}" in values
        assert f"{row['bits_per_byte_mean']:.4f}" in values and row["verdict"] in values
        if row["delta"] is not None:
            assert f"{row['delta']:+.4f}" in values
            assert f"[{row['delta_low']:+.4f}, {row['delta_high']:+.4f}]" in values
    text = opened.page.inner_text("main")
    assert "G1 is better than baseline" in text and "within noise" in text
    assert not re.search(r"\b(NaN|undefined|null|None)\b", text)


def test_table_sorts_by_the_number_and_marks_best_and_baseline(opened):
    page = opened.page
    assert page.inner_text(".cell-best").startswith("4.")
    assert page.locator('.row-baseline[row-id="baseline"]').count() >= 1
    page.click(".ag-header-cell:has-text('Δ loss')")
    page.wait_for_selector(
        '.ag-row[row-index="0"] .cell-variant:has-text("baseline"), .ag-row[row-index="0"] .cell-variant:has-text("G1")'
    )
    order = [page.inner_text(f'.ag-row[row-index="{i}"] .cell-variant') for i in range(6)]
    assert [name for name in order if name != "baseline"] == ["G1", "G2", "G3", "G4", "G5"]


@pytest.mark.slow
def test_address_keeps_the_view_through_reload_and_a_fresh_browser(address, visit):
    start = f"{address}/study/gate-position"
    visit.study(start)
    page = visit.page
    page.click("#curves-metric >> text=Training")
    page.click("#curves-x >> text=Steps")
    page.click("#curves-smooth >> text=0.9")
    page.wait_for_function("location.search.includes('metric=training') && location.search.includes('smooth=0.9')")
    link = page.url
    for below in ("to-curves", "to-curves-below"):
        page.wait_for_function(f"document.getElementById('{below}').search.includes('metric=training')")
    page.goto("about:blank")
    visit.study(link)
    assert _axis_titles(page) == ["Optimizer steps", "Training loss (nats/token)"]
    visit.study(f"{start}?metric=nonsense&unknown=1")
    assert "nonsense" in page.inner_text(".notice")
    assert _axis_titles(page)[1] == "Validation loss (nats/token)"


def _axis_titles(page):
    return [page.text_content(f"#curves .{axis}title") for axis in "xy"]


def test_figures_are_svg_lines_without_a_share_button(opened):
    page = opened.page
    types = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].flatMap(g => g.data.map(t => t.type))")
    assert types and set(types) == {"scatter"}
    buttons = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title || '')")
    assert buttons and not [title for title in buttons if "share" in title.lower() or "cloud" in title.lower()]
    assert page.locator("canvas").count() == 0


@pytest.mark.slow
def test_a_finished_trial_appears_by_itself_and_keeps_the_zoom(tmp_path, served, visit):
    root = tmp_path / ".archlab"
    with live(root) as (made, plan, last):
        visit.study(f"{served(root)}/study/live")
        page = visit.page
        assert "incomplete" in " ".join(visit.cells("G1").values())
        _drag(page, "#curves .nsewdrag")
        zoom = page.evaluate(RANGE)
        run_trial(made, plan, last)
        page.wait_for_selector(".verdicts >> text=G1 is better than baseline", timeout=240_000)
        page.wait_for_selector('.ag-row[row-id="G1"] >> text=better')
        assert page.evaluate(RANGE) == zoom and zoom[0] > 200_000


RANGE = "document.querySelector('#curves .js-plotly-plot')._fullLayout.xaxis.range"


def _drag(page, selector):
    """Zooms into the middle of a figure with the mouse."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=4)
    page.mouse.up()


@pytest.mark.slow
def test_names_that_look_like_html_are_text(address, visit):
    visit.page.goto(f"{address}/")
    visit.page.wait_for_selector(".study-card")
    assert XSS in visit.page.inner_text("main")
    visit.study(f"{address}/study/qk-norm?trials=tuning")
    assert XSS in visit.page.inner_text("h1") and visit.page.locator("main img").count() == 0
    assert XSS in visit.page.inner_text(".variants")


def test_a_broken_store_is_a_card_that_heals_by_itself(tmp_path, served, visit):
    root = tmp_path / ".archlab"
    base = served(root)
    visit.page.goto(f"{base}/")
    visit.page.wait_for_selector("text=No studies yet")
    assert "archlab run" in visit.page.inner_text("main")
    with make_store(root) as made:
        make_study(made, Plan(rates=(), effects={"baseline": 0.0}))
    visit.page.wait_for_selector(".study-card", timeout=240_000)

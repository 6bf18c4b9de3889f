"""The page of curves and the comparison of trials in a real browser: choices, zoom, clicks, addresses, live trials."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from archlab.search.store.store import Store
from tests.dashboards.generate import live, run_trial

pytestmark = [pytest.mark.browser, pytest.mark.slow]
RANGES = "['xaxis', 'yaxis'].map(axis => document.querySelector('#curve .js-plotly-plot')._fullLayout[axis].range)"
DATA = (
    "document.querySelector('#curve .js-plotly-plot').data.map(trace => [trace.name, trace.x.length, trace.y.length])"
)
PICKED = (
    "[...document.querySelectorAll('#runs .ag-pinned-left-cols-container .ag-row-selected')]"
    ".map(row => row.getAttribute('row-id')).sort()"
)
DRAWN = "#curve .scatterlayer .trace"
CHOSEN = {"metric": "Training", "x": "Steps", "smooth": "0.5", "trials": "All", "lines": "Trials", "scale": "Log y"}


@pytest.fixture
def trials(store):
    """The trials of the finished study."""
    with Store.open(store, create=False) as opened:
        return opened.study_trials("gate-position")


def _drag(page, selector="#curve .nsewdrag"):
    """Zooms into the middle of a figure with the mouse."""
    box = page.locator(selector).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=4)
    page.mouse.up()


def test_every_choice_and_the_zoom_are_the_address_in_a_fresh_browser_too(address, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position/curves")
    page.wait_for_selector(DRAWN)
    for key, label in CHOSEN.items():
        page.click(f"#curve-{key} >> text=/^{label}$/")
        page.wait_for_function(f"location.search.includes('{key}=')")
    page.fill("#curve-q", "variant=G1,G2 lr>=0.002")
    page.wait_for_function("location.search.includes('q=')")
    page.wait_for_function(f"{DATA}.filter(trace => trace[1]).length == 8")
    _drag(page)
    page.wait_for_function("location.search.includes('xr=')")
    link, data, ranges = page.url, page.evaluate(DATA), page.evaluate(RANGES)
    assert set(parse_qs(urlsplit(link).query)) >= {*CHOSEN, "q", "xr"}
    fresh = page.context.browser.new_context(viewport={"width": 1280, "height": 900})
    fresh.set_default_timeout(240_000)
    other = fresh.new_page()
    other.goto(link)
    other.wait_for_selector(DRAWN)
    assert other.evaluate(DATA) == data
    assert other.evaluate(RANGES)[0] == pytest.approx(ranges[0], rel=1e-4)
    assert other.input_value("#curve-q") == "variant=G1,G2 lr>=0.002"
    for key, label in CHOSEN.items():
        assert other.locator(f"#curve-{key} label:has-text('{label}')").first.get_attribute("data-active") == "true"
    fresh.close()
    page.reload()
    page.wait_for_selector(DRAWN)
    assert page.evaluate(RANGES)[0] == pytest.approx(ranges[0], rel=1e-4) and page.url == link
    page.click("text=Runs")
    page.wait_for_selector("#runs .ag-row")
    assert page.input_value("#runs-q") == "variant=G1,G2 lr>=0.002", "the filter goes along"
    page.go_back()
    page.wait_for_selector(DRAWN)
    assert page.url == link and page.evaluate(DATA) == data
    page.click("#curve-metric >> text=/^Validation$/")
    page.wait_for_function("!location.search.includes('xr=')")


def test_a_wrong_filter_and_an_empty_one_are_said_beside_the_figure(address, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position/curves?q=verdit%3Dbetter&xr=a,b&scale=cubic")
    page.wait_for_selector(DRAWN)
    assert "did you mean 'verdict'" in page.inner_text("#curve-problem")
    assert "xr 'a,b'" in page.inner_text("#curve-notice") and "'cubic'" in page.inner_text("#curve-notice")
    page.fill("#curve-q", "seed=99")
    page.wait_for_selector("#curve >> text=No trial with a curve matches the filter")


def test_a_click_on_a_line_leads_to_its_trial_or_its_variant(address, trials, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position/curves?lines=runs&q=variant%3DG3")
    page.wait_for_selector(DRAWN)
    _click_line(page, 0)
    page.wait_for_url(re.compile(r"/run/[0-9a-f]{64}"))
    key = re.search(r"/run/([0-9a-f]{64})", page.url)[1]
    assert key in {trial["key"] for trial in trials if trial["variant"] == "G3"}
    page.goto(f"{address}/study/gate-position/curves?q=variant%3DG4")
    page.wait_for_selector(DRAWN)
    lines = page.evaluate("document.querySelector('#curve .js-plotly-plot').data.map(line => [line.x, line.y])")
    mean = page.evaluate(f"{DATA}.findIndex(trace => trace[0] == 'G4')")
    (first, *_, last), heights = lines[mean][0][8:13], [y[10] for x, y in lines if len(x) == len(lines[mean][0])]
    zoom = f"xr={first},{last}&yr={min(heights)},{max(heights)}"  # there the seeds are apart
    page.goto(f"{address}/study/gate-position/curves?q=variant%3DG4&{zoom}")
    page.wait_for_selector(DRAWN)
    _click_line(page, mean)
    page.wait_for_url("**/study/gate-position/table?open=G4")
    page.wait_for_selector("#ablation a >> text=seed 2")


def _click_line(page, trace):
    """Clicks the point of a line that is farthest from all others, so that no other line is under the pointer."""
    x, y = page.evaluate(
        """trace => {
        const figure = document.querySelector('#curve .js-plotly-plot'), own = figure.data[trace];
        const {xaxis, yaxis} = figure._fullLayout, box = figure.getBoundingClientRect();
        const points = line => [...line.x].map((x, i) => [xaxis.c2p(x), yaxis.c2p(line.y[i])]);
        const others = figure.data.filter(line => line !== own && line.x).flatMap(points);
        const room = ([x, y]) => Math.min(...others.map(([u, v]) => Math.hypot(x - u, y - v)));
        const inside = ([x, y]) => x > 5 && y > 5 && x < xaxis._length - 5 && y < yaxis._length - 5;
        const [x, y] = points(own).filter(inside).reduce((best, point) => room(point) > room(best) ? point : best);
        return [box.left + xaxis._offset + x, box.top + yaxis._offset + y];
    }""",
        trace,
    )
    page.mouse.move(x - 3, y - 3)
    page.mouse.move(x, y)
    page.wait_for_selector("#curve .hoverlayer .hovertext")
    page.mouse.click(x, y)


def test_ticked_trials_stand_beside_each_other(address, trials, visit):
    page = visit.page
    page.goto(f"{address}/study/gate-position/runs?q=variant%3DG1")
    page.wait_for_selector("#runs .ag-row")
    boxes = page.locator("#runs .ag-selection-checkbox input")
    page.wait_for_function("document.querySelectorAll('#runs .ag-selection-checkbox input').length == 5")
    boxes.nth(0).check()
    boxes.nth(2).check()
    page.wait_for_function("(new URLSearchParams(location.search).get('ticked') || '').split(',').length == 2")
    link, picked = page.url, page.evaluate(PICKED)
    assert len(picked) == 2 and parse_qs(urlsplit(link).query)["ticked"][0].count(",") == 1
    page.reload()
    page.wait_for_function(f"{PICKED}.length == 2")
    assert page.evaluate(PICKED) == picked and page.url == link
    page.click("text=Compare 2 trials")
    page.wait_for_selector("#compare-curves .scatterlayer .trace")
    page.go_back()
    page.wait_for_function(f"{PICKED}.length == 2")
    assert page.evaluate(PICKED) == picked and page.url == link
    page.click("text=Compare 2 trials")
    page.wait_for_selector("#compare-curves .scatterlayer .trace")
    keys = parse_qs(urlsplit(page.url).query)["runs"][0].split(",")
    mine = [trial for trial in trials if trial["key"][:12] in keys and trial["role"] == "tune"]
    assert len(keys) == 2 and {trial["variant"] for trial in mine} == {"G1"}
    text = page.inner_text("main")
    for trial in mine:
        assert f"G1 · seed {trial['seed']} · lr={trial['settings']['lr']:g}" in text
        assert f"{trial['result']['test']['loss']:.4f}" in text
    assert "lr" in page.inner_text(".beside") and "tokens" not in page.inner_text(".beside")
    page.reload()
    page.wait_for_selector("#compare-curves .scatterlayer .trace")
    assert page.locator("#compare-curves .legendtext").count() == 2


def test_a_driver_that_was_killed_leaves_the_page_up_and_its_zoom(tmp_path, served, visit):
    root = tmp_path / ".archlab"
    with live(root) as (made, plan, last):
        page = visit.page
        page.goto(f"{served(root)}/study/live/curves?lines=runs")
        page.wait_for_selector(DRAWN)
        _drag(page)
        page.wait_for_function("location.search.includes('xr=')")
        zoom, before = page.evaluate(RANGES), len(page.evaluate(DATA))
        run_trial(made, plan, last, fraction=0.5)  # half a curve, and nobody who goes on with it
        page.wait_for_function(f"{DATA}.length == {before + 1}", timeout=240_000)
        assert page.evaluate(RANGES) == zoom
        page.click("text=Runs")
        page.wait_for_selector("#runs .ag-row >> text=interrupted")

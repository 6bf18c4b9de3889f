"""What holds of every page in a real browser: whole, local, wide enough, readable, and reached by the keyboard."""

import re

import numpy as np
import pytest

from archlab.dashboards import theme
from archlab.dashboards.pages.shell import TABS
from archlab.search.comparison.compare import load_comparison
from tests.dashboards.findings_kit import measure_all
from tests.dashboards.generate import Plan, make_store, make_study
from tests.dashboards.special_studies import FACTORIAL, LADDER, SEARCH, make_factorial, make_ladder, make_search

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WHOLE = """() => {
  const content = document.querySelector('#_pages_content');
  if (!content || content.innerText.trim().length < 40) return false;
  const drawn = [...document.querySelectorAll('.dash-graph')].every(graph => graph.querySelector('.main-svg'));
  return drawn && [...document.querySelectorAll('.paper-table')].every(table => table.querySelector('.ag-row'));
}"""
OFFERED = "[...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title || '')"
KINDS = "[...document.querySelectorAll('.js-plotly-plot')].flatMap(graph => graph.data.map(trace => trace.type))"


@pytest.fixture(scope="module")
def base(tmp_path_factory, served):
    """A store with a study of each kind, served."""
    root = tmp_path_factory.mktemp("every") / ".archlab"
    with make_store(root) as made:
        make_study(made)
        measure_all(made, "gate-position")
        make_search(made)
        make_ladder(made)
        make_factorial(made)
        key = made.study_trials("gate-position")[0]["key"]
    return served(root), key


OF = {"factor": FACTORIAL, "scaling": LADDER, "search": SEARCH}
ADDRESSES = ["/", "/write", f"/compare?studies=gate-position,{LADDER}", "/nothing", "/study/nope", "/run/0", "/run/KEY"]
ADDRESSES += [f"/study/{OF.get(tab.step, 'gate-position')}/{tab.step}".rstrip("/") for tab in TABS]


@pytest.mark.parametrize("path", ADDRESSES)
def test_every_address_is_a_whole_page_in_all_widths(base, visit, path):
    """And, as of every visit here, no request leaves the machine and the browser has nothing to complain of."""
    page, (start, key) = visit.page, base
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(start + path.replace("KEY", key))
    page.wait_for_function(WHOLE)
    assert not re.search(r"\b(NaN|undefined|null|None|This page failed)\b", page.inner_text("body"))
    assert not [title for title in page.evaluate(OFFERED) if "share" in title.lower() or "cloud" in title.lower()]
    assert not {kind for kind in page.evaluate(KINDS) if "gl" in kind}
    for width in (1280, 800, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")


def test_two_tabs_with_different_filters_leave_each_other_alone(base, visit):
    one, two = visit.page, visit.page.context.new_page()
    for page, query in ((one, "q=variant%3DG1"), (two, "q=variant%3DG2,G3&err=se")):
        page.goto(f"{base[0]}/study/gate-position/table?{query}")
        page.wait_for_function(WHOLE)
    one.fill("#ablation-q", "variant=G4")
    one.wait_for_selector('#ablation .ag-row[row-id="G4"]')
    with two.expect_response(lambda got: "ablation-tick" in (got.request.post_data or ""), timeout=240_000):
        pass  # a tick of the other tab
    assert two.locator("#ablation .ag-pinned-left-cols-container .ag-row").count() == 2
    assert two.input_value("#ablation-q") == "variant=G2,G3" and "err=se" in two.url
    two.close()


def test_the_table_of_the_page_is_that_of_the_command_line(base, visit, tmp_path_factory):
    page = visit.page
    page.goto(f"{base[0]}/study/gate-position/table")
    page.wait_for_function(WHOLE)
    told = page.request.get(f"{base[0]}/download/gate-position.json").json()["table"]
    for row in told:
        centre = f'#ablation .ag-center-cols-container .ag-row[row-id="{row["variant"]}"]'
        page.wait_for_selector(f"{centre} [role=gridcell]")
        texts = [cell.replace("\N{MINUS SIGN}", "-") for cell in visit.cells(row["variant"]).values()]
        if row["delta"] is not None:
            assert f"{row['delta']:+.4f}" in texts and f"[{row['delta_low']:+.4f}, {row['delta_high']:+.4f}]" in texts
        assert f"{row['perplexity_mean']:.3f} ± {row['perplexity_std']:.3f}" in texts and str(row["n"]) in texts


def test_columns_of_numbers_sort_as_numbers(tmp_path, served, visit):
    effects = {"baseline": 0.0, "w1024": 0.01, "w128": 0.02, "w64": 0.03}
    with make_store(tmp_path) as made:
        plan = make_study(made, Plan(effects=effects, rates=(), seeds=(0,)))
        stored = made.study(plan.name)
        for variant in stored["variants"][1:]:
            variant |= {"matched": {}, "changes": [["block.ffn.width", "340", variant["name"][1:]]]}
        made.save_study(plan.name, stored, "study: gate-position\n")
        assert load_comparison(made, plan.name).table["varied"].map(dict)[1]["block.ffn.width"] == "1024"
    page = visit.page
    page.goto(
        f"{served(tmp_path)}/study/gate-position/table?cols=varied.block.ffn.width&sort=c_varied_2e_block_2e_ffn_2e_width"
    )
    page.wait_for_function(WHOLE)
    cell = "#ablation .ag-center-cols-container .ag-row[row-index='{}'] .ag-cell"
    assert [page.inner_text(cell.format(place)) for place in range(4)] == ["64", "128", "340", "1024"]


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(base, visit):
    page = visit.page
    page.goto(f"{base[0]}/study/gate-position/table")
    page.wait_for_function(WHOLE)
    seen = []
    for _ in range(26):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("""() => {
          const at = document.activeElement, style = getComputedStyle(at), label = at.closest('label');
          const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
          return [at.innerText || at.getAttribute('aria-label') || at.value || at.id, ring,
                  ring || style.boxShadow !== 'none' || style.borderColor !== '' , at.getBoundingClientRect().top];
        }"""))  # fmt: skip
    names = [str(each[0]).strip() for each in seen]
    places = [names.index(name) for name in ("archlab", "Studies", "Overview", "Curves", "Report", "Filter rows")]
    assert places == sorted(places), names
    for name in ("Overview", "Curves", "Report"):
        assert seen[names.index(name)][1], f"{name} shows no focus"
    page.keyboard.press("Shift+Tab")
    page.locator(".to-page >> text=Curves").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/curves")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(base, visit, scheme):
    """WCAG's contrast of 4.5 for every text of the style sheet on every ground that it stands on, in the scheme of the
    reader's system."""
    page = visit.page
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{base[0]}/")
    page.wait_for_function(WHOLE)
    page.wait_for_selector(f"html[data-mantine-color-scheme='{scheme}']")
    names = ("ink", "muted", "faint", "link", "good", "bad", "warn", "calm", "busy", "ground", "paper", "good-ground")
    names += ("bad-ground", "warn-ground", "calm-ground")
    style = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
    colour = {name: page.evaluate(style, name) for name in names}
    pairs = [(text, on) for text in ("ink", "muted", "faint", "link", "busy") for on in ("ground", "paper")]
    pairs += [(text, f"{text}-ground") for text in ("good", "bad", "warn", "calm")]
    for text, ground in pairs:
        assert contrast(colour[text], colour[ground]) >= 4.5, f"{text} on {ground}"


def _linear(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """(brighter + 0.05) / (darker + 0.05) of relative luminances."""
    low, high = sorted(float(_linear(each) @ [0.2126, 0.7152, 0.0722]) + 0.05 for each in (one, other))
    return high / low


BLIND = {  # Machado, Oliveira and Fernandes (2009), severity 1
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("kind", BLIND)
def test_the_first_six_colours_are_told_apart_by_colour_blind_eyes(kind):
    lab = [_lab(np.clip(np.array(BLIND[kind]) @ _linear(each), 0, 1)) for each in theme.PALETTE[:5]]
    lab.append(_lab(_linear(theme.BASELINE_COLOUR)))
    apart = [np.linalg.norm(a - b) for i, a in enumerate(lab) for b in lab[:i]]
    assert min(apart) > 3 * 2.3, "2.3 is just noticeable"


def _lab(linear):
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(matrix) @ linear / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

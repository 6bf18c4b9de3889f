"""1,000 trials with 500 points each in a real browser: what its benchmark measures, and at most 200 lines."""

import argparse

import pytest

from benchmarks.dashboard import GOALS, make, measured, tab
from benchmarks.servers import STUDY, free_port, ours, served

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def root(tmp_path_factory, chromium):
    """A finished study of 200 variants, five trials each."""
    root = tmp_path_factory.mktemp("scale") / ".archlab"
    assert make(root, 200, 500, track=False) == 1000
    return root


def test_the_benchmark_measures_every_goal_and_a_first_visit_is_small(root, chromium):
    found = dict(measured(chromium.browser, root, argparse.Namespace(turns=2, variants=200, alone=True)))
    assert set(GOALS) <= set(found) and all(each > 0 for times in found.values() for each in times)
    assert max(found["first visit, MB"]) < GOALS["first visit, MB"]


def test_no_more_than_two_hundred_lines_are_drawn_and_the_page_says_so(root, chromium):
    port = free_port()
    with served(*ours(root, port)), tab(chromium.browser) as page:
        page.goto(f"http://127.0.0.1:{port}/study/{STUDY}/curves?lines=runs")
        page.wait_for_selector("#curve .scatterlayer .trace")
        assert "Showing 200 of 600 trials as lines." in page.inner_text("#curve-note")
        assert page.evaluate("document.querySelectorAll('#curve .scatterlayer .trace').length") <= 200

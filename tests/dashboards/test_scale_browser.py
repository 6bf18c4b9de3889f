"""Hundreds of trials in a real browser: what its benchmark measures, and at most 200 lines.

`make test-all` has 1,000 trials of 500 points each."""

import argparse

import pytest

from benchmarks.dashboard import GOALS, make, measured, tab
from benchmarks.servers import STUDY, free_port, ours, served
from tests.slow_tests import ALL

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1800)]
VARIANTS, POINTS = (200, 500) if ALL else (80, 50)


@pytest.fixture(scope="module")
def root(tmp_path_factory, chromium):
    """A finished study, five trials of each variant, three of which are lines."""
    root = tmp_path_factory.mktemp("scale") / ".archlab"
    assert make(root, VARIANTS, POINTS, track=False) == 5 * VARIANTS
    return root


def test_the_benchmark_measures_every_goal_and_a_first_visit_is_small(root, chromium):
    found = dict(measured(chromium.browser, root, argparse.Namespace(turns=1, variants=VARIANTS, alone=True)))
    assert set(GOALS) <= set(found) and all(each > 0 for times in found.values() for each in times)
    assert max(found["first visit, MB"]) < GOALS["first visit, MB"]


def test_no_more_than_two_hundred_lines_are_drawn_and_the_page_says_so(root, chromium):
    port = free_port()
    with served(*ours(root, port)), tab(chromium.browser) as page:
        page.goto(f"http://127.0.0.1:{port}/study/{STUDY}/curves?lines=runs")
        page.wait_for_selector("#curve .scatterlayer .trace")
        assert f"Showing 200 of {3 * VARIANTS} trials as lines." in page.inner_text("#curve-note")
        assert page.evaluate("document.querySelectorAll('#curve .scatterlayer .trace').length") <= 200

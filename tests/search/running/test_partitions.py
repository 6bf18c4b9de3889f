"""A cluster falls apart: whatever is cut, the study ends as if nothing had happened. `make partitions` has more."""

import tempfile
from pathlib import Path

import pytest

from tests.search.lab import Lab, lacks
from tests.search.oracle import whole_of
from tests.search.partitions import KINDS, SHORT, one
from tests.search.storm import undisturbed, write_corpus

TRIED = ("deaf", "half-open")


@pytest.fixture(scope="module")
def lab():
    """Machines, a study's file, and what it comes to without a fault."""
    if missing := lacks():
        pytest.skip(f"nothing is cut, as a lab needs what is not here: {missing}")
    with tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as name:  # sockets need short paths
        folder = Path(name)
        study = write_corpus(folder, SHORT)
        calm = whole_of(undisturbed(study, folder / "calm"))
        lab = Lab(folder)
        yield lab, study, calm
        lab.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRIED)
def test_a_study_on_a_cluster_that_falls_apart_ends_as_an_undisturbed_one(kind, lab):
    lab, study, calm = lab
    seed = list(KINDS).index(kind)
    scenario, counts = one(seed, study, lab.folder, lab, calm)
    assert scenario.kind == kind and counts["tried"] == 1

"""A storm: whatever is killed whenever, the study ends as if nothing had happened. `make storm` has more."""

import shutil

import pytest

from tests.search.oracle import whole_of
from tests.search.postgres_kit import programs
from tests.search.storm import Servers, Storm, undisturbed, write_corpus


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The study's file, and what it comes to without a fault."""
    folder = tmp_path_factory.mktemp("calm")
    path = write_corpus(folder)
    return path, whole_of(undisturbed(path, folder / "store"))


@pytest.mark.slow
def test_a_study_in_a_storm_ends_as_an_undisturbed_one(study, tmp_path):
    if programs() is None:
        print("PostgreSQL is not installed (Debian: apt-get install postgresql): it is not among the killed")
    path, calm = study
    servers = Servers(tmp_path)
    try:
        storm = Storm(0, path, tmp_path / "store", servers, extra=0)
        storm.run()
        counts = storm.judge(calm)
    finally:
        servers.close()
    assert sum(each["tried"] for each in counts.values()) >= 3
    assert sum(each["lost"] + each["rerun"] for each in counts.values()) == 0
    shutil.rmtree(tmp_path, ignore_errors=True)

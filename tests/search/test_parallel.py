"""Several processes train one trial: it is the trial of one process within rounding, and itself to the bit."""

import json

import numpy as np
import pytest
import torch

from tests.search.gang_kit import lines, make, train_alone, train_together, weights, write_store

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One torch thread, as the ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A store with a data set."""
    return write_store(tmp_path_factory.mktemp("store"))


def assert_same_trial(one, other, exact=False):
    """That two trials have the same lines, results, documents and weights, within rounding or to the bit."""
    tolerance = {"rtol": 0, "atol": 0} if exact else CLOSE
    first, second = lines(one), lines(other)
    assert [line.keys() for line in first] == [line.keys() for line in second]
    for mine, theirs in zip(first, second, strict=True):
        logged = [line.pop("loss", 0.0) for line in (mine, theirs)]  # summed in float32, whatever the model is
        np.testing.assert_allclose(*logged, rtol=0 if exact else 1e-6)
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), **tolerance)
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (one, other))
    for split in ("validation", "test"):
        np.testing.assert_allclose(list(first[split].values()), list(second[split].values()), **tolerance)
    assert [first[name] for name in ("state", "step", "tokens", "parameters")] == [
        second[name] for name in ("state", "step", "tokens", "parameters")
    ]
    first, second = (dict(np.load(folder / "test_documents.npz")) for folder in (one, other))
    for name in first:
        np.testing.assert_allclose(first[name], second[name], **tolerance)
    first, second = weights(one), weights(other)
    assert list(first) == list(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], **tolerance)


@pytest.mark.parametrize("parallel", [{"data": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_two_processes_train_the_trial_of_one(tmp_path, root, parallel):
    alone, together = make(tmp_path / "alone"), make(tmp_path / "together")
    train_alone(alone, root)
    results = train_together(together, root, **parallel)
    assert_same_trial(alone, together)
    assert [result["state"] for result in results] == ["complete", "complete"]

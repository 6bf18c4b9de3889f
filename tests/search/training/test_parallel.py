"""Several processes train one trial: it is the trial of one process within rounding, and itself to the bit."""

import json

import numpy as np
import pytest
import torch

from archlab.search.executors.process_group import Parallel
from tests.search.gang_kit import Job, lines, make, run, run_together, weights, write_store

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


TWO = {name: Parallel(**{name: 2}) for name in ("data", "shard", "tensor", "pipeline")}
HALTED = "shard", "pipeline"  # where most is gathered for a checkpoint; test_gang continues one of `data`
NORMALISED = {
    "attention": {"heads": 4, "query": ["l2", {"type": "learned_scale", "power": 2}], "key": ["l2"], "join": "nlerp"},
    "glu": {"width": 16, "linear": ["learned_scale"], "join": "nlerp"},
}
# What else the layouts are asked to divide: changes of the model and of the recipe.
OTHERS = {
    "tensor of a parallel group": (
        "tensor",
        {
            "unembedding": {"tied": False, "bias": True},
            "block": {
                "parallel": {
                    "pre": ["layernorm"],
                    "attention": {
                        "heads": 4,
                        "head_dim": 6,
                        "bias": True,
                        "mask": {"type": "window", "size": 5},
                        "value": ["gate"],
                        "post": ["gate"],
                    },
                    "mlp": {"width": 40, "bias": True},
                }
            },
            "overrides": {"1::2": {"block.parallel.attention.heads": 2}},
        },
        {"recompute": "layers"},
    ),
    "values and losses that layers leave": (
        "shard",
        {
            "block": {
                "attention": {"heads": 4, "value": ["value_residual"], "mask": {"type": "causal", "documents": True}},
                "moe": {
                    "width": 16,
                    "experts": 4,
                    "z_loss": 0.01,
                    "balance": {"type": "bias", "rate": 0.1, "auxiliary": {"type": "switch", "over": "sequence"}},
                },
            }
        },
        {"recompute": "layers"},
    ),
    "several residual streams": ("tensor", {"streams": {"type": "hyper", "n": 2}, "skips": ["mirror", "x0_mix"]}, {}),
    "several residual streams in shards": ("shard", {"streams": "manifold", "skips": ["x0_mix"]}, {}),
    "looped layers in shards": ("shard", {"loop": {"turns": 2, "inject": "concat"}}, {}),
    "layers that share their parts": (
        "shard",
        {"block": {"attention": {"heads": 4, "scores": [{"type": "t5_buckets", "share": "stack"}]}, "mlp": {}}},
        {"optimizer": "lion"},
    ),
    "an encoder and a decoder": (
        "data",
        {
            "n_layers": None,
            "block": None,
            "encoder": {"n_layers": 1, "block": {"attention": {"heads": 2, "mask": "full"}, "mlp": {}}},
            "decoder": {
                "n_layers": 2,
                "block": {"attention": {"heads": 2}, "cross_attention": {"heads": 2}, "mlp": {"width": 8}},
            },
        },
        {"objective": "prefix", "optimizer": "muon"},
    ),
    "a pipeline without micro-batches": (
        "pipeline",
        {"unembedding": {"tied": False}, "embed": ["rmsnorm"], "embedding": {"width": 8}},
        {"accumulate": 1, "optimizer": "adafactor", "z_loss": 0.0, "objective": "prefix"},
    ),
    "weights that are evaluated as a mean": (
        "shard",
        {},
        {"optimizer": {"type": "schedule_free", "betas": [0.8, 0.95]}, "schedule": {"type": "constant", "warmup": 0.2}},
    ),
    "heads of further tokens": ("data", {"predict": {"type": "sequential", "tokens": 3}}, {}),
    "exits of a loop": ("data", {"loop": {"turns": 2, "exit": 0.1}}, {}),
    "weights on the unit sphere": ("data", {"constraint": "unit_norm", "block": NORMALISED}, {}),
    "weights on the unit sphere in a pipeline": ("pipeline", {"constraint": "unit_norm", "block": NORMALISED}, {}),
    "a batch that grows": ("data", {}, {"ramp": {"start": 4, "step": 4, "tokens": 256}}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, root):
    """LLaMA's trial as one process trains it."""
    folder = make(tmp_path_factory.mktemp("alone") / "trial")
    run(Job(folder, Parallel()), root)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, root):
    """The same trial, of every layout of two processes: whole, and stopped on the way and continued."""
    base = tmp_path_factory.mktemp("pairs")
    jobs = []
    for name, parallel in TWO.items():
        jobs.append(Job(make(base / name / "whole"), parallel))
    for name in HALTED:
        halted = make(base / name / "halted")
        beside = {"checkpoint_s": 1e-9}  # the leader writes whenever its writer is free
        jobs += [Job(halted, TWO[name], stop_after=4, options=beside), Job(halted, TWO[name], options=beside)]
    results = iter(run_together(jobs, root))
    whole = {name: next(results) for name in TWO}
    return base, whole, {name: (next(results), next(results)) for name in HALTED}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_the_trial_of_one(name, pairs, alone):
    base, whole, _ = pairs
    results = whole[name]
    assert_same_trial(alone, base / name / "whole")
    assert [result["state"] for result in results] == ["complete", "complete"]
    assert results[0]["fingerprint"]["parallel"] == f"{name} 2"


@pytest.mark.slow
@pytest.mark.parametrize("name", HALTED)
def test_a_trial_that_processes_continue_has_the_same_bits(name, pairs):
    base, _, halted = pairs
    stopped, results = halted[name]
    assert stopped == (None, None)
    assert_same_trial(base / name / "whole", base / name / "halted", exact=True)
    assert (results[0]["resumed_from"], results[0]["bit_exact"]) == ([4], True)


@pytest.fixture(scope="module")
def others(tmp_path_factory, root):
    """Other models and recipes, each in the layout that is asked to divide it."""
    base = tmp_path_factory.mktemp("others")
    made = {name: make(base / name, model, **recipe) for name, (_, model, recipe) in OTHERS.items()}
    run_together([Job(made[name], TWO[layout]) for name, (layout, _, _) in OTHERS.items()], root)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_recipes_are_divided_too(tmp_path, root, others, name):
    _, model, recipe = OTHERS[name]
    folder = make(tmp_path / "alone", model, **recipe)
    run(Job(folder, Parallel()), root)
    assert_same_trial(folder, others[name])


FOUR = [
    Parallel(data=2, shard=2),
    Parallel(tensor=2, pipeline=2),
    Parallel(shard=2, tensor=2),
    Parallel(shard=2, pipeline=2),
    Parallel(pipeline=4),
]


@pytest.mark.slow
def test_four_processes_train_the_trial_of_one(tmp_path, root, alone):
    folders = [make(tmp_path / str(parallel)) for parallel in FOUR]
    run_together([Job(folder, parallel) for folder, parallel in zip(folders, FOUR, strict=True)], root)
    for folder in folders:
        assert_same_trial(alone, folder)

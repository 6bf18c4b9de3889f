"""Training one trial: continuing gives the same bits, a divergence is a result, the clock changes nothing."""

import hashlib
import itertools
import json
import math
import os
import resource
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from archlab.arch_dsl import canonical, compile, load, resolve
from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.hardware import load as machine_load
from archlab.search.recipe.curve import curve_points
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.loop import Loop
from archlab.search.training.module import seeds_of, split_seed
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.rough_start import read_signs
from archlab.search.trial.snapshot import tensors_in
from archlab.search.trial.trial import Trial
from archlab.search.trial.writer import spent
from tests.search.forked import forking

RECIPE = {
    "tokens": 12 * 64,
    "context": 16,
    "batch": 4,
    "lr": 0.02,
    "schedule": {"type": "cosine", "warmup": 0.2},
    "clip": 0.05,
}
STEPS = 12
TIMINGS = {"time", "attempt", "tokens_per_s"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads of one process that wait for another's take minutes where the processors are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    """A folder with one prepared data set, `data`: bytes of sums."""
    root = tmp_path_factory.mktemp("store")
    (root / "data").mkdir()
    texts = {
        name: [f"{i} + {i * k} = {i + i * k}\n".encode() for i in range(count)]
        for k, (name, count) in enumerate([("train", 300), ("validation", 40), ("test", 50)], start=2)
    }
    write(root / "data", Bytes().train([], "tokenizer"), texts, {})
    return root


class Tiny(nn.Module):
    """Embedding, dropout, two layers: small, with state of every kind (matrices, vectors, a buffer, randomness)."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(257, 8, generator=generator) * 0.1)
        self.hidden = nn.Parameter(torch.randn(8, 8, generator=generator) * 0.3)
        self.bias = nn.Parameter(torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))

    def loss(self, tokens, targets, call=None, reduction="mean", z_loss=0.0):
        self.calls += self.training
        x = nn.functional.dropout(self.embedding[tokens], 0.1, self.training)
        logits = torch.tanh(x @ self.hidden + self.bias) @ self.embedding.T
        if z_loss:
            call.losses["z_loss"] = z_loss * logits.logsumexp(-1).square().mean()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets) if reduction == "none" else losses.sum() / (targets != -100).sum()


def build(trial, recipe, device):
    """The tiny model of a trial."""
    return Tiny(seeds_of(trial, recipe).init)


def make(folder, seed=0, **recipe):
    """A folder for a trial of the tiny model."""
    folder.mkdir()
    trial = Trial({"tiny": 1}, canonical(load_recipe(RECIPE | recipe)), "data", seed)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


def never():
    """Asks for no stop."""
    return False


def stop_after(steps):
    """Asks for a stop after this many steps of an attempt."""
    calls = iter(range(1, 10**6))
    return lambda: next(calls) >= steps


def run(folder, data_root, attempt=1, should_stop=never, **options):
    """Trains the tiny model."""
    return train(folder, data_root, attempt, should_stop, build=build, **options)


def weights(folder):
    """The digest of the final weights and buffers, by name."""
    model = checkpoint.load(folder, checkpoint.steps_in(folder)[0])["model"]
    data = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(model.items()))
    return hashlib.sha256(data).hexdigest()


def lines(folder):
    """The measures of a trial without what depends on the clock."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in found]


def measures(folder):
    """What the result says of the model, and its documents."""
    result = json.loads((folder / "result.json").read_text())
    documents = np.load(folder / "test_documents.npz")
    return result["validation"], result["test"], *(documents[name].tolist() for name in documents)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_root):
    """A trial that was never interrupted, with samples of the machine's load as often as they come."""
    folder = make(tmp_path_factory.mktemp("trials") / "whole")

    def once_sampled():
        while not (folder / machine_load.FILE).exists():
            threading.Event().wait(0.01)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_load, "gaps", lambda: itertools.repeat(0.01))
        run(folder, data_root, should_stop=once_sampled)
    return folder


def same(first, second):
    """Whether two trials agree in every bit that is no timing."""
    return (weights(first), lines(first), measures(first)) == (weights(second), lines(second), measures(second))


def test_a_trial_leaves_its_result_its_lines_and_its_weights(whole, data_root):
    result = json.loads((whole / "result.json").read_text())
    assert (result["state"], result["reason"], result["step"], result["tokens"]) == ("complete", None, 12, 768)
    assert result["parameters"] == 257 * 8 + 64 + 8
    assert result["validation"]["perplexity"] == pytest.approx(math.exp(result["validation"]["loss"]))
    assert result["peak_memory_bytes"] > 10_000_000
    assert {"torch", "python", "threads", "cpu", "device", "platform", "archlab"} <= result["fingerprint"].keys()
    assert (result["bit_exact"], result["resumed_from"], result["discarded_checkpoints"]) == (True, [], [])
    assert result["signs"] == list(read_signs(whole)) == []
    training = [line for line in lines(whole) if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    assert all(line.keys() == {"step", "tokens", "loss", "lr", "grad_norm"} for line in training)
    assert training[0]["loss"] == pytest.approx(math.log(257), abs=0.05)
    assert training[-1]["loss"] < training[0]["loss"] - 0.1
    curve = [line["step"] for line in lines(whole) if "validation_loss" in line]
    assert curve == sorted(curve_points(STEPS))
    documents = np.load(whole / "test_documents.npz")
    assert result["test"]["loss"] == pytest.approx(documents["nll"].sum() / documents["tokens"].sum())
    assert {name: documents[name].dtype.name for name in documents} == {
        "nll": "float64", "tokens": "int64", "bytes": "int64"
    }  # fmt: skip
    assert sorted(entry.name for entry in whole.iterdir()) == [
        "checkpoint-12.pt", "checkpoint-12.pt.sha256", "checkpoints.jsonl", "load.jsonl", "metrics.jsonl",
        "result.json", "test_documents.npz", "trial.json", "windows-0.f32",
    ]  # fmt: skip
    sampled = [json.loads(line) for line in (whole / machine_load.FILE).read_text().splitlines()]
    assert all(each["memory_bytes"] > 10_000_000 and 0 <= each["machine_cpu"] <= 1 for each in sampled) and sampled


@pytest.mark.parametrize("stops", [[1], [5], [11], [3, 1, 4]], ids=str)
def test_continued_trial_has_the_bits_of_one_that_never_stopped(tmp_path, data_root, whole, stops):
    folder = make(tmp_path / "parts")
    for attempt, steps in enumerate(stops, start=1):
        with pytest.raises(Interrupted):
            run(folder, data_root, attempt, stop_after(steps))
    result = run(folder, data_root, len(stops) + 1)
    assert result["resumed_from"] == np.cumsum(stops).tolist()
    assert result["bit_exact"]
    assert same(folder, whole)


@pytest.mark.parametrize("stops", [[2], [8], [4, 6, 11]], ids=str)
def test_a_trial_that_pauses_on_the_way_has_the_bits_of_one_that_never_did(tmp_path, data_root, whole, stops):
    folder = make(tmp_path / "parts")
    for attempt, until in enumerate(stops, start=1):
        told = run(folder, data_root, attempt, until=until)
        (loss,) = (line["validation_loss"] for line in lines(folder)[-2:] if "validation_loss" in line)
        assert told == {"state": "paused", "step": until, "tokens": until * 64, "validation": {"loss": loss}}
        assert "optimizer" in checkpoint.load(folder, until)
        assert not (folder / "result.json").exists()
    run(folder, data_root, len(stops) + 1)
    assert same(folder, whole)


def test_a_paused_trial_that_is_to_pause_where_it_has_been_returns_at_once(tmp_path, data_root, monkeypatch):
    folder = make(tmp_path / "parts")
    early, late = run(folder, data_root, until=4), run(folder, data_root, 2, until=8)
    monkeypatch.setattr("archlab.search.training.train.Run.loop", None)
    assert run(folder, data_root, 3, until=8) == late
    assert run(folder, data_root, 4, until=4) == early
    assert checkpoint.steps_in(folder)[0] == 8


def test_a_trial_that_is_stopped_before_its_pause_goes_on_to_it(tmp_path, data_root, whole):
    folder = make(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(3), until=8)
    assert run(folder, data_root, 2, stop_after(5), until=8)["step"] == 8  # the pause comes before the stop
    run(folder, data_root, 3)
    assert same(folder, whole)


def test_a_pause_is_a_point_of_the_validation_curve(tmp_path, data_root):
    assert 7 not in curve_points(STEPS)
    with pytest.raises(ValueError, match=r"after one of the steps \[2, 3, 4, 5, 6, 8, 9, 10, 11\], not after 7"):
        run(make(tmp_path / "parts"), data_root, until=7)


def test_lines_between_logs_are_continued_too(tmp_path, data_root, monkeypatch):
    monkeypatch.setattr("archlab.search.training.loop.LOG_LINES", 3)  # a line every fourth step
    whole, folder = make(tmp_path / "whole"), make(tmp_path / "parts")
    run(whole, data_root)
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(6))
    run(folder, data_root, 2)
    assert [line["step"] for line in lines(whole) if "loss" in line] == [4, 8, 12]
    assert same(folder, whole)


BESIDE_S = 1e-9  # a checkpoint as soon as the one before is written


@pytest.mark.parametrize("checkpoint_s", [0, BESIDE_S])
def test_checkpoints_at_every_step_change_no_bit(tmp_path, data_root, whole, checkpoint_s):
    folder = make(tmp_path / "often")
    result = run(folder, data_root, checkpoint_s=checkpoint_s)
    assert same(folder, whole)
    assert result["checkpoints"] == spent(folder)
    assert result["checkpoints"]["count"] == STEPS if checkpoint_s == 0 else 1 < result["checkpoints"]["count"] <= STEPS


def slow_disk(monkeypatch, after=1):
    """What is written beside training hangs at the `after`th sync until the event that is returned is set."""
    gate, really, seen = threading.Event(), os.fsync, []

    def fsync(descriptor):
        if threading.current_thread().name == "checkpoint":
            seen.append(descriptor)
            if len(seen) >= after:
                gate.wait()
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return gate


@pytest.mark.parametrize("after", [1, 2])
def test_a_stop_while_a_slow_disk_writes_waits_for_both_checkpoints(tmp_path, data_root, whole, monkeypatch, after):
    """The first is of step 1, as it was then, though four steps have changed all of it meanwhile."""
    first, folder = make(tmp_path / "first"), make(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run(first, data_root, 1, stop_after(1))
    stop, gate, before = stop_after(5), slow_disk(monkeypatch, after), []

    def should_stop():
        if asked := stop():
            before.extend(checkpoint.steps_in(folder))
            gate.set()
        return asked

    with pytest.raises(Interrupted, match="after step 5"):
        run(folder, data_root, 1, should_stop, checkpoint_s=BESIDE_S)
    assert (before, checkpoint.steps_in(folder)) == ([], [5, 1])
    ours, theirs = checkpoint.load(folder, 1), checkpoint.load(first, 1)
    assert [*map(torch.Tensor.tolist, tensors_in(ours))] == [*map(torch.Tensor.tolist, tensors_in(theirs))]
    (folder / "checkpoint-5.pt").unlink()
    assert run(folder, data_root, 2)["resumed_from"] == [1]
    assert same(folder, whole)


def die_while_writing(folder, data_root, sync):
    """Trains until the `sync`th sync beside training, and is killed there."""
    torch.set_num_threads(1)
    really, seen = os.fsync, []

    def fsync(descriptor):
        if threading.current_thread().name == "checkpoint":
            seen.append(descriptor)
            if len(seen) == sync:
                os.kill(os.getpid(), signal.SIGKILL)
        really(descriptor)

    os.fsync = fsync
    run(folder, data_root, checkpoint_s=BESIDE_S)


@pytest.mark.parametrize("part", range(5), ids=["lines", "state", "its name", "digest", "its name too"])
def test_a_trial_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before(tmp_path, data_root, whole, part):
    folder = make(tmp_path / "killed")
    process = forking().Process(target=die_while_writing, args=(folder, data_root, 6 + part))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    newest, *older = checkpoint.steps_in(folder)
    expected = older[0] if part in (2, 3) else newest  # one whose digest is missing counts for nothing
    assert run(folder, data_root, 2)["resumed_from"] == [expected]
    assert same(folder, whole)


def test_stop_during_the_last_step_or_the_evaluation_keeps_the_weights(tmp_path, data_root, whole):
    folder = make(tmp_path / "parts")
    with pytest.raises(Interrupted, match="evaluating"):
        run(folder, data_root, 1, stop_after(STEPS))
    assert checkpoint.steps_in(folder)[0] == STEPS
    assert not (folder / "result.json").exists()
    assert run(folder, data_root, 2)["resumed_from"] == [STEPS]
    assert same(folder, whole)


def drop_optimizer(state):
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"].zero_()


def drop_optimizer_steps(state):
    for moments in state["optimizer"]["state"].values():
        moments["step"].zero_()


def drop_random_state(state):
    state["random"] = torch.Generator().manual_seed(1).get_state()


def drop_place_in_the_data(state):
    state["step"] -= 1


def drop_a_buffer(state):
    state["model"]["calls"].zero_()


MUTATIONS = [drop_optimizer, drop_optimizer_steps, drop_random_state, drop_place_in_the_data, drop_a_buffer]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_each_part_of_the_state_is_needed_for_the_same_bits(tmp_path, data_root, whole, mutate):
    folder = make(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(5))
    state = checkpoint.load(folder, 5)
    mutate(state)
    checkpoint.save(folder, 5, state)
    run(folder, data_root, 2)
    assert weights(folder) != weights(whole)


def test_lines_past_the_checkpoint_are_written_once(tmp_path, data_root, whole):
    folder = make(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(5))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "time": 1, "attempt": 1, "tokens": 1, "loss": 9.0, "lr": 1, "grad_norm": 1}\n{"ste')
    run(folder, data_root, 2)
    assert same(folder, whole)


@pytest.mark.parametrize(("damaged", "step"), [([6], 5), ([6, 5], 0)], ids=["newest", "all"])
def test_damaged_checkpoints_are_recorded_and_repeated_from_before(tmp_path, data_root, whole, damaged, step):
    folder = make(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(6), checkpoint_s=0)
    for name in damaged:
        (folder / f"checkpoint-{name}.pt").write_bytes(b"")
    result = run(folder, data_root, 2)
    assert [item["name"] for item in result["discarded_checkpoints"]] == [f"checkpoint-{name}.pt" for name in damaged]
    assert all("sha256" in item["reason"] for item in result["discarded_checkpoints"])
    assert result["resumed_from"] == [step]
    assert same(folder, whole)


def test_continuing_with_other_threads_is_flagged(tmp_path, data_root):
    folder = make(tmp_path / "parts")
    threads = torch.get_num_threads()
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(5))
    torch.set_num_threads(threads + 1)
    try:
        assert run(folder, data_root, 2)["bit_exact"] is False
    finally:
        torch.set_num_threads(threads)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[0]["changed"] == {"threads": [str(threads), str(threads + 1)]}


def test_checkpoint_of_another_trial_is_refused(tmp_path, data_root):
    first, second = make(tmp_path / "first"), make(tmp_path / "second", seed=1)
    with pytest.raises(Interrupted):
        run(first, data_root, 1, stop_after(5))
    for name in ("checkpoint-5.pt", "checkpoint-5.pt.sha256"):
        (first / name).rename(second / name)
    with pytest.raises(ValueError, match="belongs to trial"):
        run(second, data_root)


@pytest.mark.parametrize("checkpoint_s", [0, BESIDE_S])
def test_full_disk_ends_the_attempt_and_the_next_one_goes_on(tmp_path, data_root, whole, checkpoint_s):
    folder = make(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run(folder, data_root, 1, stop_after(5))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError):
            run(folder, data_root, 2, checkpoint_s=checkpoint_s)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.steps_in(folder) == [5]
    assert run(folder, data_root, 3)["resumed_from"] == [5, 5]
    assert same(folder, whole)


@pytest.mark.parametrize("checkpoint_s", [0, BESIDE_S])
def test_too_high_a_rate_ends_as_diverged(tmp_path, data_root, checkpoint_s):
    folder = make(tmp_path / "wild", lr=1e25, clip=None, schedule={"type": "constant", "warmup": 0.0})
    result = run(folder, data_root, checkpoint_s=checkpoint_s)
    assert result == json.loads((folder / "result.json").read_text())
    assert (result["state"], result["reason"]) == ("diverged", "the loss or a gradient is not finite")
    assert result["validation"] is result["test"] is None
    assert 1 < result["step"] < STEPS
    assert result["tokens"] == result["step"] * 64
    last = lines(folder)[-1]
    assert (last["step"], last["loss"], last["grad_norm"]) == (result["step"], None, None)
    assert checkpoint.steps_in(folder) == []


@pytest.mark.parametrize("log_lines", [400, 1])
def test_divergence_is_told_at_the_step_where_it_began(tmp_path, data_root, monkeypatch, log_lines):
    monkeypatch.setattr("archlab.search.training.loop.LOG_LINES", log_lines)

    class Breaks(Tiny):
        def loss(self, *arguments, **options):
            found = super().loss(*arguments, **options)
            return found / (self.calls != 7) if self.training else found

    folder = make(tmp_path / "trial")
    result = train(folder, data_root, 1, never, build=lambda *_: Breaks(0))
    assert (result["state"], result["step"]) == ("diverged", 7)
    assert lines(folder)[-1] == {
        "step": 7, "tokens": 7 * 64, "lr": pytest.approx(load_recipe(RECIPE).lr_at(6)), "loss": None,
        "grad_norm": None,
    }  # fmt: skip


def test_finished_trial_is_returned_as_it_is(whole, data_root):
    before = {entry.name: entry.stat().st_mtime_ns for entry in whole.iterdir()}
    assert run(whole, data_root, 2) == json.loads((whole / "result.json").read_text())
    assert before == {entry.name: entry.stat().st_mtime_ns for entry in whole.iterdir()}


def gradients(data_root, folder, accumulate):
    """The gradients of the first step, dropout off."""
    model = Tiny(0).eval()
    recipe = load_recipe(RECIPE | {"accumulate": accumulate})
    loop = Loop(folder, "key", 1, recipe, Dataset.open(data_root, "data"), model, 0)
    loss = loop.gradients(0)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), loss


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, data_root, accumulate):
    whole, loss = gradients(data_root, tmp_path, 1)
    parts, parts_loss = gradients(data_root, tmp_path, accumulate)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts_loss, loss, rtol=1e-6, atol=1e-6)


def test_seed_splits_into_three_that_never_change():
    assert split_seed(0) == (882712081664759174, 976837161525922134, 4966265956636144244)
    assert len({seed for number in range(100) for seed in split_seed(number)}) == 300


CHANGES = [
    {"tokens": 11 * 64},
    {"context": 8},
    {"batch": 2},
    {"accumulate": 2},
    {"lr": 0.021},
    {"clip": 0.06},
    {"clip": None},
    {"precision": "bf16"},
    {"z_loss": 0.1},
    {"init_seed": 1},
    {"data_seed": 1},
    {"objective": "prefix"},
    {"optimizer": {"type": "adamw", "betas": [0.8, 0.95]}},
    {"optimizer": {"type": "adamw", "betas": [0.9, 0.9]}},
    {"optimizer": {"type": "adamw", "weight_decay": 0.2}},
    {"optimizer": {"type": "adamw", "eps": 1e-4}},
    {"optimizer": {"type": "adamw", "groups": [{"parameters": ["hidden"], "lr_factor": 0.5}]}},
    {"optimizer": "adafactor"},
    {"batch_tokens": 32},
    {"ramp": {"start": 2, "step": 1, "tokens": 256}},
    {"schedule": "linear"},
    {"schedule": "inverse_sqrt"},
    {"schedule": "constant"},
    {"schedule": "wsd"},
    {"schedule": {"type": "cosine", "warmup": 0.3}},
    {"schedule": {"type": "cosine", "warmup": 0.2, "final": 0.5}},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: json.dumps(change).replace('"', ""))
def test_every_field_of_a_recipe_changes_the_weights(tmp_path, data_root, whole, change):
    changed = make(tmp_path / "changed", **change)
    run(changed, data_root)
    assert weights(changed) != weights(whole)


def test_seed_changes_the_weights_and_the_order_of_the_data(tmp_path, data_root, whole):
    other = make(tmp_path / "other", seed=1)
    run(other, data_root)
    assert weights(other) != weights(whole)


def test_a_seed_held_fixed_is_that_of_the_trial_of_that_number(tmp_path, data_root, whole):
    """At its own number it changes nothing; beside another trial seed only the other part varies, and the dropout."""
    recipes = {name: load_recipe(RECIPE | {name: 0}) for name in ("init_seed", "data_seed")}
    for name, recipe in recipes.items():
        own = make(tmp_path / name, **{name: 0})
        run(own, data_root)
        assert weights(own) == weights(whole)
        trial = Trial({"tiny": 1}, canonical(recipe), "data", 1)
        kept, other = (getattr(seeds_of(trial, recipe), part) for part in ("init", "data"))
        if name == "data_seed":
            kept, other = other, kept
        part = name.removesuffix("_seed")
        assert kept == getattr(split_seed(0), part) and other in split_seed(1)
        assert seeds_of(trial, recipe).noise == split_seed(1).noise


def test_validation_curve_changes_no_bit_of_the_training(tmp_path, data_root, monkeypatch, whole):
    monkeypatch.setattr("archlab.search.recipe.curve.CURVE_POINTS", 1)
    folder = make(tmp_path / "once")
    run(folder, data_root)
    assert len(lines(folder)) == STEPS + 1
    assert weights(folder) == weights(whole)


def test_training_leaves_the_settings_of_the_process_alone(tmp_path, data_root):
    before = torch.get_rng_state()
    run(make(tmp_path / "trial"), data_root)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


MODEL = {
    "d_model": 16,
    "n_layers": 2,
    "vocab": 257,
    "block": {
        "norm": {"type": "rmsnorm", "placement": "pre"},
        "attention": {"heads": 2, "positional": "rope", "gate": {"position": "sdpa"}},
        "ffn": {"type": "glu", "width": 32},
    },
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_model_is_continued_to_the_same_bits(tmp_path, data_root, precision):
    spec = resolve(load(MODEL), max_positions=16)
    trial = Trial(canonical(spec), canonical(load_recipe(RECIPE | {"precision": precision})), "data", 0)
    folders = tmp_path / "whole", tmp_path / "parts"
    for folder in folders:
        folder.mkdir()
        (folder / "trial.json").write_text(trial.to_json())
    result = train(folders[0], data_root, 1, never)
    with pytest.raises(Interrupted):
        train(folders[1], data_root, 1, stop_after(5))
    train(folders[1], data_root, 2, never)
    assert result["parameters"] == sum(p.numel() for p in compile(spec).parameters())
    assert same(*folders)

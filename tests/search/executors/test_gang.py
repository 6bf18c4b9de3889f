"""Gangs: who is who, what is refused before anything is trained, and what a trial lives through."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from archlab.api import plan
from archlab.arch_dsl import SpecError, load, resolve
from archlab.search.executors.process_group import Gang, Parallel
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.module import build_model
from archlab.search.training.parallel.rules import problems
from tests.search.gang_kit import LLAMA, RECIPE, Job, lines, make, run, run_together, weights, write_store

INDEXER = {"type": "lightning_indexer", "heads": 2, "head_dim": 8}
DATA, SHARD, TENSOR, PIPELINE = (Parallel(**{name: 2}) for name in ("data", "shard", "tensor", "pipeline"))


def test_ranks_have_places_from_the_outside_in():
    parallel = Parallel(data=2, tensor=2, pipeline=2)
    places = [Gang(rank, 8, "127.0.0.1:1", parallel).place for rank in range(8)]
    assert [tuple(place[name] for name in ("pipeline", "data", "shard", "tensor")) for place in places] == [
        (p, d, 0, t) for p in (0, 1) for d in (0, 1) for t in (0, 1)
    ]
    assert (parallel.world, parallel.copies, str(parallel)) == (8, 2, "pipeline 2, data 2, tensor 2")


def test_a_gang_is_the_same_after_a_journey_as_text():
    gang = Gang(1, 4, "[::1]:29500", Parallel(shard=2, tensor=2))
    assert Gang.of(json.loads(json.dumps(dataclasses.asdict(gang)))) == gang


@pytest.mark.parametrize(
    ("rank", "world", "address", "message"),
    [
        (0, 3, "127.0.0.1:1", r"parallel \(data 2\) takes 2 processes, found 3"),
        (2, 2, "127.0.0.1:1", "rank 2 is none of 2 processes"),
        (0, 2, "here", "the address of a gang is host:port, found 'here'"),
    ],
)
def test_a_gang_that_makes_no_sense_is_refused(rank, world, address, message):
    with pytest.raises(ValueError, match=message):
        Gang(rank, world, address, DATA)


ATTENTION = {"heads": 4, "kv_heads": 2}
MLP = {"type": "mlp", "width": 8}


def block(attention=None, **branches):
    """A block of attention and other branches."""
    return {"block": {"attention": ATTENTION | (attention or {}), **(branches or {"ffn": MLP})}}


EARLIER = {"overrides": {"1": {"block.attention.kv": "earlier"}}}
REFUSED = {
    "rows": (DATA, {}, {"batch": 6}, "data: divides micro-batches into 2 parts (data 2), and one has 3 sequences"),
    "rows of a ramp": (SHARD, {}, {"ramp": {"start": 1, "step": 1, "tokens": 256}}, "shard: divides micro-batches"),
    "rows of a stage": (DATA, {}, {"stages": [{"tokens": 64, "lr": 1e-3, "batch": 2}]}, "and one has 1 sequences"),
    "muon": (
        SHARD,
        {},
        {"optimizer": "muon"},
        "shard: divides matrices, and muon needs them whole (adamw, adam, lion, schedule_free)",
    ),
    "cautious": (
        SHARD,
        {},
        {"optimizer": {"type": "lion", "cautious": True}},
        "shard: divides matrices, and lion with cautious needs them whole",
    ),
    "adafactor": (TENSOR, {}, {"optimizer": "adafactor"}, "tensor: divides matrices, and adafactor needs them whole"),
    "balance": (
        DATA,
        block(moe={"balance": "switch"}),
        {},
        "data: block.moe.balance is over a whole batch, whose rows are divided; set `over: sequence`",
    ),
    "balance of uneven rows": (
        DATA,
        block(moe={"z_loss": 0.1}),
        {"objective": "prefix"},
        "block.moe has losses over tokens, of which rows have unequally many under prefix",
    ),
    "heads": (Parallel(tensor=3), {}, {}, "tensor: block.attention.heads: 4 cannot be divided into 3 equal parts"),
    "kv_heads": (TENSOR, block({"kv_heads": 1}), {}, "block.attention.kv_heads: 1 cannot be divided"),
    "kv_heads of one layer": (
        TENSOR,
        {"overrides": {"1": {"block.attention.kv_heads": 1}}},
        {},
        "block (layer 1).attention.kv_heads: 1 cannot be divided",
    ),
    "scores": (TENSOR, block({"scores": ["alibi"]}), {}, "block.attention.scores: alibi belongs to heads"),
    "norm over heads": (
        TENSOR,
        block({"query": [{"type": "rmsnorm", "over": "heads"}]}),
        {},
        "query: rmsnorm looks at",
    ),
    "gate of all heads": (TENSOR, block({"sdpa": [{"type": "gate", "heads": "shared"}]}), {}, "sdpa: gate looks at"),
    "gate of low rank": (TENSOR, block({"sdpa": [{"type": "gate", "rank": 2}]}), {}, "sdpa: gate looks at"),
    "mask by head": (TENSOR, block({"mask": "bigbird"}), {}, "block.attention.mask: bigbird differs from head to head"),
    "vectors of heads": (
        TENSOR,
        block({"weights": {"type": "stick_breaking", "remainder": "learned"}}),
        {},
        "block.attention.weights: stick_breaking has learned vectors of heads",
    ),
    "memory": (TENSOR, block({"memory": 2}), {}, "block.attention.memory cannot be divided"),
    "shared branch": (TENSOR, block({"share": "stack"}), {}, "block.attention.share cannot be divided"),
    "experts of maps": (TENSOR, block({"switch": {"of": "value"}}), {}, "block.attention.switch cannot be divided"),
    "keys of a layer before": (TENSOR, EARLIER, {}, "block (layer 1).attention.kv cannot be divided"),
    "keys of another process": (PIPELINE, EARLIER, {}, "block (layer 1).attention.kv: takes keys and values of a"),
    "queries": (TENSOR, block({"queries": "positions"}), {}, "block.attention.queries: those of positions"),
    "width": (TENSOR, block(ffn=MLP | {"width": 7}), {}, "block.ffn.width: 7 channels cannot be divided"),
    "inner": (TENSOR, block(ffn=MLP | {"inner": ["rmsnorm"]}), {}, "block.ffn.inner: rmsnorm looks at all hidden"),
    "experts": (TENSOR, block(moe={}), {}, "block.moe is moe, which cannot be divided (attention, glu, mlp)"),
    "linear mixer": (TENSOR, {"block": {"rwkv4": {}, "mlp": {}}}, {}, "block.rwkv4 is rwkv4, which cannot be divided"),
    "one map of a group": (
        TENSOR,
        {"block": {"parallel": {"output": "shared", "attention": ATTENTION, "mlp": {"width": 32}}}},
        {},
        "block.parallel.output: one map of all members is not divided with them",
    ),
    "inside a group": (
        TENSOR,
        {"block": {"parallel": {"attention": ATTENTION, "mlp": {"width": 5}}}},
        {},
        "block.parallel.mlp.width: 5 channels",
    ),
    "experts in a pipeline": (PIPELINE, block(moe={}), {}, "pipeline: block.moe is moe, whose losses and loads"),
    "an indexer in a pipeline": (
        PIPELINE,
        block({"scores": [INDEXER]}),
        {},
        "pipeline: block.attention.scores has a lightning_indexer, whose loss other processes would not see",
    ),
    "an indexer of rows with unequally many targets": (
        Parallel(data=2),
        block({"scores": [INDEXER]}),
        {"objective": "prefix"},
        "block.attention.scores has a loss over tokens, of which rows have unequally many under prefix",
    ),
    "chosen tokens of rows with unequally many targets": (
        Parallel(data=2),
        {"depths": 0.5},
        {"objective": "prefix"},
        "depths has a loss over tokens, of which rows have unequally many under prefix",
    ),
    "layers": (Parallel(pipeline=5), {}, {}, "pipeline: n_layers: 4 layers cannot be divided among 5 processes"),
    "prompt": (PIPELINE, {"prompt": 2}, {}, "pipeline: prompt: vectors before the tokens"),
    "a constraint": (
        SHARD,
        {"constraint": "unit_norm"},
        {},
        "shard: divides matrices, and constraint: unit_norm needs",
    ),
    "a constraint on heads": (
        TENSOR,
        {"constraint": "unit_norm"},
        {},
        "tensor: divides matrices, and constraint: unit_norm",
    ),
    "a scale in the feed-forward": (
        TENSOR,
        {"block": {"attention": ATTENTION, "ffn": {"type": "glu", "width": 48, "preactivation": ["learned_scale"]}}},
        {},
        "block.ffn.preactivation: learned_scale looks at all hidden channels, or is not divided with them",
    ),
    "heads of further tokens": (
        SHARD,
        {"predict": "parallel"},
        {},
        "shard: predict: the heads of further tokens are not",
    ),
    "ramp": (PIPELINE, {}, {"ramp": {"start": 4, "step": 4, "tokens": 256}}, "pipeline: train.ramp: the micro-batches"),
    "values across layers": (
        PIPELINE,
        block({"value": ["value_residual"]}),
        {},
        "block.attention.value.0: value_residual carries more than the stream",
    ),
    "values of RWKV-7": (
        PIPELINE,
        {"block": {"rwkv7": {"head_dim": 8}, "mlp": {}}},
        {},
        "block.rwkv7: rwkv7 carries more than the stream",
    ),
    "streams": (PIPELINE, {"streams": "hyper"}, {}, "pipeline: streams: layers hand on more than one stream"),
    "skips": (PIPELINE, {"skips": ["mirror"]}, {}, "pipeline: skips: layers hand on more than one stream"),
    "loop": (PIPELINE, {"loop": 2}, {}, "pipeline: loop: a layer is applied again after layers that another"),
    "tables of tokens in layers": (
        PIPELINE,
        block(per_layer_embedding={"width": 8}),
        {},
        "block.per_layer_embedding: per_layer_embedding carries more than the stream",
    ),
    "table of a layer before": (
        PIPELINE,
        block({"value": ["value_embedding"]})
        | {"overrides": {"1": {"block.attention.value": [{"type": "value_embedding", "table_of": 0}]}}},
        {},
        "block (layer 1).attention.value.0 is shared by layers",
    ),
    "gate of some channels": (TENSOR, block({"sdpa": [{"type": "gate", "channels": 4}]}), {}, "sdpa: gate looks at"),
    "preactivation": (TENSOR, block(ffn=MLP | {"preactivation": ["canon"]}), {}, "preactivation: short_conv looks at"),
    "shared parts": (
        PIPELINE,
        block({"scores": [{"type": "t5_buckets", "share": "stack"}]}),
        {},
        "block.attention.scores.0 is shared by layers",
    ),
    "encoder": (
        Parallel(tensor=2, pipeline=2),
        {
            "n_layers": None,
            "block": None,
            "encoder": {"n_layers": 2, "block": {"attention": ATTENTION | {"mask": "full"}}},
            "decoder": {"n_layers": 2, "block": {"attention": ATTENTION, "cross_attention": ATTENTION}},
        },
        {"objective": "prefix"},
        "pipeline: divides the layers of a decoder alone, and the model has an encoder too",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_with_its_path(name):
    parallel, model, recipe, message = REFUSED[name]
    said = {key: value for key, value in (LLAMA | model).items() if value is not None}
    found = problems(parallel, resolve(load(said)), load_recipe(RECIPE | recipe))
    assert any(
        message in f"{problem.path.removeprefix('resources.parallel.')}: {problem.message}" for problem in found
    ), found


def test_one_process_is_refused_nothing():
    for _, model, recipe, _ in REFUSED.values():
        said = {key: value for key, value in (LLAMA | model).items() if value is not None}
        assert problems(Parallel(), resolve(load(said)), load_recipe(RECIPE | recipe)) == []


def test_a_study_is_refused_at_the_line_that_asks(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"{n} is a number of a text" for n in range(4000)))
    (tmp_path / "study.yaml").write_text(
        "study: wide\n"
        "model: {d_model: 16, n_layers: 1, block: {attention: {heads: 2, kv_heads: 1}, mlp: {}}}\n"
        "variants: {baseline: {}}\n"
        "train: {data: {text: corpus.txt}, tokens: 512, context: 16, batch: 4, lr: 1e-3}\n"
        "resources: {cpus: 1, parallel: {data: 2, tensor: 2}}\n"
    )
    with pytest.raises(SpecError) as fault:
        plan(tmp_path / "study.yaml", tmp_path / "store")
    place = "study.yaml:5:50: resources.parallel.tensor"
    assert f"{place}: block.attention.kv_heads: 1 cannot be divided into 2 equal parts" in str(fault.value)


def quiet(trial, recipe, device):
    """The trial's model, and the addresses at which this process listens beside its port for the others."""
    numbers = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in numbers:
                assert words[1].startswith(("0100007F:", f"{'0' * 24}01000000:")), f"listens at {words[1]}"
                numbers.discard(f"socket:[{words[9]}]")
                LISTENING.append(words[1])
    assert LISTENING, "no socket listens, so nothing was looked at"
    return build_model(trial, recipe, device)


LISTENING = []


def _is_open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


DROPOUT = {
    "block": {"attention": ATTENTION | {"post": [{"type": "dropout", "rate": 0.2}]}, "ffn": MLP},
    "embed": [{"type": "dropout", "rate": 0.1}],
}
STAGES = {
    "stages": [{"tokens": 4 * 64, "lr": 1e-3, "batch": 4, "accumulate": 1, "trainable": ["block.*"]}],
    "optimizer": {"type": "adamw", "groups": [{"parameters": ["*norm*"], "lr_factor": 0.5}]},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A store with a data set."""
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def lives(tmp_path_factory, root):
    """What trials of two processes live through; the folders, and what the ranks returned, by name."""
    base = tmp_path_factory.mktemp("lives")
    single = {"build": build_model}
    jobs = {
        "noise": Job(make(base / "noise", DROPOUT), DATA, options=single),
        "noise stopped": Job(make(base / "noise again", DROPOUT), DATA, 3, single),
        "noise continued": Job(base / "noise again", DATA, options=single),
        "paused": Job(make(base / "paused"), SHARD, options={"until": 5}),
        "after the pause": Job(base / "paused", SHARD),
        "moved": Job(make(base / "moved"), SHARD, 4),
        "moved again": Job(base / "moved", TENSOR, 3),
        "staged": Job(make(base / "staged", **STAGES), SHARD),
        "diverged": Job(make(base / "diverged", lr=1e38, clip=None, schedule="constant"), SHARD, options=single),
        "listening": Job(make(base / "listening"), PIPELINE, options={"build": quiet}),
    }
    results = run_together(list(jobs.values()), root)
    return {name: (job.folder, ranks) for (name, job), ranks in zip(jobs.items(), results, strict=True)}


@pytest.mark.slow
def test_noise_is_the_same_again(lives):
    whole, again = (lives[name][0] for name in ("noise", "noise continued"))
    assert lines(whole) == lines(again)
    for one, other in zip(weights(whole).values(), weights(again).values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_pause_changes_nothing(lives, root, tmp_path):
    folder, ranks = lives["paused"]
    assert ranks[0] == ranks[1] == {"state": "paused", "step": 5, "tokens": 640, "validation": ranks[0]["validation"]}
    run(Job(make(tmp_path / "alone"), Parallel()), root)
    assert_close(weights(folder), weights(tmp_path / "alone"))


@pytest.mark.slow
def test_a_trial_moves_between_layouts(lives, root, tmp_path):
    """From FSDP to tensor parallel to one process, which says that its bits are not those of either."""
    folder, _ = lives["moved again"]
    result = run(Job(folder, Parallel()), root)
    run(Job(make(tmp_path / "alone"), Parallel()), root)
    assert_close(weights(folder), weights(tmp_path / "alone"))
    assert (result["resumed_from"], result["bit_exact"]) == ([4, 7], False)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["changed"] for event in events] == [
        {"parallel": ["shard 2", "tensor 2"]},
        {"parallel": ["tensor 2", ""]},
    ]


@pytest.mark.slow
def test_stages_are_trained_by_the_same_processes(lives, root, tmp_path):
    folder, ranks = lives["staged"]
    alone = run(Job(make(tmp_path / "store" / "alone", **STAGES), Parallel()), root)
    assert_close(weights(folder), weights(tmp_path / "store" / "alone"))
    assert [stage["tokens"] for stage in ranks[0]["stages"]] == [stage["tokens"] for stage in alone["stages"]]


@pytest.mark.slow
def test_all_processes_see_a_divergence(lives):
    folder, ranks = lives["diverged"]
    assert [(rank["state"], rank["step"]) for rank in ranks] == [("diverged", ranks[0]["step"])] * 2
    assert json.loads((folder / "result.json").read_text())["state"] == "diverged"


@pytest.mark.slow
def test_layouts_agree_under_bf16(root, tmp_path):
    single = {"build": build_model}
    alone = run(Job(make(tmp_path / "alone", precision="bf16"), Parallel(), options=single), root)
    layouts = (DATA, SHARD, TENSOR, PIPELINE)
    jobs = [Job(make(tmp_path / str(layout), precision="bf16"), layout, options=single) for layout in layouts]
    for job, (result, _) in zip(jobs, run_together(jobs, root), strict=True):
        assert result["validation"]["loss"] == pytest.approx(alone["validation"]["loss"], abs=2e-3), job.parallel


@pytest.mark.slow
def test_no_process_listens_beyond_its_machine(lives):
    assert lives["listening"][1][0]["state"] == "complete"


def deserted(trial, recipe, device):
    """The trial's model; where the environment says so, this process dies instead."""
    if os.environ.get("LEAVES"):
        os._exit(3)
    return build_model(trial, recipe, device)


@pytest.mark.slow
def test_who_is_left_alone_fails_and_does_not_wait(tmp_path, root):
    jobs = [Job(make(tmp_path / "trial"), DATA, options={"build": deserted})]
    with pytest.raises(AssertionError, match=r"rank 0:\n(.|\n)*(Connection closed|Broken pipe|reset by peer)"):
        run_together(jobs, root, environment={1: {"LEAVES": "1"}})
    assert not (tmp_path / "trial" / "result.json").exists()


def assert_close(first, second):
    """That weights agree within rounding."""
    assert list(first) == list(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-10, atol=1e-10)

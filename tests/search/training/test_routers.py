"""Training a model with experts: its losses are trained on and told apart, and its routers are measured."""

import json
import math

import pytest
import torch

from archlab.arch_dsl import Call, canonical, compile, load, resolve
from archlab.arch_dsl.weights.files import read_weights
from archlab.search.data.dataset import write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.models.weights import export_weights
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.routers import health
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial

RECIPE = {"tokens": 40 * 128, "context": 16, "batch": 8, "lr": 0.01, "schedule": "constant"}
MOE = {"type": "moe", "experts": 4, "top_k": 2, "width": 16}


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    """A folder with one prepared data set, `data`: bytes of sums."""
    root = tmp_path_factory.mktemp("store")
    (root / "data").mkdir()
    counts = {"train": 300, "validation": 40, "test": 50}
    texts = {name: [f"{i} + {7 * i} = {8 * i}\n".encode() for i in range(count)] for name, count in counts.items()}
    write(root / "data", Bytes().train([], "tokenizer"), texts, {})
    return root


def model(ffn):
    """A resolved model whose second layer has this feed-forward."""
    block = {"norm": "rmsnorm", "attention": {"heads": 2}, "mlp": {"width": 16}}
    data = {"d_model": 16, "n_layers": 2, "vocab": 257, "max_positions": 16, "block": block, "init": {"std": 0.02}}
    return resolve(load({**data, "overrides": {"1": {"block.mlp": ffn}}}))


def make(folder, ffn, **recipe):
    """A folder for a trial."""
    folder.mkdir()
    trial = Trial(canonical(model(ffn)), canonical(load_recipe(RECIPE | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


def trained(folder, data_root, ffn, **recipe):
    """The training lines and the result of a trial."""
    result = train(make(folder, ffn, **recipe), data_root, 1, lambda: False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], result


def test_load_is_told_against_its_mean_and_means_are_over_layers():
    measures = {
        "block.0.ffn.load": torch.tensor([0.5, 0.25, 0.25]) * 4,
        "block.0.ffn.entropy": torch.tensor(4.0),
        "block.0.ffn.dropped": torch.tensor(0.0),
        "block.1.ffn.load": torch.tensor([4.0, 0.0, 0.0]),
        "block.1.ffn.entropy": torch.tensor(2.0),
        "block.1.ffn.dropped": torch.tensor(0.8),
        "another": torch.tensor(12.0),
    }
    found = {name: round(float(value), 6) for name, value in health(measures, 4).items()}
    assert found == {
        "block.0.ffn.load_max": 1.5,
        "block.1.ffn.load_max": 3.0,
        "block.0.ffn.entropy": 1.0,
        "block.1.ffn.entropy": 0.5,
        "block.0.ffn.dropped": 0.0,
        "block.1.ffn.dropped": 0.2,
        "another": 3.0,
        "router_load_max": 2.25,
        "router_entropy": 0.75,
        "router_dropped": 0.1,
    }
    assert health({"another": torch.tensor(1.0)}, 2) == {"another": 0.5}


def test_journal_and_result_tell_of_the_routers(tmp_path, data_root):
    lines, result = trained(tmp_path / "a", data_root, {**MOE, "balance": "switch", "z_loss": 0.01})
    for line in lines:
        assert 1 <= line["block.1.mlp.load_max"] <= 4 and line["router_load_max"] == line["block.1.mlp.load_max"]
        assert 0 < line["router_entropy"] <= math.log(4) + 1e-6 and line["router_dropped"] == 0
        assert line["block.1.mlp.balance"] == pytest.approx(0.01, rel=0.2) and line["block.1.mlp.z_loss"] > 0
    for split in ("validation", "test"):
        assert 1 <= result[split]["router_load_max"] <= 4
        assert result[split]["router_dropped"] == 0


def test_a_dense_model_tells_of_no_routers(tmp_path, data_root):
    lines, result = trained(tmp_path / "a", data_root, {"type": "mlp", "width": 32})
    assert not any("router" in name for line in lines for name in line)
    assert result["test"].keys() == {"loss", "perplexity", "bits_per_byte"}


def test_a_first_step_tells_the_cross_entropy_alone(tmp_path, data_root):
    balances = ({"type": "switch", "coefficient": coefficient} for coefficient in (0.01, 50.0))
    ffns = [{**MOE, "balance": balance} for balance in balances]
    lines = [trained(tmp_path / str(i), data_root, ffn)[0] for i, ffn in enumerate(ffns)]
    assert lines[0][0]["loss"] == lines[1][0]["loss"]
    assert lines[0][1]["loss"] != lines[1][1]["loss"]
    assert lines[1][-1]["router_load_max"] < lines[0][-1]["router_load_max"]


def test_global_balance_knows_the_load_of_earlier_micro_batches(tmp_path, data_root):
    told = {}
    for over in ("batch", "global_batch"):
        for accumulate in (1, 4):
            ffn = {**MOE, "balance": {"type": "switch", "over": over}}
            lines, _ = trained(tmp_path / f"{over}{accumulate}", data_root, ffn, accumulate=accumulate)
            told[over, accumulate] = lines[0]
    assert told["batch", 1]["block.1.mlp.balance"] == told["global_batch", 1]["block.1.mlp.balance"]
    assert told["batch", 4]["block.1.mlp.balance"] != told["global_batch", 4]["block.1.mlp.balance"]
    loads = [line["block.1.mlp.load_max"] for line in told.values()]
    assert loads == pytest.approx([loads[0]] * 4, rel=1e-5)  # the load of a step is that of its whole batch


def test_computing_layers_again_trains_the_same(tmp_path, data_root):
    ffn = {**MOE, "balance": {"type": "switch", "coefficient": 1.0}, "z_loss": 0.1}
    ways = [trained(tmp_path / way, data_root, ffn, recompute=way)[0] for way in ("none", "layers")]
    kept = ("step", "loss", "grad_norm", "router_load_max", "block.1.mlp.balance", "block.1.mlp.z_loss")
    one, other = ([[line[name] for name in kept] for line in lines] for lines in ways)
    assert one == other


def test_auxiliary_losses_leave_evaluation_alone():
    module = compile(model({**MOE, "balance": "switch", "z_loss": 0.1})).eval()
    tokens = torch.arange(32).view(2, 16)
    call = Call()
    loss = module.loss(tokens, tokens, call)
    assert call.losses and torch.equal(loss, module.loss(tokens, tokens))


BIAS = {**MOE, "routing": "sigmoid", "balance": {"type": "bias", "rate": 0.01}}


def state(folder):
    """The weights of a trial after its last checkpoint, the bias of its router among them."""
    return checkpoint.load(folder, checkpoint.steps_in(folder)[0])["model"]


@pytest.fixture(scope="module")
def balanced(tmp_path_factory, data_root):
    """A trial that was balanced without a loss, and its lines."""
    folder = tmp_path_factory.mktemp("balanced") / "a"
    return folder, trained(folder, data_root, BIAS)[0]


def test_a_bias_moves_by_its_rate_after_every_step(balanced):
    moved = state(balanced[0])["block.1.mlp.correction.bias"] / 0.01
    assert moved.any() and (moved.abs() <= 40).all()
    torch.testing.assert_close(moved, moved.round())
    assert not any("assigned" in name or "mlp.balance" in name for line in balanced[1] for name in line)


def test_a_bias_is_continued_to_the_same_bits(tmp_path, data_root, balanced):
    folder, asked = make(tmp_path / "a", BIAS), iter([False] * 16 + [True] * 99)
    with pytest.raises(Interrupted):
        train(folder, data_root, 1, lambda: next(asked))
    assert state(folder)["block.1.mlp.correction.bias"].any()
    assert train(folder, data_root, 2, lambda: False)["resumed_from"] == [17]
    whole, parts = state(balanced[0]), state(folder)
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_bias_goes_by_the_load_of_all_micro_batches(tmp_path, data_root, balanced):
    trained(tmp_path / "a", data_root, BIAS, accumulate=4, tokens=3 * 128)
    trained(tmp_path / "b", data_root, BIAS, tokens=3 * 128)
    biases = [state(tmp_path / name)["block.1.mlp.correction.bias"] for name in "ab"]
    assert torch.equal(*biases) and biases[0].any()


def test_evaluation_leaves_the_bias_as_it_is():
    module = compile(model(BIAS)).eval()
    tokens = torch.arange(32).view(2, 16)
    module.loss(tokens, tokens, Call())
    assert not module.block[1].mlp.correction.bias.any()


def test_exported_weights_hold_the_bias(tmp_path, balanced):
    done = export_weights(str(balanced[0]), tmp_path, None, tmp_path / "a.safetensors")
    spec, weights = read_weights(done.file)
    compile(spec).load_state_dict(weights)
    assert torch.equal(weights["block.1.mlp.correction.bias"], state(balanced[0])["block.1.mlp.correction.bias"])

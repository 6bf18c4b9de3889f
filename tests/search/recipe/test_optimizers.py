"""Optimizers: each update is its formula or torch's own, groups are obeyed, and a continuation gives the same bits."""

import io

import pytest
import torch
from torch import nn

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.search.recipe.optimizers import (
    Adafactor,
    Adam,
    AdamW,
    Group,
    Lion,
    Muon,
    Optimizer,
    decay_groups,
    unmatched,
)
from archlab.search.recipe.recipe import load_recipe


def model(seed=0):
    """A table, two matrices, a stack of matrices, a vector; called `embedding`, `up`, `down`, `experts`, `scale`."""
    generator = torch.Generator().manual_seed(seed)
    found = nn.ParameterDict(
        {
            "embedding": torch.randn(9, 4, generator=generator),
            "up": torch.randn(4, 8, generator=generator),
            "down": torch.randn(8, 4, generator=generator),
            "experts": torch.randn(2, 4, 8, generator=generator),
            "scale": torch.randn(4, generator=generator),
        }
    )
    found.embedding.table = True
    return found


def loss(module, step):
    tokens = torch.arange(6) * (step + 2) % 9
    hidden = module.embedding[tokens] * module.scale
    hidden = torch.tanh(hidden @ module.up) @ module.down + (hidden @ module.experts).tanh().mean((0, 2))[:, None]
    return hidden.square().sum()


def train(module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss(module, step).backward()
        optimizer.step()


def assert_same(a, b, **tolerance):
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], **tolerance)


def built(spec, module, lr=0.01):
    return spec.build(module.named_parameters(), lr)


@pytest.mark.parametrize("spec", [kind() for kind in Optimizer.members.values()], ids=lambda spec: spec.type)
def test_a_continuation_gives_the_same_bits(spec):
    whole, part, again = model(), model(), model(1)
    train(whole, built(spec, whole), range(6))
    optimizer = built(spec, part)
    train(part, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": part.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again.load_state_dict(state["model"])
    optimizer = built(spec, again)
    optimizer.load_state_dict(state["optimizer"])
    train(again, optimizer, range(3, 6))
    assert_same(again, whole, rtol=0, atol=0)
    assert not torch.equal(whole["up"], part["up"])


def test_adafactor_is_torchs_where_torch_has_it():
    ours, theirs = model(), model()
    spec = Adafactor(weight_decay=0.1)
    train(ours, built(spec, ours), range(5))
    # Theirs bounds the rate by 1 / sqrt(step), which a rate of 0.01 does not reach, and decays vectors too.
    groups = decay_groups(theirs.named_parameters(), 0.1)
    train(theirs, torch.optim.Adafactor(groups, lr=0.01, eps=(1e-15, 1e-3)), range(5))
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_unfactored_adafactor_is_its_formula(relative, beta1):
    module = model()
    value, expected = module["up"], module["up"].detach().double()
    optimizer = built(Adafactor(factored=False, relative=relative, beta1=beta1, threshold=0.7), module)
    square, mean = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss(module, step).backward()
        grad = value.grad.double()
        kept = 1 - step**-0.8
        square = kept * square + (1 - kept) * (grad**2 + 1e-30)
        update = grad / square.sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()) / 0.7)
        mean = beta1 * mean + (1 - beta1) * update
        size = max(1e-3, float(expected.square().mean().sqrt())) if relative else 1.0
        expected = expected - 0.01 * size * mean
        optimizer.step()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_lion_is_its_formula():
    module = model()
    value, expected = module["up"], module["up"].detach().clone()
    optimizer = built(Lion(betas=(0.8, 0.6), weight_decay=0.5), module)
    mean = torch.zeros_like(expected)
    for step in range(3):
        optimizer.zero_grad()
        loss(module, step).backward()
        grad = value.grad
        expected = expected - 0.01 * ((0.8 * mean + 0.2 * grad).sign() + 0.5 * expected)
        mean = 0.6 * mean + 0.4 * grad
        optimizer.step()
    torch.testing.assert_close(value, expected)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    ours, muon, adamw = model(), model(), model()
    train(ours, built(Muon(), ours), range(1))
    hidden = {"up", "down"}
    muon_groups = [{"params": [muon[name] for name in sorted(hidden, reverse=True)], "weight_decay": 0.1}]
    train(muon, torch.optim.Muon(muon_groups, lr=0.01, adjust_lr_fn="match_rms_adamw"), range(1))
    train(adamw, built(AdamW(), adamw), range(1))
    for name in ours:
        assert torch.equal(ours[name], (muon if name in hidden else adamw)[name]), name
        assert not torch.equal(muon[name], adamw[name]), name


def test_adam_adds_its_decay_to_the_gradient():
    ours, theirs = model(), model()
    train(ours, built(Adam(weight_decay=0.1), ours), range(3))
    train(theirs, torch.optim.Adam(decay_groups(theirs.named_parameters(), 0.1), lr=0.01), range(3))
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", Optimizer.members)
def test_groups_have_their_own_rate_and_decay(kind):
    groups = [{"parameters": ["u*", "scale"], "lr_factor": 0.5}, {"parameters": ["*"], "weight_decay": 0.25}]
    module = model()
    spec = parse(Optimizer, {"type": kind, "weight_decay": 0.1, "groups": groups})
    found = {
        id(value): (group.get("lr_factor", 1.0), group["weight_decay"])
        for group in built(spec, module).param_groups
        for value in group["params"]
    }
    assert {name: found[id(value)] for name, value in module.items()} == {
        "embedding": (1.0, 0.25),
        "up": (0.5, 0.1),
        "down": (1.0, 0.25),
        "experts": (1.0, 0.25),
        "scale": (0.5, 0.0),
    }


def test_patterns_that_match_nothing_are_found():
    groups = (Group(parameters=("u*", "block.*.bias")), Group(parameters=("scal",)))
    assert unmatched(groups, model()) == ["block.*.bias", "scal"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "lion", "betas": [0.9]}, r"train\.optimizer: lion has two betas, found 1"),
        ({"type": "adafactor", "decay": 2}, r"optimizer\.decay: must be at most 1"),
        ({"type": "muon", "groups": [{"lr_factor": 2}]}, r"groups\.0\.parameters: is missing"),
        ({"type": "adamw", "groups": [{"parameters": ["*"], "lr": 2}]}, r"'lr' is not a key of group"),
    ],
)
def test_refuses(optimizer, message):
    with pytest.raises(SpecError, match=message):
        load_recipe({"tokens": 1000, "lr": 1e-3, "optimizer": optimizer})

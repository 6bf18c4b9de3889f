"""A plug-in written with `nn.Linear` and `nn.Parameter` starts as a function of the seed and its path."""

from __future__ import annotations

import torch
from torch import nn

from archlab.arch_dsl.parts.layers import initialize, normal, parameter


class Plain(nn.Module):
    def __init__(self, before: int = 0) -> None:
        super().__init__()
        torch.rand(before)  # what else is made first changes nothing
        self.linear = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.full((1,), 0.25))
        self.ours = parameter((5, 5), normal(0.02))


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def test_modules_of_torch_draw_by_seed_and_path() -> None:
    first, again, other = Plain(), Plain(before=7), Plain()
    state = torch.random.get_rng_state()
    for module, seed in ((first, 3), (again, 3), (other, 4)):
        initialize(module, seed)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's generator is left alone"
    one, same, different = map(values, (first, again, other))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["linear.weight"], different["linear.weight"])
    assert not torch.equal(one["linear.bias"], different["linear.bias"])
    bound = 6**-0.5  # of nn.Linear, for weight and bias
    assert one["linear.weight"].abs().max() <= bound and one["linear.weight"].std() > bound / 3
    assert torch.equal(one["norm.weight"], torch.ones(5))
    assert one["scale"].item() == 0.25, "a parameter that knows no distribution keeps its value"


def test_weight_and_bias_of_one_module_have_seeds_of_their_own() -> None:
    alone, both = nn.Linear(6, 5, bias=False), nn.Linear(6, 5)
    for module in (alone, both):
        initialize(module, 0)
    assert torch.equal(alone.weight, both.weight), "a bias beside it changes no weight"


def test_factors_scale_them_too() -> None:
    plain, scaled = Plain(), Plain()
    initialize(plain, 0)
    initialize(scaled, 0, {"linear.weight": 0.5, "scale": 2.0})
    assert torch.equal(scaled.linear.weight, plain.linear.weight * 0.5)
    assert scaled.scale.item() == 0.5 and torch.equal(scaled.ours, plain.ours)

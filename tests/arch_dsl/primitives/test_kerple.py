"""KERPLE against its formula, one pair of positions at a time."""

import math

import torch

from archlab import arch_dsl
from archlab.arch_dsl.conformance.effects import randomize


def test_the_penalty_is_logarithmic_in_the_distance():
    block = {"attention": {"heads": 4, "positional": "kerple"}}
    spec = arch_dsl.load({"d_model": 16, "n_layers": 1, "vocab": 19, "max_positions": 9, "block": block})
    module = arch_dsl.compile(spec).double()
    randomize(module)
    kerple = module.block[0].attention.scores.biases["kerple"]
    bias = kerple(torch.zeros(1, 9, 4, 4).double(), torch.zeros(1, 9, 4, 4).double(), arch_dsl.Call())
    a, b = ([max(value, 0.01) for value in numbers.tolist()] for numbers in (kerple.a, kerple.b))
    for h in range(4):
        for i in range(9):
            for j in range(i + 1):
                expected = -a[h] * math.log(1 + b[h] * (i - j))
                assert math.isclose(bias[h, i, j].item(), expected, abs_tol=1e-12)


def test_it_starts_uniform():
    block = {"attention": {"heads": 64, "head_dim": 2, "positional": "kerple"}}
    spec = arch_dsl.load({"d_model": 16, "n_layers": 1, "vocab": 19, "max_positions": 9, "block": block})
    kerple = arch_dsl.compile(spec).block[0].attention.scores.biases["kerple"]
    assert 0 <= kerple.a.min() < 0.2 and 1.8 < kerple.a.max() <= 2
    assert 0 <= kerple.b.min() < 0.1 and 0.9 < kerple.b.max() <= 1

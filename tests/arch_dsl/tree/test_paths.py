"""A model trains to the same losses by the formulas and by what torch has of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl

VOCAB, LENGTH, ROWS = 23, 12, 2
NORMED = {"norm": "rmsnorm", "ffn": {"type": "glu"}}
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"attention": {"heads": 2, "positional": "rope", "qk_norm": "rmsnorm", "gate": {"position": "sdpa"}}},
    "forget_gate": {
        "attention": {"heads": 2, "scores": ["forget_gate", "sinks"], "mask": {"type": "window", "size": 5}}
    },
    "gated_delta_net": {"gated_delta_net": {"heads": 2}},
    "rwkv4": {"rwkv4": {}},
}


def losses(mixer: str, backend: str, steps: int) -> torch.Tensor:
    """Of each step of AdamW on a text that repeats itself with noise."""
    spec = arch_dsl.load({"d_model": 16, "n_layers": 2, "init": {"std": 0.02}, "block": {**NORMED, **MIXERS[mixer]}})
    spec = arch_dsl.resolve(spec, vocab=VOCAB, max_positions=LENGTH)
    model = arch_dsl.compile(spec, backend, seed=1, dtype=torch.float64).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
        tokens = (starts + torch.arange(LENGTH + 1) * (1 + starts % 3)) % VOCAB
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, starts, tokens)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_tiny_model_learns_alike_by_formulas_and_by_torch(mixer: str) -> None:
    """200 steps, in float64: with the delta rule, training makes what rounding changed a billion times larger."""
    formula, fast = (losses(mixer, backend, 200) for backend in ("reference", "torch"))
    assert formula[-10:].mean() < 0.7 * formula[0], "it learned"
    torch.testing.assert_close(fast, formula, atol=1e-4, rtol=0)

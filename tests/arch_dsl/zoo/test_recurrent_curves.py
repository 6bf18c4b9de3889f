"""Tiny recurrent models learn the same with Triton's kernels, in its interpreter, as by the formulas."""

from typing import Any

import pytest
import torch

from archlab import arch_dsl

BRANCHES: dict[str, dict[str, Any]] = {
    "mamba": {"mixer": {"type": "mamba", "state": 3}},
    "rwkv4": {"mixer": {"type": "rwkv4"}, "feed": {"type": "channel_mix", "width": 16}},
    "gated_delta_net": {"mixer": {"type": "gated_delta_net", "heads": 2, "head_dim": 4}},
    "gla": {"mixer": {"type": "gla", "heads": 2}},
}
OPS = {"mamba": "selective_scan", "rwkv4": "wkv4"}


def curve(name: str, backend: str) -> list[float]:
    """The losses of three steps; the recurrence was computed by the backend that was asked for."""
    data = {"vocab": 19, "d_model": 8, "n_layers": 1, "block": {"norm": "rmsnorm", **BRANCHES[name]}}
    model = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data)), backend=backend)
    taken = {choice.op: choice.implementation for choice in model.choices}
    assert taken[OPS.get(name, "linear_recurrence")] == backend
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in range(3):
        tokens = torch.randint(19, (1, 10), generator=torch.Generator().manual_seed(step))
        loss = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES)
def test_three_steps_with_triton_follow_those_of_the_formula(name: str) -> None:
    wanted = curve(name, "reference")
    assert len({round(loss, 4) for loss in wanted}) == 3, "training changes the loss"
    torch.testing.assert_close(curve(name, "triton"), wanted, rtol=1e-4, atol=1e-5)

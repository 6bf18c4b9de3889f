"""Tiny recurrent models learn the same with Triton's kernels, in its interpreter, as by the formulas."""

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.parts.context import Call, State

BRANCHES: dict[str, dict[str, Any]] = {
    "mamba": {"mixer": {"type": "mamba", "state": 3}},
    "rwkv4": {"mixer": {"type": "rwkv4"}, "feed": {"type": "channel_mix", "width": 16}},
    "gated_delta_net": {"mixer": {"type": "gated_delta_net", "heads": 2, "head_dim": 4}},
    "kda": {"mixer": {"type": "kda", "heads": 2}},
    "gla": {"mixer": {"type": "gla", "heads": 2}},
}
OPS = {
    "mamba": {"selective_scan", "short_conv"},
    "rwkv4": {"wkv4", "token_shift"},
    "gated_delta_net": {"linear_recurrence", "short_conv"},
    "kda": {"linear_recurrence", "short_conv"},
    "gla": {"linear_recurrence"},
}


def curve(name: str, backend: str) -> list[float]:
    """The losses of three steps; recurrence and shifts were computed by the backend that was asked for."""
    data = {"vocab": 19, "d_model": 8, "n_layers": 1, "block": {"norm": "rmsnorm", **BRANCHES[name]}}
    model = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data)), backend=backend)
    assert OPS[name] <= {choice.op for choice in model.choices if choice.implementation == backend}
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


@pytest.mark.slow
def test_a_short_convolution_in_triton_reads_in_pieces_what_it_reads_at_once() -> None:
    conv = {"type": "short_conv", "bias": True, "activation": "silu", "residual": True}
    block = {"linear_attention": {"heads": 2, "documents": True, "key": [conv], "value": [conv]}}
    model = arch_dsl.resolve(arch_dsl.load({"vocab": 19, "d_model": 8, "n_layers": 1, "block": block}))
    module, state = arch_dsl.compile(model, backend="triton"), State()
    assert "short_conv" in {choice.op for choice in module.choices if choice.implementation == "triton"}
    tokens = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(9) >= torch.tensor([[4], [6]])).long()
    pieces = zip(tokens.split([4, 1, 1, 3], 1), documents.split([4, 1, 1, 3], 1), strict=True)
    parts = [module(piece, Call(documents=own, state=state)) for piece, own in pieces]
    torch.testing.assert_close(torch.cat(parts, 1), module(tokens, Call(documents=documents)))

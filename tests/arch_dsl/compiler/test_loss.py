"""The loss of a model: one number whatever computes it, a chunk of logits at a time or all at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import Call
from archlab.arch_dsl.primitives.scales import logit_form
from tests.arch_dsl.conformance import TARGETS, TOKENS, randomize

BLOCK = {"norm": "rmsnorm", "attention": {"heads": 4, "positional": "rope"}, "ffn": {"type": "glu"}}
BASE = {"d_model": 16, "n_layers": 1, "block": BLOCK}
CAPPED = [{"type": "scale", "width_power": -0.5}, {"type": "softcap", "cap": 2.0}]
ENDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied_bias": {"unembedding": {"tied": False, "bias": True}},
    "narrow_table": {"embedding": {"width": 6}},
    "scale_and_cap": {"logits": CAPPED},
    "cap_and_scale": {"logits": [*CAPPED[1:], {"type": "scale", "by": -0.3}]},
    "other_map": {"logits": [{"type": "feature_map", "function": "softplus(x)"}]},
    "two_caps": {"logits": [*CAPPED, {"type": "softcap", "cap": 1.5}]},
}


@pytest.fixture(autouse=True)
def _nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCHLAB_KERNELS", raising=False)


def model(ends: dict[str, Any], backend: str = "auto") -> Any:
    module = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(BASE | ends), vocab=19, max_positions=16), backend)
    randomize(module)
    return module.double()


def ignoring() -> Tensor:
    targets = TARGETS.clone()
    targets[0, 3] = targets[1, 5] = -100
    return targets


def found(module: nn.Module, **options: Any) -> list[Tensor]:
    """The loss, the z-loss, and the gradients of their sum."""
    call = Call()
    loss = module.loss(TOKENS, ignoring(), call, **options)
    whole = sum((value.sum() for value in call.losses.values()), loss.square().sum())
    return [loss, *call.losses.values(), *torch.autograd.grad(whole, list(module.parameters()))]


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"reduction": "none", "z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("ends", ENDS)
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    ends: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model(ENDS[ends])
    want = found(module, **options)
    monkeypatch.setattr("archlab.arch_dsl.model.model.LOSS_CHUNK", 19 * 5)
    assert module.takes_op(TARGETS) is (ends not in ("other_map", "two_caps"))
    for a, b in zip(found(module, **options), want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_one_chunk_is_torchs_cross_entropy_to_the_bit() -> None:
    module = model({}).float()
    targets = ignoring()
    logits = module(TOKENS).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
    assert torch.equal(module.loss(TOKENS, targets), losses.sum() / (targets != -100).sum())
    assert torch.equal(module.loss(TOKENS, targets, reduction="none"), losses.view_as(targets))


@pytest.mark.parametrize("ends", ["tied", "cap_and_scale", "scale_and_cap", "two_caps", "other_map"])
def test_maps_of_logits_are_a_factor_and_a_cap_or_nothing(ends: str) -> None:
    module = model(ENDS[ends])
    form = logit_form(module.spec.logits, module.spec.d_model)
    if ends in ("two_caps", "other_map"):
        assert form is None
        note = module.choices[-1]
        assert (note.path, note.implementation) == ("loss", "reference") and "other maps" in note.reason
        return
    assert form is not None
    x = torch.linspace(-9, 9, 50, dtype=torch.float64)
    scaled = form[0] * x
    capped = scaled if form[1] is None else form[1] * torch.tanh(scaled / form[1])
    torch.testing.assert_close(capped, module.logit_maps(x, Call(), iter(())))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_loss_in_chunks_is_captured_as_one_graph(z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archlab.arch_dsl.model.model.LOSS_CHUNK", 19 * 5)
    module = model(ENDS["untied_bias"])
    hidden = module.hidden(TOKENS).detach().requires_grad_()

    def sums(hidden: Tensor) -> Tensor:
        loss, squares = module.loss_sums(hidden, TARGETS, z_loss)
        return loss if squares is None else loss + z_loss * squares

    torch.compiler.reset()
    compiled = torch.compile(sums, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(hidden), (hidden, module.bias)) for f in (compiled, sums))
    torch.testing.assert_close(got, want)


def test_under_autocast_chunks_differ_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model({}).float()
    with torch.autocast("cpu", torch.bfloat16):
        whole = found(module)
        monkeypatch.setattr("archlab.arch_dsl.model.model.LOSS_CHUNK", 19 * 5)
        chunked = found(module)
    assert [x.dtype for x in chunked] == [x.dtype for x in whole]
    for a, b in zip(chunked, whole, strict=True):
        assert float((a - b).detach().norm()) <= 0.02 * float(b.detach().norm()) + 1e-6


def curve(backend: str, steps: int, rows: int, n_layers: int) -> list[float]:
    """Training losses of a tiny model that learns to count on with a stride, with chunks of the loss."""
    spec = {
        **BASE, "n_layers": n_layers, "logits": [{"type": "softcap", "cap": 15.0}],
        "block": {**BLOCK, "attention": {**BLOCK["attention"], "gate": {"position": "sdpa"}}},
    }  # fmt: skip
    module = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(spec), vocab=19, max_positions=16), backend, seed=3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        first, stride = torch.randint(1, 4, (2, rows, 1), generator=generator)
        read = (first + stride * torch.arange(17)) % 19
        call = Call()
        loss = module.loss(read[:, :-1], read[:, 1:], call, z_loss=1e-3)
        (loss + sum(call.losses.values())).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def _chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("archlab.arch_dsl.model.model.LOSS_CHUNK", 19 * 20)
    yield


@pytest.mark.slow
def test_200_steps_agree_between_reference_and_torch(_chunks: None) -> None:
    reference, fast = (torch.tensor(curve(backend, 200, rows=8, n_layers=2)) for backend in ("reference", "torch"))
    assert reference[-1] < 0.5 * reference[0]
    assert float((reference - fast).abs().max()) < 1e-3
    assert float((reference - fast)[:50].abs().max()) < 1e-5


@pytest.mark.slow
def test_3_steps_agree_between_reference_and_triton(_chunks: None) -> None:
    reference, fused = (torch.tensor(curve(backend, 3, rows=2, n_layers=1)) for backend in ("reference", "triton"))
    torch.testing.assert_close(fused, reference, atol=1e-5, rtol=1e-5)

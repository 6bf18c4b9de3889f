"""All that a spec can influence, as tensors: built with random parameters, compared beyond rounding."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor, nn

from archlab import kernels
from archlab.arch_dsl.compiler import modules
from archlab.arch_dsl.compiler.modules import LanguageModel, compile, stored
from archlab.arch_dsl.conformance.hosts import CALL, TARGETS, TOKENS
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.layers import after_step


def randomize(module: nn.Module, std: float = 0.4) -> None:
    """Fills every parameter from N(0, std^2) (norm weights around 1) as a function of its path."""
    with torch.no_grad():
        for path, value in module.named_parameters():
            seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            around = 1.0 if "norm" in path and path.endswith("weight") else 0.0
            value.copy_(around + std * drawn)


def build(model: Model, *, backend: str = "reference", dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A module with random parameters in `dtype`, without the noise of training."""
    module = compile(model, backend=backend).to(dtype).eval()
    randomize(module)
    return module


def build_as_for_a_gpu(model: Model) -> LanguageModel:
    """The same as `build`, as planned for a GPU: maps that read one tensor are one product."""
    module = modules.build(model, model.context(kernels.Device.parse("sm_90"), backend="reference")).double().eval()
    randomize(module)
    return module


def effect(model: Model) -> dict[str, Tensor]:
    """All that a spec can influence: initial values; logits and gradients at random parameters; what a step leaves in
    state without a gradient; in float64.

    Gradients are those of the cross-entropy and of auxiliary losses, for which another micro-batch came before. Raises
    ValueError for a parameter that takes no part in the result.
    """
    module = compile(model, backend="reference")
    found = {f"initial {name}": value.detach().double() for name, value in module.named_parameters()}
    module = module.double()
    randomize(module)
    call = dataclasses.replace(CALL, losses={}, measures={})
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # training, with the same noise every time
        logits = module(TOKENS, call)
        if call.losses:
            before = dataclasses.replace(CALL, losses={}, measures={})
            module(TOKENS.flip(1), before)
            call = dataclasses.replace(call, earlier=before.measures)
            logits = module(TOKENS, call)
        if getattr(module, "predict", None) is not None:
            module.loss(TOKENS, TARGETS, call)  # in which alone heads of further tokens take part
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    sum(call.losses.values(), loss).backward()
    found["logits"] = logits.detach()
    for name, value in module.named_parameters():
        if value.grad is None:
            raise ValueError(f"{name} takes no part in the model")
        found[f"gradient {name}"] = value.grad
    after_step(module, call.measures)
    found |= {f"state {name}": value for name, value in stored(module).items() if not isinstance(value, nn.Parameter)}
    return found


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether anything differs by more than rounding in float64."""
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return True
    return any(bool((a[name] - b[name]).abs().max() > 1e-11) for name in a)

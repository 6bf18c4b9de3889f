"""Training steps of whole models in the ways that archlab can take them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from archlab import arch_dsl
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.context import Call
from archlab.kernels import Device, bench
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.compiling import compile_blocks, compiled_into
from archlab.search.training.passes import Graphed, Passes, eager

RECIPE = load_recipe({"tokens": 1, "lr": 1e-3, "precision": "bf16"})
# d_model, layers, heads, width of the feed-forward, vocabulary, context, sequences
SIZES = {
    "cuda": {
        "Llama, 125M": (768, 12, 12, 2048, 32_000, 1024, 8),
        "Llama, 350M": (1024, 24, 16, 2816, 32_000, 1024, 8),
    },
    "cpu": {"Llama, 0.2M": (64, 4, 4, 176, 256, 64, 2)},
}


def steps(device: Device) -> Iterator[dict[str, Any]]:
    """What each size takes in each way."""
    top = bench.ceilings(device).flops_per_s[torch.bfloat16]
    for name, (d_model, n_layers, heads, width, vocab, context, rows) in SIZES[device.kind].items():
        block = {"norm": "rmsnorm", "attention": {"heads": heads, "positional": "rope"},
                 "ffn": {"type": "glu", "width": width}}  # fmt: skip
        spec = arch_dsl.load({"d_model": d_model, "n_layers": n_layers, "block": block})
        for found in ways(arch_dsl.resolve(spec, vocab=vocab, max_positions=context), rows, device):
            flops = 3 * rows * arch_dsl.cost(spec.replace(vocab=vocab, max_positions=context), context).flops_model
            yield {"model": name} | found | {"mfu": round(flops / (found["ms"] / 1e3) / top, 3)}


def ways(spec: Model, rows: int, device: Device) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step of `rows` sequences in bfloat16, tokens per second, and the GB that torch reserved: kernel
    by kernel, as a graph, with compiled layers, and both. On a CPU, kernel by kernel alone."""
    assert spec.vocab is not None and spec.max_positions is not None
    model = arch_dsl.compile(spec, device=device.kind, dtype=torch.bfloat16)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab, (rows, spec.max_positions + 1), generator=drawn).to(device.kind)
    passes = eager(model, RECIPE, torch.device(device.kind))

    def row(way: str, passes: Passes) -> dict[str, Any]:
        seconds, reserved = _timed(_stepper(passes, model, tokens), device)
        speed = round(tokens[:, 1:].numel() / seconds)
        return {"way": way, "ms": round(seconds * 1e3, 3), "tokens_per_s": speed, "reserved_gb": reserved}

    yield row("kernel by kernel", passes)
    if device.kind == "cpu":
        return
    yield row("graph", Graphed(passes, model))
    with tempfile.TemporaryDirectory() as folder, compiled_into(Path(folder), lambda: None):
        compile_blocks(model, rows)
        yield row("compiled layers", passes)
        yield row("both", Graphed(passes, model))


def _stepper(passes: Passes, model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """One step on fixed tokens `[batch, context + 1]`, as studies take it: AdamW, and gradients of a norm of 1."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    read, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    times = torch.ones((), device=tokens.device)

    def step() -> None:
        passes(read, targets, Call(), times, None)
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(step: Callable[[], None], device: Device, times: int = 15) -> tuple[float, float | None]:
    """Seconds of a step, the least of three means, and the GB of memory that torch reserved for it."""
    on_card = device.kind == "cuda"
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    means = []
    for _ in range(3):
        _wait(on_card)
        start = time.perf_counter()
        for _ in range(times):
            step()
        _wait(on_card)
        means.append((time.perf_counter() - start) / times)
    return min(means), round(torch.cuda.max_memory_reserved() / 1e9, 2) if on_card else None


def _wait(on_card: bool) -> None:
    if on_card:
        torch.cuda.synchronize()

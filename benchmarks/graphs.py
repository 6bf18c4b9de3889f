"""A training step on a GPU: launched kernel by kernel, as a CUDA graph, with compiled layers, and both.

    python benchmarks/graphs.py    # two minutes

Three models in bfloat16 with AdamW and clipping, as studies train them. Each figure is the least mean of three times 15
steps, in ms; memory is what torch reserved, in GB.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from archlab import arch_dsl
from archlab.arch_dsl.parts.context import Call
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.compiling import compile_blocks, compiled_into
from archlab.search.training.passes import Graphed, Passes, eager

# d_model, layers, heads, width of the feed-forward, vocabulary, context, sequences, attention
MODELS: dict[str, tuple[int, int, int, int, int, int, int, dict[str, Any]]] = {
    "Llama, 110M": (768, 12, 12, 2048, 32_000, 1024, 8, {"positional": "rope"}),
    "with a forget gate": (768, 12, 12, 2048, 32_000, 1024, 8, {"scores": "forget_gate"}),
    "small": (64, 4, 4, 176, 2048, 128, 8, {"positional": "rope"}),
}
RECIPE = load_recipe({"tokens": 1, "lr": 1e-3, "precision": "bf16"})


def stepper(passes: Passes, model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """One step on fixed tokens `[batch, context + 1]`."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    read, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        passes(read, targets, Call(), 1.0, None)
        norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step: Callable[[], None], steps: int = 15) -> float:
    """Of a step: the least of three means."""
    for _ in range(3):
        step()
    means = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        means.append((time.perf_counter() - start) / steps * 1e3)
    return min(means)


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    torch.set_num_threads(1)
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, (d_model, n_layers, heads, width, vocab, context, rows, fields) in MODELS.items():
        block = {"norm": "rmsnorm", "attention": {"heads": heads, **fields}, "ffn": {"type": "glu", "width": width}}
        spec = arch_dsl.load({"d_model": d_model, "n_layers": n_layers, "block": block})
        spec = arch_dsl.resolve(spec, vocab=vocab, max_positions=context)
        model = arch_dsl.compile(spec, device="cuda", dtype=torch.bfloat16)
        tokens = torch.randint(0, vocab, (rows, context + 1), generator=torch.Generator().manual_seed(0)).cuda()
        passes = eager(model, RECIPE, device)

        def measure(way: str, passes: Passes, model: Any = model, tokens: Any = tokens, name: str = name) -> None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            took = milliseconds(stepper(passes, model, tokens))
            print(f"{name}, {way}: {took:.2f} ms, {torch.cuda.max_memory_reserved() / 1e9:.2f} GB", flush=True)

        measure("kernel by kernel", passes)
        measure("graph", Graphed(passes, model))
        with tempfile.TemporaryDirectory() as folder, compiled_into(Path(folder), lambda: None):
            compile_blocks(model, rows)
            measure("blocks", passes)
            measure("both", Graphed(passes, model))


if __name__ == "__main__":
    main()

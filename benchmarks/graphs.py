"""A training step on a GPU: launched kernel by kernel, as a CUDA graph, with compiled layers, and both.

    python benchmarks/graphs.py    # two minutes

Three models in bfloat16 with AdamW and clipping, as studies train them. Each figure is the least mean of three times 15
steps, in ms; memory is what torch reserved, in GB.
"""

from __future__ import annotations

from typing import Any

import torch

from archlab import arch_dsl
from archlab.cli.gpu_report.steps import ways
from archlab.kernels import Device

# d_model, layers, heads, width of the feed-forward, vocabulary, context, sequences, attention
MODELS: dict[str, tuple[int, int, int, int, int, int, int, dict[str, Any]]] = {
    "Llama, 110M": (768, 12, 12, 2048, 32_000, 1024, 8, {"positional": "rope"}),
    "with a forget gate": (768, 12, 12, 2048, 32_000, 1024, 8, {"scores": "forget_gate"}),
    "small": (64, 4, 4, 176, 2048, 128, 8, {"positional": "rope"}),
}


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, (d_model, n_layers, heads, width, vocab, context, rows, fields) in MODELS.items():
        block = {"norm": "rmsnorm", "attention": {"heads": heads, **fields}, "ffn": {"type": "glu", "width": width}}
        spec = arch_dsl.load({"d_model": d_model, "n_layers": n_layers, "block": block})
        for row in ways(arch_dsl.resolve(spec, vocab=vocab, max_positions=context), rows, Device.current()):
            print(f"{name}, {row['way']}: {row['ms']:.2f} ms, {row['reserved_gb']:.2f} GB", flush=True)


if __name__ == "__main__":
    main()

"""Decoding with latent attention: maps in queries and outputs, against keys and values made anew.

    python benchmarks/latent.py                # one layer on one thread, at four lengths; a minute
    python benchmarks/latent.py --rounds 5

One token is read after so many that are held, by processor time. The contestants take turns; a figure is the median of
the rounds' ratios theirs / ours: above 1, ours is faster. `anew` is our layer as it reads longer pieces, `transformers`
is DeepseekV3Attention with its DynamicCache, which holds whole keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch

D_MODEL, HEADS, HEAD_DIM, LATENT, ROTATED = 1024, 16, 64, 256, 32
LENGTHS = (128, 512, 2048, 8192)


def ours(length: int, absorbs: bool) -> Callable[[Tensor], Any]:
    """Reads a token after `length` held ones."""
    fields = {"heads": HEADS, "head_dim": HEAD_DIM, "kv_latent": LATENT, "rotary_dim": ROTATED}
    facts: dict[str, Any] = {"d_model": D_MODEL, "n_layers": 1, "vocab": 2, "max_positions": None, "std": 0.02}
    ctx = BuildContext(**facts, residual_std=0.02, width=D_MODEL, hidden=D_MODEL, backend="auto")
    layer: Any = parse(Branch, {"type": "mla", **fields}).build(ctx).eval()
    if not absorbs:
        layer.few = 0
    held: dict[str, Any] = {}
    layer(torch.randn(1, length, D_MODEL), Call(held=held, positions=None))
    return lambda token: layer(token, Call(held=dict(held), positions=torch.tensor([[length]])))


def theirs(length: int) -> Callable[[Tensor], Any]:
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    config = DeepseekV3Config(
        hidden_size=D_MODEL, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=LATENT,
        q_lora_rank=None, qk_rope_head_dim=ROTATED, qk_nope_head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, num_hidden_layers=1,
        max_position_embeddings=2 * LENGTHS[-1],
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layer, rotary = deepseek.DeepseekV3Attention(config, 0).eval(), deepseek.DeepseekV3RotaryEmbedding(config)
    start = torch.randn(1, length, D_MODEL)
    made = DynamicCache()
    layer(start, rotary(start, torch.arange(length)[None]), None, past_key_values=made)
    keys, values = made.layers[0].keys, made.layers[0].values

    def step(token: Tensor) -> Any:
        cache = DynamicCache()
        cache.update(keys, values, 0)
        return layer(token, rotary(token, torch.tensor([[length]])), None, past_key_values=cache)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    token = torch.randn(1, 1, D_MODEL)
    for length in LENGTHS:
        contestants = {"absorbed": ours(length, True), "anew": ours(length, False), "transformers": theirs(length)}
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for index in range(rounds + 2):
            for name, step in contestants.items():
                before = time.process_time()
                for _ in range(3):
                    step(token)
                if index >= 2:
                    taken[name].append((time.process_time() - before) / 3)
        row: dict[str, Any] = {"length": length, "ms": round(1e3 * statistics.median(taken["absorbed"]), 2)}
        for name in ("anew", "transformers"):
            ratios = [theirs / mine for theirs, mine in zip(taken[name], taken["absorbed"], strict=True)]
            row[name] = round(statistics.median(ratios), 2)
        print(json.dumps(row), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()

"""Prints changes of night.yaml's block, drawn at random: one edit, of all layers or of some, or two edits at once.

python studies/search/mutate.py 600 | archlab challenge studies/search/night.yaml - --together 4
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archlab.arch_dsl import SpecError, identity, patch, resolve
from archlab.search.study.load import load_study
from archlab.search.variants.mistakes import no_name

WHERE = {
    "": "block",
    " in layer 0": "overrides.0.block",
    " in layer 3": "overrides.3.block",
    " in layers 1 and 3": "overrides.1::2.block",
    " in layers 1 to 3": "overrides.1:.block",
}
CONV = {"append": {"type": "short_conv", "residual": True}}
IN_LAYERS: dict[str, tuple[str, Any]] = {
    "gated DeltaNet": ("attention", {"type": "gated_delta_net", "heads": 2}),
    "DeltaNet": ("attention", {"type": "delta_net", "heads": 2}),
    "KDA": ("attention", {"type": "kda", "heads": 2}),
    "Mamba-2": ("attention", {"type": "mamba2", "head_dim": 32, "value_dim": 32}),
    "GLA": ("attention", {"type": "gla", "heads": 2}),
    "RetNet": ("attention", {"type": "retnet", "heads": 2}),
    "mLSTM": ("attention", {"type": "mlstm", "heads": 2}),
    "G1": ("attention.gate", "sdpa"),
    "G1 headwise": ("attention.gate", {"position": "sdpa", "granularity": "headwise"}),
    "G1 with silu": ("attention.gate", {"position": "sdpa", "activation": "silu"}),
    "G2": ("attention.gate", "value"),
    "G3": ("attention.gate", "key"),
    "G4": ("attention.gate", "query"),
    "G5": ("attention.gate", "dense"),
    "no positions": ("attention.positional", "none"),
    "ALiBi": ("attention.positional", "alibi"),
    "forget gate": ("attention.positional", "forget_gate"),
    "KERPLE": ("attention.positional", "kerple"),
    "RoPE base 1000": ("attention.positional", {"type": "rope", "theta": 1000}),
    "half RoPE": ("attention.positional", {"type": "rope", "fraction": 0.5}),
    "QK-norm": ("attention.qk_norm", "rmsnorm"),
    "QK l2": ("attention.qk_norm", "l2"),
    "window of 16": ("attention.mask", {"type": "window", "size": 16}),
    "window of 32": ("attention.mask", {"type": "window", "size": 32}),
    "window of 64": ("attention.mask", {"type": "window", "size": 64}),
    "one key head": ("attention.kv_heads", 1),
    "two key heads": ("attention.kv_heads", 2),
    "two heads": ("attention.heads", 2),
    "eight heads": ("attention.heads", 8),
    "sinks": ("attention.scores", {"append": "sinks"}),
    "selective attention": ("attention.scores", {"append": "selective"}),
    "softcap of scores": ("attention.scores", {"append": {"type": "softcap", "cap": 20}}),
    "stick-breaking": ("attention.weighting", "stick_breaking"),  # no such field: never drawn, as in the night kept
    "key shift": ("attention.key", {"prepend": "shift"}),
    "key convolution": ("attention.key", {"prepend": "short_conv"}),
    "value shift": ("attention.value", {"append": "shift"}),
    "value residual": ("attention.value", {"append": "value_residual"}),
    "value embedding": ("attention.value", {"append": "value_embedding"}),
    "norm of heads": ("attention.sdpa", {"append": {"type": "rmsnorm", "per_head": True}}),
    "canon in attention": ("attention.pre", CONV),
    "token shift in attention": ("attention.pre", {"append": "token_shift"}),
    "scale of attention": ("attention.post", {"append": "learned_scale"}),
    "canon in feed-forward": ("ffn.pre", CONV),
    "token shift in feed-forward": ("ffn.pre", {"append": "token_shift"}),
    "canon in hidden units": ("ffn.inner", CONV),
    "norm of hidden units": ("ffn.inner", "rmsnorm"),
    "GEGLU": ("ffn.activation", "gelu"),
    "ReGLU": ("ffn.activation", "relu"),
    "bilinear": ("ffn.activation", "identity"),
    "relu2 MLP": ("ffn", {"type": "mlp", "activation": "relu2"}),
    "gelu MLP": ("ffn", {"type": "mlp", "activation": "gelu"}),
    "scale of feed-forward": ("ffn.post", {"append": "learned_scale"}),
}
OF_THE_MODEL: dict[str, tuple[str, Any]] = {
    "LayerNorm": ("block.norm", "layernorm"),
    "dynamic tanh": ("block.norm", "dynamic_tanh"),
    "sandwich norm": ("block.norm.placement", "sandwich"),
    "norm after branches": ("block.norm.placement", "res_post"),
    "peri-norm": ("block.norm.placement", "peri"),
    "norm of embeddings": ("embed", {"append": "rmsnorm"}),
    "embeddings times 8": ("embed", {"append": {"type": "scale", "by": 8}}),
    "softcap of logits": ("logits", {"append": {"type": "softcap", "cap": 15}}),
    "three layers": ("n_layers", 3),
    "six layers": ("n_layers", 6),
    "half the initial values": ("init", {"std": 0.01}),
    "twice the initial values": ("init", {"std": 0.04}),
}


def edit(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """What it is called, and the change."""
    name = draw.choice([*IN_LAYERS, *OF_THE_MODEL])
    if name in OF_THE_MODEL:
        path, value = OF_THE_MODEL[name]
        return name, {path: value}
    path, value = IN_LAYERS[name]
    where = draw.choice(["", *WHERE])
    return f"{name}{where}", {f"{WHERE[where]}.{path}": value}


def named(edits: list[tuple[str, dict[str, Any]]]) -> str:
    return " + ".join(name for name, _ in edits)


def changes(count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many changes that the block can have, each another model."""
    draw, study = random.Random(seed), load_study(Path(__file__).with_name("night.yaml"))
    seen = {identity(resolve(study.model, vocab=257))}
    while len(seen) <= count:
        edits = [edit(draw) for _ in range(draw.choice([1, 1, 2]))]
        change = {path: value for _, each in edits for path, value in each.items()}
        if len(change) < len(edits) or no_name(named(edits)):
            continue
        try:
            made = identity(resolve(patch(study.model, change), vocab=257))
        except SpecError:
            continue
        if made not in seen:
            seen.add(made)
            yield named(edits), change


if __name__ == "__main__":
    for name, change in changes(*map(int, sys.argv[1:])):
        print(f"{json.dumps(name)}: {json.dumps(change)}")

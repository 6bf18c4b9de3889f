"""A training step of one block with each mixer in the place of softmax attention, over the length of the context.

    python benchmarks/mixers.py            # about six minutes
    python benchmarks/mixers.py --quick    # a smoke test of the benchmark itself

The block is pre-norm, d_model 256, 4 heads, with a SwiGLU of width 688, between an embedding and a head of 256 tokens;
a step is forward, backward and fused AdamW over 4096 tokens (8192 where the context is as long). All blocks of a
context take turns within one run, and each ratio is the median over the rounds of attention's time over theirs: above
1, the mixer is faster than our softmax attention in the same round. The peers are attention written by hand around
PyTorch's SDPA, and the torch forms of transformers' mixers in the same block; that of its Mamba-1, a loop over tokens,
takes minutes for a step and is left out. The rows `op` set our recurrence alone
beside fla-core's plain chunked functions and transformers' chunked gated delta rule.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.kernels.linear_recurrence.torch_ops import chunked

D_MODEL, HEADS, WIDTH, VOCAB, TOKENS = 256, 4, 688, 256, 4096
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"type": "attention", "heads": HEADS, "positional": "rope"},
    **{name: {"type": name, "heads": HEADS} for name in ("retnet", "gla", "hgrn2", "delta_net", "gated_delta_net")},
    **{name: {"type": name} for name in ("mamba2", "mamba", "rwkv4")},
}


class Ours(nn.Module):
    """archlab's block from its YAML."""

    def __init__(self, mixer: dict[str, Any], context: int, dtype: torch.dtype) -> None:
        super().__init__()
        block = {"norm": "rmsnorm", "mixer": mixer, "ffn": {"type": "glu", "width": WIDTH}}
        spec = arch_dsl.load({"d_model": D_MODEL, "n_layers": 1, "block": block})
        self.model = arch_dsl.compile(arch_dsl.resolve(spec, vocab=VOCAB, max_positions=context), dtype=dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


class Peer(nn.Module):
    """The same block around another mixer, by hand."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL, eps=1e-6) for _ in range(3))
        self.mixer = mixer
        self.up = nn.Linear(D_MODEL, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, D_MODEL, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.mixer(self.norms[0](x))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        logits = F.linear(self.norms[2](x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SDPA(nn.Module):
    """Causal attention with rotary positions around torch's scaled_dot_product_attention."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)
        half = D_MODEL // HEADS // 2
        angles = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1).to(x.dtype)


def peers(context: int) -> dict[str, Callable[[], nn.Module]]:
    """What else could stand there, by name."""
    from transformers import Mamba2Config, Qwen3NextConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    mamba2 = Mamba2Config(hidden_size=D_MODEL, num_heads=8, head_dim=64, n_groups=1, state_size=128, chunk_size=64)
    torch_form(qwen3_next, "torch_chunk_gated_delta_rule")
    heads = {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS}
    delta = Qwen3NextConfig(hidden_size=D_MODEL, linear_key_head_dim=64, linear_value_head_dim=64, **heads)
    return {
        "plain SDPA": lambda: SDPA(context),
        "transformers mamba2": lambda: Mamba2Mixer(mamba2, 0),
        "transformers gated_delta_net": lambda: qwen3_next.Qwen3NextGatedDeltaNet(delta, 0),
    }


def torch_form(module: Any, name: str) -> Callable[..., Any]:
    """transformers' own function of that name, also where fla-core is installed, whose kernels need a GPU."""
    setattr(module, name, inspect.unwrap(getattr(module, name)))
    return getattr(module, name)


def stepper(model: nn.Module, context: int, dtype: torch.dtype) -> Callable[[], None]:
    """One optimizer step on fixed random tokens."""
    tokens = torch.randint(
        0, VOCAB, (max(TOKENS // context, 1), context + 1), generator=torch.Generator().manual_seed(0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def race(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contestant, in rounds in which each takes its turn after one to warm up."""
    for step in contestants.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def row(kind: str, first: str, tokens: int, seconds: dict[str, list[float]], **facts: Any) -> dict[str, Any]:
    """The medians, and the ratios of each round to the first contestant."""
    faster = {
        name: statistics.median(a / b for a, b in zip(seconds[first], taken, strict=True))
        for name, taken in seconds.items()
    }
    return {
        "kind": kind,
        **facts,
        "tokens_per_s": {name: round(tokens / statistics.median(taken)) for name, taken in seconds.items()},
        f"{first}_over": {name: round(ratio, 3) for name, ratio in faster.items()},
    }


def blocks(contexts: list[int], dtypes: list[torch.dtype], rounds: int, peers_at: int) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        for context in contexts:
            models: dict[str, nn.Module] = {name: Ours(mixer, context, dtype) for name, mixer in MIXERS.items()}
            if context == peers_at:
                models |= {name: Peer(make()) for name, make in peers(context).items()}
            else:
                models["plain SDPA"] = Peer(SDPA(context))
            seconds = race({name: stepper(model, context, dtype) for name, model in models.items()}, rounds)
            sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
            facts = {"context": context, "dtype": str(dtype).removeprefix("torch."), "parameters": sizes}
            yield row("block", "attention", max(TOKENS, context), seconds, **facts)


def op(context: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Forward and backward of the recurrence alone in float32, ours first."""
    from fla.ops.delta_rule.naive import delta_rule_chunkwise
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla
    from transformers.models.qwen3_next import modeling_qwen3_next

    gated = torch_form(modeling_qwen3_next, "torch_chunk_gated_delta_rule")
    q, v, k = (torch.randn(TOKENS // context, context, HEADS, 64, requires_grad=True) for _ in range(3))
    decay, share = (x.detach().requires_grad_() for x in (F.logsigmoid(q[..., 0] + 3), q[..., 1].sigmoid()))
    unit = F.normalize(k.detach(), dim=-1).requires_grad_()
    swapped = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, unit, v, share)]
    tests: dict[str, dict[str, tuple[Callable[..., Any], list[Tensor]]]] = {
        "decay per token": {
            "ours": (lambda q, k, v, g: chunked(q, k, v, g)[0], [q, k, v, decay]),
            "fla-core": (lambda q, k, v, g: naive_chunk_simple_gla(q, k, v, g)[0], [q, k, v, decay]),
        },
        "delta rule": {
            "ours": (lambda q, k, v, b: chunked(q, k, v, beta=b)[0], [q, unit, v, share]),
            "fla-core": (lambda q, k, v, b: delta_rule_chunkwise(q, k, v, b)[0], swapped),
        },
        "gated delta rule": {
            "ours": (lambda q, k, v, g, b: chunked(q, k, v, g, b)[0], [q, unit, v, decay, share]),
            "fla-core": (lambda *x: naive_chunk_gated_delta_rule(*x)[0], [q, unit, v, decay, share]),
            "transformers": (lambda *x: gated(*x)[0], [q, unit, v, decay, share]),
        },
    }

    def both(call: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.backward(call(*tensors).sum(), inputs=tensors)

    for name, contestants in tests.items():
        seconds = race({who: both(*given) for who, given in contestants.items()}, rounds)
        yield row("op", "ours", TOKENS, seconds, op=name, context=context, dtype="float32")


def table(found: dict[str, Any]) -> str:
    """One line per contestant: tokens per second, and how many times the first one's that is."""
    title = ", ".join(str(found[key]) for key in ("kind", "op", "context", "dtype") if key in found)
    ratios = next(value for key, value in found.items() if key.endswith("_over"))
    lines = [f"  {name:30} {speed:>9,} {ratios[name]:>7.2f}" for name, speed in found["tokens_per_s"].items()]
    return "\n".join([f"{title:32} tokens/s   ratio", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="one round at context 512 in float32")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines instead of tables")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # fla-core and transformers tell that there is no GPU
    contexts, names, rounds = options.contexts, options.dtypes, options.rounds
    if options.quick:
        contexts, names, rounds = [512], ["float32"], 1
    dtypes = [getattr(torch, name) for name in names]
    for rows in (op(512, rounds), blocks(contexts, dtypes, rounds, peers_at=512)):
        for found in rows:
            found |= {"torch": torch.__version__, "threads": options.threads, "python": sys.version.split()[0]}
            print(json.dumps(found) if options.json else table(found) + "\n", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

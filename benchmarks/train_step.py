"""A training step of a LLaMA-shaped model: ours against plain PyTorch, Hugging Face's Llama and x-transformers.

    python benchmarks/train_step.py            # all rows; some minutes
    python benchmarks/train_step.py --quick    # eager rows alone, a smoke test of the benchmark itself
    python benchmarks/train_step.py --device cuda  # a model of 110M parameters, 8 x 1024 tokens a step

Same shape, batch, dtype and compile mode; the contestants take turns within one run and each figure is the median of
the per-round ratios peer / ours, so a drift of the machine's speed cancels out. Above 1: ours is faster.

On a GPU, `graphs` is ours as studies train it, forward and backward pass launched as one CUDA graph, beside eager
peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl.parts.context import Call
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.passes import Graphed, eager

RECIPE = load_recipe({"tokens": 1, "lr": 1e-3, "precision": "bf16"})
D_MODEL, N_LAYERS, HEADS, CONTEXT, VOCAB, BATCH, WIDTH = 256, 4, 8, 256, 4096, 4, 688
ON_CUDA = {"D_MODEL": 768, "N_LAYERS": 12, "HEADS": 12, "CONTEXT": 1024, "VOCAB": 32_000, "BATCH": 8, "WIDTH": 2048}
DEVICE = "cpu"


class PlainBlock(nn.Module):
    """What a careful author writes by hand: fused query-key-value product, SDPA, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D_MODEL, eps=1e-6), nn.RMSNorm(D_MODEL, eps=1e-6)
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.up = nn.Linear(D_MODEL, 2 * WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, D_MODEL, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time_, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(qkv[0], cos, sin), rotate(qkv[1], cos, sin), qkv[2]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time_, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Plain(nn.Module):
    """A hand-written decoder of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(N_LAYERS))
        self.norm = nn.RMSNorm(D_MODEL, eps=1e-6)
        half = D_MODEL // HEADS // 2
        angles = torch.arange(CONTEXT)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Ours(nn.Module):
    """archlab's model from its YAML."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        attention = {"heads": HEADS, "positional": "rope"}
        block = {"norm": "rmsnorm", "attention": attention, "ffn": {"type": "glu", "width": WIDTH}}
        spec = arch_dsl.load({"d_model": D_MODEL, "n_layers": N_LAYERS, "block": block})
        spec = arch_dsl.resolve(spec, vocab=VOCAB, max_positions=CONTEXT)
        self.model = arch_dsl.compile(spec, device=DEVICE, dtype=dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


class HuggingFace(nn.Module):
    """transformers' LlamaForCausalLM."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=D_MODEL,
            intermediate_size=WIDTH,
            num_hidden_layers=N_LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class XTransformers(nn.Module):
    """x-transformers' decoder with the same choices."""

    def __init__(self) -> None:
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(
            dim=D_MODEL,
            depth=N_LAYERS,
            heads=HEADS,
            attn_dim_head=D_MODEL // HEADS,
            rotary_pos_emb=True,
            use_rmsnorm=True,
            ff_glu=True,
            ff_swish=True,
            ff_no_bias=True,
            ff_mult=WIDTH / D_MODEL,
            attn_flash=True,
        )
        self.model = TransformerWrapper(
            num_tokens=VOCAB, max_seq_len=CONTEXT, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=True
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def stepper(model: nn.Module, dtype: torch.dtype, mode: str) -> Callable[[], float]:
    """One optimizer step on fixed random tokens; returns its loss."""
    model.to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    call = torch.compile(model) if mode == "compiled" else model
    graphed = Graphed(eager(model.model, RECIPE, torch.device(DEVICE)), model) if mode == "graphs" else None

    def loss_with_gradients() -> Tensor:
        if graphed is not None:
            return graphed(tokens[:, :-1], tokens[:, 1:], Call(), torch.ones((), device=DEVICE), None).loss
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss: Tensor = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss

    def step() -> float:
        loss = loss_with_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def race(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contestant, in rounds in which each takes its turn."""
    for step in contestants.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def row(mode: str, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Ours and its peers in one mode."""
    makers = {"ours": lambda: Ours(dtype), "plain": Plain, "huggingface": HuggingFace, "x-transformers": XTransformers}
    models = {name: make() for name, make in makers.items()}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    modes = {name: "eager" if mode == "graphs" and name != "ours" else mode for name in models}
    seconds = race({name: stepper(model, dtype, modes[name]) for name, model in models.items()}, rounds)
    ratios = {
        name: statistics.median(theirs / ours for theirs, ours in zip(seconds[name], seconds["ours"], strict=True))
        for name in seconds
        if name != "ours"
    }
    return {
        "mode": mode,
        "dtype": str(dtype).removeprefix("torch."),
        "ours_ms": round(1000 * statistics.median(seconds["ours"]), 1),
        "peer_over_ours": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "parameters": sizes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    on = "CPU"
    if options.device == "cuda":
        globals().update(ON_CUDA, DEVICE="cuda")
        on = torch.cuda.get_device_name()
    modes = ["eager"] if options.quick else ["eager", "compiled"]
    if options.device == "cuda":
        modes.insert(1, "graphs")
    for mode in modes:
        for dtype in (torch.bfloat16,) if options.device == "cuda" else (torch.float32, torch.bfloat16):
            found = row(mode, dtype, 3 if options.quick else options.rounds)
            found |= {
                "device": on,
                "torch": torch.__version__,
                "threads": options.threads,
                "python": sys.version.split()[0],
            }
            print(json.dumps(found), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

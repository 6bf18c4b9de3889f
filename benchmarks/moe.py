"""A training step with experts against the dense model of the same active parameters, and transformers' Mixtral.

    python benchmarks/moe.py            # float32 and bfloat16, one sequence and four: some minutes
    python benchmarks/moe.py --quick    # one row, a smoke test of the benchmark itself

4 layers of d_model 256, context 512; 8 experts of width 512, of which each token meets two, beside a gated feed-forward
of width 1024. A step is loss, gradients, clipping and AdamW over all parameters. The contestants take turns within one
run; each figure is the median over the rounds of the ratio to the dense model's time in the same round, so a drift of
the machine's speed cancels out. Mixtral has the same shape; `experts` names its ways to compute them, and the dense
Llama of transformers stands beside it, so that what its experts cost can be told from what the rest does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train_step import race

from archlab import arch_dsl
from archlab.arch_dsl import Call

D_MODEL, N_LAYERS, HEADS, CONTEXT, VOCAB = 256, 4, 4, 512, 4096
EXPERTS, TOP_K, WIDTH = 8, 2, 512


class Ours(nn.Module):
    """archlab's model with this feed-forward."""

    def __init__(self, ffn: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        block = {"norm": "rmsnorm", "attention": {"heads": HEADS, "positional": "rope"}, "ffn": ffn}
        spec = arch_dsl.load({"d_model": D_MODEL, "n_layers": N_LAYERS, "block": block})
        self.spec = arch_dsl.resolve(spec, vocab=VOCAB, max_positions=CONTEXT)
        self.model = arch_dsl.compile(self.spec, dtype=dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        call = Call()
        loss = self.model.loss(tokens, targets, call)
        return sum(call.losses.values(), loss)


class Theirs(nn.Module):
    """A causal language model of transformers."""

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{name}Config")(
            vocab_size=VOCAB,
            hidden_size=D_MODEL,
            num_hidden_layers=N_LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            use_cache=False,
            **fields,
        )
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stepper(model: nn.Module, batch: int, dtype: torch.dtype) -> Callable[[], float]:
    """One optimizer step on fixed random tokens; returns its loss."""
    tokens = torch.randint(0, VOCAB, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def row(batch: int, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """All contestants at one batch size and precision."""
    moe = {"type": "moe", "experts": EXPERTS, "top_k": TOP_K, "width": WIDTH, "balance": "switch"}
    mixtral = {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    models = {
        "dense": Ours({"type": "swiglu", "width": TOP_K * WIDTH}, dtype),
        "moe": Ours(moe, dtype),
        "huggingface dense": Theirs("Llama", intermediate_size=TOP_K * WIDTH),
        **{
            f"huggingface mixtral, experts {way}": Theirs("Mixtral", **mixtral, experts_implementation=way)
            for way in ("eager", "grouped_mm")
        },
    }
    costs = {name: arch_dsl.cost(models[name].spec, CONTEXT) for name in ("dense", "moe")}
    seconds = race({name: stepper(model, batch, dtype) for name, model in models.items()}, rounds)
    ratios = {
        name: statistics.median(mine / dense for mine, dense in zip(each, seconds["dense"], strict=True))
        for name, each in seconds.items()
        if name != "dense"
    }
    return {
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "dense_ms": round(1000 * statistics.median(seconds["dense"]), 1),
        "over_dense": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "active_parameters": {name: cost.active for name, cost in costs.items()},
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in training
    rows = [(batch, dtype) for dtype in (torch.float32, torch.bfloat16) for batch in (1, 4)]
    for batch, dtype in rows[:1] if options.quick else rows:
        found = row(batch, dtype, 3 if options.quick else options.rounds)
        found |= {"torch": torch.__version__, "threads": options.threads, "python": sys.version.split()[0]}
        print(json.dumps(found), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""A training step of every architecture of the zoo: ours against torch.compile of its formulas, at its tiny size.

    python benchmarks/zoo_step.py                           # an entry of each kind; some minutes, most of it compiling
    python benchmarks/zoo_step.py --entries all             # all; goes on after the last row when it is started again
    python benchmarks/zoo_step.py --eager --entries t5      # nothing is compiled, a smoke test
    python benchmarks/zoo_step.py --auto                    # our `auto` against transformers' Llama; four minutes

The reference is the same model built of the ops' formulas (`backend="reference"`), compiled as a whole, as is ours;
`blocks` is ours as `compile: blocks` trains it. Both compute forward, backward and fused AdamW on the same tokens, and
must agree in their first loss. Recurrences go token by token in the reference: these loops are compiled in stretches
(`formulas.py`). Contestants take turns, and each figure is the median over rounds of the reference's time over ours:
above 1, ours is faster; the bar is 0.95. `--processor` takes processor time, for a machine that is not idle.

Rows are appended to benchmarks/results/zoo_step.jsonl; what has one there, of this source and these options, is not
measured again (`--again` does). `--eager` writes none.

`--auto` is the benchmark of `train_step.py` for what a study gets by default (bfloat16, compiled layers) against
transformers' Llama in eager float32: the bar is 2.5. Both start from the same weights and see the same batches, so that
their losses after `--steps` steps may differ by rounding alone; they are timed meanwhile, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from formulas import recurrences_in_stretches
from torch import nn
from train_step import BATCH, CONTEXT, VOCAB, HuggingFace, Ours

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.model.model import EncoderDecoderModel
from archlab.arch_dsl.parts.context import Call
from archlab.search.executors.shipping import ours
from archlab.search.training.compiling import compile_blocks, compiled_into

LENGTH, ROWS, BAR, AUTO_BAR, SAME_LOSS = 512, 2, 0.95, 2.5, 0.01
RESULTS = Path(__file__).parent / "results" / "zoo_step.jsonl"
EACH_KIND = ["llama", "fox_llama", "mamba2", "gated_delta_net"]
Step = Callable[[], float]
Seconds = dict[str, list[float]]


def specification(name: str) -> arch_dsl.Model:
    """The tiny size of an entry, for `LENGTH` tokens."""
    spec = zoo.load(name, "tiny")
    if spec.max_positions is not None and spec.max_positions < LENGTH:
        spec = arch_dsl.patch(spec, {"max_positions": LENGTH})
    return arch_dsl.resolve(spec, vocab=spec.vocab or 257, max_positions=spec.max_positions or LENGTH)


def step_of(spec: arch_dsl.Model, backend: str, mode: str, dtype: torch.dtype) -> Step:
    """A training step that returns its loss. `mode` is eager, whole or blocks."""
    model = arch_dsl.compile(spec, seed=0, backend=backend, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab or 1, (ROWS, LENGTH + 1), generator=generator)
    source = tokens[:, :-1].flip(1) if isinstance(spec, EncoderDecoderModel) else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if mode == "blocks":
        compile_blocks(model, ROWS)

    def loss() -> torch.Tensor:
        call = Call(source_tokens=source)
        found = model.loss(tokens[:, :-1], tokens[:, 1:], call)
        return sum(call.losses.values(), found)

    taken = torch.compile(loss, dynamic=False) if mode == "whole" else loss

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = taken()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(found.detach())

    return step


def race(contestants: dict[str, Step], rounds: int, clock: Callable[[], float]) -> tuple[Seconds, Seconds]:
    """Seconds and loss of each step of each contestant, in rounds in which each takes its turn."""
    seconds: Seconds = {name: [] for name in contestants}
    losses: Seconds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            started = clock()
            losses[name].append(step())
            seconds[name].append(clock() - started)
    return seconds, losses


def row(name: str, modes: list[str], dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """An entry of the zoo: ours in each mode against the reference. Raises ValueError where they disagree."""
    spec = specification(name)
    peer = "whole" if modes != ["eager"] else "eager"
    steps = {mode: step_of(spec, "auto", mode, dtype) for mode in modes}
    with recurrences_in_stretches() if peer == "whole" else nullcontext():
        steps["reference"] = step_of(spec, "reference", peer, dtype)
    first = {kind: step() for kind, step in steps.items()}
    if max(first.values()) - min(first.values()) > (2e-3 if dtype == torch.float32 else 5e-2):
        raise ValueError(f"{name}: the first losses differ, so there is nothing to time: {first}")
    race(steps, 2, clock)
    seconds, _ = race(steps, rounds, clock)
    ratios = {
        mode: statistics.median(theirs / ours for theirs, ours in zip(seconds["reference"], seconds[mode], strict=True))
        for mode in modes
    }
    return {
        "entry": name,
        "dtype": str(dtype).removeprefix("torch."),
        "ms": {kind: round(1000 * statistics.median(taken), 2) for kind, taken in seconds.items()},
        "reference_over_ours": {mode: round(ratio, 3) for mode, ratio in ratios.items()},
        "meets_the_bar": max(ratios.values()) >= BAR,
    }


def auto_row(steps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Our bfloat16 with compiled layers against transformers' Llama in eager float32: time, and loss after training."""
    torch.manual_seed(0)
    ours, theirs = Ours(torch.bfloat16), HuggingFace()
    ours.model.load_state_dict(_renamed(theirs))
    compile_blocks(ours.model, BATCH)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (64,), generator=generator)[torch.randint(0, 64, (20_000,), generator=generator)]
    contestants = {"ours": _on_text(ours, text, half=True), "huggingface": _on_text(theirs, text, half=False)}
    seconds, losses = race(contestants, steps, clock)
    pairs = zip(seconds["ours"][2:], seconds["huggingface"][2:], strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    last = {name: statistics.mean(found[-20:]) for name, found in losses.items()}
    return {
        "entry": "auto",
        "ms": {name: round(1000 * statistics.median(taken), 1) for name, taken in seconds.items()},
        "huggingface_over_ours": round(ratio, 3),
        "loss": {name: round(loss, 4) for name, loss in last.items()},
        "largest_difference": round(max(abs(a - b) for a, b in zip(*losses.values(), strict=True)), 4),
        "steps": steps,
        "meets_the_bar": ratio >= AUTO_BAR and abs(last["ours"] - last["huggingface"]) < SAME_LOSS,
    }


def _renamed(theirs: HuggingFace) -> dict[str, torch.Tensor]:
    """The weights of transformers' Llama under the names of ours."""
    names = {
        "model.embed_tokens.weight": "embedding",
        "model.norm.weight": "final.rmsnorm.weight",
        "self_attn.q_proj": "attention.query_projection",
        "self_attn.k_proj": "attention.key_projection",
        "self_attn.v_proj": "attention.value_projection",
        "self_attn.o_proj": "attention.output_projection",
        "mlp.gate_proj": "ffn.gate_projection",
        "mlp.up_proj": "ffn.input_projection",
        "mlp.down_proj": "ffn.output_projection",
        "input_layernorm": "attention.pre.rmsnorm",
        "post_attention_layernorm": "ffn.pre.rmsnorm",
        "model.layers.": "block.",
    }
    found = {}
    for name, value in theirs.model.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = value
    return {name: value for name, value in found.items() if name != "lm_head.weight"}  # tied


def _on_text(model: nn.Module, text: torch.Tensor, half: bool) -> Step:
    """Steps on random windows of a text, the same ones for all models."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(1)

    def step() -> float:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=draw)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", nargs="+", default=EACH_KIND, metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=["whole", "blocks"], choices=["whole", "blocks", "eager"])
    parser.add_argument("--eager", action="store_true", help="compile nothing, the reference neither")
    parser.add_argument("--auto", action="store_true", help="our default against transformers' Llama, and no entries")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300, help="of --auto, after which losses are compared")
    parser.add_argument("--processor", action="store_true", help="processor time in place of the clock's")
    parser.add_argument("--cache", type=Path, help="where compiled code stays for the next run")
    parser.add_argument("--again", action="store_true", help="measure what has a row already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are appended, as JSON lines")
    options = parser.parse_args()
    entries = list(zoo.names()) if options.entries == ["all"] else options.entries
    torch.set_num_threads(1)
    clock = time.process_time if options.processor else time.perf_counter
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    modes = ["eager"] if options.eager else options.modes
    facts = {"torch": torch.__version__, "python": sys.version.split()[0], "length": LENGTH, "rows": ROWS}
    facts |= {"clock": clock.__name__, "source": ours()["archlab's source"]}
    done = set() if options.again else measured(options.out, facts)
    with tempfile.TemporaryDirectory() as folder:
        for name in ["auto"] if options.auto else entries:
            if (name, *([] if options.auto else [str(dtype)[6:], *modes])) in done:
                print(f"{name}: measured already", flush=True)
                continue
            torch._dynamo.reset()  # which forgets who is told of compilations, so before somebody is
            with compiled_into(options.cache or Path(folder), lambda: None):
                made = (
                    auto_row(options.steps, clock) if options.auto else row(name, modes, dtype, options.rounds, clock)
                )
            print(json.dumps(made | facts), flush=True)
            if not options.eager:
                with options.out.open("a") as file:
                    file.write(json.dumps(made | facts) + "\n")


def measured(file: Path, facts: dict[str, Any]) -> set[tuple[str, ...]]:
    """What has a row of these facts: the entry, and its dtype and modes."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {
        (each["entry"], *([each["dtype"], *each["reference_over_ours"]] if "dtype" in each else []))
        for each in rows
        if all(each.get(name) == value for name, value in facts.items())
    }


if __name__ == "__main__":
    main()

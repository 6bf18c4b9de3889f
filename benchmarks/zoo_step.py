"""A training step of every architecture of the zoo: ours against torch.compile of its formulas, at its tiny size.

    python benchmarks/zoo_step.py                           # an entry of each kind; some minutes, most of it compiling
    python benchmarks/zoo_step.py --entries all --out benchmarks/results/zoo_step.jsonl   # hours
    python benchmarks/zoo_step.py --eager --entries t5      # nothing is compiled, a smoke test
    python benchmarks/zoo_step.py --auto                                    # our `auto` against transformers' Llama

The reference is the same model built of the ops' formulas (`backend="reference"`), compiled as a whole, as is ours;
`blocks` is ours as `compile: blocks` trains it. Both compute forward, backward and fused AdamW on the same tokens, and
must agree in their first loss. Contestants take turns, and each figure is the median over rounds of the reference's
time over ours: above 1, ours is faster; the bar is 0.95. `--processor` takes processor time, for a machine that is not
idle. `--auto` is the benchmark of `train_step.py` for what a study gets by default (bfloat16, compiled layers) against
transformers' Llama in eager float32: the bar is 2.5, at losses after `--steps` steps that differ by noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from train_step import BATCH, CONTEXT, VOCAB, HuggingFace, Ours

import arch_dsl
from arch_dsl import zoo
from arch_dsl.context import Call
from arch_dsl.model import EncoderDecoderModel
from search.compiling import compile_blocks, compiled_into

LENGTH, ROWS, BAR, AUTO_BAR = 512, 2, 0.95, 2.5
EACH_KIND = ["llama", "fox_llama", "mamba2", "gated_delta_net"]
Step = Callable[[], float]


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


def race(contestants: dict[str, Step], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds per step of each contestant, in rounds in which each takes its turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            started = clock()
            step()
            seconds[name].append(clock() - started)
    return seconds


def row(name: str, modes: list[str], dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """An entry of the zoo: ours in each mode against the reference. Raises ValueError where they disagree."""
    torch._dynamo.reset()
    spec = specification(name)
    peer = "whole" if modes != ["eager"] else "eager"
    steps = {mode: step_of(spec, "auto", mode, dtype) for mode in modes}
    steps["reference"] = step_of(spec, "reference", peer, dtype)
    first = {kind: step() for kind, step in steps.items()}
    if max(first.values()) - min(first.values()) > (2e-3 if dtype == torch.float32 else 5e-2):
        raise ValueError(f"{name}: the first losses differ, so there is nothing to time: {first}")
    race(steps, 2, clock)
    seconds = race(steps, rounds, clock)
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


def auto_row(rounds: int, steps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Our bfloat16 with compiled layers against transformers' Llama in eager float32: time, and loss after training."""
    torch.manual_seed(0)
    ours, theirs = Ours(torch.bfloat16), HuggingFace()
    compile_blocks(ours.model, BATCH)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (64,), generator=generator)[torch.randint(0, 64, (20_000,), generator=generator)]
    contestants: dict[str, Step] = {}
    for name, model, half in (("ours", ours, True), ("huggingface", theirs, False)):
        contestants[name] = _on_text(model, text, half)
    race(contestants, 2, clock)
    seconds = race(contestants, rounds, clock)
    losses = {name: statistics.mean([step() for _ in range(steps)][-20:]) for name, step in contestants.items()}
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["huggingface"], strict=True))
    shown = {name: round(1000 * statistics.median(taken), 1) for name, taken in seconds.items()}
    shown_losses = {name: round(loss, 4) for name, loss in losses.items()}
    return {
        "entry": "auto",
        "ms": shown,
        "huggingface_over_ours": round(ratio, 3),
        "loss": shown_losses,
        "steps": steps,
        "meets_the_bar": ratio >= AUTO_BAR,
    }


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
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    options = parser.parse_args()
    entries = list(zoo.names()) if options.entries == ["all"] else options.entries
    torch.set_num_threads(1)
    clock = time.process_time if options.processor else time.perf_counter
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    modes = ["eager"] if options.eager else options.modes
    facts = {"torch": torch.__version__, "python": sys.version.split()[0], "length": LENGTH, "rows": ROWS}
    with tempfile.TemporaryDirectory() as folder, compiled_into(options.cache or Path(folder), lambda: None):
        made = (
            [lambda: auto_row(options.rounds, options.steps, clock)]
            if options.auto
            else [lambda name=name: row(name, modes, dtype, options.rounds, clock) for name in entries]
        )
        for make in made:
            found = make() | facts
            print(json.dumps(found), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

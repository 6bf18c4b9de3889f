"""What a card would refuse, or wait for in a step, is found without one: steps, measures and graphs of the whole zoo.

Each test asks a process in which torch believes in an H100 (`card.py`). Tensors have no values there, and no kernel is
launched: what is looked at are devices, dtypes, shapes, launches, fake forms, and whether the host waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl import zoo
from archlab.kernels.launch import missing
from archlab.search.hardware.compiler import cannot_compile, compiler
from archlab.search.objectives import Objective
from archlab.search.recipe.optimizers import Optimizer
from tests.docs_kit import ROOT
from tests.fake_cuda.card import build_guard

pytestmark = pytest.mark.skipif(bool(cannot_compile() or missing()), reason="needs a C++ compiler and Triton")
SAMPLE = {"fox_pro", "kimi_linear"}
MEASURES: tuple[tuple[str, Any], ...] = (
    ("llama", "perplexity"),
    ("llama", "loss_by_position"),
    ("llama", "decoding"),
    ("llama", "speed"),
    ("ouro", "exits"),
    ("llama", "attention_entropy"),
    ("llama", "local_attention"),
    ("llama", "first_token_attention"),
    ("llama", "strong_attention"),
    ("llama", "massive_activations"),
    ("llama", "activation_norms"),
    ("llama", "effective_rank"),
    ("llama", "gradient_norms"),
    ("gated_attention", "gates"),
    ("fox_pro", "forget_gate"),
    ("mixtral", "router_load"),
)
RECIPES: dict[str, dict[str, Any]] = {
    "z_loss": {"z_loss": 1e-4},
    "recomputed layers": {"recompute": "layers"},
    "fp32": {"precision": "fp32"},
    "no clip": {"clip": None},
    "cautious": {"optimizer": {"type": "adamw", "cautious": True}},
}


class Card:
    """The process that pretends to have one."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.fake_cuda", str(build_guard(compiler(), folder))]
        plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=plain, stdin=pipe, stdout=pipe, text=True)

    def ask(self, name: str, do: str = "trial", **asked: Any) -> dict[str, Any]:
        """What it answers about an entry of the zoo."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"do": do, "name": name, "recipe": {}, "change": {}} | asked) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def takes(self, name: str, do: str = "trial", **asked: Any) -> dict[str, Any]:
        """The same where nothing is refused."""
        answer = self.ask(name, do, **asked)
        assert "error" not in answer, answer["trace"]
        return answer

    def trains(self, name: str, **asked: Any) -> None:
        """Two steps of two micro-batches with a log line, scoring, and going on from the state between them."""
        answer = self.takes(name, **asked)
        assert answer["kernels"]
        assert answer["graphs"] == (not answer["looks_back"])


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Card]:
    found = Card(tmp_path_factory.mktemp("guard"))
    yield found
    found.process.communicate()


def sampled(names: Any, kept: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in kept else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("buffer", "convert all Tensors to FakeTensors"),
        ("waiting", "_local_scalar_dense.default waits for the card"),
        ("dtype", "mm.default of torch.float16 and torch.float32"),
    ],
)
def test_a_planted_mistake_is_found(card: Card, planted: str, found: str) -> None:
    assert found in card.ask("llama", planted=planted)["error"]


@pytest.mark.parametrize("name", sampled(zoo.names(), SAMPLE))
def test_a_card_takes_the_steps_of_every_entry(card: Card, name: str) -> None:
    card.trains(name)


@pytest.mark.parametrize("name", sampled(zoo.names(), {"fox_pro"}))
def test_a_card_gets_one_graph_of_every_entry(card: Card, name: str) -> None:
    assert card.takes(name, "captured") == {"graphs": 1}


@pytest.mark.parametrize("name", sampled(Optimizer.members, {"muon"}))
def test_a_card_takes_every_optimizer(card: Card, name: str) -> None:
    schedule = {"schedule": "constant"} if name == "schedule_free" else {}
    card.trains("llama", recipe={"optimizer": name, **schedule})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name, found in Objective.members.items() if not found.of_examples))
def test_a_card_takes_every_objective_of_text(card: Card, name: str) -> None:
    entry = "t5" if name == "masked_encoder" else "llama"
    mask = {"masked": "full", "prefix": "prefix"}.get(name)
    card.trains(entry, recipe={"objective": name}, change={"block.attention.mask": mask} if mask else {})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_card_takes_other_recipes(card: Card, recipe: dict[str, Any]) -> None:
    card.trains("llama", recipe=recipe)


@pytest.mark.slow
def test_layers_that_draw_and_are_recomputed_read_the_generator(card: Card) -> None:
    """So that they are launched kernel by kernel on a card, where the capture is refused."""
    dropout = {"block.*.post": {"append": {"type": "dropout", "rate": 0.1}}}
    answer = card.ask("llama", recipe={"recompute": "layers"}, change=dropout)
    assert "the state of the generator is read while a graph is captured" in answer["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measure"), MEASURES)
def test_a_card_takes_measures(card: Card, name: str, measure: Any) -> None:
    card.takes(name, "measured", measure=measure)

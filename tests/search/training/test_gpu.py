"""Training steps of the whole zoo on a CUDA device: by kernels and by formulas, without waiting, and compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.compiler import slower
from archlab.arch_dsl.model.model import EncoderDecoderModel
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.layers import after_step
from archlab.search.hardware.determinism import deterministic
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.compiling import compile_blocks, compiled_into
from archlab.search.training.passes import Found, Graphed, Passes, eager, nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::archlab.arch_dsl.compiler.slower.SlowerKernel"),
]
ROWS, LENGTH, FULL, HALF = 2, 128, torch.float32, torch.bfloat16
# Entries of each kind of mixer and feed-forward: inductor takes seconds for each distinct layer.
COMPILED = (
    "llama", "fox_pro", "gated_attention", "gated_delta_net", "mamba2", "mamba3", "rwkv7", "kimi_linear", "xlstm",
    "deepseek_v3", "gpt_oss", "ngpt", "t5", "modernbert", "modded_nanogpt",
)  # fmt: skip


class Trainee:
    """A tiny entry on the card, with its optimizer and one batch."""

    def __init__(self, name: str, backend: str, dtype: torch.dtype, change: dict[str, Any] | None = None) -> None:
        spec = arch_dsl.resolve(arch_dsl.patch(zoo.load(name, "tiny"), change or {}))
        length = min(LENGTH, spec.max_positions or LENGTH)
        spec = arch_dsl.resolve(spec, vocab=spec.vocab or 257, max_positions=length)
        self.dtype = dtype
        self.model = arch_dsl.compile(spec, backend, seed=0, device="cuda", dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(0, spec.vocab or 1, (ROWS, length + 1), generator=torch.Generator().manual_seed(0))
        self.read, self.targets = (part.contiguous().cuda() for part in (tokens[:, :-1], tokens[:, 1:]))
        self.source = self.read.flip(1) if isinstance(spec, EncoderDecoderModel) else None

    def loss(self) -> Tensor:
        """With the terms that parts of the model add."""
        call = Call(source_tokens=self.source)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.dtype == HALF):
            found = self.model.loss(self.read, self.targets, call)
            return sum(call.losses.values(), found)

    def step(self) -> Tensor:
        """Forward, backward and optimizer: the loss before it."""
        found = self.loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Of each parameter that the loss reaches, in float32."""
        self.loss().backward()
        found = {name: x.grad.float() for name, x in self.model.named_parameters() if x.grad is not None}
        self.optimizer.zero_grad()
        return found


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """How far gradients are from others, as one vector and by its length: a tiny one alone is rounding."""
    assert found.keys() == wanted.keys()
    between = sum(float((found[name] - x).square().sum()) for name, x in wanted.items())
    return (between / sum(float(x.square().sum()) for x in wanted.values())) ** 0.5


@pytest.mark.parametrize("name", zoo.names())
def test_kernels_give_the_step_of_the_formulas(name: str) -> None:
    """In bfloat16, where a router may choose others, they are as near to float32 as formulas in bfloat16 are."""
    ours, half, exact = Trainee(name, "auto", FULL), Trainee(name, "auto", HALF), Trainee(name, "reference", FULL)
    rounded = Trainee(name, "reference", HALF)
    torch.testing.assert_close(ours.loss(), exact.loss(), rtol=1e-5, atol=0)
    torch.testing.assert_close(half.loss(), exact.loss(), rtol=1e-2, atol=0)
    wanted = exact.gradients()
    assert apart(ours.gradients(), wanted) <= 1e-3
    assert apart(half.gradients(), wanted) <= 2 * apart(rounded.gradients(), wanted) + 3e-2


@pytest.mark.parametrize("name", zoo.names())
def test_a_step_waits_for_nothing(name: str) -> None:
    trainee = Trainee(name, "auto", HALF)
    first = trainee.step()
    with nothing_waits():
        second = trainee.step()
    assert second < first


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_take_the_step_of_eager_ones(name: str, tmp_path: Path) -> None:
    uncompiled, compiled = (Trainee(name, "auto", HALF) for _ in range(2))
    exact = Trainee(name, "reference", FULL).gradients()
    with compiled_into(tmp_path, lambda: None):
        compile_blocks(compiled.model, ROWS)
        torch.testing.assert_close(compiled.loss(), uncompiled.loss(), rtol=1e-2, atol=0)
        assert apart(compiled.gradients(), exact) <= 2 * apart(uncompiled.gradients(), exact) + 3e-2


def test_a_model_of_the_cpu_that_is_moved_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slower, "_WARNED", set())
    built = arch_dsl.compile(arch_dsl.resolve(zoo.load("llama", "tiny")))
    with pytest.warns(slower.SlowerKernel, match="compiled for the CPU"):
        built.cuda()


def trained(name: str, graphs: bool, steps: int = 4, **changes: Any) -> tuple[list[Tensor], Trainee, Graphed]:
    """The losses of micro-batches, two a step, all of other tokens."""
    trainee = Trainee(name, "auto", HALF, **changes)
    passes = eager(trainee.model, load_recipe({"tokens": 1, "lr": 1e-3, "precision": "bf16"}), torch.device("cuda"))
    graphed, losses = Graphed(passes, trainee.model), []
    with deterministic(torch.device("cuda")):
        torch.manual_seed(0)
        for step in range(steps):
            for part in range(2):
                read, targets = (x.roll(2 * step + part, 1) for x in (trainee.read, trainee.targets))
                call = Call(source_tokens=trainee.source)
                found = (graphed if graphs else passes)(read, targets, call, torch.full((), 2.0, device="cuda"), None)
                losses.append(found.loss)
            trainee.optimizer.step()
            after_step(trainee.model, found.measures)
            trainee.optimizer.zero_grad()
    return losses, trainee, graphed


@pytest.mark.parametrize("name", zoo.names())
def test_a_graph_takes_the_steps_of_its_kernels(name: str) -> None:
    eagerly, plain, _ = trained(name, False)
    at_once, other, graphed = trained(name, True)
    assert not graphed.refused
    assert [float(x) for x in at_once] == [float(x) for x in eagerly]
    for (path, one), two in zip(plain.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two), path


def test_a_graph_drops_other_units_each_time_as_its_kernels_do() -> None:
    change = {"embed": {"type": "dropout", "rate": 0.2}}
    eagerly, _, _ = trained("llama", False, change=change)
    at_once, _, graphed = trained("llama", True, change=change)
    assert not graphed.refused
    assert [float(x) for x in at_once] == [float(x) for x in eagerly]


def test_what_waits_is_launched_kernel_by_kernel_and_draws_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A capture that fails would leave the generator of dropout unfit, so the passes are rehearsed first."""
    losses = {}
    for kind in ("eager", "waiting"):
        trainee = Trainee("llama", "auto", HALF, change={"embed": {"type": "dropout", "rate": 0.2}})
        plain = eager(trainee.model, load_recipe({"tokens": 1, "lr": 1e-3, "precision": "bf16"}), torch.device("cuda"))

        def waiting(tokens: Tensor, *rest: Any, plain: Passes = plain) -> Found:
            assert int(tokens[0, 0]) >= 0
            return plain(tokens, *rest)

        graphed = Graphed(waiting, trainee.model)
        passes = plain if kind == "eager" else graphed
        torch.manual_seed(0)
        found = [
            passes(trainee.read, trainee.targets, Call(), torch.ones((), device="cuda"), None).loss for _ in range(4)
        ]
        losses[kind] = [float(loss) for loss in found]
    assert losses["waiting"] == losses["eager"]
    assert len(set(losses["eager"])) == 4
    assert "synchronizing" in graphed.refused
    assert "no CUDA graph" in capsys.readouterr().err

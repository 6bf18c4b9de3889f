"""A model written as plain PyTorch computes the same to the bit, with torch alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import Model, zoo
from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.model.model import DecoderModel, kept
from archlab.arch_dsl.plain import Unexportable, to_python
from archlab.arch_dsl.plain.classes import listed
from tests.arch_dsl.conformance import CALL, TARGETS, TOKENS, build, cases, load, whole_model
from tests.arch_dsl.specs import assert_plain_agrees
from tests.slow_tests import ALL

# What a fresh interpreter does with every file: load the weights, compare logits and gradients.
CHECK = """
import importlib.util, inspect, pathlib, sys
import torch

torch.set_num_threads(int(sys.argv[2]))  # which order sums are taken in
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    wanted = torch.load(path.with_suffix(".pt"))
    model = module.Model().eval()  # without dropout
    assert list(model.state_dict()) == list(wanted["state"]), (path.stem, "names")
    model.load_state_dict(wanted["state"])
    taken = set(inspect.signature(model.forward).parameters) & {"documents", "prefix"}
    logits = model(wanted["tokens"], **{name: wanted[name] for name in taken})
    assert torch.equal(logits, wanted["logits"]), (path.stem, "logits", (logits - wanted["logits"]).abs().max())
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted["targets"].flatten()).backward()
    for name, parameter in model.named_parameters():
        theirs = wanted["gradients"][name]  # None where only an auxiliary loss, which no file has, gives one
        same = parameter.grad is None if theirs is None else torch.equal(parameter.grad, theirs)
        assert same, (path.stem, "gradient", name)
    print(path.stem)
assert not {"arch_dsl", "kernels", "search"} & set(sys.modules)
"""
PLUGIN = """
import torch
from torch import nn
from archlab.arch_dsl.parts.families import Scale


@Scale.register("swing")
class Swing(Scale):
    turns: int = 2

    def build(self, ctx):
        return _Swing(self.turns)


class _Swing(nn.Module):
    def __init__(self, turns):
        super().__init__()
        self.turns = turns
        self.rate = 0.5

    def forward(self, x, call):
        total = x
        for turn in range(self.turns):
            if x.shape[1] > 4 and turn:
                total = total + torch.sin(self.rate * total)
            else:
                total = total - torch.sin(x) if turn else total * 2
        return total
"""
# What people write in a forward pass, beside what the primitives of this repository do.
ORDINARY = """
import torch
from torch import nn
from archlab.arch_dsl.parts.families import Scale


@Scale.register("ordinary")
class Ordinary(Scale):
    def build(self, ctx):
        return _Ordinary()


def shared_out(*parts, **sizes):
    return [part / sizes["by"] for part in parts]


class _Shift(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return torch.sin(x + self.by).square()


class _Ordinary(nn.Module):
    def __init__(self):
        super().__init__()
        self.smooth = nn.Softplus(beta=2.0)
        self.shifts = nn.ModuleDict({"a": _Shift(0.5), "b": _Shift(0.25)})
        self.signs = (1.0, -1.0)
        self.listed = [self.shifts["b"]]

    @property
    def first(self):
        return self.shifts["a"]

    @staticmethod
    def doubled(x):
        return x + x

    def squared(self, x):
        waves = x.cos()
        return waves * waves

    def above(self, x):
        if x.sum() > 0:
            return x.exp()
        else:
            return x - 1

    def forward(self, x, call):
        parts = []
        for number, (name, shift) in enumerate(self.shifts.items()):
            part = shift(x)
            part *= self.signs[number]
            parts.append(part)
        named = {f"part_{number}": part for number, part in enumerate(parts) if number < 2}
        for name, part in named.items():
            x = x + part if name == "part_0" else x - part
        if len(parts) == 2 and isinstance(parts, list) and all(sign < 2 for sign in self.signs):
            x += sum(shared_out(*parts, by=2.0))
        if any(part is not None for part in parts):
            x = x.tanh()
        rest = iter(parts)
        x = x + next(rest) * next(iter(rest)) + next(rest, x)
        x = torch.maximum(self.first(x) * 2, self.above(self.doubled(x)))
        x = torch.minimum(x.sin() * 2, self.squared(x))
        return self.smooth(x + self.listed[0](x))
"""
GOLDEN = Path(__file__).parents[1] / "plain_model.py.txt"


def layered(n_layers: int, windows: bool = True, **attention: Any) -> Model:
    """A model whose layers share something, alternate, or differ by a number."""
    data = whole_model()
    block = {**data["block"], "attention": {**data["block"]["attention"], **attention}}
    overrides = {"1::2": {"block.attention.mask": {"type": "window", "size": 3}}} if windows else {}
    return load({**data, "n_layers": n_layers, "block": block, "overrides": overrides})


REACHING = ("constant-True", "layers")  # starting points that are written by what no default asks for
OFTEN = ("gated_delta_net", "llama", "palm", "pangu_alpha", "rwkv4", "samba")


def models(often: bool) -> dict[str, Model]:
    """Primitives as they are by default, models whose layers differ, and some of the zoo in its tiny size.

    Not `often`: the other starting points of primitives, two thirds of the first ones, and the other models of the zoo.
    Models with `depths` are refused (tests/arch_dsl/model/test_depths.py).
    """
    found = {
        f"case_{number}": case.model
        for number, case in enumerate(cases())
        if (case.id in REACHING or (case.plain and number % 3 == 0)) == often
    }
    found = {name: model for name, model in found.items() if isinstance(model, DecoderModel) and not model.depths}
    if often:
        found |= layered_models()
    tiny = {f"zoo_{name}": arch_dsl.resolve(zoo.load(name, "tiny")) for name in zoo.names() if (name in OFTEN) == often}
    return found | {name: model for name, model in tiny.items() if isinstance(model, DecoderModel)}


def layered_models() -> dict[str, Model]:
    """Models whose layers share something or differ."""
    found = {}
    found["share_bias"] = layered(4, scores=[{"type": "t5_buckets", "share": "stack"}])
    found["share_branch"] = layered(3, windows=False, share="stack")
    apart = {"type": "causal", "documents": True}
    found["documents"] = layered(2, windows=False, mask=apart, key=["shift"], value=["shift"])
    overrides = {"1::2": {"block.attention.mask": apart}}
    found["some_documents"] = load({**whole_model(), "n_layers": 4, "overrides": overrides})
    found["numbers"] = layered(5, pre=["rmsnorm", "depth_scale"])
    ours = "relu2(x) + min(ns_sigmoid(x), identity(x)) * max(gelu_tanh(x), 0)"
    data = whole_model()
    found["formula"] = load({**data, "block": {**data["block"], "ffn": {"type": "mlp", "activation": ours}}})
    return found


@pytest.fixture(scope="module")
def written() -> dict[str, tuple[Model, str]]:
    return {name: (model, to_python(model)) for name, model in models(often=True).items()}


def test_computes_the_same_in_an_interpreter_with_torch_alone(written: dict[str, tuple[Model, str]], tmp_path: Path):
    computes_the_same(written, tmp_path)


@pytest.mark.slow
def test_the_other_models_compute_the_same_in_an_interpreter_with_torch_alone(tmp_path: Path):
    tried = [*models(often=False).items()][:: 1 if ALL else 4]
    computes_the_same({name: (model, to_python(model)) for name, model in tried}, tmp_path)


def computes_the_same(written: dict[str, tuple[Model, str]], tmp_path: Path) -> None:
    """Asserts that logits and gradients of the text are those of the model that is kept, in a process of its own."""
    for name, (model, code) in written.items():
        (tmp_path / f"{name}.py").write_text(code)
        module = build(kept(model), dtype=torch.float32)
        logits = module(TOKENS, CALL)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).backward()
        gradients = {key: value.grad for key, value in module.named_parameters()}
        wanted = {"state": module.state_dict(), "logits": logits.detach(), "gradients": gradients}
        inputs = {"tokens": TOKENS, "targets": TARGETS, "documents": CALL.documents, "prefix": CALL.prefix}
        torch.save({**wanted, **inputs}, tmp_path / f"{name}.pt")
    command = [sys.executable, "-I", "-c", CHECK, str(tmp_path), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(written)


def test_is_clean(written: dict[str, tuple[Model, str]], tmp_path: Path):
    for name, (_, code) in written.items():
        (tmp_path / f"{name}.py").write_text(code)
        assert max(map(len, code.splitlines())) <= 120
    rules = ["--select", "E,F,I,UP,B,C4,SIM,RUF", "--line-length", "120", "--target-version", "py311", "--no-cache"]
    command = [str(Path(sys.executable).with_name("ruff")), "check", "--isolated", *rules, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_is_the_same_text_each_time(written: dict[str, tuple[Model, str]]):
    for name in ("case_0", "zoo_llama"):
        model, code = written[name]
        assert to_python(model) == code


def test_equal_layers_are_written_once(written: dict[str, tuple[Model, str]]):
    deep = to_python(load({**whole_model(), "n_layers": 12}))
    assert deep.count("\nclass ") == to_python(load(whole_model())).count("\nclass ")
    assert "for _ in range(12)" in deep and "for layer in self.block:" in deep
    scaled = {**whole_model(), "n_layers": 5}
    scaled["block"]["attention"]["pre"] = ["rmsnorm", "depth_scale"]
    assert to_python(load(scaled)).count("\nclass ") == deep.count("\nclass ") + 1


@pytest.mark.parametrize(
    ("calls", "written"),
    [
        (["A()", "B(1)"], "[A(), B(1)]"),
        (["A()"] * 3, "A() for _ in range(3)"),
        (["A(1)", "A(2)", "A(3)"], "A(number) for number in (1, 2, 3)"),
        (["A(1, 2)", "A(2, 2)", "A(3, 1)"], "A(*numbers) for numbers in ((1, 2), (2, 2), (3, 1))"),
        (["A()", "B()"] * 2, "kind() for kind in (A, B) * 2"),
        (["A()", "A()", "B()"], "kind() for kind in [A] * 2 + [B]"),
    ],
)
def test_lists_layers_by_what_differs(calls: list[str], written: str):
    assert listed(calls) == written


def test_leaves_out_a_parameter_that_is_none_and_then_set():
    code = to_python(layered(1, windows=False, memory=2))
    assert "def forward(self, queries: int, k: Tensor, v: Tensor) ->" in code
    assert "self.memory(q_BTHD.shape[1], k_BSKD, value.unflatten(-1, (-1, self.head_dim)))" in code


def test_llama_is_short():
    model = arch_dsl.resolve(zoo.load("llama", "7b"))
    code = to_python(model)
    assert len(code.splitlines()) < 220
    assert "self.block = nn.ModuleList(Layer() for _ in range(32))" in code


def test_initial_values_have_the_same_distributions():
    model = load({**whole_model(), "d_model": 64, "unembedding": {"tied": False}})
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(to_python(model), namespace)
    torch.manual_seed(0)
    ours, plain = arch_dsl.compile(model, seed=1), dict(namespace["Model"]().named_parameters())
    for name, value in ours.named_parameters():
        assert plain[name].shape == value.shape
        torch.testing.assert_close(plain[name].std(correction=0), value.std(correction=0), atol=0, rtol=0.2)
        torch.testing.assert_close(plain[name].mean(), value.mean(), atol=0.01, rtol=0)


def test_reads_as_it_did_when_it_was_last_looked_at():
    assert to_python(load(whole_model())) == GOLDEN.read_text()


def test_a_learned_prompt_stands_before_the_tokens():
    assert_plain_agrees(load({**whole_model(), "prompt": 2}))


def test_says_what_cannot_be_written(monkeypatch: pytest.MonkeyPatch):
    from archlab.arch_dsl.primitives import joins

    def forward(self, stream, update, call):
        async def later():
            return stream

        return update

    monkeypatch.setattr(joins._Add, "forward", forward)
    with pytest.raises(Unexportable, match="a model with an encoder: only decoders are written down"):
        to_python(zoo.load("t5", "tiny"))
    with pytest.raises(Unexportable, match="a model with a learned prompt and a prefix mask"):
        to_python(load({**whole_model(), "prompt": 2, "block": {"attention": {"heads": 4, "mask": "prefix"}}}))
    with pytest.raises(Unexportable, match="AsyncFunctionDef"):
        to_python(load(whole_model()))


@pytest.mark.parametrize(("source", "item"), [(PLUGIN, {"type": "swing", "turns": 3}), (ORDINARY, "ordinary")])
def test_writes_a_plugin(source: str, item: Any, tmp_path: Path):
    file = tmp_path / "plugin.py"
    file.write_text(source)
    plugin = plugins.load(file)
    try:
        data = whole_model()
        data["block"]["ffn"]["post"] = [item]
        code, compiled = to_python(load(data)), build(load(data), dtype=torch.float32)
    finally:
        plugins.unload(plugin)
    assert "class Swing(nn.Module):" in code or "class Ordinary(nn.Module):" in code
    assert "for turn in range" not in code and "enumerate" not in code
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(code, namespace)
    plain = namespace["Model"]()
    plain.load_state_dict(compiled.state_dict())
    assert torch.equal(plain(TOKENS), compiled(TOKENS))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x = (lambda y: y + y)(x)", "a Lambda expression"),
        ("x.kept = x", "this assignment"),
        ("x = x + {**{}}.get('a', 0)", "this mapping"),
        ("raise ValueError(x)", "a Raise statement"),
        ("name = f'{x}'", "a text that only the run knows"),
        ("self.train()", "`train` of a module"),
        ("[x].pop()", "`pop` of a list"),
    ],
)
def test_says_which_line_cannot_be_written(line: str, why: str, tmp_path: Path):
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN.replace("        total = x\n", f"        total = x\n        {line}\n"))
    plugin = plugins.load(file)
    data = whole_model()
    data["block"]["ffn"]["post"] = ["swing"]
    try:
        with pytest.raises(Unexportable, match=re.escape(why)):
            to_python(load(data))
    finally:
        plugins.unload(plugin)

"""Compiled layers: the same bits after an interruption, the parameters' names, what is compiled when, fallbacks."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from archlab.arch_dsl import canonical, compile, load, resolve
from archlab.search.hardware.compiler import cannot_compile
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.compiling import FOLDER, compile_blocks, compiling, private
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.training.test_train import MODEL, RECIPE, data_root, never, one_thread, same, stop_after

__all__ = ["data_root", "one_thread"]


def trial_in(folder, **recipe):
    """A folder for a trial of a small model whose layers are compiled."""
    folder.mkdir()
    spec = resolve(load(MODEL), max_positions=16)
    trial = Trial(canonical(spec), canonical(load_recipe(RECIPE | {"compile": "blocks"} | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine without a C++ compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    cannot_compile.cache_clear()
    yield
    cannot_compile.cache_clear()


@pytest.mark.slow
def test_compiled_trial_is_continued_to_the_same_bits(tmp_path, data_root):
    recipe = {"precision": "bf16", "recompute": "layers"}
    whole, parts = trial_in(tmp_path / "whole", **recipe), trial_in(tmp_path / "parts", **recipe)
    result = train(whole, data_root, 1, never)
    pieces = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert pieces > 0
    torch._dynamo.reset()  # as in another process
    with pytest.raises(Interrupted):
        train(parts, data_root, 1, stop_after(5))
    torch._dynamo.reset()
    train(parts, data_root, 2, never)
    assert same(whole, parts)
    assert "g++" in result["fingerprint"]["compiler"] or os.environ.get("CXX")
    names = checkpoint.load(whole, 12)["model"].keys()
    assert names == compile(resolve(load(MODEL), max_positions=16)).state_dict().keys()
    assert not (data_root.parent / FOLDER).stat().st_mode & 0o077


def test_without_a_compiler_a_trial_says_so_and_runs_as_it_is(tmp_path, data_root, no_compiler, capfd):
    folder = trial_in(tmp_path / "compiled")
    result = train(folder, data_root, 1, never)
    plain = train(trial_in(tmp_path / "plain", compile="off"), data_root, 1, never)
    assert "no-such-compiler" in capfd.readouterr().err
    assert result["fingerprint"]["compiler"] == "none: uncompiled"
    assert "compiler" not in plain["fingerprint"]
    assert result["test"] == plain["test"]


def test_only_training_on_whole_micro_batches_is_compiled(monkeypatch):
    asked = []

    def traced(forward, **options):
        assert options == {"dynamic": False, "fullgraph": True}
        return lambda stream, call: asked.append(len(stream)) or forward(stream, call)

    monkeypatch.setattr(torch, "compile", traced)
    model = compile(resolve(load(MODEL), max_positions=16))
    names = list(model.state_dict())
    compile_blocks(model, 4)
    tokens = torch.zeros(4, 9, dtype=torch.long)
    for rows, training in ((4, True), (3, True), (4, False)):
        model.train(training)
        model.loss(tokens[:rows, :-1], tokens[:rows, 1:])
    with torch.no_grad():
        model.train().loss(tokens[:, :-1], tokens[:, 1:])
    assert asked == [4, 4]  # once for each layer
    assert list(model.state_dict()) == names


FFN = {"type": "glu", "width": 32}
ALIKE = {
    "attention": {"norm": "rmsnorm", "attention": {"heads": 2, "positional": "rope"}, "ffn": FFN},
    "forget gate": {"norm": "rmsnorm", "attention": {"heads": 2, "scores": "forget_gate"}, "ffn": FFN},
    "documents": {"attention": {"heads": 2, "mask": {"type": "causal", "documents": True}}, "ffn": FFN},
    "recurrence": {"mixer": {"type": "gated_delta_net", "heads": 2, "key": ["short_conv"]}, "ffn": FFN},
    "shift": {"mixer": {"type": "rwkv4"}, "ffn": {"type": "channel_mix", "width": 32}},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ALIKE if kind != "shift"] + ["shift"]
)
def test_layers_that_are_alike_are_captured_once(kind, tmp_path, monkeypatch):
    graphs, real = [], torch.compile

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda forward, **options: real(forward, backend=counted, **options))
    torch.compiler.reset()
    spec = load({**MODEL, "n_layers": 4, "block": ALIKE[kind]})
    model = compile(resolve(spec, max_positions=16))
    compile_blocks(model, 2)
    tokens = torch.zeros(2, 9, dtype=torch.long)
    with compiling({"compile": "blocks"}, tmp_path):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    torch.compiler.reset()
    assert len(graphs) == 1


def test_what_is_compiled_lies_in_a_folder_that_nobody_else_writes(tmp_path):
    own = private(tmp_path / FOLDER)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o770)
    with pytest.raises(PermissionError, match="mode 700"):
        private(tmp_path / FOLDER)


def test_compiling_puts_the_process_back(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    import torch._dynamo.config as dynamo

    before = dynamo.recompile_limit
    with compiling({"compile": "blocks"}, tmp_path):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
        assert dynamo.fail_on_recompile_limit_hit
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert dynamo.recompile_limit == before
    with compiling({"compile": "off"}, tmp_path / "other"):
        assert not (tmp_path / "other").exists()

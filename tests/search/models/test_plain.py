"""`archlab export --python` writes what `to_python` gives for a model by any of its names."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.weights.files import write_weights
from archlab.cli.main import main


def test_writes_a_model_of_the_zoo_or_of_a_study(tmp_path: Path):
    out = tmp_path / "model.py"
    done = CliRunner().invoke(main, ["export", "--python", "gpt2/tiny", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text() == arch_dsl.to_python(zoo.load("gpt2", "tiny"), title="gpt2/tiny")
    printed = CliRunner().invoke(main, ["export", "--python", "gpt2/tiny"])
    assert printed.output == out.read_text()


def test_writes_the_model_of_weights(tmp_path: Path):
    model = arch_dsl.resolve(zoo.load("gpt2", "tiny"))
    write_weights(tmp_path / "w.safetensors", model, arch_dsl.compile(model).state_dict())
    done = CliRunner().invoke(main, ["export", "--python", str(tmp_path / "w.safetensors"), "--store", str(tmp_path)])
    assert done.output == arch_dsl.to_python(model, title=str(tmp_path / "w.safetensors"))
    missing = CliRunner().invoke(main, ["export", "--python", "gpt22/tiny", "--store", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "no model of the zoo; did you mean 'gpt2'?" in missing.output


def test_says_what_a_model_lacks(tmp_path: Path):
    file = tmp_path / "model.yaml"
    file.write_text("d_model: 16\nn_layers: 1\nblock: {ffn: mlp}\n")
    done = CliRunner().invoke(main, ["export", "--python", str(file)])
    assert done.exit_code == 2
    assert "vocab" in done.output
    assert CliRunner().invoke(main, ["export", "--python", "gpt2", "--map", "x"]).exit_code == 2
    assert "-o FILE.safetensors" in CliRunner().invoke(main, ["export", "no-run"]).output

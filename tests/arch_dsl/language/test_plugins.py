"""Plug-ins: a file outside the repository adds primitives, whose source is part of every model that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.parts.families import Gate, Norm
from archlab.arch_dsl.primitives.norms import RMSNorm

GAIN = '''\
"""A gate of my own."""

from __future__ import annotations

from torch import Tensor, nn

from archlab.arch_dsl.parts.context import BuildContext, Call, Cost
from archlab.arch_dsl.parts.families import Gate
from archlab.arch_dsl.parts.layers import constant, parameter


@Gate.register("tanh_gain")
class TanhGain(Gate):
    """y' = y * tanh(a) with a learned a per channel."""

    start: float = 0.5

    def build(self, ctx: BuildContext) -> nn.Module:
        return _TanhGain(self, ctx)

    def cost(self, ctx: BuildContext, tokens: int) -> Cost:
        return Cost(parameters=ctx.width)


class _TanhGain(nn.Module):
    def __init__(self, spec: TanhGain, ctx: BuildContext) -> None:
        super().__init__()
        self.gain = parameter((ctx.width,), constant(spec.start))

    def forward(self, y: Tensor, call: Call) -> Tensor:
        return y * self.gain.tanh()
'''
BLOCK = {"attention": {"heads": 2, "gate": {"position": "sdpa", "type": "tanh_gain"}}}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No plug-in outlives its test."""
    before = dict(Gate.members), dict(Norm.members)
    yield
    for plugin in plugins.loaded():
        plugins.unload(plugin)
    assert (dict(Gate.members), dict(Norm.members)) == before


def write(folder: Path, text: str, name: str = "my_gate.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def model() -> arch_dsl.Model:
    return arch_dsl.load({"d_model": 16, "n_layers": 1, "vocab": 7, "max_positions": 4, "block": BLOCK})


def test_a_plugin_is_executed_once_per_content(tmp_path: Path) -> None:
    plugin = plugins.load(write(tmp_path, GAIN))
    copy = plugins.load(write(tmp_path, GAIN, "copy.py"))
    assert copy is plugin and plugins.loaded() == (plugin,)
    assert [member.type for member in plugin.members] == ["tanh_gain"]
    assert plugin.file_name == f"my_gate-{plugin.digest}.py"


def test_its_source_is_part_of_the_identity(tmp_path: Path) -> None:
    first = plugins.load(write(tmp_path, GAIN))
    stored = arch_dsl.canonical(arch_dsl.resolve(model()))
    assert arch_dsl.load(stored) == arch_dsl.resolve(model())
    assert set(plugins.used_by(stored)) == {first.digest}
    plugins.unload(first)
    second = plugins.load(write(tmp_path, GAIN + "# another state\n"))
    assert arch_dsl.canonical(arch_dsl.resolve(model())) != stored
    with pytest.raises(SpecError) as caught:
        arch_dsl.load(stored)
    assert f"made with the source {first.digest} of tanh_gain" in str(caught.value)
    assert f"the one loaded is {second.digest}" in str(caught.value)


def test_a_stored_model_says_which_source_it_lacks(tmp_path: Path) -> None:
    plugin = plugins.load(write(tmp_path, GAIN))
    stored = arch_dsl.canonical(model())
    plugins.unload(plugin)
    with pytest.raises(SpecError, match=f"'tanh_gain' is a .*plug-in that is not loaded.*{plugin.digest}"):
        arch_dsl.load(stored)


def test_what_people_read_holds_no_hash(tmp_path: Path) -> None:
    plugins.load(write(tmp_path, GAIN))
    assert "plugin" not in arch_dsl.dump(model())


def test_a_built_in_member_has_no_source(tmp_path: Path) -> None:
    stored = {"type": "rmsnorm", "plugin": "0123456789abcdef"}
    with pytest.raises(SpecError, match="source 0123456789abcdef of rmsnorm; this one is built in"):
        arch_dsl.load({"d_model": 16, "n_layers": 1, "block": {"attention": {"heads": 2, "pre": [stored]}}})
    assert RMSNorm.plugin == ""


WRONG = [
    ("not found", None, "cannot read the plug-in"),
    ("syntax", "x = 1\ny = (\n", r"my_gate\.py:2: the plug-in failed: SyntaxError"),
    ("raises", "import torch\n\n\ndef f():\n    return 1 / 0\n\n\nf()\n", r"my_gate\.py:5: .*ZeroDivisionError"),
    ("exits", "import sys\n\nsys.exit(0)\n", r"my_gate\.py:3: .*SystemExit"),
    ("nothing", "x = 1\n", "registers no primitive"),
    ("taken", GAIN.replace("tanh_gain", "gate"), r"my_gate\.py:12: .*'gate' is already a gate"),
    ("reserved", GAIN.replace("start: float", "plugin: float"), "has a field 'plugin', a name that is reserved"),
]


@pytest.mark.parametrize(("text", "message"), [pytest.param(t, m, id=name) for name, t, m in WRONG])
def test_what_cannot_be_loaded_says_where_and_leaves_nothing(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "my_gate.py" if text is None else write(tmp_path, text)
    with pytest.raises(SpecError, match=message):
        plugins.load(file)
    assert plugins.loaded() == ()


def test_what_was_registered_before_an_error_is_taken_back(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="ZeroDivisionError"):
        plugins.load(write(tmp_path, GAIN + "\n1 / 0\n"))
    assert "tanh_gain" not in Gate.members
    plugins.load(write(tmp_path, GAIN))


def test_two_states_of_one_file_cannot_be_loaded_together(tmp_path: Path) -> None:
    plugins.load(write(tmp_path, GAIN))
    with pytest.raises(SpecError, match="'tanh_gain' is already a gate"):
        plugins.load(write(tmp_path, GAIN + "\n"))


def test_a_plug_in_with_imports_of_before_loads_under_the_hash_of_its_source(tmp_path):
    """Stores keep plug-ins by the hash of their source, which no move of a module may change."""
    old = GAIN.replace("archlab.arch_dsl.parts.", "arch_dsl.").replace("archlab.arch_dsl.language.", "arch_dsl.")
    assert "from arch_dsl.families import" in old and "archlab" not in old
    file = tmp_path / "old.py"
    file.write_text(old)
    plugin = plugins.load(file)
    try:
        assert plugin.digest == plugins.digest_of(old.encode())
        assert plugin.members
    finally:
        plugins.unload(plugin)

"""`archlab new-primitive`: a copy of any primitive loads under its new name and computes the same."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from archlab.arch_dsl import SpecError, conformance
from archlab.arch_dsl.catalogue.describe import FAMILIES
from archlab.arch_dsl.catalogue.new import sources
from archlab.arch_dsl.language import plugins
from archlab.cli.main import main

MEMBERS = {member.type: member for family in FAMILIES for member in family.members.values()}
# What stands only in some models: those with an encoder, with a second stream, in a layer after the first; and what
# kernels compute in place of its module, or what changes weights between steps
ELSEWHERE = {"cross_attention", "dual", "value_residual", "softmax", "unit_norm"}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No plug-in outlives its test."""
    yield
    for plugin in plugins.loaded():
        plugins.unload(plugin)


@pytest.mark.parametrize("like", sorted(MEMBERS.keys() - ELSEWHERE))
def test_a_copy_computes_what_its_neighbour_does(like: str, tmp_path: Path) -> None:
    (tmp_path / "my_own.py").write_text(sources("my_own", like)[0])
    (member,) = plugins.load(tmp_path / "my_own.py").members
    assert member.type == "my_own" and member is not MEMBERS[like]
    module, inputs, output = conformance.seen("my_own")
    neighbour = conformance.seen(like).module
    neighbour.load_state_dict(module.state_dict())
    torch.testing.assert_close(neighbour(*inputs), output)


def test_the_files_are_written_once_and_their_test_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    again = [CliRunner().invoke(main, ["new-primitive", "cap", "--like", "softcap"]) for _ in range(2)]
    assert [result.exit_code for result in again] == [0, 2]
    assert "already here: cap.py, test_cap.py" in again[1].output
    runpy.run_path("test_cap.py")["test_it_computes_its_formula"]()
    text = Path("cap.py").read_text()
    Path("cap.py").write_text(re.sub(r"torch\.tanh", "torch.sin", text))
    assert Path("cap.py").read_text() != text
    for plugin in plugins.loaded():
        plugins.unload(plugin)
    with pytest.raises(AssertionError, match="not close"):
        runpy.run_path("test_cap.py")["test_it_computes_its_formula"]()


@pytest.mark.parametrize(
    ("name", "like", "said"),
    [
        ("rope", "xpos", "'rope' is taken: archlab primitives rope"),
        ("mla", "attention", "'mla' is taken"),
        ("Differ", "attention", "cannot be the name"),
        ("class", "attention", "cannot be the name"),
        ("mine", "atention", "did you mean 'attention'"),
        ("mine", "qk_norm", "qk_norm is a short form for sites"),
    ],
)
def test_what_cannot_be_begun_is_refused(name: str, like: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        sources(name, like)

"""`archlab diff`: two models are found by what a user types, compared where they differ, and sized alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.main import main
from archlab.search.models.difference import difference, plain
from archlab.search.models.find import Found, find_model
from tests.search.study_files import write_study

MODEL = {"d_model": 64, "n_layers": 1, "block": {"norm": "rmsnorm", "attention": {"heads": 4}, "ffn": "swiglu"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    (tmp_path / "model.yaml").write_text(arch_dsl.dump(arch_dsl.load(MODEL)))
    (tmp_path / "gpt2").mkdir()
    return tmp_path


def archlab(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("text", "name", "d_model"),
    [
        ("model.yaml", "model", 64),
        ("study.yaml", "study:baseline", 64),
        ("study.yaml:gated", "study:gated", 64),
        ("gpt2", "gpt2", 768),
        ("gpt2/medium", "gpt2/medium", 1024),
    ],
)
def test_model_is_found_by_file_by_variant_and_by_name(text: str, name: str, d_model: int, folder: Path) -> None:
    found = find_model(text, folder / "data")
    assert (found.name, found.model.d_model) == (name, d_model)
    if text.endswith("gated"):
        assert found.model.block["attention"].sdpa  # type: ignore[attr-defined]


def test_show_takes_the_file_of_a_model_and_a_name_of_the_zoo(folder: Path) -> None:
    shown = archlab("show", "model.yaml").stdout
    resolved = arch_dsl.resolve(arch_dsl.load(MODEL), vocab=256, max_positions=1024)
    assert shown.startswith("model  d_model 64, n_layers 1, vocab 256") and arch_dsl.identity(resolved) in shown
    assert archlab("show", "gpt2/medium").stdout.startswith("model  d_model 1024, n_layers 24, vocab 50257")
    refused = archlab("show", "model.yaml", "--variant", "gated")
    assert refused.exit_code == 2 and "model.yaml is a model, which has no variants" in refused.output
    assert "no model of the zoo; did you mean 'gpt2'?" in archlab("show", "gtp2/medium").output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gtp2", "'gtp2' is no file, and no model of the zoo; did you mean 'gpt2'?"),
        ("none.yaml", "'none.yaml' is no file, and no model of the zoo"),
        ("gpt2/huge", "'huge' is not a size of gpt2"),
        ("study.yaml:gate", "'gate' is not a variant; did you mean 'gated'? (baseline, gated)"),
        ("model.yaml:gated", "model.yaml holds a model, which has no variants; found ':gated'"),
    ],
)
def test_what_is_no_model_is_told_with_the_nearest_name(text: str, message: str, folder: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        find_model(text, folder / "data")
    result = archlab("diff", text, "gpt2")
    assert result.exit_code == 2 and message in result.stderr


def found(**fields: Any) -> Found:
    return Found("m", arch_dsl.load({**MODEL, **fields}))


def test_difference_holds_every_change_and_the_sizes_of_both() -> None:
    told = plain(difference(found(), found(d_model=32, vocab=100)))
    assert told["assumed"] == {"vocab": 100, "max_positions": 1024} and told["context"] == 1024
    paths = {change["path"]: (change["from"], change["to"]) for change in told["changes"]}
    assert paths["d_model"] == (64, 32) and paths["block.attention.head_dim"] == (16, 8)
    assert paths["block.ffn.width"] == (176, 88), "what is derived is compared too"
    assert {change["place"] for change in told["changes"]} == {"model", "block.attention", "block.ffn"}
    sides = [arch_dsl.resolve(found(d_model=d).model, vocab=100, max_positions=1024) for d in (64, 32)]
    for side, model in zip(("from", "to"), sides, strict=True):
        total = arch_dsl.cost(model, 1024)
        assert told[side]["parameters"] == total.parameters
        assert told[side]["flops_per_token"] == total.flops_model // 1024
        assert told[side]["identity"] == arch_dsl.identity(model)


def test_both_sides_are_costed_at_the_shorter_context() -> None:
    told = difference(found(max_positions=64), found(max_positions=2048))
    assert told.context == 64
    assert [change.path for change in told.changes] == ["max_positions"]
    assert told.before.flops_per_token == told.after.flops_per_token


def test_diff_prints_places_changes_and_sizes(folder: Path) -> None:
    result = archlab("diff", "gpt2", "llama/7b")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["block.attention"] in lines and ["block.ffn"] in lines and ["unembedding"] in lines
    assert ["d_model", "768", "4096"] in lines and ["query", "[]", "[rope]"] in lines
    parameters = next(line for line in lines if line[:1] == ["parameters"])
    assert parameters[1] == f"{arch_dsl.cost(arch_dsl.resolve(zoo.load('gpt2'))).parameters:,}"
    assert json.loads(archlab("diff", "gpt2", "llama/7b", "--json").stdout)["from"]["name"] == "gpt2"


def test_a_model_differs_in_nothing_from_itself(folder: Path) -> None:
    result = archlab("diff", "model.yaml", "model.yaml")
    assert "the two are the same model" in result.stdout
    assert json.loads(archlab("diff", "model.yaml", "model.yaml", "--json").stdout)["changes"] == []


def test_a_branch_that_one_model_has_alone_is_told_by_its_members_or_fields(folder: Path) -> None:
    told = archlab("diff", "llama3", "falcon_h1").stdout
    assert re.search(r"parallel +none +parallel mamba2, attention", told)
    assert re.search(r"attention: heads 32, kv_heads 8, head_dim 128,\s+none", told)
    hybrid = archlab("diff", "llama3", "lfm2").stdout
    assert "block[0-1,3-4,6-7,… 10 layers]" in hybrid and "block[2,5,8,… 6 layers].attention" in hybrid
    assert hybrid.count("4608") == 1, "the width of every feed-forward is told once"
    assert re.search(r"conv +none +glu: width 1024, activation identity,", hybrid)

"""The JSON Schema of studies: every study of ours is valid, wrong ones are not, and the committed file is current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator

from archlab.arch_dsl.catalogue.describe import FAMILIES
from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.language.source import read, read_text
from archlab.arch_dsl.language.spec import fields_of
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.cli.main import main
from archlab.search.study.schema import schema_text, study_schema
from archlab.search.study.study import Study
from tests.arch_dsl.language.test_plugins import GAIN
from tests.docs_kit import PAGES, ROOT, TEMPLATE, blocks, plugins_of

SCHEMA = study_schema()
VALIDATOR = Draft7Validator(SCHEMA)
STUDIES = [*sorted((ROOT / "studies").glob("*.yaml")), TEMPLATE]
EXAMPLES = [
    pytest.param(page, block.text, id=f"{page.name}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text())
    if block.language == "yaml" and "tensors:" not in block.text  # a map of weights is no study
]


def complaints(data: Any, schema: Draft7Validator = VALIDATOR) -> list[str]:
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in schema.iter_errors(data)]


def base() -> dict[str, Any]:
    data: dict[str, Any] = read(TEMPLATE).plain()
    return data


def test_it_is_a_schema_and_the_committed_one() -> None:
    Draft7Validator.check_schema(SCHEMA)
    committed = (ROOT / "docs" / "study.schema.json").read_text()
    assert committed == schema_text(), "archlab schema > docs/study.schema.json"


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.name)
def test_our_studies_are_valid_and_name_the_schema(file: Path) -> None:
    assert complaints(read(file).plain()) == []
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", file.read_text())
    assert named is not None
    assert file == TEMPLATE or (file.parent / named[1]).resolve() == ROOT / "docs" / "study.schema.json"


@pytest.mark.parametrize(("page", "text"), EXAMPLES)
def test_the_examples_of_the_pages_are_valid(page: Path, text: str, tmp_path: Path) -> None:
    data = read_text(text).plain()
    if set(data) == {"model"} or "study" not in data:
        data = base() | data
    with plugins_of(page, tmp_path):
        for file in tmp_path.glob("[!t]*.py"):  # not tests
            plugins.load(file)
        added = any(tmp_path.glob("*.py"))
        assert complaints(data, Draft7Validator(study_schema()) if added else VALIDATOR) == []


RIGHT = {
    "a number with a unit": {"seeds": 3, "model.d_model": "1k", "train.tokens": "2M"},
    "one item for a list": {"model.final": "rmsnorm"},
    "none for a list": {"model.final": "none", "model.block.attention.gate": "none"},
    "a mapping for a member": {"train.schedule": {"type": "wsd", "decay": 0.1}},
    "the default type": {"train.optimizer": {"weight_decay": 0}},
    "a word of a knob": {"model.block.attention.gate": "sdpa"},
    "several gates": {"model.block.attention.gate": [{"position": "sdpa"}, {"position": "value", "bias": True}]},
    "a norm with its placement": {"model.block.norm": {"type": "layernorm", "bias": False, "placement": "sandwich"}},
    "a formula": {"model.block.ffn.activation": "x * sigmoid(x)"},
    "a branch by name alone": {"model.block.mlp": None, "model.block.attention_2": {"heads": 2}},
    "a published name that brings what is required": {"model.block.mixer": {"type": "mamba2", "head_dim": 16}},
    "a published name for a branch": {"model.block.mamba2": {"head_dim": 16}, "model.block.gla": {"heads": 2}},
    "a source in short": {"train.data": {"text": ["a.txt", "b.txt"]}},
    "a source in full": {"train.data": {"type": "text", "files": "*.txt", "test_bytes": "64k"}},
    "a source in short with fields": {"train.data": {"jsonl": "a.jsonl", "field": "body", "test_bytes": "64k"}},
    "a mixture": {"train.data": {"mixture": {"a": {"text": "*", "weight": 0.7}, "b": "stdlib"}, "temperature": 2}},
    "cleaning": {"train.data": {"text": "*", "clean": [{"quality": "gopher"}, {"dedup": "spans", "words": 9}, "mask"]}},
    "a pretrained tokenizer": {"train.tokenizer": {"pretrained": "gpt2", "eod": "</s>"}},
    "rates": {"tune": {"lr": {"grid": "1-2-5", "from": 1e-3, "to": 1e-2}}},
    "a time": {"budget": {"wall": "1.5h"}},
    "a variant of nothing": {"variants": {"baseline": None, "mine": "gate"}},
    "layers": {"model.overrides": {"1::2": {"block.attention.mask": {"type": "window", "size": 4}}}},
}
WRONG = {
    "unknown section": {"trian": {}},
    "no variants' mapping": {"variants": ["baseline"]},
    "misspelt key of the model": {"model.d_modle": 64},
    "misspelt field of a branch": {"model.block.attention.head": 4},
    "a published name that does not": {"model.block.mixer": {"type": "gla", "head_dim": 16}},
    "word for a number": {"model.d_model": "wide"},
    "too small": {"seeds": 0},
    "too large": {"seeds": 1001},
    "not above the limit": {"train.lr": 0},
    "no integer": {"model.n_layers": 1.5},
    "unknown member": {"model.block.norm": "rmsnrom"},
    "unknown position": {"model.block.attention.gate": {"position": "sdp"}},
    "unknown placement": {"model.block.norm": {"type": "rmsnorm", "placement": "middle"}},
    "field of another member": {"train.schedule": {"type": "cosine", "decay": 0.1}},
    "branch without type": {"model.block.other": {"width": 8}},
    "branch without what it needs": {"model.block.attention": {"kv_heads": 2}},
    "path of a patch": {"variants": {"mine": {"blocks.attention.heads": 2}}},
    "path of a grid": {"grid": {"lr": [1e-3]}},
    "axis without values": {"grid": {"train.lr": []}},
    "axis of a space": {"space": {"train.lr": {"floats": [1e-4, 1e-2]}}},
    "range with three ends": {"space": {"train.lr": {"float": [1, 2, 3]}}},
    "time without a unit": {"budget": {"wall": 30}},
    "field of another source": {"train.data": {"jsonl": "a.jsonl", "column": "body"}},
    "stage of another group": {"train.data": {"text": "*", "clean": [{"quality": "minhash"}]}},
    "weight of nothing": {"train.data": {"mixture": {"a": {"text": "*", "weight": 0}, "b": "stdlib"}}},
    "grid of rates": {"tune": {"lr": {"grid": "1-2-6", "from": 1e-3, "to": 1e-2}}},
    "layers by a word": {"model.overrides": {"odd": {"block.ffn": "none"}}},
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The template's study with values replaced by path."""
    data = base()
    for path, value in changes.items():
        *steps, last = path.split(".")
        at = data
        for step in steps:
            at = at[step]
        at[last] = value
    return data


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_parser_reads_is_valid(name: str) -> None:
    assert complaints(changed(RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_not_valid(name: str) -> None:
    assert complaints(changed(WRONG[name])) != []


@pytest.mark.parametrize("key", ["study", "model", "train"])
def test_what_is_required_is(key: str) -> None:
    data = base()
    del data[key]
    assert complaints(data) != []


def test_every_key_primitive_knob_and_alias_is_in_it() -> None:
    assert {*fields_of(Study)} <= {*SCHEMA["properties"]}
    text = json.dumps(SCHEMA["definitions"])
    for kind in FAMILIES:
        for name, member in kind.members.items():
            ends = (f"_{name}", f"{name}_branch", f"_{name}_untyped")
            found = [value for key, value in SCHEMA["definitions"].items() if key.endswith(ends) and "title" in value]
            described = [each for each in found if set(fields_of(member)) <= set(each.get("properties", ()))]
            assert described and all(each["description"] for each in described), name
        for alias in kind.aliases:
            assert f'"{alias}"' in text
    assert {f"knob_{knob.name}" for knob in KNOBS} <= set(SCHEMA["definitions"])


def test_fields_say_what_may_stand_there_and_their_default() -> None:
    eps = SCHEMA["definitions"]["norm_rmsnorm"]["properties"]["eps"]
    assert eps["default"] == 1e-6 and eps["description"].startswith("a number > 0. Default: 1.0e-06.")
    assert (
        "One optimizer step consumes `batch`" in SCHEMA["definitions"]["recipe"]["properties"]["batch"]["description"]
    )


def test_a_new_study_names_a_schema_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    assert CliRunner().invoke(main, ["init", str(tmp_path / "studies" / "mine.yaml")]).exit_code == 0
    first = (tmp_path / "studies" / "mine.yaml").read_text().splitlines()[0]
    named = tmp_path / "studies" / first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(named.read_text()) == SCHEMA


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 0 and result.output == schema_text()


def test_a_plugin_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "my_gate.py").write_text(GAIN)
    plugin = plugins.load(tmp_path / "my_gate.py")
    try:
        found = Draft7Validator(study_schema())
        data = changed({"model.block.attention.gate": {"position": "sdpa", "type": "tanh_gain", "start": 0.1}})
        assert complaints(data, found) == [] and complaints(data) != []
    finally:
        plugins.unload(plugin)

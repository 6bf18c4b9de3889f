"""Every mistake in a model file is told with its place, its path, what was found, what is allowed and meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.source import MAX_BYTES, read_text
from archlab.arch_dsl.patching.knobs import KNOBS
from tests.arch_dsl.specs import told

WRONG = (Path(__file__).parents[1] / "wrong_models.txt").read_text()
GOOD = "d_model: 64\nn_layers: 2\nvocab: 19\nblock:\n  attention: {heads: 4}\n"


def wrong_models() -> list[Any]:
    """(file, message) of every block `=== title` of wrong_models.txt."""
    found = []
    for block in WRONG.removeprefix("=== ").split("\n=== "):
        title, _, rest = block.partition("\n")
        text, message = rest.split("\n---\n")
        found.append(pytest.param(text + "\n", told(message.rstrip("\n")), id=title))
    return found


def message_of(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What loading and resolving m.yaml with this content says."""
    monkeypatch.chdir(tmp_path)
    Path("m.yaml").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        arch_dsl.resolve(arch_dsl.load("m.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(("text", "message"), wrong_models())
def test_wrong_model_is_told_in_full(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert message_of(text.encode(), tmp_path, monkeypatch) == message


FOUR = """\
m.yaml:5:22: block.attention.heads: must be an integer, found 'four'
    5 |   attention: {heads: four}
      |                      ^"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "m.yaml:1:1: must be a mapping, found nothing", id="empty"),
        pytest.param(
            b"d_model: 64\n\tn_layers: 2\n",
            "m.yaml:2:1: this is not YAML: a tab, where lines are indented by spaces\n    2 | \tn_layers: 2\n      | ^",
            id="tab",
        ),
        pytest.param(("\ufeff" + GOOD.replace("4}", "four}")).encode(), FOUR, id="byte-order-mark"),
        pytest.param(GOOD.replace("4}", "four}").replace("\n", "\r\n").encode(), FOUR, id="windows-line-ends"),
        pytest.param(
            GOOD.encode() + b"---\n" + GOOD.encode(),
            "m.yaml:6:1: a file holds one document; found a second '---'\n    6 | ---\n      | ^",
            id="second-document",
        ),
        pytest.param(GOOD.encode() + b"# \xff\n", "m.yaml is not UTF-8 text (byte 67)", id="not-utf-8"),
        pytest.param(
            b"d_model: 6\x004\n",
            "m.yaml:1:11: this is not YAML: unacceptable character #x0000: control characters are not allowed",
            id="control-character",
        ),
        pytest.param(
            GOOD.encode() + b"#" * MAX_BYTES,
            "m.yaml is larger than 1,000,000 bytes; a study is a small text file",
            id="too-long",
        ),
        pytest.param(
            b"d_model: " + b"9" * 500 + b"\nn_layers: 1\nvocab: 3\nblock: {mlp: {}}\n",
            f"m.yaml:1:10: d_model: must be an integer, found '{'9' * 60}…'\n"
            f"    1 | d_model: {'9' * 151}\n      |          ^",
            id="number-of-500-digits",
        ),
        pytest.param(
            (GOOD + " " * 300 + "n_layer: 3\n").encode(),
            "m.yaml:6:301: this is not YAML: this line is indented by 300 spaces, line 5 by 2: "
            "the keys of one mapping begin in the same column",
            id="beyond-the-quoted-width",
        ),
    ],
)
def test_file_that_cannot_be_read_is_told_in_full(content, message, tmp_path, monkeypatch):
    assert message_of(content, tmp_path, monkeypatch) == message


def _aliases(levels: int) -> str:
    """Ten to the power of `levels` nodes in a few lines."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    for i in range(levels):
        lines.append(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]")
    return "\n".join(lines) + "\n"


def _merges() -> str:
    """A mapping of a hundred keys, merged two thousand times."""
    keys = ", ".join(f"k{i}: 1" for i in range(100))
    return f"a: &a {{{keys}}}\n" + "".join(f"m{i}: {{<<: *a}}\n" for i in range(2000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(_aliases(20), "m.yaml:5:29: more than 100,000 nodes once its aliases are expanded", id="aliases"),
        pytest.param(_merges(), "m.yaml:970:12: more than 100,000 nodes once its aliases are expanded", id="merges"),
        pytest.param("a: " + "[" * 200, "m.yaml:1:67: nested deeper than 64 levels", id="depth"),
        pytest.param("{a: " * 200, "m.yaml:1:257: nested deeper than 64 levels", id="depth-of-mappings"),
        pytest.param(
            "- a\n" * 150_000, "m.yaml:100001:3: more than 100,000 nodes once its aliases are expanded", id="length"
        ),
    ],
)
def test_bombs_are_refused_before_they_grow(text, message, tmp_path, monkeypatch):
    assert message_of(text.encode(), tmp_path, monkeypatch).splitlines()[0] == message


@pytest.mark.parametrize("text", ["a: " + "[" * 50_000, "{a: " * 50_000], ids=["lists", "mappings"])
def test_what_libyaml_itself_finds_too_deep_is_told_in_our_words(text, tmp_path, monkeypatch):
    """Some versions look ahead and stop at a thousand levels, before we have seen the sixty-fifth."""
    told = message_of(text.encode(), tmp_path, monkeypatch).splitlines()[0]
    assert re.fullmatch(r"m\.yaml:1:\d+: nested deeper than 64 levels", told)


def test_missing_file_and_folder_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        arch_dsl.load("absent.yaml")
    assert str(caught.value) == "cannot read absent.yaml: No such file or directory"
    with pytest.raises(SpecError) as caught:
        arch_dsl.load(tmp_path)
    assert str(caught.value) == f"cannot read {tmp_path}: Is a directory"


def test_python_data_has_paths_but_no_places():
    with pytest.raises(SpecError) as caught:
        arch_dsl.load({"d_model": "wide", "n_layers": 1, "block": {"attention": {"heads": 0}}})
    assert str(caught.value) == (
        "d_model: must be an integer, found 'wide'\nblock.attention.heads: must be at least 1, found 0"
    )
    assert [(problem.path, problem.mark) for problem in caught.value.problems] == [
        ("d_model", None),
        ("block.attention.heads", None),
    ]


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        ({"vocab": 10}, {"vocab": 20}, "vocab: 10 is less than the 20 that the data and the recipe need"),
        (
            {"vocab": 10, "max_positions": 8},
            {"max_positions": 16},
            "max_positions: 8 is less than the 16 that the data and the recipe need",
        ),
        ({}, {}, "vocab: is not given, and no tokenizer says it"),
    ],
    ids=["vocabulary", "positions", "no-vocabulary"],
)
def test_sizes_that_conflict_with_the_data_are_refused(spec, given, message):
    model = arch_dsl.load({"d_model": 8, "n_layers": 1, "block": {"mlp": {}}, **spec})
    with pytest.raises(SpecError) as caught:
        arch_dsl.resolve(model, **given)
    assert str(caught.value) == message


def test_yaml_scalars_are_those_of_version_1_2(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "d_model: 2k\nn_layers: 0o\n".replace("0o", "02")
        + "block:\n  on: {type: mlp, width: 1.5k, bias: True}\ninit: {std: 4e-3}\n"
    )
    model = arch_dsl.load(path)
    assert (model.d_model, model.n_layers, model.init.std) == (2000, 2, 0.004)
    assert model.block["on"].width == 1500 and model.block["on"].bias is True


def test_merge_keys_and_anchors_within_bounds_are_read(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("d_model: 8\nn_layers: 1\nblock:\n  mlp: &a {width: 12, bias: true}\n  glu: {<<: *a, width: 9}\n")
    block = arch_dsl.load(path).block
    assert (block["mlp"].width, block["mlp"].bias, block["glu"].width, block["glu"].bias) == (12, True, 9, True)


def test_a_file_may_hold_its_model_under_the_key_of_a_study(tmp_path):
    model = "d_model: 8\nn_layers: 1\nblock: {ffn: {type: mlp}}\n"
    (tmp_path / "bare.yaml").write_text(model)
    (tmp_path / "wrapped.yaml").write_text("model:\n" + "".join(f"  {line}\n" for line in model.splitlines()))
    (tmp_path / "more.yaml").write_text("model: {zoo: llama}\nsizes: {}\n")
    (tmp_path / "wrong.yaml").write_text("model: {d_model: 8, n_layers: 1, blok: {ffn: {type: mlp}}}\n")
    assert arch_dsl.load(tmp_path / "wrapped.yaml") == arch_dsl.load(tmp_path / "bare.yaml")
    with pytest.raises(SpecError, match="1:1: model: stands beside sizes; a file holds a model alone, under `model:`"):
        arch_dsl.load(tmp_path / "more.yaml")
    with pytest.raises(SpecError, match=r"1:34: model\.blok: 'blok' is not a key of model; did you mean 'block'"):
        arch_dsl.load(tmp_path / "wrong.yaml")


def test_keys_keep_their_text():
    node = arch_dsl.language.source.read_text("true: 1\n007: 2\n7: 3\n1e3: 4\nno: 5\n'': 6\n")
    assert node.plain() == {"true": 1, "007": 2, "7": 3, "1e3": 4, "no": 5, "": 6}


def test_short_forms_are_named_where_they_may_stand():
    for knob in KNOBS:
        assert knob.name in knob.holder.short_forms
    assert {name for knob in KNOBS for name in knob.holder.short_forms} == {knob.name for knob in KNOBS}


@pytest.mark.parametrize("text", ["d_model: 64\nblo", "d_model: 64\nblo\nn_layers: 2\n"])
def test_a_key_that_is_half_typed_is_told_by_its_line(text: str) -> None:
    with pytest.raises(SpecError, match=r"this is not YAML: line 2 has a key without its ':'"):
        read_text(text)

"""Files that include files: what is said in the end, where it stands, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language import include
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.include import over, read_whole, text_of, whole_text
from archlab.arch_dsl.language.source import Node, read_text, written


def write(folder: Path, **files: str) -> Path:
    """Files by their names without `.yaml`, `__` for a folder; the path of `study.yaml`."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "study.yaml"


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"a": {"b": 1, "c": {"d": 2}}}, {"a": {"c": {"e": 3}}}, {"a": {"b": 1, "c": {"d": 2, "e": 3}}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"clip": 1.0}, {"clip": None}, {"clip": None}),
        ({"a": {"type": "cosine", "final": 0}}, {"a": {"type": "wsd"}}, {"a": {"type": "wsd"}}),
        ({"a": {"type": "wsd", "x": 0}}, {"a": {"type": "wsd", "y": 1}}, {"a": {"type": "wsd", "x": 0, "y": 1}}),
        ({"a": {"d_model": 8}}, {"a": {"zoo": "gpt2"}}, {"a": {"zoo": "gpt2"}}),
        ({"a": {"zoo": "gpt2"}}, {"a": {"size": "large"}}, {"a": {"zoo": "gpt2", "size": "large"}}),
    ],
)
def test_a_file_comes_over_what_it_includes_key_by_key(base: Any, own: Any, expected: Any) -> None:
    assert over(Node.of(base), Node.of(own)).plain() == expected


def test_later_files_come_over_earlier_ones_and_the_study_over_all(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        study="study: mine\ninclude: [one.yaml, parts/two.yaml]\na: {own: 1}\n",
        one="study: other\na: {own: 2, both: 2, one: 2}\nb: 2\n",
        parts__two="include: three.yaml\na: {own: 3, both: 3}\nc: 3\n",
        parts__three="a: {both: 4, three: 4}\nc: 4\nd: 4\n",
    )
    assert read_whole(file).plain() == {
        "study": "mine",
        "include": ["one.yaml", "parts/two.yaml", "parts/three.yaml"],
        "a": {"own": 1, "both": 3, "one": 2, "three": 4},
        "b": 2,
        "c": 3,
        "d": 4,
    }


def test_a_study_has_no_name_but_its_own(tmp_path: Path) -> None:
    assert "study" not in read_whole(write(tmp_path, study="include: one.yaml\n", one="study: other\na: 1\n")).plain()


def test_null_leaves_a_section_out_and_is_a_value_below(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        study="include: one.yaml\ngrid: null\nprune: null\ntrain: {clip: null}\n",
        one="grid: {a: [1]}\ntrain: {clip: 1.0, lr: 2}\n",
    )
    assert read_whole(file).plain() == {"include": ["one.yaml"], "prune": None, "train": {"clip": None, "lr": 2}}


def test_a_file_may_be_included_twice_but_not_by_itself(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        study="include: [left.yaml, right.yaml]\n",
        left="include: base.yaml\na: 1\n",
        right="include: base.yaml\nb: 2\n",
        base="a: 0\nb: 0\n",
    )
    assert read_whole(file).plain() == {"include": ["left.yaml", "base.yaml", "right.yaml"], "a": 0, "b": 2}
    write(tmp_path, base="include: right.yaml\n")
    with pytest.raises(SpecError, match=r"right.yaml:1:10: include: goes in a circle: base.yaml -> right.yaml -> ba"):
        read_whole(tmp_path / "base.yaml")
    with pytest.raises(SpecError, match=r"goes in a circle: base.yaml -> right.yaml -> base.yaml"):
        read_whole(file)
    with pytest.raises(SpecError, match=r"goes in a circle: left.yaml -> left.yaml"):
        read_whole(write(tmp_path, left="include: ./left.yaml\n").with_name("left.yaml"))


def test_every_value_keeps_its_place(tmp_path: Path) -> None:
    file = write(tmp_path, study="include: one.yaml\na: {b: 1}\n", one="# text\na:\n  c: 2\nd: 3\n")
    whole = read_whole(file)
    assert isinstance(whole.value, dict) and isinstance(whole.value["a"].value, dict)
    places = {"a.b": whole.value["a"].value["b"], "a.c": whole.value["a"].value["c"], "d": whole.value["d"]}
    said = {name: str(node.mark).removeprefix(f"{tmp_path}/") for name, node in places.items()}
    assert said == {"a.b": "study.yaml:2:8", "a.c": "one.yaml:3:6", "d": "one.yaml:4:4"}
    assert str(whole.mark) == f"{file}:1:1", "that of the study itself"
    assert str(whole.key_marks["d"]) == f"{tmp_path}/one.yaml:4:1"


def test_plugins_are_named_from_the_file_that_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absolute = tmp_path / "else.py"
    file = write(
        tmp_path,
        study="include: parts/one.yaml\n",
        parts__one="include: two.yaml\n",
        parts__two=f"plugins: [gate.py, ../norm.py, {absolute}]\n",
    )
    assert read_whole(file).plain()["plugins"] == ["parts/gate.py", "norm.py", str(absolute)]
    monkeypatch.chdir(tmp_path)
    assert read_whole("study.yaml").plain()["plugins"] == ["parts/gate.py", "norm.py", str(absolute)]
    write(tmp_path, study="include: parts/one.yaml\nplugins: own.py\n")
    assert read_whole(file).plain()["plugins"] == "own.py"


WRONG = {
    "include: comon.yaml": "include: there is no file 'comon.yaml'; did you mean 'common.yaml'? (common.yaml,",
    "include: [common.yaml, sub/comon.yml]": "include.1: there is no file 'sub/comon.yml'; did you mean 'sub/common",
    "include: recipe.yaml": "include: there is no file 'recipe.yaml' (common.yaml,",
    "include: nowhere/common.yaml": "include: 'nowhere/common.yaml' is in no folder that there is: ",
    "include: folder.yaml": "include: there is no file 'folder.yaml'",
    "include: secret.txt": "include: 'secret.txt' is no study file: its name ends in .yaml or .yml",
    "include: []": "include: must be a file, or a list of files, found an empty one",
    "include: [common.yaml, {a: 1}]": "include.1: must be a file such as common.yaml, found a mapping",
    "include:": "include: must be a file such as common.yaml, found nothing",
    "include: latin.yaml": "is not UTF-8 text",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_included_is_told_where_it_is_named(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, study=f"a: 1\n{text}\n", common="b: 2\n", list="- 1\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "common.yml").write_text("c: 3\n")
    if "latin" in text:
        (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    if "folder" in text:
        (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(SpecError) as caught:
        read_whole(file)
    (problem,) = caught.value.problems
    assert problem.mark is not None and (problem.mark.file, problem.mark.line) == (str(file), 2)
    assert WRONG[text] in f"{problem.path}: {problem.message}"


def test_what_is_wrong_in_an_included_file_is_told_there(tmp_path: Path) -> None:
    file = write(tmp_path, study="include: one.yaml\n", one="- 1\n")
    with pytest.raises(SpecError, match=r"one.yaml:1:1: an included file holds .* a mapping; found a list"):
        read_whole(file)
    write(tmp_path, one="a: 1\na: 2\n")
    with pytest.raises(SpecError, match=r"one.yaml:2:1: the key 'a' was already given on line 1"):
        read_whole(file)


def test_a_pipe_or_a_device_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError, match=r"there is no file 'pipe.yaml'"):
        read_whole(write(tmp_path, study="include: pipe.yaml\n"))


def test_files_and_nodes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"f{number}" for number in range(include.MOST + 1)]
    file = write(
        tmp_path, study=f"include: [{', '.join(f'{each}.yaml' for each in names)}]\n", **dict.fromkeys(names, "a: 1")
    )
    with pytest.raises(SpecError, match=f"include.{include.MOST}: is one file too many: a study includes at most"):
        read_whole(file)
    monkeypatch.setattr(include, "MAX_NODES", 8)
    two = write(tmp_path, study="include: [f0.yaml, f1.yaml]\n", f0="a: [1, 2, 3]\n", f1="b: [1, 2, 3]\n")
    with pytest.raises(SpecError, match="makes more than 8 nodes"):
        read_whole(two)


def test_the_text_of_the_whole_says_the_same_without_the_files(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        study="include: parts/one.yaml\nstudy: mine\ntrain: {lr: 1e-3, schedule: {type: wsd}}\n",
        parts__one="plugins: [a.py]\nquestion: 'why: not?'\nvariants: {baseline: null, on: {x: 'on'}}\n",
    )
    text = whole_text(file)
    assert text.startswith("# with what it includes: parts/one.yaml\nstudy: mine\nquestion: 'why: not?'\n")
    said = read_whole(file).plain()
    assert read_text(text).plain() == {key: value for key, value in said.items() if key != "include"}
    (tmp_path / "alone.yaml").write_text("# mine\na:   1\n")
    assert whole_text(tmp_path / "alone.yaml") == "# mine\na:   1\n", "a file that includes nothing is its own text"
    assert text_of(read_whole(tmp_path / "alone.yaml")) == ""


TEXTS = (
    ["1e-3", "010", "08", "0o7", "1.", ".5", "true", "yes", "null", "~", "", "-", "2M", "a: b", "# c", "é", "a\nb\n"],
    ["[x]", "2020-01-01", "1_000", "0x1f", "=", "&a", "*", "!t", "%", "@", "`", " x ", "x" * 300],
    [1, -1, 1.5, 1e-9, 1e20, 3e-4, True, False, None, 10**30],
)


@pytest.mark.parametrize("value", [value for values in TEXTS for value in values], ids=repr)
def test_a_written_tree_reads_as_the_same_values(value: Any) -> None:
    data = {"value": value, "list": [value, {"x": value}], "deep": {str(value): {"a": [[value]]}}}
    found = read_text(written(Node.of(data))).plain()
    assert found == data
    assert type(found["value"]) is type(value)


def test_what_is_written_reads_as_the_same_numbers():
    tree = read_text("[1e400, -1e999, 1e16, .5, 1e-320, '1e400', '.inf']")
    assert read_text(written(tree)).plain() == tree.plain()

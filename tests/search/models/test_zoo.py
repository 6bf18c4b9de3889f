"""The zoo from the command line and in a study: what is listed and shown, and what a reference and a recipe bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from archlab.arch_dsl import SpecError, resolve, zoo
from archlab.arch_dsl.language.source import read_text
from archlab.cli.main import main
from archlab.search.recipe.recipe import load_recipe
from archlab.search.study.load import load_study, parse_study


def archlab(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["zoo", *arguments])


def test_zoo_lists_every_published_size_and_marks_what_does_not_agree():
    lines = archlab("--sizes").output.splitlines()
    (line,) = [line for line in lines if "13b" in line and "12,853,386,240" in line]
    assert line.split() == ["13b", "12,853,386,240", "13.0B", "≠", "2048"]
    (line,) = [line for line in lines if line.startswith("llama ")]
    assert line.split() == ["llama", "7b", "6,738,415,616", "6.7B", "2048", "2023-02"]
    assert len([line for line in lines if "≠" in line]) == 1 + sum(not row.agrees for row in zoo.rows())


def test_zoo_lists_a_line_for_each_model_by_kind_and_release():
    groups = [group.splitlines() for group in archlab().output.split("\n\n")[:-1]]
    headings = ["decoders", "mixtures of experts", "recurrent, hybrid", "encoder-decoders", "encoders"]
    assert [group[0].partition("  ")[0] for group in groups] == headings
    models = [[line.split()[:2] for line in group[1:]] for group in groups]
    assert sorted(name for group in models for name, _ in group) == zoo.names()
    assert all(group == sorted(group, key=lambda model: model[1]) for group in models)
    (line,) = [line for line in groups[0] if line.startswith("llama ")]
    assert line.split()[:5] == ["llama", "2023-02", "6.74B", "to", "65.3B"]
    assert line.endswith("RMS norms, SwiGLU and RoPE together, without biases".ljust(len(line) - line.index("RMS")))


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "falcon_7b": "decoder",
        "modded_nanogpt": "decoder",
        "mixtral": "mixture of experts",
        "qwen3_next": "mixture of experts",
        "samba": "recurrent or hybrid",
        "rwkv4": "recurrent or hybrid",
        "falcon_h1": "recurrent or hybrid",
        "lfm2": "recurrent or hybrid",
        "jamba": "mixture of experts",
        "modernbert": "encoder",
        "rwkv7": "recurrent or hybrid",
        "t5": "encoder-decoder",
        "bigbird": "encoder",
    }.items(),
)
def test_the_kind_of_a_model_follows_from_its_layers(name: str, kind: str):
    assert zoo.kind_of(resolve(zoo.load(name, "tiny"))) == kind


MORE = ("active", "kind", "introduced")


def test_zoo_as_json_is_a_row_for_each_size():
    rows = json.loads(archlab("--json").output)
    assert [(row["name"], row["size"]) for row in rows] == [(row.name, row.size) for row in zoo.rows()]
    assert set(rows[0]) == {"name", "size", "parameters", "published", "agrees", "context", "release", *MORE}


def test_zoo_show_prints_card_notes_yaml_and_tree():
    said = archlab("show", "gpt3/13b").output
    for part in (
        "release    2020-05",
        "12.9B, published 13.0B",
        "5140 as printed",
        "d_model: 5120",
        "└── unembedding",
    ):
        assert part in said


def test_zoo_show_as_json_holds_the_model_and_its_nodes():
    facts = json.loads(archlab("show", "llama/tiny", "--json").output)
    assert facts["card"]["largest"] == "65B" and facts["size"] == "tiny" and facts["published"] is None
    assert facts["model"]["d_model"] == 32
    assert facts["nodes"][0]["parameters"] == facts["parameters"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "llma"], "zoo: 'llma' is not a model of the zoo; did you mean 'llama'?"),
        (["show", "llama/6b"], "size: '6b' is not a size of llama; did you mean '65b'?"),
        (["show"], "zoo show needs a NAME"),
    ],
)
def test_zoo_show_says_what_there_is_not(arguments: list[str], said: str):
    result = archlab(*arguments)
    assert result.exit_code == 2 and said in result.output


STUDY = """\
study: zoo
model: {zoo: gpt2, size: tiny, block.attention.heads: 4}
variants: {baseline: {}, wide: {d_model: 64}}
train: {recipe: gpt3-125m, tokens: 20k, batch: 8}
"""


def study(text: str) -> Any:
    return parse_study(read_text(text, "study.yaml"))


def test_a_study_starts_from_the_zoo():
    model = study(STUDY).model
    assert (model.d_model, model.block["attention"].heads, model.vocab) == (32, 4, None)


def test_set_changes_one_path_of_a_model_of_the_zoo(tmp_path: Path):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    model = load_study(file, {"model.block.attention.kv_heads": 2, "model.block.attention.heads": 2}).model
    assert [*model.block] == ["attention", "ffn"]
    assert (model.block["attention"].heads, model.block["attention"].kv_heads) == (2, 2)
    assert load_study(file, {"model.zoo": "llama"}).model.block["ffn"].type == "glu"


def test_a_recipe_is_taken_over_but_for_what_stands_beside_it():
    recipe = study(STUDY).train
    assert (recipe.lr, recipe.context, recipe.batch, recipe.tokens) == (6e-4, 2048, 8, 20_000)
    assert (recipe.optimizer.betas, recipe.schedule.warmup) == ((0.9, 0.95), 0.00125)


def test_what_is_wrong_with_reference_and_recipe_is_said_at_once_with_its_place():
    wrong = STUDY.replace("size: tiny", "size: small-").replace("gpt3-125m", "gpt3-126m").replace("20k", "some")
    with pytest.raises(SpecError) as caught:
        study(wrong)
    text = str(caught.value)
    assert "study.yaml:2:26: model.size: 'small-' is not a size of gpt2; did you mean 'small'?" in text
    assert "study.yaml:4:17: train.recipe: 'gpt3-126m' is not a published recipe; did you mean 'gpt3-125m'?" in text
    assert "train.tokens: must be an integer, found 'some'" in text


RECIPES = [name for entry in zoo.names() for name in zoo.entry(entry).train]


@pytest.mark.parametrize("name", RECIPES)
def test_every_published_recipe_is_one_of_ours(name: str):
    fields = zoo.recipe(name)
    recipe = load_recipe({"recipe": name, "tokens": "2M"})
    assert recipe.tokens == 2_000_000 and recipe.lr == fields["lr"]
    if "batch_tokens" in zoo.entry(name.partition("-")[0]).train[name]:
        published = zoo.entry(name.partition("-")[0]).train[name]["batch_tokens"]
        number = float(published[:-1]) * {"k": 1e3, "M": 1e6}[published[-1]]
        assert recipe.tokens_at(1) == pytest.approx(number, rel=0.005)


def test_a_recipe_names_its_nearest():
    with pytest.raises(SpecError, match=r"train.recipe: 'lama-7b' is not a published recipe; did you mean 'llama-7b'"):
        load_recipe({"recipe": "lama-7b", "tokens": 1})

"""A variant may be a model of the zoo: it starts from that one, in the size that the base asks for, and is matched by
whichever widths it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl import SpecError, identity, resolve, zoo
from archlab.arch_dsl.language.source import read_text
from archlab.search.planning.builder import Builder
from archlab.search.study.asked import asked_variants
from archlab.search.study.changes import changed
from archlab.search.study.load import parse_study
from archlab.search.study.study import Study
from tests.golden import resolved

STUDY = """\
study: zoo
model: {zoo: llama, size: {parameters: 200k}}
components: {gated: {block.attention.gate: sdpa}}
variants:
  llama: {}
  gpt2: {zoo: gpt2}
  gated gpt2: [gated, {zoo: gpt2, block.attention.bias: false}]
  palm: {zoo: palm, train.lr: 1e-2}
  mamba2: {zoo: mamba2, size: {parameters: 300k}}
train: {tokens: 1M, lr: 4e-3}
report: {baseline: llama}
"""


def study(text: str = STUDY) -> Study:
    return parse_study(read_text(text, "study.yaml"))


def models(text: str = STUDY) -> dict[str, Any]:
    """Each variant's model as it is written, resolved."""
    found = study(text)
    patched = {asked.name: changed(found, asked.settings) for asked in asked_variants(found)}
    return {name: resolve(model, vocab=257, max_positions=256) for name, (model, _) in patched.items()}


def published(name: str, parameters: int) -> str:
    model = zoo.load(name, parameters=parameters).replace(vocab=None, max_positions=None)
    return identity(resolve(model, vocab=257, max_positions=256))


def test_a_variant_is_the_model_of_the_zoo_in_the_size_of_the_base() -> None:
    found = models()
    for name, entry, parameters in (
        ("gpt2", "gpt2", 200_000),
        ("palm", "palm", 200_000),
        ("mamba2", "mamba2", 300_000),
    ):
        assert identity(found[name]) == published(entry, parameters)


def test_its_other_paths_and_components_change_that_model() -> None:
    gated, plain = models()["gated gpt2"], models()["gpt2"]
    attention = gated.block["attention"]
    assert [part.type for part in attention.sdpa] == ["gate"] and attention.bias is False
    assert plain.block["attention"].bias is True and gated.d_model == plain.d_model


def test_a_path_of_the_recipe_beside_it_is_the_recipes() -> None:
    found = study()
    rates = [Builder(found, Path()).recipe(asked.settings).lr for asked in asked_variants(found)]
    assert rates == [4e-3, 4e-3, 4e-3, 1e-2, 4e-3]


MATCHED = STUDY + "match: {parameters: llama, by: [block.ffn.width, block.parallel.ffn.width]}\n"


def test_of_several_widths_each_variant_is_matched_by_those_that_it_has() -> None:
    built = {item.name: built for item, _, built in resolved(study(MATCHED))}
    target = built["llama"].parameters
    assert [*built["gpt2"].matched] == ["block.ffn.width"]
    assert [*built["palm"].matched] == ["block.parallel.ffn.width"]
    assert built["mamba2"].matched == {}
    for name in ("gpt2", "palm"):
        assert abs(built[name].parameters / target - 1) < 0.01


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("{zoo: gpt2}", "{zoo: gpt5}", "study.yaml:6:15: zoo: 'gpt5' is not a model of the zoo; did you mean 'gpt3'?"),
        ("{zoo: gpt2}", "{zoo: gpt2, size: small-}", "size: 'small-' is not a size of gpt2; did you mean 'small'?"),
        ("[gated, {", "[gated, {zoo: palm}, {", "zoo: is set twice"),
        ("{zoo: gpt2}", "{size: small}", "size: matches nothing"),
    ],
)
def test_what_is_wrong_with_it_is_said_with_its_place(before: str, after: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        models(STUDY.replace(before, after, 1))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("grid: {zoo: [gpt2, palm]}", "grid.zoo: names models, and those are variants"),
        ("ladder: {sizes: {d_model: [64, 96]}}", "variants.gpt2.zoo: is a model of its own"),
    ],
)
def test_where_models_have_no_place(more: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        study(f"{STUDY}{more}\n")
    assert said in str(caught.value)


def test_a_path_that_no_variant_has_is_no_way_to_match() -> None:
    with pytest.raises(SpecError) as caught:
        [*resolved(study(MATCHED.replace("block.parallel.ffn.width", "block.parallel.ffn.widht")))]
    assert "match.by: no variant that is matched has block.parallel.ffn.widht" in str(caught.value)

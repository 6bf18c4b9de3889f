"""Layouts: how tensors of other libraries hold our parameters, in both directions, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError, zoo
from archlab.arch_dsl.compiler.shapes import shapes_of
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.weights.conversion import export_tensors, import_tensors
from archlab.arch_dsl.weights.files import (
    read_checkpoint,
    read_shapes,
    read_spec,
    read_weights,
    write_tensors,
    write_weights,
)
from archlab.arch_dsl.weights.layout import Layout, Stored, layout_of, layouts, load_layout
from archlab.arch_dsl.weights.moves import Move, moves

PUBLISHED = [(name, model) for name in layouts() for model in load_layout(name).zoo]


@pytest.mark.parametrize(("layout", "name"), PUBLISHED, ids=str)
def test_a_map_of_the_zoo_has_a_place_for_every_parameter(layout, name):
    assert layout_of(name) == layout
    model = arch_dsl.resolve(zoo.load(name, "tiny"))
    shapes = shapes_of(model)
    assert sorted(ours for move in moves(load_layout(layout), model, shapes) for ours in move.ours) == sorted(shapes)


def test_model_without_a_map_is_told():
    with pytest.raises(
        SpecError, match="no map says how checkpoints of 'palm' are stored; give one of bamba, bigbird, bloom, "
    ):
        layout_of("palm")
    with pytest.raises(SpecError, match=r"'lama' is not a map; did you mean 'llama'\?"):
        load_layout("lama")


# Rows of query, key and value that say (what, head, channel): heads 4, kv_heads 2, head_dim 3.
Q, K, V = (torch.arange(count * 3)[:, None] + start for count, start in ((4, 0), (2, 100), (2, 200)))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, [*range(12), *range(100, 106), *range(200, 206)]),
        (2, [*range(6), *range(100, 103), *range(200, 203), *range(6, 12), *range(103, 106), *range(203, 206)]),
    ],
)
def test_fused_parameters_lie_group_by_group(groups, expected):
    move = Move("qkv", ("q", "k", "v"), Stored(to=("q", "k", "v")), groups=groups)
    whole = move.gather([Q, K, V])
    assert whole[:, 0].tolist() == expected
    for part, back in zip((Q, K, V), move.scatter(whole, [Q.shape, K.shape, V.shape]), strict=True):
        assert torch.equal(part, back)


def test_groups_are_those_of_the_published_codes():
    """Head by head as BLOOM's view [heads, 3, head_dim], by key heads as Falcon's [kv_heads, queries + 2, head_dim]."""
    x = torch.randn(2 * 4 * 3, 5)
    move = Move("qkv", ("q", "k", "v"), Stored(to=("q", "k", "v")), groups=2)
    q, k, v = move.scatter(x, [(12, 5), (6, 5), (6, 5)])
    falcon = x.view(2, 2 + 2, 3, 5)
    assert torch.equal(q, falcon[:, :-2].reshape(12, 5))
    assert torch.equal(k, falcon[:, -2].reshape(6, 5)) and torch.equal(v, falcon[:, -1].reshape(6, 5))
    bloom = torch.randn(4 * 3 * 2, 5)
    parts = Move("qkv", ("q", "k", "v"), Stored(to=("q", "k", "v")), groups=4).scatter(bloom, [(8, 5)] * 3)
    for index, part in enumerate(parts):
        assert torch.equal(part, bloom.view(4, 3, 2, 5)[:, index].reshape(8, 5))


MODEL = {
    "d_model": 8,
    "n_layers": 2,
    "vocab": 11,
    "block": {
        "norm": "rmsnorm",
        "attention": {"heads": 2, "positional": "rope"},
        "ffn": {"type": "swiglu", "width": 12},
    },
}


@pytest.fixture
def model():
    return arch_dsl.resolve(arch_dsl.load(MODEL))


@pytest.fixture
def given(model):
    """A checkpoint of the model in Llama's layout."""
    return export_tensors(load_layout("llama"), model, dict(arch_dsl.compile(model, seed=3).state_dict()))


def test_there_and_back_is_the_same(model, given):
    back = import_tensors(load_layout("llama"), model, given)
    wanted = arch_dsl.compile(model, seed=3).state_dict()
    assert back.tensors.keys() == wanted.keys() and back.fresh == back.ignored == []
    assert all(torch.equal(back.tensors[name], wanted[name]) for name in wanted)


def test_prefix_of_a_bare_model_may_be_missing_and_caches_are_ignored(model, given):
    bare = {name.removeprefix("model."): value for name, value in given.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    found = import_tensors(load_layout("llama"), model, bare)
    assert found.tensors.keys() == shapes_of(model).keys()
    assert found.ignored == ["layers.0.self_attn.rotary_emb.inv_freq"]


def test_tied_table_may_be_stored_twice_but_not_differ(model, given):
    twice = {**given, "lm_head.weight": given["model.embed_tokens.weight"].clone()}
    assert import_tensors(load_layout("llama"), model, twice).tensors.keys() == shapes_of(model).keys()
    twice["lm_head.weight"][0, 0] += 1
    with pytest.raises(SpecError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight, to which"):
        import_tensors(load_layout("llama"), model, twice)


def changed(given, **changes):
    """A checkpoint with tensors replaced, or left out (None)."""
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in {**given, **names}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__norm__weight": torch.ones(9)},
            r"model\.norm\.weight: has shape \[9\]; final\.rmsnorm\.weight \[8\] needs \[8\]",
        ),
        ({"model__norm__weight": None}, r"model\.norm\.weight: is not in the checkpoint; final\.rmsnorm\.weight \[8\]"),
        ({"model__more": torch.ones(2)}, r"model\.more: of shape \[2\] has no place in this model"),
        (
            {f"model__layers__{layer}__mlp__up_proj__weight": None for layer in (0, 1)},
            r"model\.layers\.0\.mlp\.up_proj\.weight: is not in the checkpoint; .*, and so in 1 more layers",
        ),
    ],
    ids=["shape", "missing", "unused", "two layers"],
)
def test_checkpoint_of_another_model_is_refused(model, given, changes, message):
    with pytest.raises(SpecError, match=message):
        import_tensors(load_layout("llama"), model, changed(given, **changes))


GATED = {
    **MODEL,
    "block": {**MODEL["block"], "attention": {**MODEL["block"]["attention"], "gate": {"position": "sdpa"}}},
}


def test_parameter_that_a_layout_does_not_know_is_told_in_both_directions(given):
    gated = arch_dsl.resolve(arch_dsl.load(GATED))
    with pytest.raises(SpecError, match=r"sdpa\.gate\.projection\.weight: .*the map names no tensor"):
        import_tensors(load_layout("llama"), gated, given)
    with pytest.raises(SpecError, match=r"sdpa\.gate\.projection\.weight: has no place in this layout"):
        export_tensors(load_layout("llama"), gated, dict(arch_dsl.compile(gated).state_dict()))


def test_parameters_that_no_checkpoint_has_are_fresh_where_the_map_says_so(given):
    gated = arch_dsl.resolve(arch_dsl.load(GATED))
    layout = load_layout("llama").replace(fresh=("block.{i}.attention.sdpa.gate.projection.weight",))
    found = import_tensors(layout, gated, given)
    assert found.fresh == [f"block.{layer}.attention.sdpa.gate.projection.weight" for layer in (0, 1)]
    assert found.tensors.keys() | set(found.fresh) == shapes_of(gated).keys()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.{i}": "block.{i}.*.output_projection.weight"}, r"a\.0: would be .* and .* at once"),
        ({"a": "embedding", "b": "embedding"}, "b: holds embedding, as does a"),
        ({"a": {"to": ["embedding", "bias"]}}, "a: holds bias, which this model lacks"),
        (
            {"a": {"to": ["embedding", "final.rmsnorm.weight"], "groups": 3}},
            r"holds embedding \[11, 8\], which 3 groups",
        ),
    ],
    ids=["several", "twice", "missing", "uneven"],
)
def test_wrong_map_is_told(model, tensors, message):
    with pytest.raises(SpecError, match=message):
        moves(parse(Layout, {"tensors": tensors}), model, shapes_of(model))


MIXED = {  # one name, attention in one layer and linear attention in the other
    **{key: value for key, value in MODEL.items() if key != "block"},
    "block": {"norm": "rmsnorm", "mixer": {"type": "attention", "heads": 2}},
    "overrides": {"1": {"block.mixer": {"type": "linear_attention", "heads": 2, "sdpa": ["gate"]}}},
}
FULL, LINEAR = (["query", "key", "value"], ["query", "key", "value", "sdpa.gate"])


def mixers(typed=False):
    """A map of a model that stores its two kinds of mixers under two names."""

    def one(kind, *to):
        ours = [f"block.{{i}}.mixer.{name}{'.' if '.' in name else '_'}projection.weight" for name in to]
        return {"to": ours, **({"type": kind} if typed else {})}

    norms = {"norm": "final.rmsnorm.weight", "{i}.norm": "block.{i}.mixer.pre.rmsnorm.weight"}
    full = {f"{{i}}.full.{name}": one("attention", name) for name in (*FULL, "output")}
    linear = {"{i}.linear.in": one("linear_attention", *LINEAR), "{i}.linear.out": one("linear_attention", "output")}
    return parse(Layout, {"tensors": {"embed": "embedding", **norms, **full, **linear}})


def test_a_branch_of_one_name_and_two_types_is_read_by_what_the_checkpoint_has():
    model = arch_dsl.resolve(arch_dsl.load(MIXED))
    module = dict(arch_dsl.compile(model, seed=3).state_dict())
    with pytest.raises(SpecError, match=r"linear\.out: holds block\.0\..*; if .* of two types, say the `type` of each"):
        export_tensors(mixers(), model, module)
    given = export_tensors(mixers(typed=True), model, module)
    assert {name for name in given if "out" in name} == {"0.full.output", "1.linear.out"}
    for layout in (mixers(), mixers(typed=True)):
        back = import_tensors(layout, model, given).tensors
        assert back.keys() == module.keys() and all(torch.equal(back[name], module[name]) for name in module)


def test_a_branch_that_a_map_calls_otherwise_is_told_its_name_there(given):
    renamed = {**MODEL, "block": {"norm": "rmsnorm", "mixer": {"type": "attention", "heads": 2}}}
    with pytest.raises(
        SpecError, match=r"block\.0\.mixer\.query_.*; branches are called attention, ffn there, and this"
    ):
        import_tensors(load_layout("llama"), arch_dsl.resolve(arch_dsl.load(renamed)), given)


EXPERTS = {
    "d_model": 8,
    "n_layers": 1,
    "vocab": 11,
    "block": {"norm": "rmsnorm", "attention": {"heads": 2}, "ffn": {"type": "moe", "experts": 3, "width": 6}},
    "unembedding": {"tied": False},
}
UP = "model.layers.0.mlp.experts.{}.up_proj.weight"


def test_experts_are_stored_one_by_one():
    model, layout = arch_dsl.resolve(arch_dsl.load(EXPERTS)), load_layout("llama")
    tensors = {name: torch.randn(shape) for name, shape in shapes_of(model).items()}
    stored = export_tensors(layout, model, tensors)
    ours = tensors["block.0.ffn.experts.input_projection.weight"]
    assert all(torch.equal(stored[UP.format(expert)], ours[expert]) for expert in range(3))
    back = import_tensors(layout, model, stored).tensors
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    lacking = {name: value for name, value in stored.items() if name != UP.format(1)}
    with pytest.raises(SpecError, match=rf"{UP.format(1)}: is not in the checkpoint; block.0.ffn.experts.input_p"):
        import_tensors(layout, model, lacking)
    with pytest.raises(SpecError, match=rf"{UP.format(2)}: has shape \[6, 9\]; .* needs \[6, 8\]"):
        import_tensors(layout, model, stored | {UP.format(2): torch.zeros(6, 9)})
    with pytest.raises(SpecError, match=rf"{UP.format(3)}: of shape \[6, 8\] has no place in this model"):
        import_tensors(layout, model, stored | {UP.format(3): torch.zeros(6, 8)})


def test_our_file_says_which_model_it_is_of(model, tmp_path):
    tensors = dict(arch_dsl.compile(model, seed=3).state_dict())
    first, second = (write_weights(tmp_path / name, model, tensors) for name in ("a.safetensors", "b.safetensors"))
    assert first == second
    found, values = read_weights(tmp_path / "a.safetensors")
    assert found == model and all(torch.equal(values[name], tensors[name]) for name in tensors)
    write_tensors(tmp_path / "c.safetensors", tensors, {})
    with pytest.raises(SpecError, match="does not say which model it is of"):
        read_spec(tmp_path / "c.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "c.safetensors"]


def test_checkpoints_are_read_whole_in_shards_and_from_torch(given, tmp_path):
    names = sorted(given)
    shards = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in shards.items():
        write_tensors(tmp_path / file, {name: given[name] for name in part}, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(given, tmp_path / "weights.bin")
    torch.save({"model": given, "step": 3}, tmp_path / "state.pt")
    for place in ("", "weights.bin", "state.pt"):
        found = read_checkpoint(tmp_path / place)
        assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


class Harmful:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return (print, ("harm",))


def test_files_that_are_no_weights_are_refused_and_run_no_code(tmp_path, capsys):
    torch.save({"a": Harmful()}, tmp_path / "harm.pt")
    (tmp_path / "text.safetensors").write_text("no")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "up.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    (tmp_path / "gone.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    (tmp_path / "empty.index.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "harm.pt": "torch can't read it as weights",
        "text.safetensors": "is no safetensors file",
        "list.pt": "holds no mapping of names to tensors",
        "up.index.json": "which does not lie beside it",
        "gone.index.json": "'a.safetensors', which is missing",
        "empty.index.json": "is no index of shards",
        "empty": "holds no checkpoint",
        "nothing": "is neither a file nor a folder",
    }.items():
        with pytest.raises(SpecError, match=message):
            read_checkpoint(tmp_path / name)
    assert "harm" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["new.pt", "old.pt", "whole.safetensors"])
def test_files_that_are_empty_or_cut_off_are_refused_by_name(tmp_path, name):
    file, tensors = tmp_path / name, {"a": torch.ones(100, 100), "b": torch.ones(3)}
    if file.suffix == ".pt":
        torch.save(tensors, file, _use_new_zipfile_serialization=name == "new.pt")
    else:
        write_tensors(file, tensors, {})
    whole = file.read_bytes()
    for size in (0, 1, 4, 8, 20, 300, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        file.write_bytes(whole[:size])
        for read in [read_checkpoint] if file.suffix == ".pt" else [read_checkpoint, read_spec, read_shapes]:
            with pytest.raises(SpecError) as told:
                read(file)
            why = str(told.value).removeprefix(f"{file}: ")
            assert len(why) > 20 and ("is empty" in why) == (size == 0), (size, why)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "\\ud800"}}', ""], ids=repr
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SpecError, match=r"which is missing|is no index of shards"):
        read_checkpoint(tmp_path)


def test_a_spec_of_our_file_that_is_no_json_is_told(tmp_path):
    for text in ("[" * 100_000, "{"):
        write_tensors(tmp_path / "ours.safetensors", {"a": torch.ones(1)}, {"archlab.model": text})
        with pytest.raises(SpecError, match=r"ours\.safetensors: does not say in JSON which model it is of"):
            read_spec(tmp_path / "ours.safetensors")

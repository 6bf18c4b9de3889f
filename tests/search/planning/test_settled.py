"""What `auto` settles: by machine, width and length, for all variants alike, once, and as if it had been written."""

from __future__ import annotations

import pytest

from archlab.search.planning import auto_settings as settled
from archlab.search.planning.page import plan_json, print_plan
from archlab.search.planning.plan import plan
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.study_files import SECTIONS, write_study

BF16 = "this CPU has AVX512_BF16"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A CPU with bfloat16 units and a compiler; a test may take them away."""
    monkeypatch.setattr(settled, "cpu_units", lambda: BF16)
    monkeypatch.setattr(settled.machine, "usable_gpus", lambda: 0)
    monkeypatch.setattr("archlab.search.hardware.compiler.cannot_compile", lambda: None)


def train(tokens, *lines):
    """The recipe with so many tokens and more lines."""
    return "\n".join([SECTIONS["train"].replace("1k", tokens), *(f"  {line}" for line in lines)])


def made(folder, tokens, *lines, **sections):
    """The plan of a small study, d_model 64 unless the sections say otherwise; 1B tokens are hours, 30M minutes."""
    return plan(load_study(write_study(folder, train=train(tokens, *lines), **sections)), folder / "store" / "data")


NARROW = {"model": SECTIONS["model"].replace("d_model: 64", "d_model: 32")}
PLAN = [
    pytest.param("1k", (), {}, ("fp32", "off"), "less than a second in float32, too short", id="short"),
    pytest.param("30M", (), {}, ("bf16", "off"), "compiling its layer 25 s", id="minutes"),
    pytest.param("1B", (), {}, ("bf16", "blocks"), "AVX512_BF16, and a step", id="hours"),
    pytest.param("1B", (), NARROW, ("fp32", "blocks"), "at d_model 32 casts cost", id="narrow"),
    pytest.param("1B", ("precision: fp32",), {}, ("fp32", "blocks"), "compile blocks", id="fp32 stays fp32"),
    pytest.param("1B", ("compile: off",), {}, ("bf16", "off"), "precision bf16", id="off stays off"),
]


@pytest.mark.parametrize(("tokens", "lines", "sections", "found", "why"), PLAN)
def test_auto_is_settled_by_width_and_length_for_all_variants(tmp_path, tokens, lines, sections, found, why):
    planned = made(tmp_path, tokens, *lines, **sections)
    assert {(v.recipe.precision, v.recipe.compile) for v in planned.variants} == {found}
    assert why in str(planned.builder.settled)


def test_nothing_is_settled_where_all_is_said(tmp_path, capsys):
    planned = made(tmp_path, "1B", "precision: bf16", "compile: off")
    assert planned.builder.settled is None
    assert plan_json(planned, tmp_path / "store")["settled"] is None
    print_plan(planned, tmp_path / "store")
    assert "precision" not in capsys.readouterr().out


def test_a_machine_without_units_or_compiler_computes_in_float32_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(settled, "cpu_units", lambda: None)
    monkeypatch.setattr("archlab.search.hardware.compiler.cannot_compile", lambda: "g++ not found")
    planned = made(tmp_path, "1B")
    assert str(planned.builder.settled) == (
        "precision fp32: no bfloat16 units are known where trials run; compile off: g++ not found"
    )
    print_plan(made(tmp_path, "1k", "compile: blocks"), tmp_path / "store")
    told = capsys.readouterr().out
    assert "here g++ not found, so trials that train here run uncompiled" in told
    assert "precision fp32:" in told and "compile off:" not in told


@pytest.mark.parametrize(("tokens", "said"), [("1k", ("fp32", "off")), ("1B", ("bf16", "blocks"))])
def test_what_is_settled_hashes_as_if_written(tmp_path, tokens, said):
    keys = [variant.trial(0).key for variant in made(tmp_path, tokens).variants]
    written = made(tmp_path, tokens, *(f"{name}: {value}" for name, value in zip(NAMES, said, strict=True)))
    assert [variant.trial(0).key for variant in written.variants] == keys


NAMES = ("precision", "compile")


def test_a_variant_that_says_its_precision_has_it(tmp_path):
    variants = "variants:\n  baseline: {}\n  whole: {train.precision: fp32}\n  open: {train.lr: 2e-3}"
    planned = made(tmp_path, "1B", components=None, variants=variants)
    assert [variant.recipe.precision for variant in planned.variants] == ["bf16", "fp32", "bf16"]
    assert [str(change) for change in planned.variants[1].changes] == ["train.precision: auto → fp32"]


def test_the_longest_cell_of_the_baseline_decides(tmp_path):
    planned = made(tmp_path, "1k", grid="grid: {train.tokens: [1k, 1B]}")
    assert {variant.recipe.precision for variant in planned.variants} == {"bf16"}


def test_a_study_keeps_what_was_settled_when_it_was_first_run(tmp_path, monkeypatch):
    path, root, events = write_study(tmp_path, seeds="seeds: 1"), tmp_path / "store", []
    run(path, root, executor="inline", track=False, on_event=events.append)
    (told,) = (event["message"] for event in events if event["event"] == "settled")
    assert told.startswith("precision fp32: a trial takes less than a second") and "compile off" in told
    planned = made(tmp_path, "1B")
    assert {variant.recipe.precision for variant in planned.variants} == {"fp32"}
    assert plan_json(planned, root)["settled"]["precision"] == "fp32"
    assert "when the study was first run; it would be bf16 now: write train.precision" in str(planned.builder.settled)
    assert made(tmp_path, "1B", study="study: another").variants[0].recipe.precision == "bf16"


def test_a_study_begun_before_anything_was_settled_goes_on_as_it_was(tmp_path, monkeypatch):
    sections = {
        "seeds": "seeds: 1",
        "components": None,
        "variants": "variants:\n  halved: {train.precision: bf16}\n  baseline: {}",
    }
    path = write_study(tmp_path, train=train("1k", "precision: fp32", "compile: off"), **sections)
    root = tmp_path / "store"
    with monkeypatch.context() as older:
        older.setattr(settled, "keep", lambda *_: None)
        run(path, root, executor="inline", track=False)
    with Store.open(root) as store:
        assert store.decided("gates", settled.DECISION) is None
        assert store.study("gates")["recipe"]["precision"] == "bf16", "the first variant's own"
    planned = made(tmp_path, "1k", **sections)
    assert str(planned.builder.settled).startswith("precision fp32: its trials were begun before")
    assert [variant.recipe.precision for variant in planned.variants] == ["bf16", "fp32"]
    with Store.open(root) as store:
        assert planned.done(store) == 2
    summary = run(tmp_path / "study.yaml", root, executor="inline", track=False)
    assert summary.counts == {"complete": 2, "reused": 2}

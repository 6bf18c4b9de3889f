"""Designs and ablations as studies: which variants they make, what is compared with what, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archlab import arch_dsl
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.patching.patch import apply
from archlab.search.comparison.compare import compare
from archlab.search.planning.page import print_plan
from archlab.search.planning.plan import Plan, plan
from archlab.search.study.load import load_study
from tests.search.study_files import write_study

COMPONENTS = """\
components:
  gate: {block.attention.gate: sdpa}
  qk_norm: {block.attention.qk_norm: rmsnorm}
  wide: {block.ffn.width: 200}"""
ABLATE = """\
ablate:
  from: {d_model: 64, n_layers: 1, block: {norm: layernorm, attention: {heads: 4, positional: learned}, ffn: mlp}}
  to: {d_model: 64, n_layers: 1, block: {norm: rmsnorm, attention: {heads: 4, positional: rope}, ffn: swiglu}}"""
CLASHING = """\
components:
  pre: {block.norm.placement: pre, block.norm.type: layernorm}
  post: {block.norm.placement: post}
  capped: {block.attention.scores: [alibi, {type: softcap, cap: 20}]}
  narrow: {block.ffn.width: 100}"""


def planned(folder: Path, **sections: str | None) -> Plan:
    return plan(load_study(write_study(folder, **{"variants": None, **sections})), folder / "data")


def rows(made: Plan) -> dict[str, str]:
    """The variants with what they are compared with."""
    return {variant.name: variant.baseline for variant in made.variants}


DESIGNS: dict[str, tuple[str, dict[str, str]]] = {
    "add_one_in": (
        "design: add_one_in",
        dict.fromkeys(["baseline", "gate", "qk_norm", "wide"], "baseline"),
    ),
    "leave_one_out": (
        "design: leave_one_out",
        dict.fromkeys(["all", "all − gate", "all − qk_norm", "all − wide"], "all"),
    ),
    "both_ends": (
        "design: both_ends",
        dict.fromkeys(["baseline", "gate", "qk_norm", "wide", "all"], "baseline")
        | dict.fromkeys(["all − gate", "all − qk_norm", "all − wide"], "all"),
    ),
    "two of three": (
        "design: {type: full_factorial, components: [wide, gate]}",
        dict.fromkeys(["baseline", "wide", "gate", "wide + gate"], "baseline"),
    ),
    "fractional": (
        "design: {type: fractional, runs: 4}",
        dict.fromkeys(["baseline", "gate + wide", "qk_norm + wide", "gate + qk_norm"], "baseline"),
    ),
}


@pytest.mark.parametrize(("section", "expected"), DESIGNS.values(), ids=DESIGNS)
def test_design_makes_the_variants_of_a_study(section: str, expected: dict[str, str], tmp_path: Path) -> None:
    made = planned(tmp_path, components=COMPONENTS, design=section)
    assert rows(made) == expected
    for variant in made.variants:
        on = {name for name, there in variant.components.items() if there}
        paths = {change.path for change in variant.changes}
        assert ("block.attention.sdpa" in paths, "block.attention.query" in paths, "block.ffn.width" in paths) == (
            "gate" in on,
            "qk_norm" in on,
            "wide" in on,
        )


def test_variants_of_its_own_stand_beside_those_of_the_design(tmp_path: Path) -> None:
    variants = "variants:\n  G1: [gate]\n  both: [gate, {block.ffn.width: 90}]\n  baseline: {}"
    made = planned(tmp_path, components=COMPONENTS, design="design: add_one_in", variants=variants)
    assert list(rows(made)) == ["baseline", "G1", "qk_norm", "wide", "both"], "a name of one's own is kept"


def test_a_grid_crosses_the_variants_of_a_design(tmp_path: Path) -> None:
    grid = "grid:\n  block.norm.placement: [pre, post]"
    made = planned(tmp_path, components=COMPONENTS, design="design: both_ends", grid=grid)
    assert len(made.variants) == 16
    assert rows(made)["all − gate [placement=post]"] == "all [placement=post]"
    assert rows(made)["gate [placement=post]"] == "baseline [placement=post]"


def test_record_says_what_a_fraction_mixes_up(tmp_path: Path) -> None:
    record = planned(tmp_path, components=COMPONENTS, design="design: {type: fractional, resolution: 3}").record()
    design = record["design"]
    assert (design["resolution"], len(record["variants"])) == (3, 4)
    assert design["generators"] == {"wide": ["gate", "qk_norm"]}
    assert design["aliases"] == [
        ["gate", "−qk_norm × wide"],
        ["qk_norm", "−gate × wide"],
        ["wide", "−gate × qk_norm"],
    ]
    assert design["changes"]["wide"] == ["block.ffn.width: 200"]


# what makes no sense


def test_impossible_combinations_are_refused_with_all_their_names(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"block.norm.placement: is set twice: .*\(variant pre \+ post\)"):
        planned(tmp_path, components=CLASHING, design="design: {type: pairwise, components: [pre, post, narrow]}")


def test_impossible_combinations_are_left_out_and_listed(tmp_path: Path) -> None:
    section = "design: {type: full_factorial, components: [pre, post, narrow], impossible: skip}"
    made = planned(tmp_path, components=CLASHING, design=section)
    assert list(rows(made)) == ["baseline", "pre", "post", "narrow", "pre + narrow", "post + narrow"]
    omitted = made.record()["design"]["omitted"]
    assert list(omitted) == ["pre + post", "pre + post + narrow"]
    assert all("is set twice: it was set by component pre" in reason for reason in omitted.values())


def test_repaired_combinations_are_listed_with_their_rules(tmp_path: Path) -> None:
    section = "design: {type: pairwise, components: [capped, pre, post], impossible: repair}"
    made = planned(tmp_path, components=CLASHING, design=section)
    design = made.record()["design"]
    assert design["repaired"] == {name: ["order of scores"] for name in ("capped", "capped + pre", "capped + post")}
    assert list(design["omitted"]) == ["pre + post"], "what no rule can mend is left out"
    capped = next(variant for variant in made.variants if variant.name == "capped")
    assert [item.type for item in capped.model.block["attention"].scores] == ["softcap", "alibi"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["skip", "repair"])
def test_a_component_that_no_variant_would_have_is_refused(how: str, tmp_path: Path) -> None:
    components = "components:\n  gate: {block.attention.gate: spda}\n  wide: {block.ffn.width: 200}"
    with pytest.raises(SpecError, match="'spda' is not a gate position"):
        planned(tmp_path, components=components, design=f"design: {{type: pairwise, impossible: {how}}}")


def test_what_others_are_compared_with_is_never_left_out(tmp_path: Path) -> None:
    section = "design: {type: leave_one_out, components: [pre, post], impossible: skip}"
    with pytest.raises(SpecError, match=r"is set twice: .*\(variant all\)"):
        planned(tmp_path, components=CLASHING, design=section)


@pytest.mark.parametrize("how", ["skip", "repair"])
def test_all_is_refused_where_what_lacks_a_component_is_compared_with_it(how: str, tmp_path: Path) -> None:
    section = f"design: {{type: both_ends, components: [pre, post, narrow], impossible: {how}}}"
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, components=CLASHING, design=section)
    assert "block.norm.placement: is set twice" in str(caught.value)
    assert "'all' is never left out: 'all − pre', 'all − post' and 1 more would be compared with nothing; " in str(
        caught.value
    )
    assert "take a design without it, such as add_one_in or pairwise" in str(caught.value)
    kept = section.replace("both_ends", "add_one_in")
    assert rows(planned(tmp_path, components=CLASHING, design=kept)) == dict.fromkeys(
        ["baseline", "pre", "post", "narrow"], "baseline"
    )


def test_all_that_comes_out_as_another_variant_is_refused_where_others_are_compared_with_it(tmp_path: Path) -> None:
    components = """\
components:
  narrow: {block.ffn.width: 100}
  plain: {block.ffn.bias: false}
  silu: {block.ffn.activation: silu}"""
    with pytest.raises(SpecError, match="is the same model and recipe as 'narrow'; 'all' is never left out"):
        planned(tmp_path, components=components, design="design: {type: both_ends, impossible: skip}")


def test_combinations_that_come_out_alike_are_left_out(tmp_path: Path) -> None:
    components = "components:\n  narrow: {block.ffn.width: 100}\n  same: {block.ffn.bias: false}\n  deep: {n_layers: 2}"
    section = "design: {type: add_one_in, impossible: skip}"
    made = planned(tmp_path, components=components, design=section)
    assert made.record()["design"]["omitted"] == {"same": "is the same model and recipe as 'baseline'"}


def test_a_wrong_baseline_of_hundreds_of_variants_is_told_in_a_line(tmp_path: Path) -> None:
    many = "components:\n" + "\n".join(f"  w{index}: {{block.ffn.width: {index + 8}}}" for index in range(60))
    with pytest.raises(SpecError, match=r"'w60' is not a variant; did you mean 'w\d+'\? \(w\d+ and 60 more\)"):
        planned(tmp_path, components=many, design="design: add_one_in", report="report: {baseline: w60}")


# ablate


def test_ablate_makes_components_of_what_lies_between_two_models(tmp_path: Path) -> None:
    made = planned(tmp_path, model=None, components=None, ablate=ABLATE)
    names = ["ffn", "norm", "positional"]
    assert rows(made) == dict.fromkeys(["baseline", *names, "all"], "baseline") | dict.fromkeys(
        [f"all − {name}" for name in names], "all"
    )
    sizes = {"vocab": 257, "max_positions": 32}
    study = made.study
    assert study.ablate is not None
    for name, wanted in (("baseline", study.model), ("all", study.ablate.after)):
        variant = next(variant for variant in made.variants if variant.name == name)
        assert arch_dsl.identity(variant.model) == arch_dsl.identity(arch_dsl.resolve(wanted, **sizes))


def test_ablate_takes_a_design_a_match_and_variants(tmp_path: Path) -> None:
    made = planned(
        tmp_path,
        model=None,
        components="components:\n  gate: {block.attention.gate: sdpa}",
        ablate=ABLATE,
        design="design: {type: chain, components: [norm, positional, ffn, gate]}",
        variants="variants:\n  swiglu with a gate: [ffn, gate]",
        match="match: {parameters: baseline, by: block.ffn.width}",
    )
    chain = ["baseline", "norm", "norm + positional", "norm + positional + ffn", "norm + positional + ffn + gate"]
    assert list(rows(made)) == [*chain, "swiglu with a gate"]
    assert all(abs(variant.mismatch) < 0.01 for variant in made.variants)


def test_ablate_says_what_cannot_vary_alone(tmp_path: Path) -> None:
    ablate = ABLATE.replace("to: {d_model: 64", "to: {d_model: 60").replace(
        "heads: 4, positional: rope", "heads: 6, positional: rope"
    )
    made = planned(tmp_path, model=None, components=None, ablate=ablate)
    assert made.record()["design"]["merged"] == {"d_model_and_heads": ["d_model", "heads"]}
    assert {"d_model_and_heads", "all − d_model_and_heads"} <= set(rows(made))


def test_the_width_that_match_solves_is_no_component(tmp_path: Path) -> None:
    ablate = ABLATE.replace("ffn: swiglu", "ffn: {type: glu, width: 90}")
    made = planned(
        tmp_path,
        model=None,
        components=None,
        ablate=ablate,
        match="match: {parameters: baseline, by: block.ffn.width}",
    )
    assert list(made.variants[0].components) == ["ffn", "norm", "positional"]


def test_a_component_that_no_variant_has_is_no_column(tmp_path: Path) -> None:
    made = planned(tmp_path, model=None, components=COMPONENTS, ablate=ABLATE, variants="variants:\n  own: [gate]")
    assert list(made.variants[0].components) == ["ffn", "norm", "positional", "gate"]


# what a plan prints


def printed(made: Plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_plan(made, folder)
    return capsys.readouterr().out.splitlines()


def test_a_plan_of_many_components_has_check_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a_component_with_a_long_name_{index}" for index in range(8)]
    components = "components:\n" + "\n".join(f"  {n}: {{block.ffn.width: {90 + i}}}" for i, n in enumerate(names))
    made = planned(tmp_path, components=components, design="design: add_one_in")
    lines = printed(made, tmp_path, capsys)
    assert lines[1].split()[:9] == ["variant", *"12345678"]
    assert lines[4].split()[:2] == [names[1], "✓"] and lines[4].index("✓") == lines[1].index("2")
    assert sum("→" in line for line in lines) == 0 and len(lines) < 40
    assert f"columns: 1 {names[0]}, 2 {names[1]}, " in " ".join(lines)


def test_a_plan_says_below_its_check_marks_what_else_variants_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = "variants:\n  baseline: {}\n  both: [gate, wide]\n  deep: [gate, {n_layers: 2, train.batch: 2}]"
    grid = "grid:\n  block.norm.placement: [pre, post]"
    lines = printed(planned(tmp_path, components=COMPONENTS, variants=variants, grid=grid), tmp_path, capsys)
    assert lines[1].split()[:3] == ["variant", "gate", "wide"]
    assert [line for line in lines if line.startswith("deep also")] == ["deep also changes n_layers: 2; train.batch: 2"]
    assert "  wide  block.ffn.width: 200" in lines
    beside = planned(tmp_path, components=COMPONENTS, design="design: {type: chain, components: [gate]}")
    lines = printed(beside, tmp_path, capsys)
    assert lines[1].split()[:3] == ["variant", "gate", "parameters"]
    two = planned(
        tmp_path,
        components=COMPONENTS,
        design="design: {type: chain, components: [gate]}",
        variants="variants:\n  wider: [wide, {n_layers: 2}]",
    )
    lines = printed(two, tmp_path, capsys)
    assert "wider also changes n_layers: 2" in lines
    assert lines[lines.index("other components:") + 1] == "  wide  block.ffn.width: 200"


def test_long_changes_of_a_component_are_cut_in_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = (
        "{attention: {type: attention, heads: 4, pre: rmsnorm, sdpa: [gate], query: [rope, rmsnorm], key: [rope, "
        "rmsnorm]}, ffn: {type: glu, pre: rmsnorm, width: 90}}"
    )
    components = f"components:\n  whole: {{block: {block}}}\n  deep: {{n_layers: 2}}"
    made = planned(tmp_path, components=components, design="design: full_factorial")
    (line,) = [line for line in printed(made, tmp_path, capsys) if line.startswith("  whole")]
    assert line.startswith("  whole  block: {attention: {") and line.endswith("…") and len(line) < 120
    assert "width: 90" in made.record()["design"]["changes"]["whole"][0], "--json has it all"


# what a report says


def trial(variant: str, seed: int, loss: float) -> dict[str, Any]:
    test = {"loss": loss, "perplexity": 2**loss, "bits_per_byte": loss, "tokens": 10}
    result = {"test": test, "validation": test, "tokens_per_s": 1.0}
    shown = {"variant": variant, "role": "repeat", "settings": {"lr": 1e-3}, "seed": seed, "state": "complete"}
    return {
        **shown,
        "key": f"{variant}{seed}",
        "result": result,
        "reused": False,
        "reason": None,
        "attempt": 1,
        "folder": "",
    }


def test_report_compares_what_lacks_a_component_with_what_has_all(tmp_path: Path) -> None:
    made = planned(tmp_path, components=COMPONENTS, design="design: both_ends", seeds="seeds: 3")
    names = [variant.name for variant in made.variants]
    losses = {name: 3.0 + 0.1 * index for index, name in enumerate(names)}
    trials = [trial(name, seed, losses[name] + 0.001 * seed) for name in names for seed in range(3)]
    found = compare(made.record(), trials)
    deltas = dict(zip(found.table["variant"], found.table["delta"], strict=True))
    assert deltas["all"] == pytest.approx(losses["all"] - losses["baseline"])
    assert deltas["all − gate"] == pytest.approx(losses["all − gate"] - losses["all"])
    assert (
        "what lacks one component is compared with the variant that has all, the others with the baseline"
        in found.notes
    )


def test_report_notes_what_was_left_out_and_mixed_up(tmp_path: Path) -> None:
    section = "design: {type: fractional, runs: 4, components: [pre, post, narrow], impossible: skip}"
    made = planned(tmp_path, components=CLASHING, design=section, seeds="seeds: 1")
    notes = compare(made.record(), [trial(v.name, 0, 3.0) for v in made.variants]).notes
    assert any(
        note.startswith("a fractional design, resolution 3: 6 effects of components and pairs") for note in notes
    )
    assert any(note.startswith("left out: pre + post (block.norm.placement: is set twice") for note in notes)


def test_all_slots_of_a_study_are_patches_that_a_variant_may_name(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, model=None, components=None, variants=None, ablate=ABLATE))
    settings = [setting for patch in study.components.values() for setting in patch.settings]
    assert study.ablate is not None
    ends = (apply(study.model, settings), study.ablate.after)
    one, other = (arch_dsl.identity(arch_dsl.resolve(model, vocab=257, max_positions=32)) for model in ends)
    assert one == other

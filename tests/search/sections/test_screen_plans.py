"""Studies with a screen: what the probes are made of, what is asked for next, and a run with the real trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.tree.identity import canonical
from archlab.search.comparison.compare import load_comparison
from archlab.search.planning.edits import edits
from archlab.search.planning.estimate import estimate
from archlab.search.planning.known import resolution
from archlab.search.planning.page import plan_json, print_plan
from archlab.search.planning.plan import Plan, plan
from archlab.search.reporting.report import report
from archlab.search.running.pace import Pace, worker
from archlab.search.running.progress import Progress
from archlab.search.running.run import run
from archlab.search.running.status import status_of
from archlab.search.sections.screen.decide import screened
from archlab.search.store.roles import ROLE
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.trackers.acknowledged import Spool
from archlab.search.trackers.optuna_sink import OptunaSink
from archlab.search.trackers.run_facts import run_name
from archlab.search.trackers.tracked import tracked
from tests.search.plan_kit import simulate
from tests.search.study_files import SECTIONS, write_study

WIDTHS = {"baseline": 48, "a": 8, "b": 16, "c": 24, "d": 32, "e": 40, "f": 56, "g": 64}
VARIANTS = "variants:\n" + "\n".join(
    f"  {name}: {{block.ffn.width: {width}}}" if name != "baseline" else "  baseline: {}"
    for name, width in WIDTHS.items()
)
RECALL = (
    "{associative_recall: {pairs: 2, keys: 4, values: 4, sequences: 64, validation_sequences: 8, test_sequences: 8}}"
)
SCREEN = f"screen: {{train: {{data: {RECALL}, context: 8, tokens: 256, lr: 2e-3}}, keep: 0.25, calibrate: 4}}"
TINY: dict[str, Any] = {"components": None, "variants": VARIANTS, "seeds": "seeds: 2"}
PROBE_LR = 2e-3


def planned(folder: Path, screen: str | None = SCREEN, **sections: str | None) -> Plan:
    return plan(load_study(write_study(folder, **{**TINY, "screen": screen, **sections})), folder / "data")


def by_width(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
    """Wider is better, by both recipes; the probe is told by its rate."""
    return 5.0 - WIDTHS[variant] / 100 - 0.01 * seed - share


def against_width(variant: str, settings: dict[str, Any], seed: int, share: float) -> float:
    sign = -1 if settings["lr"] == PROBE_LR else 1
    return 5.0 - sign * WIDTHS[variant] / 100 - share


# probes


def test_a_probe_is_the_variants_model_under_the_changed_recipe(tmp_path: Path) -> None:
    variants = """\
variants:
  baseline: {}
  a: {block.norm: layernorm, train.lr: 9e-4, train.clip: 3}
  b: {n_layers: 2}
  c: {block.attention.kv_heads: 1}
  d: {block.attention.kv_heads: 2}
  e: {block.attention.qk_norm: rmsnorm}"""
    match, screen = "match: {parameters: baseline, by: block.ffn.width}", SCREEN.replace("2e-3", "2e-3, batch: 2")
    made = planned(tmp_path, variants=variants, match=match, screen=screen)
    own = {variant.name: variant for variant in made.variants}
    recipe = made.parts[0].variants["a"].recipe
    assert (recipe.lr, recipe.clip, recipe.batch, recipe.tokens) == (2e-3, 3.0, 2, 256), "its own, but for the screen's"
    assert (recipe.context, recipe.objective.type, recipe.data.type) == (8, "answers", "associative_recall")
    assert (own["a"].recipe.lr, own["a"].recipe.objective.type) == (9e-4, "causal")
    for name, variant in own.items():
        probe, model = canonical(made.parts[0].variants[name].model), canonical(variant.model)
        assert probe["block"] == model["block"] and probe["n_layers"] == model["n_layers"], "at the matched width"
        assert probe["vocab"] != model["vocab"]
    assert own["b"].matched != own["c"].matched


def test_a_screen_changes_no_other_trial(tmp_path: Path) -> None:
    made, without = planned(tmp_path), planned(tmp_path, screen=None)
    assert [v.trial(0).key for v in made.variants] == [v.trial(0).key for v in without.variants]
    assert not without.parts and "screen" not in without.record()
    keys = {probe.trial(0).key for probe in made.beside}
    assert len(keys) == len(WIDTHS) and keys.isdisjoint(v.trial(0).key for v in made.variants)


def test_an_objective_that_the_screen_names_is_taken(tmp_path: Path) -> None:
    made = planned(tmp_path, screen="screen: {train: {tokens: 256, objective: causal}, calibrate: 4}")
    assert {probe.recipe.objective.type for probe in made.beside} == {"causal"}


# what is asked for


def members(trials: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row["variant"], row["role"], row["key"]) for row in trials}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"tune": "tune: {lr: [1e-3, 3e-3], extend: 1}"},
        {"tune": "tune: {lr: {grid: 1-2-5, from: 5e-4, to: 1e-2}}"},
        {"seeds": "seeds: {min: 2, max: 4}"},
    ],
    ids=["plain", "tuned", "brackets", "seeds until resolved"],
)
def test_the_table_is_one_whatever_ends_first_and_wherever_it_stops(sections: dict[str, str], tmp_path: Path) -> None:
    made = planned(tmp_path, **sections)
    whole = simulate(made, by_width)
    found = screened(made.record(), whole)
    assert found.state == "on" and {*found.kept} == {"f", "g"} and found.left_out
    assert {row["variant"] for row in whole if row["role"] != ROLE} == found.wanted
    assert {row["variant"] for row in whole if row["role"] == ROLE} == {*WIDTHS}
    for seed, ends in ((1, None), (2, 3), (3, 14)):
        first = simulate(planned(tmp_path, **sections), by_width, seed=seed, ends=ends)
        assert members(simulate(planned(tmp_path, **sections), by_width, first, seed=seed + 10)) == members(whole)


def test_ranks_that_disagree_train_everything(tmp_path: Path) -> None:
    made = planned(tmp_path)
    whole = simulate(made, against_width)
    assert screened(made.record(), whole).state == "off"
    assert {row["variant"] for row in whole if row["role"] == "repeat"} == {*WIDTHS}
    assert made.trials == len(members(whole)) == len(WIDTHS) * 3


def test_a_plan_counts_no_trials_of_what_was_left_out(tmp_path: Path) -> None:
    made = planned(tmp_path)
    assert made.trials == len(WIDTHS) * 3
    whole = simulate(made, by_width)
    assert made.trials == len(members(whole)) == len(WIDTHS) * 3 - 2 * len(screened(made.record(), whole).left_out)
    left_out = screened(made.record(), whole).left_out[0]
    lost = next(v for v in made.variants if v.name == left_out).trial(0)
    row = {"variant": left_out, "role": "repeat", "settings": {"lr": 1e-3}, "seed": 0, "key": lost.key}
    assert not made.may_want(row) and planned(tmp_path).may_want(row)
    assert all(made.may_want(row) for row in whole)


def test_probes_of_another_recipe_decide_nothing(tmp_path: Path) -> None:
    whole = simulate(planned(tmp_path), by_width)
    for edited in ({"screen": SCREEN.replace("256", "512")}, {"train": SECTIONS["train"].replace("1k", "2k")}):
        made = planned(tmp_path, **edited)
        made.rows(whole)
        assert (found := made.parts[0].found) is not None and not found.losses and found.last is None
    assert (found := made.parts[0].found) is not None and found.state == "calibration", (
        "the probes are the same, the variants' trials are not"
    )


def test_first_seeds_come_first_while_the_screen_looks_at_them(tmp_path: Path) -> None:
    made = planned(tmp_path)
    probed = simulate(made, by_width, ends=len(WIDTHS))
    seeds = [row.seed for row in made.rows(probed) if row.role == "repeat"]
    assert seeds == sorted(seeds) and {*seeds} == {0, 1}


def test_a_plan_says_what_the_probes_take_and_may_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(tmp_path)
    print_plan(made, tmp_path / "store", slots=1)
    said = " ".join(capsys.readouterr().out.split())
    assert "8 variants x 2 seeds: at most 24 trials of 1k tokens" in said and "8 probes among them" in said
    assert "a screen: 8 probes of 256 tokens of associative_recall, 2.05k in all; it may leave out up to 3" in said
    told = plan_json(made, tmp_path / "store", slots=1)
    assert told["screen"]["train"]["context"] == 8 and told["variants"][0]["probe"]["tokens"] == 256
    alone = planned(tmp_path, screen=None)
    assert estimate(made, tmp_path / "store", 1).core_s > estimate(alone, tmp_path / "store", 1).core_s


@pytest.mark.parametrize(("tokens", "seeds"), [(58_048, 7), (58_047, 6)])
def test_a_budget_of_tokens_is_no_less_for_its_probes_than_these_take(tokens: int, seeds: int, tmp_path: Path) -> None:
    """8 probes of 256 tokens and 8 variants of 1,000 with 7 seeds take 58,048 tokens."""
    made = planned(tmp_path, seeds="seeds: 7", budget=f"budget: {{tokens: {tokens}}}")
    found = resolution(made, None)
    assert found is not None and found.seeds == seeds


# around the table


def test_progress_counts_probes_as_the_little_work_that_they_are() -> None:
    variants = [{"name": n, "flops_per_token": 100, "tokens": 1000} for n in "ab"]
    probes = [v | {"probe": {"flops_per_token": 50, "tokens": 200}} for v in variants]
    assert Pace.of({"variants": probes}).work[worker("a", ROLE)] == pytest.approx(0.1)
    shown = Progress()
    shown.plan({"study": "s", "variants": probes, "seeds": [0], "tune": {}}, 4)
    done = {"role": ROLE, "variant": "a", "settings": {"lr": 1.0}, "seed": 0, "key": "k", "until": None}
    rows = [done | {"state": "complete", "result": {"train_s": 1.0}}]
    shown.plan({"study": "s", "variants": probes, "seeds": [0], "tune": {}}, 4, rows)
    shown.event({"event": "study", "study": "s", "counts": {"reused": 1}})
    assert shown.left_s() == pytest.approx(10 * (2 + 0.1)), "two trials and a probe at 10 s for a trial's work"
    shown.event({"event": "screen", "messages": ["x"], "left_out": 1, "trials": 3})
    assert shown.total == 3 and "1/3 trials" in shown.headline()


@pytest.mark.slow
def test_a_study_runs_and_goes_on_by_its_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a threshold of zero the ranks of tiny models decide one way or the other; both are told."""
    loose = SCREEN.replace("calibrate: 4", "calibrate: 4, correlation: 0")
    path = write_study(tmp_path, **{**TINY, "screen": loose, "seeds": "seeds: 1"})
    told: list[dict[str, Any]] = []
    summary = run(path, tmp_path / "store", executor="inline", on_event=told.append, track=False)
    assert summary.exit_code == 0
    states = [event["state"] for event in told if event["event"] == "screen"]
    assert states[:2] == ["probes", "calibration"] and states[-1] in ("on", "off")
    roles = [event["role"] for event in told if event["event"] == "launched"]
    assert roles[: len(WIDTHS)] == [ROLE] * len(WIDTHS) and ROLE not in roles[len(WIDTHS) :]
    with Store.open(tmp_path / "store", create=False) as store:
        comparison, rows = load_comparison(store, "gates"), store.study_trials("gates")
        found = screened(store.study("gates"), rows)
        assert store.study("gates")["trials"] == len({row["key"] for row in rows}) == summary.counts["complete"]
        assert {row["variant"] for row in rows if row["role"] == "repeat"} == found.wanted
        assert all(math.isfinite(loss) for loss in found.probes.values())
        made = plan(load_study(path), tmp_path / "store" / "data")
        assert edits(made, store) == [] and made.left(made.done(store)) == 0
        names = [run_name(each) for each in tracked(store, "gates") if each.roles == (ROLE,)]
        assert len(names) == len(WIDTHS) and all(" probe lr=0.002 " in name for name in names)
        sink = OptunaSink(store.root, "gates", Spool(store.root))
        assert sink.pending(tracked(store, "gates")) == len(rows) - len(WIDTHS), "no probe is told"
    assert all(verdict != "incomplete" for verdict in comparison.table["verdict"])
    assert "Spearman's rho" in report(comparison, "text")
    (now,) = status_of(tmp_path / "store", "gates")
    assert now["counts"] == {"complete": summary.counts["complete"]}
    assert run(path, tmp_path / "store", executor="inline", track=False).counts["reused"] == summary.counts["complete"]
    path.write_text(path.read_text().replace("correlation: 0", "correlation: 0.999"))
    with Store.open(tmp_path / "store", create=False) as store:
        assert edits(plan(load_study(path), store.root / "data"), store)[0] == "the screen has another correlation"
    assert run(path, tmp_path / "store", executor="inline", track=False).exit_code == 0
    with Store.open(tmp_path / "store", create=False) as store:
        found = screened(store.study("gates"), store.study_trials("gates"))
        assert found.state == "off" and found.wanted == {*WIDTHS}

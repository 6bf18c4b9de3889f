"""What is printed: the same numbers in every format, nothing bold that noise could have made, nothing that escapes."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata

import pytest

from archlab.search.comparison.compare import compare
from archlab.search.formatting.tables import DASH, Block, Cell, Column, short_count
from archlab.search.formatting.words import terse
from archlab.search.reporting.main_table import best_rows
from archlab.search.reporting.report import FORMATS, build_page, report, to_plain
from archlab.search.reporting.text import _block
from archlab.search.results.comparison import Comparison
from tests.search.compare_kit import end_as, make_study, make_trial, measures, pick

EFFECTS = {"baseline": 0.0, "sdpa": -0.05, "value": 0.0005, "dense": 0.05}


@pytest.fixture
def comparison() -> Comparison:
    """One of everything: better, within noise, a rate at the edge, a diverged row, a reused trial."""
    record, trials = make_study(EFFECTS)
    end_as(pick(trials, "dense", role="repeat", seed=1), "diverged", "loss is not finite")
    end_as(pick(trials, "value", role="tune", lr=2e-3), "failed")
    pick(trials, "baseline", role="repeat")[1]["reused"] = True
    return compare(record, trials)


def test_text_is_the_table_with_its_curve_and_what_to_know(comparison: Comparison) -> None:
    printed = report(comparison, rates=True)
    lines = printed.splitlines()
    assert lines[0] == "gate-position: Where should attention be gated?"
    sdpa = next(line for line in lines if line.startswith("sdpa"))
    row = comparison.table.set_index("variant").loc["sdpa"]
    assert f"{row['delta']:+.4f}" in sdpa
    assert f"[{row['delta_low']:+.4f}, {row['delta_high']:+.4f}]" in sdpa
    assert re.search(r"\d+\.\d+ ± \d+\.\d+\*", sdpa), "the best is marked"
    assert "better" in sdpa
    text = " ".join(lines)
    assert "seed variance of each variant moderated by that of all 3 (4 degrees of freedom)" in text
    noise = comparison.noise
    assert f"{noise['resolvable']:.4f} nats/token ({noise['resolvable_percent']:.2g}% of perplexity)" in text
    assert "Validation perplexity by learning rate (seed 0)" in text
    assert "- dense: seed 1 diverged at learning rate 0.001 (loss is not finite): no mean, no interval" in text
    assert "data 0123456789ab (stdlib, bytes; 12,000,000 train" in text
    assert "500,000 tokens per trial, context 128, seeds 0 1 2; archlab 0.1.0, torch 2.13.0" in text


def test_text_ends_with_the_findings_and_leaves_the_rates_to_a_flag(comparison: Comparison) -> None:
    brief, whole = report(comparison, "text"), report(comparison, rates=True)
    findings = ["> sdpa is better than baseline", "> value is within noise of baseline", "> dense diverged"]
    for printed in (brief, whole):
        assert all(line.startswith(told) for line, told in zip(printed.splitlines()[-3:], findings, strict=True))
    assert "by learning rate" not in brief and "archlab report gate-position --rates" in brief
    assert "--rates" not in whole
    assert "- sdpa is better than baseline" in report(comparison, "md").split("| variant")[0]


def test_provenance_prints_the_tokens_and_contexts_of_all_variants() -> None:
    record, trials = make_study({"baseline": 0.0, "sdpa": -0.05})
    record["variants"][0] |= {"tokens": 500_000, "context": 128}
    record["variants"][1] |= {"tokens": 1_000_000, "context": 256}
    comparison = compare(record, trials)
    assert "500,000 / 1,000,000 tokens per trial, context 128 / 256, seeds" in build_page(comparison).provenance


def test_experts_have_their_active_parameters_and_their_load() -> None:
    record, trials = make_study({"baseline": 0.0, "experts": -0.05})
    headers = [column.header for column in build_page(compare(record, trials)).blocks[0].columns]
    assert not {"active", "max load"} & set(headers) and "active" not in report(compare(record, trials), "csv")
    record["variants"][1]["active_parameters"] = 400_000
    for seed, trial in enumerate(pick(trials, "experts", role="repeat")):
        trial["result"]["test"] |= {"router_load_max": 1.2 + 0.1 * seed, "router_entropy": 2.0, "router_dropped": 0.0}
    found = compare(record, trials)
    columns = {column.header: [cell.text for cell in column.cells] for column in build_page(found).blocks[0].columns}
    assert columns["active"] == ["861k", "400k"]
    assert columns["max load"] == [DASH, "1.30"]
    assert "active: parameters that one token meets" in build_page(found).blocks[0].legend
    rows = list(csv.DictReader(io.StringIO(report(found, "csv"))))
    assert [row["active_parameters"] for row in rows] == ["861312", "400000"]


def test_curve_marks_the_best_rate_and_its_edge(comparison: Comparison) -> None:
    _, curve = report(comparison, rates=True).split("Validation perplexity by learning rate")
    curve, _ = curve.split("Learning rates on validation")
    rows = {line.split()[0]: line.split() for line in curve.splitlines() if line.split()}
    best = comparison.rates[comparison.rates["best"]].set_index("variant")["validation_perplexity"]
    assert rows["variant"] == ["variant", "0.0005", "0.001", "0.002"]
    assert rows["sdpa"][2] == f"{best['sdpa']:.3f}*"
    assert rows["value"][2:] == [f"{best['value']:.3f}^*", "failed"]
    assert not rows["sdpa"][1].endswith("*")


def test_diverged_row_is_dashes_in_every_printed_format(comparison: Comparison) -> None:
    text, markdown = report(comparison, "text"), report(comparison, "md")
    assert re.search(rf"^dense .*{DASH} .*{DASH} .*{DASH}  diverged", text, re.MULTILINE)
    assert re.search(rf"^\| dense .*(\| {DASH} ){{4}}\| diverged", markdown, re.MULTILINE)
    assert re.search(r"^dense & -- & -- & -- & diverged", report(comparison, "latex"), re.MULTILINE)
    for form in FORMATS:
        assert not re.search(r"\bnan\b", report(comparison, form), re.IGNORECASE)


@pytest.mark.parametrize(
    "names",
    [
        [f"variant_{i}" for i in range(30)],
        ["a very long name of a variant that somebody generated from a grid [placement=sandwich, heads=8]", "b"],
        ["一个变体" * 6, "b"],
    ],
    ids=["many", "long", "wide characters"],
)
@pytest.mark.parametrize("rates", [(5e-4, 1e-3, 2e-3), tuple(1e-3 * 1.37**i for i in range(20))], ids=["3", "20"])
def test_text_fits_110_columns(names: list[str], rates: tuple[float, ...]) -> None:
    record, trials = make_study({name: 0.01 * i for i, name in enumerate(names)}, rates=rates)
    record["question"] = "Why? " * 60
    for line in report(compare(record, trials)).splitlines():
        assert len(line) + sum(unicodedata.east_asian_width(c) in "WF" for c in line) <= 110


def test_text_keeps_every_rate_of_a_wide_curve() -> None:
    rates = tuple(round(1e-3 * 1.37**i, 6) for i in range(20))
    record, trials = make_study({"baseline": 0.0, "sdpa": 0.0}, rates=rates)
    printed = report(compare(record, trials), rates=True)
    assert all(re.search(rf"\b{r:g}\b", printed) for r in rates)


def test_best_is_bold_only_beyond_noise() -> None:
    def bold(effects: dict[str, float], form: str = "md") -> list[str]:
        table = report(compare(*make_study(effects)), form).split("Validation")[0]
        mark = "**" if form == "md" else r"\textbf"
        return [re.split(r" [|&] ", line.removeprefix("| "))[0] for line in table.splitlines() if mark in line]

    assert bold({"baseline": 0.0, "sdpa": -0.05, "dense": -0.02}) == ["sdpa"]
    assert bold({"baseline": 0.0, "sdpa": -0.05, "dense": -0.02}, "latex") == ["sdpa"]
    assert bold({"baseline": 0.0, "sdpa": -0.0005, "dense": 0.05}) == []
    assert bold({"baseline": 0.0, "sdpa": 0.05, "dense": 0.05}) == ["baseline"]
    assert bold({"baseline": 0.0, "sdpa": 0.0005, "dense": 0.05}) == []


def test_what_is_bold_owes_nothing_to_its_seeds() -> None:
    """`dense` is lowest at each seed that both have; `sdpa` alone lacks the seed that is worst for all."""
    effects = {"baseline": 0.0, "sdpa": -0.05, "dense": -0.06}
    record, trials = make_study(effects, seeds=4, rates=())
    for trial in trials:
        trial["result"] = trial["result"] | {"test": measures(3 + effects[trial["variant"]] + 0.1 * trial["seed"])}
    fewer = [trial for trial in trials if (trial["variant"], trial["seed"]) != ("sdpa", 3)]
    rows = compare(record, fewer).table.to_dict("records")
    assert rows[1]["loss_mean"] < rows[2]["loss_mean"]
    assert best_rows([{**row, "verdict": row["verdict"].replace("incomplete", "better")} for row in rows]) == {2}


def test_too_few_seeds_are_never_bold() -> None:
    table = report(compare(*make_study(EFFECTS, seeds=2)), "md").split("Validation")[0]
    assert "**" not in table
    assert "No intervals: they need 3 complete seeds of the baseline and of a variant." in table
    assert "could have resolved" not in table


def test_json_is_exactly_the_frames(comparison: Comparison) -> None:
    data = json.loads(report(comparison, "json"))
    assert data == to_plain(comparison)
    for name in ("table", "rates", "trials", "search"):
        frame = getattr(comparison, name)
        assert len(data[name]) == len(frame)
        for row, printed in zip(frame.to_dict("records"), data[name], strict=True):
            assert list(printed) == list(frame.columns)
            for column, value in row.items():
                missing = value is None or (isinstance(value, float) and math.isnan(value))
                assert printed[column] == (None if missing else value), (name, column)
    assert data["noise"] == comparison.noise
    assert data["notes"] == comparison.notes


def test_csv_is_the_table_with_exact_numbers(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(report(comparison, "csv"))))
    table = comparison.table.set_index("variant")
    assert [row["variant"] for row in rows] == list(EFFECTS)
    for row in rows:
        for column in ("perplexity_mean", "delta", "delta_low", "loss_std", "mismatch"):
            exact = table.loc[row["variant"], column]
            assert row[column] == "" if math.isnan(exact) else float(row[column]) == exact
    assert [row["component.sdpa_gate"] for row in rows] == ["False", "True", "False", "False"]


def test_no_cell_of_a_csv_is_a_formula() -> None:
    names = ["=cmd|'/c calc'!A1", "+1", "-pos", "@x"]
    text = report(compare(*make_study(dict.fromkeys(["base", *names], -0.01))), "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["variant"] for row in rows] == ["base", *(f"'{name}" for name in names)]
    assert all(float(row["delta"]) < 1 for row in rows[1:]), "numbers stay numbers, below zero too"


def test_markdown_rows_have_equal_cells_and_name_components(comparison: Comparison) -> None:
    table = [line for line in report(comparison, "md").splitlines() if line.startswith("| ")]
    heads = [i for i, line in enumerate(table) if line.startswith("| variant")]
    assert len(heads) == 3
    for start, stop in zip(heads, [*heads[1:], len(table)], strict=True):
        assert len({line.count(" | ") for line in table[start:stop]}) == 1
    assert r"| sdpa\_gate |" in table[0]
    assert "| sdpa | ✓ |" in "\n".join(table)


def test_latex_is_balanced_and_plain(comparison: Comparison) -> None:
    printed = report(comparison, "latex")
    for name in ("table", "tabular"):
        assert printed.count(rf"\begin{{{name}}}") == printed.count(rf"\end{{{name}}}") == 1
    assert printed.count(r"\toprule") == printed.count(r"\midrule") == printed.count(r"\bottomrule") == 1
    unescaped = re.sub(r"\\[{}\\]", "", printed)
    assert unescaped.count("{") == unescaped.count("}")
    assert printed.isascii()
    for tabular in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end", printed, re.DOTALL):
        rows = [line for line in tabular[1].splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(tabular[0])}


HOSTILE = "a|b <script>alert(1)</script> \x1b[31m_x_ 50% & $y$ [l](javascript:1) \\input{z}"


def test_names_cannot_leave_their_cell() -> None:
    record, trials = make_study({"baseline": 0.0, HOSTILE: -0.05})
    record["question"] = HOSTILE + "\n# heading"
    end_as(pick(trials, HOSTILE, role="tune", lr=2e-3), "failed", "\x1b]0;title\x07 \\end{table} | <b>")
    comparison = compare(record, trials)
    for form in ("text", "md", "latex"):
        assert not any(unicodedata.category(c) == "Cc" and c != "\n" for c in report(comparison, form))
    markdown = report(comparison, "md")
    assert "<script>" not in markdown
    assert "](" not in markdown
    assert "\n# heading" not in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| a"))
    assert len(re.findall(r"(?<!\\)\|", row)) == len(
        re.findall(r"\|", next(line for line in markdown.splitlines() if line.startswith("|")))
    )
    latex = report(comparison, "latex")
    assert r"\input" not in latex
    assert latex.count(r"\end{table}") == 1
    assert r"50\% \& \$y\$" in latex


def test_search_prints_its_best_trials() -> None:
    record, _ = make_study({"base": 0.0}, seeds=1, rates=())
    trials = [make_trial("base", "search", {"heads": i}, 0, 0.01 * ((i * 7) % 25)) for i in range(25)]
    printed = report(compare(record, trials))
    block = printed.split("Search, validation (the best 20 of 25 trials)")[1].splitlines()[3:23]
    assert block[0].split()[0] == "0"
    assert block[0].endswith("heads=0")
    assert all("complete" in line for line in block)


def test_settings_of_a_search_are_short_and_whole() -> None:
    record, _ = make_study({"base": 0.0, "found": -0.1}, seeds=1, rates=())
    mask = {"type": "sliding_window", "window": 64}
    settings = {
        "number": 7,
        "lr": 0.007904890123456789,
        "train.lr": 0.007904890123456789,
        "block.attention.kv_heads": 2,
        "block.attention.mask": mask,
    }
    shown = "lr=0.0079, kv_heads=2, mask={type: sliding_window, window: 64}"
    best = make_trial("search", "search", settings, 0, -0.1)
    repeat = {**best, "variant": "found", "role": "repeat", "settings": {"lr": settings["lr"]}}
    trials = [make_trial("base", "repeat", {"lr": 1e-3}, 0, 0.0), best, repeat]
    record["search"] = {
        "sampler": "tpe",
        "minimize": ["perplexity"],
        "constraints": {},
        "proposals": [],
        "trials": 1,
        "most": 10,
    }
    text = report(compare(record, trials))
    block = text.split("Search, validation (1 trials)")[1]
    assert block.splitlines()[3].endswith(f"  {shown}")
    assert f"found is trial 7 ({shown})" in " ".join(block.split())
    assert "- search: what it found has a learning rate of its own, the baseline that of the recipe" in text
    assert f"found is trial 7 ({shown.replace('_', chr(92) + '_')})" in report(compare(record, trials), "md")
    record["search"]["minimize"] = ["perplexity", "flops_per_token"]
    for variant in record["variants"]:
        variant["components"] = {f"component_{place}": True for place in range(9)}
    assert "FLOPs/token" in report(compare(record, trials)).split("Search, validation")[0].split("left out")[0]


def test_long_settings_go_on_below_and_lose_nothing() -> None:
    record, _ = make_study({"base": 0.0}, seeds=1, rates=())
    settings = {f"block.attention.{name}": f"some_long_value_{name}" for name in "abcdef"}
    trials = [make_trial("base", "search", settings | {"f": place}, 0, 0.01 * place) for place in range(2)]
    printed = report(compare(record, trials))
    first, second, *_ = printed.split("Search, validation (2 trials)")[1].splitlines()[3:]
    assert first.split()[0] == "0" and second.startswith(" " * first.index("a=")) and "…" not in printed
    assert "- search: what it found has a learning rate" not in printed
    whole = " ".join(printed.split())
    assert ", ".join(f"{name}=some_long_value_{name}" for name in "abcde") in whole


def test_a_table_in_several_parts_has_no_empty_rows() -> None:
    wide = [Column(f"{'x' * 24}{i}", [Cell("1"), Cell("2")]) for i in range(6)]
    words = Column("settings", [Cell("word " * 20), Cell("few words")], "l")
    lines = list(_block(Block("", [Column("name", [Cell("a"), Cell("b")], "l"), *wide, words])))
    assert all(line.strip() for line in lines) and "…" in "".join(lines)


def test_settings_are_named_by_the_fewest_steps_that_tell_them_apart() -> None:
    paths = {"block.ffn.width": 64, "block.attention.width": 0.12345, "lr": 1e-5, "d_model": True}
    assert terse(paths) == ["ffn.width=64", "attention.width=0.123", "lr=1e-05", "d_model=true"]
    assert terse({"a.width": 1}, ["b.width"]) == ["a.width=1"]


def test_a_study_that_has_not_begun_prints_in_every_format() -> None:
    record, _ = make_study(EFFECTS)
    for form in FORMATS:
        assert "baseline" in report(compare(record, []), form)


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'latx' is not a report format; did you mean 'latex'\? \(text, md, latex"):
        report(compare(*make_study(EFFECTS)), "latx")


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (861_312, "861k"),
        (999_900, "1.00M"),
        (2.5e9, "2.50G"),
    ],
    ids=str,
)
def test_counts_are_three_digits(value: float, printed: str) -> None:
    assert short_count(value) == printed


def with_components(names: list[str]) -> Comparison:
    record, trials = make_study(EFFECTS)
    for index, variant in enumerate(record["variants"]):
        variant["components"] = {name: place < index for place, name in enumerate(names)}
    return compare(record, trials)


def test_text_has_a_check_mark_per_component_before_it_has_bits_per_byte() -> None:
    table = report(with_components(["gate", "norm", "rope"]), "text").split("Validation")[0]
    lines = table.splitlines()
    assert lines[2].split()[:5] == ["variant", "gate", "norm", "rope", "lr"]
    assert lines[5].split()[:4] == ["sdpa", "✓", DASH, DASH]
    assert "bits/byte" not in lines[2] and "perplexity" in lines[2]
    assert "left out, as the table is too wide for them (--format md has all): bits/byte ↓, mismatch" in table


def test_text_names_the_components_that_it_has_no_room_for() -> None:
    names = [f"component_{index}" for index in range(8)]
    table = report(with_components(names), "text").split("Validation")[0]
    heading, below = table.splitlines()[2], " ".join(table.split("* lowest")[1].split())
    assert not any(name in heading for name in names)
    assert "params" in heading and "bits/byte" in heading, "what fits beside is there"
    assert "(--format md has all): " + ", ".join(names) in below
    assert all(f"| {name} |".replace("_", r"\_") in report(with_components(names), "md") for name in names[1::2])


def test_a_table_without_matching_has_no_mismatch() -> None:
    record, trials = make_study(EFFECTS)
    for variant in record["variants"]:
        variant |= {"matched": {}, "mismatch": 0.0}
    plain, matched = compare(record, trials), compare(*make_study(EFFECTS))
    for form in ("text", "md", "csv"):
        assert "mismatch" not in report(plain, form)
        assert "mismatch" in report(matched, form)
    assert {row["mismatch"] for row in to_plain(plain)["table"]} == {None}


@pytest.mark.parametrize(("smaller", "said"), [(True, True), (False, False)])
def test_an_effect_says_by_how_much_its_models_differ_in_size(smaller: bool, said: bool) -> None:
    names = {"baseline [kv=4]": 0.0, "gate [kv=4]": -0.1, "baseline [kv=1]": 0.05, "gate [kv=1]": -0.05}
    record, trials = make_study(names, rates=())
    for variant in record["variants"]:
        row, kv = variant["name"].removesuffix("]").split(" [kv=")
        variant |= {"row": row, "axes": {"kv": kv}, "components": {}}
        variant["parameters"] = 80_000 if smaller and kv == "1" else 100_000
    found = compare(record, trials)
    text = report(found)
    assert ("params: by how much the models of the level are larger, as each cell" in " ".join(text.split())) is said
    (effect,) = found.effects[found.effects["factor"] == "kv"].to_dict("records")
    assert effect["larger"] == pytest.approx(-0.2 if smaller else 0.0)

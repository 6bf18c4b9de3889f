"""What a report says, before it looks like anything: tables of formatted cells, and the lines below them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search.notes import NO_DIFFERENCE

if TYPE_CHECKING:
    from search.comparison import Comparison

DASH = "\N{EN DASH}"
SEARCH_ROWS = 20


@dataclass(frozen=True)
class Cell:
    """A formatted value; `strong` marks the best."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Column:
    """`align` is "l", "r" or "c"; of a table too wide for its medium, the highest `keep` is kept first (0 always).

    `room`: from so many characters on a terminal leaves out the middle of a text.
    """

    header: str
    cells: list[Cell]
    align: str = "r"
    keep: int = 0
    room: int = 40


@dataclass(frozen=True)
class Block:
    """A table with its title and the legend of its marks."""

    title: str
    columns: list[Column]
    legend: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report. `method`, `resolvable` and `notes` are printed below the first table, `provenance` last."""

    study: str
    question: str
    blocks: list[Block]
    lines: list[str]
    notes: list[str]
    provenance: str


def build_page(comparison: Comparison) -> Page:
    """All that text, Markdown and LaTeX print."""
    # both are made of what is defined here
    from search.render.measure_blocks import measure_blocks
    from search.render.scaling_blocks import scaling_blocks
    from search.render.search_blocks import search_blocks

    blocks = [_main(comparison)]
    if len(comparison.rates):
        blocks.append(_curve(comparison))
    if len(comparison.tuning):
        blocks.append(_tuning(comparison))
    blocks += search_blocks(comparison)
    if len(comparison.domains):
        blocks.append(_by_domain(comparison))
    blocks += scaling_blocks(comparison)
    blocks += measure_blocks(comparison)
    return Page(
        study=printable(comparison.study),
        question=printable(comparison.question),
        blocks=blocks,
        lines=_lines(comparison),
        notes=[printable(note) for note in comparison.notes],
        provenance=printable(_provenance(comparison)),
    )


def printable(text: str) -> str:
    """One line without control characters: what a study or a traceback says must not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def number(value: float | None, form: str) -> str:
    """A formatted number, or a dash where there is none."""
    return DASH if value is None or not math.isfinite(value) else format(value, form)


def short_count(value: float) -> str:
    """1234 -> 1.23k, 861312 -> 861k, 2.5e6 -> 2.50M: three digits."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1)) + 1e-3))}f}{unit}"
    return f"{value:g}"


def _main(comparison: Comparison) -> Block:
    """The table of the study, on test."""
    rows: list[dict[str, Any]] = comparison.table.to_dict("records")  # type: ignore[assignment]
    best = _best(rows)
    digits = _decimals([row["perplexity_std"] for row in rows])
    unit = comparison.noise["unit"]

    def column(header: str, show: Callable[[dict[str, Any]], str], align: str = "r", keep: int = 0) -> Column:
        cells = [Cell(printable(show(r)), header.startswith("perplexity") and i in best) for i, r in enumerate(rows)]
        return Column(header, cells, align, keep)

    components = list(dict.fromkeys(name for row in rows for name in row["components"]))
    matched = not any(math.isnan(row["mismatch"]) for row in rows)
    several = len({round(row["bytes_per_token"], 4) for row in rows if row["bytes_per_token"] > 0}) > 1
    goal = "flops_per_token" in comparison.searched.get("minimize", ())
    sparse = any(row["active_parameters"] < row["parameters"] for row in rows)
    columns = [
        column("variant", lambda r: r["variant"], "l"),
        *(column(name, _tick(name), "c", 6) for name in components),
        column("lr", lambda r: number(r["lr"], "g") + ("^" if r["lr_at_edge"] else ""), keep=8),
        column("n", lambda r: str(r["n"])),
        column("perplexity ↓", lambda r: _spread(r["perplexity_mean"], r["perplexity_std"], digits)),
        column("bits/byte ↓", lambda r: number(r["bits_per_byte_mean"], ".4f"), keep=5),
        *([column("bytes/token", lambda r: number(r["bytes_per_token"], ".3f"), keep=5)] if several else []),
        column(f"Δ {unit}", lambda r: number(r["delta"], "+.4f")),
        column("95% interval", lambda r: _interval(r["delta_low"], r["delta_high"])),
        column("verdict", lambda r: _verdict(r["verdict"], comparison.noise.get("margin")), "l"),
        column("params", lambda r: short_count(r["parameters"]), keep=7),
        *([column("active", lambda r: short_count(r["active_parameters"]), keep=7)] if sparse else []),
        *([column("mismatch", lambda r: number(100 * r["mismatch"], "+.2f") + "%", keep=4)] if matched else []),
        *([column("max load", lambda r: number(r["router_load_max"], ".2f"), keep=4)] if sparse else []),
        column("FLOPs/token", lambda r: short_count(r["flops_per_token"]), keep=0 if goal else 3),
        column("tokens/s", lambda r: DASH if math.isnan(r["tokens_per_s"]) else short_count(r["tokens_per_s"]), keep=2),
    ]
    legend = "perplexity, bits/byte and Δ on test, mean ± standard deviation over n seeds; * best and not within noise"
    if sparse:
        legend += "; active: parameters that one token meets; max load: of an expert, 1 where all are used alike"
    if (match := comparison.provenance.get("match")) and match["kind"] != "parameters":
        legend += f"; mismatch: of {match['kind'].replace('_', ' ')}, from {match['to']}"
    if any(row["lr_at_edge"] for row in rows):
        legend += "; ^ rate at the edge of those tried"
    return Block("", columns, legend)


def _tick(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "✓" if row["components"].get(name) else DASH


def _best(rows: list[dict[str, Any]]) -> set[int]:
    """The rows to print bold: of those with one baseline the lowest perplexity, unless noise could have made it that.

    A variant must be better than the baseline; the baseline must have only worse variants.
    """
    cells: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if not math.isnan(row["perplexity_mean"]) and row["verdict"] not in NO_DIFFERENCE:
            cells.setdefault(row["baseline"], []).append(i)
    return {best for known in cells.values() if (best := _best_of(rows, known)) is not None}


def _best_of(rows: list[dict[str, Any]], known: list[int]) -> int | None:
    best = min(known, key=lambda i: rows[i]["perplexity_mean"])
    if rows[best]["verdict"] == "better":
        return best
    others = [rows[i]["verdict"] for i in known if i != best]
    all_worse = bool(others) and all(verdict == "worse" for verdict in others)
    return best if rows[best]["verdict"] == "baseline" and all_worse else None


def _decimals(stds: list[float]) -> int:
    """So many decimals that the smallest spread shows two digits, 2 to 4."""
    known = [s for s in stds if s > 0]
    return min(4, max(2, 1 - math.floor(math.log10(min(known))))) if known else 2


def _spread(mean: float, std: float, digits: int) -> str:
    return number(mean, f".{digits}f") + (f" ± {std:.{digits}f}" if std >= 0 else "")


def _verdict(verdict: str, margin: float | None) -> str:
    return f"{verdict} within {margin:g}" if verdict == "equivalent" else verdict


def _interval(low: float, high: float) -> str:
    return DASH if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]"


def _curve(comparison: Comparison) -> Block:
    """Validation perplexity per variant and tuned setting, one seed, and what the curve over the rate says."""
    labels: dict[str, float] = {}
    cells: dict[tuple[str, str], Cell] = {}
    edges = dict(zip(comparison.table["variant"], comparison.table["lr_at_edge"], strict=True))
    for row in comparison.rates.to_dict("records"):
        shown = {"complete": number(row["validation_perplexity"], ".3f"), "planned": DASH}
        text = shown.get(row["state"], row["state"]) + ("^" if row["best"] and edges[row["variant"]] else "")
        if row["state"] == "paused":
            where = f"step {row['step']:g}" if math.isnan(row["share"]) else f"{row['share']:.0%}"
            text = f"{'ended early' if row['settled'] else 'waits'} at {where}"
        labels.setdefault(row["setting"], row["lr"])
        cells[row["variant"], row["setting"]] = Cell(text, row["best"])
    names = list(dict.fromkeys(comparison.rates["variant"]))
    columns = [Column("variant", [Cell(printable(name)) for name in names], "l")]
    for label in sorted(labels, key=lambda label: (labels[label], label)):
        columns.append(Column(printable(label), [cells.get((name, label), Cell(DASH)) for name in names]))
    seed = ", ".join(str(s) for s in sorted(set(comparison.rates["seed"])))
    legend = "* chosen" + ("; ^ at the edge of those tried" if comparison.table["lr_at_edge"].any() else "")
    paused = comparison.rates[comparison.rates["state"] == "paused"]
    if paused["settled"].any():
        legend += "; ended early: at this share of the steps, being behind"
    if not paused["settled"].all():
        legend += "; waits: at this share of the steps, until the others are as far"
    only_rates = all(label == f"{lr:g}" for label, lr in labels.items())
    what = "learning rate" if only_rates else "what was tuned"
    return Block(f"Validation perplexity by {what} (seed {seed})", columns, legend)


def _tuning(comparison: Comparison) -> Block:
    """What the losses over the learning rate say."""
    rows: list[dict[str, Any]] = comparison.tuning.to_dict("records")  # type: ignore[assignment]

    def column(header: str, show: Callable[[dict[str, Any]], str], align: str = "r") -> Column:
        return Column(header, [Cell(printable(show(row))) for row in rows], align)

    def spread(row: dict[str, Any]) -> str:
        if math.isnan(row["sensitivity_from"]):
            return DASH
        return f"{number(row['sensitivity'], '.3f')} ({row['sensitivity_from']:g} to {row['sensitivity_to']:g})"

    def stable(row: dict[str, Any]) -> str:
        above = "" if math.isnan(row["diverged_lr"]) else f" ({row['diverged_lr']:g} diverged)"
        return number(row["stable_lr"], "g") + above

    columns = [
        column("variant", lambda row: row["variant"], "l"),
        column("best", lambda row: number(row["lr"], "g")),
        column("fitted", lambda row: number(row["fitted_lr"], ".2g")),
        column("curvature", lambda row: number(row["curvature"], ".3f")),
        column("largest stable", stable),
        column("sensitivity", spread),
        column("with one seed", lambda row: row["verdict"] or DASH, "l"),
    ]
    legend = (
        "fitted: lowest point of a parabola in ln(rate), curvature in nats/token per unit of it; sensitivity: mean "
        "excess over the best, in nats/token; largest stable: of those that came to their end; with one seed: whether "
        "a difference to the baseline hangs on the rate, from one pair of seeds, not corrected; not the verdict above"
    )
    return Block("Learning rates on validation", columns, legend)


def _by_domain(comparison: Comparison) -> Block:
    """The test perplexity of each variant in each domain of a mixture."""
    frame = comparison.domains.pivot(index="variant", columns="domain", values="perplexity")
    variants = list(dict.fromkeys(comparison.domains["variant"]))
    columns = [Column("variant", [Cell(printable(name)) for name in variants], "l")]
    for domain in dict.fromkeys(comparison.domains["domain"]):
        cells = [Cell(number(float(frame.loc[name, domain]), ".4g")) for name in variants]
        columns.append(Column(printable(str(domain)), cells))
    tokens = comparison.provenance["tokens"][0]
    drawn = [
        f"{row['name']} {row['share']:.0%} of the rows, {tokens * row['share'] / row['train_tokens']:.2g} epochs"
        for row in comparison.provenance["data"].get("domains", ())
    ]
    return Block("Test perplexity by domain", columns, printable(f"{comparison.baseline}: {'; '.join(drawn)}"))


def _lines(comparison: Comparison) -> list[str]:
    """How the intervals were made, and what the table could have resolved."""
    noise = comparison.noise
    method = noise["method"]
    lines = [method[0].upper() + method[1:] + "."]
    if noise["resolvable"] is not None:
        percent = noise["resolvable_percent"]
        also = "" if percent is None else f" ({percent:.2g}% of perplexity)"
        lines.append(
            f"Smallest difference this table could have resolved: {noise['resolvable']:.4f} {noise['unit']}{also}."
        )
    parts = {"one trial's seed": noise["seed_sd"], "a difference's documents": noise["document_sd"]}
    known = [f"{value:.2g} from {name}" for name, value in parts.items() if value is not None]
    if known:
        lines.append(f"Noise (standard deviation, {noise['unit']}): {', '.join(known)}.")
    return lines


def _provenance(comparison: Comparison) -> str:
    found = comparison.provenance
    data = found["data"]
    sizes = [f"{data[k]:,} {k.removesuffix('_tokens')}" for k in data if k.endswith("_tokens")]
    versions = [f"{name} {'/'.join(values)}" for name, values in found["versions"].items()]
    seeds = f", seeds {' '.join(str(s) for s in found['seeds'])}" if found["seeds"] else ""
    return (
        f"data {data['identity'][:12]} ({data['source']}, {data['tokenizer']}; {' / '.join(sizes)} tokens); "
        f"{' / '.join(f'{n:,}' for n in found['tokens'])} tokens per trial, "
        f"context {' / '.join(str(n) for n in found['context'])}{seeds}; "
        f"{', '.join(versions) or 'no finished trial'}"
    )

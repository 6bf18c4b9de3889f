"""What a report says, before it looks like anything: tables of formatted cells, and the lines below them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search.frames import records
from search.training_cost import cost_sentence

if TYPE_CHECKING:
    from search.comparison import Comparison

DASH = "\N{EN DASH}"
SEARCH_ROWS = 20
DIGITS = 12  # of a hash
IDENTITIES = "Identities: sha256 of each variant's resolved model, and of its recipe but for rate, precision, compiling"


@dataclass(frozen=True)
class Cell:
    """A formatted value; `strong` marks the best."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Column:
    """`align` is "l", "r" or "c"; of a table too wide for its medium, the highest `keep` is kept first (0 always).

    `room`: from so many characters on a terminal leaves out the middle of a text. Of the first table's columns `key` is
    the name in filters and addresses, and `values` what the cells show (None: nothing), to sort by.
    """

    header: str
    cells: list[Cell]
    align: str = "r"
    keep: int = 0
    room: int = 40
    key: str = ""
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Block:
    """A table with its title and the legend of its marks."""

    title: str
    columns: list[Column]
    legend: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report. `lines` and `notes` are printed below the first table, `provenance` last; for what is kept in a
    repository, each variant with the `identities` of its model and recipe."""

    study: str
    question: str
    blocks: list[Block]
    lines: list[str]
    notes: list[str]
    provenance: str
    identities: list[tuple[str, str]]


def build_page(comparison: Comparison) -> Page:
    """All that text, Markdown and LaTeX print."""
    # all are made of what is defined here
    from search.render.ablation import main_block
    from search.render.effect_blocks import effect_blocks
    from search.render.measure_blocks import measure_blocks
    from search.render.published_blocks import published_blocks
    from search.render.scaling_blocks import scaling_blocks
    from search.render.screen_blocks import screen_blocks
    from search.render.search_blocks import search_blocks

    blocks = [main_block(comparison), *effect_blocks(comparison), *published_blocks(comparison)]
    if len(comparison.rates):
        blocks.append(_curve(comparison))
    if len(comparison.tuning):
        blocks.append(tuning_block(comparison))
    blocks += [*screen_blocks(comparison), *search_blocks(comparison)]
    if len(comparison.domains):
        blocks.append(_by_domain(comparison))
    blocks += scaling_blocks(comparison)
    blocks += measure_blocks(comparison)
    return page_of(comparison, blocks)


def page_of(comparison: Comparison, blocks: list[Block]) -> Page:
    """Tables with all that is said below them."""
    return Page(
        study=printable(comparison.study),
        question=printable(comparison.question),
        blocks=blocks,
        lines=_lines(comparison),
        notes=[printable(note) for note in comparison.notes],
        provenance=printable(_provenance(comparison)),
        identities=[
            (printable(name), ", ".join(f"{of} {digest[:DIGITS]}" for of, digest in found.items()))
            for name, found in comparison.provenance["identities"].items()
        ],
    )


def printable(text: str) -> str:
    """One line without control characters: what a study or a traceback says must not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def number(value: float | None, form: str) -> str:
    """A formatted number, or a dash where there is none."""
    return DASH if value is None or not math.isfinite(value) else format(value, form)


def interval(low: float, high: float) -> str:
    """The ends of an interval of differences; a dash where there is none."""
    return DASH if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]"


def with_error(mean: float, half: float) -> str:
    """A mean and what stands behind its ±, with so many decimals that this shows two digits; nothing behind it for a
    single value, whose `half` is NaN."""
    if not math.isfinite(mean):
        return DASH
    if not half > 0:
        return f"{mean:.4g}" + (" ± 0" if half == 0 else "")
    decimals = 1 - math.floor(math.log10(half))
    if decimals > 6 or abs(mean) >= 1e6:
        return f"{mean:.4g} ± {half:.2g}"
    return f"{mean:.{max(decimals, 0)}f} ± {half:.{max(decimals, 0)}f}"


def short_count(value: float) -> str:
    """1234 -> 1.23k, 861312 -> 861k, 2.5e6 -> 2.50M: three digits."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1)) + 1e-3))}f}{unit}"
    return f"{value:g}"


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


def tuning_block(comparison: Comparison) -> Block:
    """What the losses over the learning rate say."""
    rows = records(comparison.tuning)

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
    cost = cost_sentence(comparison.cost)
    return [*lines, cost] if cost else lines


def _provenance(comparison: Comparison) -> str:
    found = comparison.provenance
    data = found["data"]
    sizes = [f"{data[k]:,} {k.removesuffix('_tokens')}" for k in data if k.endswith("_tokens")]
    versions = [f"{name} {'/'.join(map(_short_commit, values))}" for name, values in found["versions"].items()]
    seeds = f", seeds {' '.join(str(s) for s in found['seeds'])}" if found["seeds"] else ""
    return (
        f"{_study(found)}data {data['identity'][:DIGITS]} ({data['source']}, {data['tokenizer']}; "
        f"{' / '.join(sizes)} tokens); "
        f"{' / '.join(f'{n:,}' for n in found['tokens'])} tokens per trial, "
        f"context {' / '.join(str(n) for n in found['context'])}{seeds}; "
        f"{', '.join(versions) or 'no finished trial'}"
    )


def _study(found: dict[str, Any]) -> str:
    """The study, what was set for it, how its trials computed, and when."""
    named = f"study {found['study']}" + (f" at scale {found['scale']}" if "scale" in found else "")
    given = [f"{path}={json.dumps(value)}" for path, value in found.get("overrides", {}).items() if path != "scale"]
    recipes = [f"{name} {' / '.join(found[name])}" for name in ("precision", "compile") if name in found]
    days = list(dict.fromkeys(found["trained"].values()))
    told = [named + (f" with {', '.join(given)}" if given else ""), ", ".join(recipes)]
    told += [f"trained {' to '.join(days)} (UTC)"] if days else []
    return "".join(f"{each}; " for each in told if each)


def _short_commit(text: str) -> str:
    """A version; a git commit by its first digits."""
    head, mark, rest = text.partition("+changes")
    return f"{head[:DIGITS]}{mark}{rest}" if len(head) == 40 else text

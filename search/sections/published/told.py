"""What a report says of the published table that a study reproduces: theirs beside ours, never among ours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, Row, column_of, number, printable
from archlab.search.results.comparison import Comparison
from archlab.search.results.losses import lay_out
from archlab.search.results.measured import PERPLEXITY, measures_frame
from archlab.search.results.pairs import Differences
from archlab.search.results.told import Seen, Told
from archlab.search.sections.published.claims import (
    HOLDS,
    NOT_COVERED,
    REVERSED,
    claims_frame,
    diverged_everywhere,
)
from archlab.search.sections.published.frames import agreement, published_frame
from archlab.search.sections.recipes.average import DEPENDS, GROUP, averaged, far_apart, without_recipe

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

_NO_MEAN = "has no mean under all recipes"
_CLAIM = 64  # characters of a claim, and of what decided it, on a terminal


class ToldOfPublished(Told):
    """The section is `report: {published: …}`."""

    key = "published"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """published: a row per variant that is one of the published table, theirs beside ours; agreement: how far the
        two orders agree; claims: what our data say of what the paper claims; paper: the table's name, caption and
        source. All empty for a study without such a table."""
        import pandas as pd

        record = seen.whole
        if not (asked := record.get("published")):
            return {"published": pd.DataFrame(), "agreement": [], "claims": pd.DataFrame(), "paper": {}}
        frame = published_frame(record, seen.found.table, measures_frame(seen.selections), seen.layout.unit)
        gone = {each.variant for each in seen.selections if diverged_everywhere(each)}
        claims = claims_frame(record, Differences(seen.record, seen.selections, seen.layout))
        on_mean = _claims_on_mean(seen, claims) if record.get("recipes") and len(claims) else claims[:0]
        claims = pd.concat([claims, on_mean], ignore_index=True) if len(on_mean) else claims
        return {
            "published": frame,
            "agreement": agreement(record, frame, gone),
            "claims": claims,
            "paper": {name: asked[name] for name in ("table", "source", "caption", "without")},
        }

    def blocks(self, found: Comparison) -> Iterable[Block]:
        """The published table beside ours, how far the orders agree, what our data say of the claims."""
        if len(found.published):
            yield _beside(found)
            if found.agreement:
                yield _agreement(found)
            if len(found.claims):
                yield _claims(found)
            if len(set(found.claims.get("group", ()))) > 1:
                yield _claims_over_cells(found)


def _claims_on_mean(seen: Seen, claims: pd.DataFrame) -> pd.DataFrame:
    """The claims by the mean of the differences under all recipes, given those under each."""
    import pandas as pd

    mean, rows = averaged(seen.record, seen.selections, seen.whole["recipes"]["rows"])
    if not rows:
        return claims[:0]
    layout = lay_out(mean, rows, seen.layout.unit)
    found = claims_frame(mean, Differences(mean, rows, layout, _NO_MEAN))
    under: dict[tuple[str, str], list[Row]] = {}
    for row in records(claims):
        under.setdefault((row["claim"], without_recipe(row["group"])), []).append(row)
    judged = []
    for row in records(found):
        cell = row["group"].removeprefix(GROUP).removeprefix(", ")
        alike = [each for each in under.get((row["claim"], cell), []) if len(each["pairs"]) == len(row["pairs"])]
        without = [name for pair in row["pairs"] if not _known(pair) for name in (pair["lower"], pair["than"])]
        if without:
            lost = next((each.variant for each in rows if each.variant in without and not each.complete), without[0])
            judged.append({"verdict": NOT_COVERED, "reason": f"{lost} {_NO_MEAN}", "n": 0, "pairs": []})
            continue
        known = zip(*(each["pairs"] for each in alike), strict=True)
        apart = any(far_apart(_with_half(pair) for pair in of if pair["high"] is not None) for of in known)
        one_way = {each["verdict"] for each in alike} in ({HOLDS}, {REVERSED})
        judged.append({"verdict": DEPENDS if apart and not one_way else row["verdict"]})
    return pd.DataFrame([row | more for row, more in zip(records(found), judged, strict=True)], columns=found.columns)


def _known(pair: Row) -> bool:
    """Whether something is known of a pair."""
    return bool(pair["diverged"]) or pair["difference"] is not None


def _with_half(pair: Row) -> tuple[float, float]:
    """A difference and half the length of its interval."""
    return pair["difference"], pair["high"] - pair["difference"]


def _beside(comparison: Comparison) -> Block:
    """Each variant with its published row."""
    rows, unit = records(comparison.published), comparison.noise["unit"]
    digits = max(len(f"{row['published']:.12g}".partition(".")[2]) for row in rows)
    column = partial(column_of, rows)
    columns = [
        column("variant", lambda row: row["variant"], "l"),
        column("published row", lambda row: row["row"], "l", 6),
    ]
    if not all(math.isnan(row["published"]) and not row["diverged"] for row in rows):
        columns += [
            column("ours", lambda row: number(row["perplexity"], ".3f")),
            column("published", lambda row: "diverged" if row["diverged"] else number(row["published"], f".{digits}f")),
            column(f"our Δ {unit}", lambda row: number(row["delta"], "+.4f")),
            column("verdict", lambda row: row["verdict"], "l"),
            column("published Δ", lambda row: number(row["published_delta"], "+.4f")),
            column("our rank", lambda row: number(row["rank"], "g")),
            column("published rank", lambda row: number(row["published_rank"], "g")),
        ]
    for name in dict.fromkeys(name for row in rows for name in row["numbers"]):
        pairs = [row["numbers"][name] for row in rows]
        if any(math.isfinite(ours) for ours, _ in pairs):
            cells = [Cell(f"{number(ours, '.4g')} / {number(theirs, '.4g')}") for ours, theirs in pairs]
            columns.append(Column(printable(f"{name}: ours / published"), cells, "r", 4))
    paper, source = comparison.paper, comparison.paper["source"]
    found_at = f", arXiv:{source['arxiv']}" if source["arxiv"] else ""
    title = printable(f"Published: {paper['caption'] or paper['table']} ({source['title']}{found_at})")
    legend = (
        "perplexity: ours on our test text, theirs as printed; published Δ: ln of the published perplexity over that "
        "of the baseline's row; ranks among the rows that have both, 1 the best, a diverged one last"
    )
    return Block(title, columns, legend)


def _agreement(comparison: Comparison) -> Block:
    rows = comparison.agreement
    column = partial(column_of, rows)

    def over(row: Row) -> str:
        kind = "all rows" if row["rows"] == "all" else "resolved rows"
        return f"{kind} without {len(row['without'])}" if row["without"] else kind

    def told(name: str, row: Row) -> str:
        if row[name] is None:
            return DASH
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return f"{row[name]:+.2f}" + ("" if low is None else f" [{low:+.2f}, {high:+.2f}]")

    columns = [column("over", over, "l"), column("n", lambda row: str(row["n"]))]
    if any(row["group"] for row in rows):
        columns.insert(0, column("cell", lambda row: row["group"] or DASH, "l"))
    for name, header in (("spearman", "Spearman's rho"), ("kendall", "Kendall's tau-b")):
        columns.append(column(header, partial(told, name)))
    left = sorted({name for row in rows for name in row["without"]})
    legend = (
        "95% intervals by Fisher's transformation, none with fewer than 4 rows for rho and 5 for tau: they take the "
        "rows for a sample of variants, and do not hold the noise of our seeds"
    )
    resolved = "resolved: those better or worse than the baseline or diverged at every seed, and the baseline"
    also = f"; left out: {', '.join(left)}" if left else ""
    return Block("Published: rank correlation with our order", columns, printable(f"{resolved}; {legend}{also}"))


def _claims(comparison: Comparison) -> Block:
    rows = records(comparison.claims)
    column = partial(column_of, rows, align="l")
    columns = [
        column("claim", _sentence, room=_CLAIM),
        column("our data", lambda row: row["verdict"]),
        column("n", lambda row: str(row["n"]) if row["n"] else DASH, align="r"),
        column("decided by", decided_by, room=_CLAIM),
    ]
    if any(row["group"] for row in rows):
        columns.insert(1, column("cell", lambda row: row["group"] or DASH))
    numbers = {(row["on"], _on_mean(row)): row["comparisons"] for row in rows if row["comparisons"]}
    kinds = [f"{count} on {name}{f', {GROUP}' if mean else ''}" for (name, mean), count in numbers.items()]
    shared = "; ".join(kinds)
    legend = (
        f"differences of the first variant to the second ({comparison.noise['unit']} for {PERPLEXITY}), n pairs of "
        "seeds at least. holds: every interval excludes zero as claimed; reversed: one excludes it the other way, "
        f"corrected for the pairs of its claim; claims on one number share 5% (Bonferroni: {shared or 'none'})"
    )
    return Block("Published: what our data say of the paper's claims", columns, printable(legend))


def _claims_over_cells(comparison: Comparison) -> Block:
    """How far each claim goes: in which of the study's cells, such as recipes, it holds, is reversed, or neither."""
    cells: dict[str, dict[str, str]] = {}
    means: dict[str, list[str]] = {}
    for row in records(comparison.claims):
        if _on_mean(row):
            cell = row["group"].partition(", ")[2]
            means.setdefault(_sentence(row), []).append(row["verdict"] + (f" ({cell})" if cell else ""))
        else:
            cells.setdefault(_sentence(row), {})[row["group"] or DASH] = row["verdict"]

    def where(row: Row, *verdicts: str) -> str:
        names = [cell for cell, verdict in cells[row["claim"]].items() if verdict in verdicts]
        count = len(cells[row["claim"]])
        return DASH if not names else f"all {count}" if len(names) == count else "; ".join(names)

    rows = [{"claim": claim} for claim in cells]
    others = {verdict for found in cells.values() for verdict in found.values()} - {HOLDS, REVERSED}
    columns = [
        column_of(rows, "claim", lambda row: row["claim"], "l", room=_CLAIM),
        column_of(rows, "holds in", lambda row: where(row, HOLDS), "l"),
        column_of(rows, "reversed in", lambda row: where(row, REVERSED), "l"),
        column_of(rows, "neither in", lambda row: where(row, *others), "l"),
    ]
    if means:
        average = column_of(rows, "on average", lambda row: "; ".join(means.get(row["claim"], [])) or DASH, "l")
        columns.insert(1, average)
    return Block(
        "Published: how far each claim goes",
        columns,
        "in which cells each claim is decided; on average: by the mean of its differences under all recipes, unless "
        "these are further apart than noise allows"
        if means
        else "a claim that holds in some cells only depends on what they change",
    )


def _on_mean(row: Row) -> bool:
    """Whether a claim was judged by the mean of the differences under all recipes."""
    return str(row["group"]).startswith(GROUP)


def _sentence(row: Row) -> str:
    margin = f"within {row['margin']:g}" if row["margin"] and row["margin"] > 0 else ""
    told = ", ".join(part for part in (row["where"], margin) if part)
    return str(row["claim"]) + (f" ({told})" if told else "")


def decided_by(row: Row) -> str:
    """The pair on which a verdict rests most: the least sure one where all must hold, else the clearest of those that
    were decided otherwise; and how many of them there are."""
    if not row["pairs"]:
        return str(row["reason"])
    deciding = [pair for pair in row["pairs"] if pair["decides"]]
    equal = bool(row["margin"] and row["margin"] > 0)
    first = max(deciding, key=_sure if row["verdict"] == REVERSED else partial(_position, equal=equal))
    more = f"; {len(deciding)} of {len(row['pairs'])} pairs" if len(row["pairs"]) > 1 else ""
    return f"{pair_text(first)}{more}"


def _sure(pair: Row) -> float:
    """How far the nearer end of a reversed pair's interval is on the other side."""
    return math.inf if pair["diverged"] else float(min(abs(pair["low"]), abs(pair["high"])))


def _position(pair: Row, equal: bool) -> float:
    """How far a pair is on the wrong side of what is claimed; where nothing is known of it, furthest."""
    if pair["diverged"]:
        return math.inf if pair["diverged"] == pair["lower"] else -math.inf
    if pair["high"] is None:
        return math.inf
    return float(max(abs(pair["low"]), abs(pair["high"])) if equal else pair["high"])


def pair_text(pair: Row) -> str:
    """One difference with its interval."""
    if pair["diverged"]:
        return f"{pair['diverged']} diverged in every trial"
    named = f"{pair['lower']} - {pair['than']}"
    if pair["difference"] is None:
        return f"{named}: no common seed"
    interval = "no interval" if pair["low"] is None else f"[{pair['low']:+.3g}, {pair['high']:+.3g}]"
    return f"{named}: {pair['difference']:+.3g} {interval}"

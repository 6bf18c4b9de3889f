"""What a ladder says of scaling, as frames: its rungs, what was fitted to them or why nothing could be, its lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.frames import records
from archlab.search.results.comparable import NO_DIFFERENCE, paired_means
from archlab.search.results.selection import Selection, with_tuned_size
from archlab.search.statistics import power_laws as scaling
from archlab.search.statistics.compute_gain import gain
from archlab.search.statistics.power_laws import Estimate, Floats, Unidentified

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

NAN = math.nan
ALL = "test"  # the loss of the whole test set; others are those of domains
MEAN = "mean of domains"
RUNGS = ["variant", "series", "rung", "parameters", "non_embedding", "tokens", "compute", "loss", "gain"]
LINES = ["series", "law", "at", "x", "loss", "low", "high"]
FITS = ["series", "of", "law", "at", "name", "value", "low", "high", "exact", "n", "why"]
Fit = tuple[str, str, str, float, str, float, float, float, bool, int, str]  # as FITS names its parts
_POINTS = 41  # of a line
OVER_N, OVER_C, SURFACE, ISOFLOP, BEST, GAIN = "power_n", "power_c", "surface", "isoflop", "best_size", "gain"

TOLD = {
    OVER_N: "no power law over parameters",
    OVER_C: "no power law over compute",
    SURFACE: "no L = E + A N^-alpha + B D^-beta",
    ISOFLOP: "no IsoFLOP minimum",
    GAIN: "no compute-equivalent gain",
}


@dataclass(frozen=True)
class Series:
    """The rungs of one variant that have a loss, in the order of the study."""

    name: str
    baseline: str  # the series that it is compared with
    crossed: bool  # whether sizes have several lengths
    rungs: tuple[str, ...]
    parameters: Floats
    tokens: Floats
    compute: Floats
    loss: Floats

    def part(self, places: Any) -> Series:
        """Some of its rungs."""
        rungs = tuple(self.rungs[int(place)] for place in places)
        numbers = (each[places] for each in (self.parameters, self.tokens, self.compute, self.loss))
        return Series(self.name, self.baseline, self.crossed, rungs, *numbers)

    def at(self, losses: dict[str, float]) -> Series:
        """The rungs that have another loss, with it."""
        places = np.array([i for i, rung in enumerate(self.rungs) if rung in losses], np.intp)
        new = self.part(places)
        return replace(new, loss=np.array([losses[rung] for rung in new.rungs], np.float64))


def scaling_frames(
    record: dict[str, Any], selections: list[Selection], table: pd.DataFrame, domains: pd.DataFrame, compared: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rungs of a study's ladder, and the fits of each series; both empty without a ladder.

    Gains need losses that compare: `compared` says whether tokens are one thing throughout the study. Those by domain
    need the same seeds on both sides, as domains have no paired differences.

    rungs: a row per variant: `parameters` and `non_embedding` ones, `tokens` trained on, `compute` in FLOPs of training
        (three forward passes, mask-aware), the TEST `loss` in nats/token, that of its baseline plus the paired
        difference, and `gain`, the compute-equivalent one along the baseline's curve.
    fits: a row per series, loss `of` ("test", a domain, "mean of domains"), law and constant: `value` with its 95%
        interval, NaN where the data bounds nothing, or where nothing is left over to make it from (`exact`); `at` is
        the compute of an IsoFLOP minimum, `n` the rungs used; or a row without a constant that says `why` the law was
        not fitted.
    """
    import pandas as pd

    ladder = record.get("ladder")
    if not ladder:
        return pd.DataFrame(columns=RUNGS), pd.DataFrame(columns=FITS)
    losses = dict(zip(table["variant"], table["loss_mean"], strict=True))
    rows = list(_rungs(record, selections, paired_means(records(table), "loss_mean") if compared else losses))
    found = _series(record, rows, size_of(ladder))
    others = _of_domains(rows, domains)
    fits: list[Fit] = []
    verdicts, bases = (dict(zip(table["variant"], table[name], strict=True)) for name in ("verdict", "baseline"))
    seeds = {each.variant: {*each.complete} for each in selections}
    for series in found.values():
        mine = [row["variant"] for row in rows if row["series"] == series.name]
        base = found[series.baseline] if compared and not {*map(verdicts.get, mine)} & {*NO_DIFFERENCE} else None
        fits += _fits(series, base, rows)
        paired = all(seeds[name] == seeds[bases[name]] for name in mine)
        for of, losses in others.get(series.name, {}).items():
            own = others.get(series.baseline, {}).get(of)
            fits += _simple(series.at(losses), base.at(own) if base and own and paired else None, of)
    return pd.DataFrame(rows, columns=RUNGS), pd.DataFrame(fits, columns=FITS)


def _rungs(record: dict[str, Any], selections: list[Selection], losses: dict[str, float]) -> Iterator[dict[str, Any]]:
    for plain, selection in zip(record["variants"], selections, strict=True):
        variant = with_tuned_size(plain, selection)
        ran = [t["result"].get("tokens") for t in selection.complete.values()]
        tokens = float(np.mean([t for t in ran if t] or [variant["tokens"]]))
        yield {
            "variant": variant["name"],
            **{key: variant[key] for key in ("series", "rung", "parameters", "non_embedding")},
            "tokens": tokens,
            "compute": variant["training_flops_per_token"] * tokens,
            "loss": losses[variant["name"]],
            "gain": NAN,
        }


def _series(record: dict[str, Any], rows: list[dict[str, Any]], count: str) -> dict[str, Series]:
    """The series by name, with those rungs that have a loss."""
    of = {variant["name"]: variant["series"] for variant in record["variants"]}
    bases = {variant["series"]: of[variant["baseline"]] for variant in record["variants"]}
    found = {}
    for name, base in bases.items():
        mine = [row for row in rows if row["series"] == name and math.isfinite(row["loss"])]
        numbers = [np.array([row[key] for row in mine], np.float64) for key in (count, "tokens", "compute", "loss")]
        crossed = record["ladder"]["lengths"] > 1
        found[name] = Series(name, base, crossed, tuple(row["rung"] for row in mine), *numbers)
    return found


def _of_domains(rows: list[dict[str, Any]], domains: pd.DataFrame) -> dict[str, dict[str, dict[str, float]]]:
    """Losses by series, domain and rung; where there are several domains their mean too."""
    place = {row["variant"]: (row["series"], row["rung"]) for row in rows}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in domains.to_dict("records"):
        series, rung = place[row["variant"]]
        found.setdefault(series, {}).setdefault(str(row["domain"]), {})[rung] = float(row["loss"])
    for own in found.values():
        if len(own) > 1:
            rungs = set.intersection(*(set(losses) for losses in own.values()))
            own[MEAN] = {rung: float(np.mean([losses[rung] for losses in own.values()])) for rung in rungs}
    return found


def _fits(series: Series, base: Series | None, rows: list[dict[str, Any]]) -> Iterator[Fit]:
    """Everything that is fitted to the test loss; notes each rung's gain in its row."""
    yield from _simple(series, base, ALL, rows)
    law = _Law(series, ALL)
    yield from law.of(SURFACE, lambda: scaling.surface(series.parameters, series.tokens, series.loss))
    best = []
    for places in scaling.isoflops(series.parameters, series.compute):
        part = series.part(places)
        at = float(np.exp(np.log(part.compute).mean()))
        try:
            low = scaling.minimum(part.parameters, part.tokens, part.compute, part.loss)
        except Unidentified as reason:
            yield law.row(ISOFLOP, len(places), at=at, why=str(reason))
            continue
        best.append(low)
        for name, value in {"N": low.parameters, "D": Estimate(low.tokens), "L": Estimate(low.loss)}.items():
            yield law.row(ISOFLOP, len(places), at=at, name=name, value=value)
    if len(best) > 1:
        computes = np.array([each.compute for each in best])
        sizes = np.array([each.parameters.value for each in best])
        grown = scaling.power_law(computes, 1 / sizes)["b"]  # N = k C^a is 1/N = (1/k) C^-a
        yield law.row(BEST, len(best), name="a", value=grown)


def _simple(series: Series, base: Series | None, of: str, rows: list[dict[str, Any]] | None = None) -> Iterator[Fit]:
    """Power laws and the gain, of any loss."""
    law = _Law(series, of)
    edge = series.part(scaling.frontier(series.compute, series.loss)) if series.crossed else series
    if not series.crossed:
        yield from law.of(OVER_N, lambda: scaling.power_law(series.parameters, series.loss))
    yield from law.of(OVER_C, lambda: scaling.power_law(edge.compute, edge.loss), len(edge.rungs))
    if base is None or base.name == series.name:
        return
    steps = [base.rungs[int(i)] for i in scaling.frontier(base.compute, base.loss)] if base.crossed else base.rungs
    shared = [rung for rung in steps if rung in series.rungs]
    ours, theirs = (each.part([each.rungs.index(rung) for rung in shared]) for each in (series, base))
    try:
        found = gain(theirs.compute, theirs.loss, ours.compute, ours.loss)
    except Unidentified as reason:
        yield law.row(GAIN, len(shared), why=str(reason))
        return
    yield law.row(GAIN, len(shared), name="gain", value=found.gain)
    if math.isfinite(found.trend.value):
        yield law.row(GAIN, len(shared), name="trend", value=found.trend)
    at = dict(zip(shared, found.rungs, strict=True))
    for row in rows or ():
        if row["series"] == series.name:
            row["gain"] = at.get(row["rung"], NAN)


@dataclass(frozen=True)
class _Law:
    """Makes the rows of one series and loss."""

    series: Series
    of_loss: str

    def of(self, law: str, fit: Callable[[], dict[str, Estimate]], n: int | None = None) -> Iterator[Fit]:
        """A row per constant, or the reason that there is none."""
        count = len(self.series.rungs) if n is None else n
        try:
            found = fit()
        except Unidentified as reason:
            yield self.row(law, count, why=str(reason))
            return
        yield from (self.row(law, count, name=name, value=value) for name, value in found.items())

    def row(
        self, law: str, n: int, *, at: float = NAN, name: str = "", value: Estimate | None = None, why: str = ""
    ) -> Fit:
        found = value or Estimate(NAN)
        low, high = (NAN if end is None else end for end in (found.low, found.high))
        exact = bool(value and value.exact)
        return self.series.name, self.of_loss, law, at, name, found.value, low, high, exact, n, why


def scaling_lines(rungs: pd.DataFrame, ladder: dict[str, Any]) -> pd.DataFrame:
    """A row per point of a line of what scaling_frames fits to the test loss.

    `law` is the power law over compute or over parameters, `x` its compute (FLOPs) or N, over the range of the rungs
    that it was fitted to, `low` and `high` its 95% t band, NaN where nothing is left over to make one from; or the
    parabola at the compute `at`, which has no band. `ladder` is that of a study's record.
    """
    import pandas as pd

    size = size_of(ladder)
    rows: list[tuple[Any, ...]] = []
    for name, own in rungs[np.isfinite(rungs["loss"])].groupby("series", sort=False) if len(rungs) else ():
        parameters, compute, loss = (np.asarray(own[key], np.float64) for key in (size, "compute", "loss"))
        edge = scaling.frontier(compute, loss) if ladder["lengths"] > 1 else np.arange(len(own))
        lines = {OVER_C: (compute[edge], loss[edge])} | ({OVER_N: (parameters, loss)} if ladder["lengths"] == 1 else {})
        for law, (x, y) in lines.items():
            with suppress(Unidentified):  # the frame of the fits says why
                rows += [(name, law, NAN, *point) for point in _band(x, y)]
        for places in scaling.isoflops(parameters, compute):
            at = float(np.exp(np.log(compute[places]).mean()))
            with suppress(Unidentified):
                rows += [(name, ISOFLOP, at, *point) for point in _parabola(parameters[places], loss[places])]
    return pd.DataFrame(rows, columns=LINES)


def size_of(ladder: dict[str, Any]) -> str:
    """The column of the rungs that N is."""
    return "non_embedding" if ladder["count"] == "non_embedding" else "parameters"


def _band(x: Floats, loss: Floats) -> Iterator[tuple[float, float, float, float]]:
    at = np.geomspace(x.min(), x.max(), _POINTS) if len(x) else x
    for where, found in zip(at, scaling.power_line(x, loss, at), strict=True):
        low, high = (NAN if end is None else end for end in (found.low, found.high))
        yield float(where), found.value, low, high


def _parabola(parameters: Floats, loss: Floats) -> Iterator[tuple[float, float, float, float]]:
    if scaling.distinct(parameters) < 3:
        return
    fit, centre = scaling.parabola(parameters, loss)
    for at in np.geomspace(parameters.min(), parameters.max(), _POINTS):
        z = math.log(at) - centre
        yield float(at), float(fit.solution @ np.array([1.0, z, z * z])), NAN, NAN

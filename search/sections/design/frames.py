"""What one component, or one axis of a grid, does: differences paired over everything else that a study varies.

A factor is a component that some variants have ("with") and others lack ("without"), an axis of the grid, the rungs of
a ladder, or the row: the variant as the study writes it, before it was crossed with these. A pair are two variants that
differ in it alone, and so have equal levels of all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its special is imported when it is used: an eighth of a second

from archlab.search.results.comparable import NO_DIFFERENCE, lossy_of, objective_of

if TYPE_CHECKING:
    import pandas as pd  # when a frame is made: a quarter of a second

    from archlab.search.results.comparison import Comparison

NAN = math.nan
WITH, WITHOUT = "with", "without"
RUNG, ROW = "rung", "row"
Variants = Sequence[Mapping[str, Any]]
Cell = tuple[tuple[str, str], ...]  # the levels of some factors
Losses = dict[str, dict[int, float]]
_COLUMN = {"nats/token": "test_loss", "bits/byte": "test_bits_per_byte"}


def factors(variants: Variants) -> dict[str, tuple[str, ...]]:
    """The factors of a study's variants, each with its levels: the row first, of components "without" before "with".

    A row is none where some variants are components alone: they are told apart by these, and have none.
    """
    own = levels_of(variants).values()
    names = dict.fromkeys(name for levels in own for name in levels)
    found = {name: tuple(dict.fromkeys(levels[name] for levels in own if name in levels)) for name in names}
    found = {name: (WITHOUT, WITH) if {*levels} == {WITH, WITHOUT} else levels for name, levels in found.items()}
    if not all(ROW in levels for levels in own):
        found.pop(ROW, None)
    return {name: levels for name, levels in found.items() if len(levels) > 1}


def level_name(factor: str, level: str) -> str:
    """A level as people say it: `with G1`, `without G1`, `n_layers=4`, of a row and of a rung its name."""
    if level in (WITH, WITHOUT):
        return f"{level} {factor}"
    return level if factor in (ROW, RUNG) else f"{factor}={level}"


def factor_name(factor: str) -> str:
    """A factor as people say it: the row is the variant that a study writes, over all cells of its grid or recipes."""
    return "variant" if factor == ROW else factor


def paired(variants: Variants) -> list[str]:
    """The factors that have pairs: in which some variant at another level differs from one at the first level alone."""
    levels, found = levels_of(variants).values(), []
    for name, (first, *_) in factors(variants).items():
        cells: dict[Cell, set[str]] = {}
        for own in levels:
            if name in own:
                cells.setdefault(_without(own, (name,)), set()).add(own[name])
        if any(first in each and len(each) > 1 for each in cells.values()):
            found.append(name)
    return found


def always_with(variants: Variants, factor: str) -> list[str]:
    """Which other factors differ wherever two variants differ in this one."""
    own = [each for each in levels_of(variants).values() if factor in each]
    unlike = [(one, two) for one, two in itertools.combinations(own, 2) if one[factor] != two[factor]]
    others = [name for name in factors(variants) if name != factor]
    return [name for name in others if all(one.get(name) != two.get(name) for one, two in unlike)]


def pairs_frame(variants: Variants, comparison: Comparison, factor: str) -> pd.DataFrame:
    """A row per pair and seed that both have: `level` against the factor's first one, the `cell` (the levels of all
    other factors), `variant` and `reference`, the `difference` of their TEST losses in the unit of the table, and
    `paired`: whether both saw the same batches. Where the factor changes what is asked, so that no losses compare,
    there are none."""
    import pandas as pd

    levels, losses = levels_of(variants), _losses(comparison)
    asked = {variant["name"]: _asked(variant, comparison.noise["unit"]) for variant in variants}
    batches = {variant["name"]: variant.get("batches") for variant in variants}
    first = factors(variants)[factor][0]
    places = {_without(own, (factor,)): name for name, own in levels.items() if own.get(factor) == first}
    rows = []
    for name, own in levels.items():
        reference = places.get(_without(own, (factor,)))
        if reference is None or name == reference or asked[name] != asked[reference]:
            continue
        for seed in sorted(losses.get(name, {}).keys() & losses.get(reference, {}).keys()):
            rows.append(
                {
                    "level": own[factor],
                    "cell": told(_without(own, (factor,))),
                    **{f"at {other}": level for other, level in own.items() if other != factor},
                    "variant": name,
                    "reference": reference,
                    "seed": seed,
                    "difference": losses[name][seed] - losses[reference][seed],
                    "paired": batches[name] == batches[reference],
                }
            )
    columns = ["level", "cell", *(f"at {each}" for each in factors(variants) if each != factor)]
    return pd.DataFrame(rows, columns=[*columns, "variant", "reference", "seed", "difference", "paired"])


def effects_frame(pairs: pd.DataFrame, noise: Mapping[str, Any], by: str | None = None) -> pd.DataFrame:
    """The mean difference of each level, over its cells alike, with a 95% interval; `by` another column, of each of its
    values too.

    The variance is that of the table: 2 sigma^2 / n of each of the C cells over C^2, sigma and its degrees of freedom
    pooled over all variants, and the variance of documents, as if every cell's documents were the same. Not corrected
    for how many effects are looked at. NaN where the table has no intervals, or has such that hold at any number of
    seeds, and where the factor changes the batches.
    """
    import pandas as pd

    rows = []
    keys = ["level"] if by is None else [by, "level"]
    for key, own in pairs.groupby(keys, sort=False):
        cells = own.groupby("cell", sort=False)["difference"].agg(["mean", "count"])
        variance = float((2 / cells["count"]).sum()) / len(cells) ** 2
        half = _half_width(variance, noise) if own["paired"].all() else NAN
        mean = float(cells["mean"].mean())
        at = {"at": key[0]} if by is not None else {}
        ends = {"mean": mean, "low": mean - half, "high": mean + half}
        rows.append({**at, "level": key[-1], **ends, "cells": len(cells), "pairs": int(cells["count"].sum())})
    columns = [*([] if by is None else ["at"]), "level", "mean", "low", "high", "cells", "pairs"]
    return pd.DataFrame(rows, columns=columns)


def all_effects(variants: Variants, comparison: Comparison) -> pd.DataFrame:
    """`effects_frame` of every factor of which some level has several cells, each row with its `factor` and the level
    that it is `against`; `larger` is the share by which its variants have more parameters. What has one cell alone
    stands in the table; what changes the batches is not paired.

    Of a fraction of a factorial, in which no two variants differ in one component alone, it is the mean of all that
    have it less that of all that lack it (Box and Hunter 1961), in `pairs` of as many, and not `paired`; the design
    says what that is mixed up with.
    """
    import pandas as pd

    found = []
    for factor in paired(variants):
        pairs = pairs_frame(variants, comparison, factor)
        effects = effects_frame(pairs, comparison.noise)
        if (effects["cells"] > 1).any() and pairs["paired"].all():
            larger = effects["level"].map(_larger(variants, pairs))
            against = factors(variants)[factor][0]
            found.append(effects.assign(factor=factor, against=against, larger=larger, paired=True))
    found += [pd.DataFrame([row]) for row in _main_effects(variants, comparison)]
    columns = ["factor", "level", "against", "mean", "low", "high", "cells", "pairs", "larger", "paired"]
    return pd.concat(found)[columns] if found else pd.DataFrame(columns=columns)


def _larger(variants: Variants, pairs: pd.DataFrame) -> dict[str, float]:
    """By level, by what share the variants of its pairs have more parameters than those that they are held against."""
    sizes = {variant["name"]: variant["parameters"] for variant in variants}
    own = pairs.groupby("level", sort=False)[["variant", "reference"]]
    return {
        str(level): each["variant"].map(sizes).sum() / each["reference"].map(sizes).sum() - 1 for level, each in own
    }


def _main_effects(variants: Variants, comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Of every component without pairs, where the variants of each cell of the grid are an orthogonal array."""
    own, with_pairs = levels_of(variants), set(paired(variants))
    names = [name for name, levels in factors(variants).items() if levels == (WITHOUT, WITH)]
    if with_pairs.issuperset(names) or all(ROW in levels for levels in own.values()):
        return
    losses = _losses(comparison)
    asked = {variant["name"]: [_asked(variant, ""), variant.get("batches")] for variant in variants}
    cells: dict[Cell, list[str]] = {}
    for name, levels in own.items():
        if ROW not in levels:
            cells.setdefault(_without(levels, names), []).append(name)
    effects, trials, squares = [], 0, 0.0
    for cell in cells.values():
        if not all(own[name].keys() >= {*names} for name in cell):
            return
        seeds = sorted(set.intersection(*({*losses.get(name, {})} for name in cell)))
        signs = np.array([[1 if own[name][factor] == WITH else -1 for factor in names] for name in cell])
        is_orthogonal = (signs.T @ signs == len(cell) * np.eye(len(names))).all() and not signs.sum(axis=0).any()
        if not seeds or not is_orthogonal or not _alike(asked[name] for name in cell):
            return
        means = np.array([np.mean([losses[name][seed] for seed in seeds]) for name in cell])
        effects.append(2 * signs.T @ means / len(cell))
        trials += len(cell) * len(seeds)
        squares += 4 / (len(cell) * len(seeds)) / len(cells) ** 2
    half = _half_width(squares, comparison.noise)
    for factor, mean in zip(names, np.mean(effects, axis=0), strict=True):
        if factor not in with_pairs:
            ends = {"mean": mean, "low": mean - half, "high": mean + half}
            counts = {"cells": len(cells), "pairs": trials // 2, "larger": NAN, "paired": False}
            yield {"factor": factor, "level": WITH, "against": WITHOUT, **ends, **counts}


def interactions_frame(variants: Variants, comparison: Comparison) -> pd.DataFrame:
    """A row per two factors of two levels: by how much the one's difference is larger where the other one is at its
    second level, (ab - b) - (a - 0), mean over the cells that have all four and the seeds that all four have, with the
    half width of its 95% interval (the variances of `effects_frame`, of four losses); NaN where four losses are of so
    many batches that a seed's luck with them does not cancel."""
    import pandas as pd

    levels, losses = levels_of(variants), _losses(comparison)
    asked = {variant["name"]: _asked(variant, comparison.noise["unit"]) for variant in variants}
    batches = {variant["name"]: variant.get("batches") for variant in variants}
    two = {name: own for name, own in factors(variants).items() if len(own) == 2}
    rows = []
    for a, b in itertools.combinations(two, 2):
        cells: dict[Cell, dict[tuple[str, str], str]] = {}
        for name, own in levels.items():
            if a in own and b in own:
                cells.setdefault(_without(own, (a, b)), {})[own[a], own[b]] = name
        whole = [cell for cell in cells.values() if len(cell) == 4 and _alike(asked[name] for name in cell.values())]
        values, counts, cancels = [], [], True
        for cell in whole:
            seen = [batches[cell[x, y]] for x in two[a] for y in two[b]]
            cancels &= sorted([seen[0], seen[3]], key=str) == sorted(seen[1:3], key=str)  # those added, those taken off
            four = [losses.get(cell[x, y], {}) for x in two[a] for y in two[b]]
            if seeds := set.intersection(*map(set, four)):
                neither, second, first, both = (float(np.mean([own[seed] for seed in seeds])) for own in four)
                values.append(both - second - first + neither)
                counts.append(len(seeds))
        if values:
            half = _half_width(sum(4 / count for count in counts) / len(values) ** 2, comparison.noise)
            half = half if cancels else NAN
            rows.append({"one": a, "other": b, "value": float(np.mean(values)), "half": half, "cells": len(values)})
    return pd.DataFrame(rows, columns=["one", "other", "value", "half", "cells"])


def told(cell: Cell) -> str:
    """The levels of a cell for people: components that are there by name."""
    parts = [name if level == WITH else level_name(name, level) for name, level in cell if level != WITHOUT]
    return " + ".join(parts)


def levels_of(variants: Variants) -> dict[str, dict[str, str]]:
    """variant -> {factor: level}; one that lacks a factor has no level of it."""
    return {
        variant["name"]: {
            **({ROW: variant[ROW]} if variant.get(ROW) else {}),
            **{name: WITH if there else WITHOUT for name, there in (variant.get("components") or {}).items()},
            **(variant.get("axes") or {}),
            **({RUNG: variant[RUNG]} if variant.get(RUNG) else {}),
        }
        for variant in variants
    }


def _without(levels: Mapping[str, str], names: Sequence[str]) -> Cell:
    return tuple((name, level) for name, level in levels.items() if name not in names)


def _asked(variant: Mapping[str, Any], unit: str) -> list[Any]:
    """What a loss in this unit depends on beside the model: objective, test text, tokenizer."""
    tokens = round(variant.get("bytes_per_token") or 0.0, 4) if unit == "nats/token" else None
    return [objective_of(variant), variant.get("test"), lossy_of(variant), tokens]


def _alike(asked: Iterable[list[Any]]) -> bool:
    first, *others = asked
    return all(each == first for each in others)


def _losses(comparison: Comparison) -> Losses:
    """variant -> {seed: test loss} of what the table compares."""
    column = _COLUMN[comparison.noise["unit"]]
    table = comparison.table
    kept = table[table["loss_mean"].notna() & ~table["verdict"].isin(list(NO_DIFFERENCE))]["variant"]
    trials = comparison.trials
    trials = trials[trials["reported"] & trials["variant"].isin(list(kept)) & trials[column].notna()]
    found: Losses = {}
    for variant, seed, loss in zip(*(trials[name] for name in ("variant", "seed", column)), strict=True):
        found.setdefault(variant, {})[int(seed)] = float(loss)
    return found


def _half_width(squares: float, noise: Mapping[str, Any]) -> float:
    """Half of a 95% t interval of so many sigma^2 and the documents. Seeds that were added after a look at the
    differences have none such."""
    if noise["critical_value"] is None or noise["always_valid"]:
        return NAN
    variance = squares * noise["seed_sd"] ** 2 + (noise["document_sd"] or 0.0) ** 2
    return float(scipy.special.stdtrit(noise["df"], 0.975)) * math.sqrt(variance)

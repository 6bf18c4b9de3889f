"""What a plan says in sentences: its components and its trials."""

from __future__ import annotations

from collections.abc import Iterator

from archlab.arch_dsl.language.errors import shorten
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.formatting.numbers import count
from archlab.search.planning.plan import Plan
from archlab.search.sections.design.lines import LONGEST, component_lines, design_lines
from archlab.search.sections.tune.spec import Tune, short
from archlab.search.variants.patches import spelt
from archlab.search.variants.variant import Variant


def ticked(planned: Plan) -> list[str]:
    """The components that a plan shows as columns: those of a design, or where variants are made of several."""
    names = list(planned.variants[0].components)
    return names if planned.study.design or len(names) > 1 else []


def also_changed_lines(planned: Plan) -> Iterator[str]:
    """What variants shown by their components change beside these."""
    if not ticked(planned):
        return
    for name, patch in planned.study.variants.items():
        if own := spelt(setting for setting in patch.settings if setting.path):
            yield f"{name} also changes {'; '.join(shorten(text, LONGEST) for text in own)}"


def made_of_lines(planned: Plan) -> Iterator[str]:
    """The design, or what the components change that stand in the table."""
    record = planned.study.design.record(planned) if planned.study.design else {"components": []}
    others = {n: spelt(planned.study.components[n].settings) for n in ticked(planned) if n not in record["components"]}
    if planned.study.design:
        yield from design_lines(record)
    if others:
        yield from component_lines(others, {}, "other components" if planned.study.design else "components")


def _ends(planned: Plan) -> tuple[Variant, Variant]:
    """The variants with the fewest and with the most tokens."""
    ordered = sorted(planned.variants, key=lambda variant: variant.recipe.tokens)
    return ordered[0], ordered[-1]


def trials_line(planned: Plan) -> str:
    """How many trials of how many tokens, and what they are for."""
    recipe = planned.variants[0].recipe
    batch = f"{recipe.ramp.start} to {recipe.sequences}" if recipe.ramp else str(recipe.sequences)
    each = f"{count(recipe.tokens)} tokens ({recipe.steps} steps of {batch} x {recipe.context})"
    if planned.study.ladder:
        each = " to ".join(dict.fromkeys(count(v.recipe.tokens) for v in _ends(planned))) + " tokens"
    if planned.study.tune:
        how = f"{_tuning(planned.study.tune)} with one seed, then the best with {_seeds(planned)}"
    else:
        how = _seeds(planned)
    tune = planned.study.tune
    grows = tune is not None and any(tune.steps(path) for path in tune.axes)
    fixed = isinstance(planned.study.seeds, int) and not planned.beside
    most = "" if fixed else "about " if grows else "at most "
    text = f"{len(planned.variants)} variants x {how}: {most}{planned.trials} trials of {each}"
    text += f", {len(planned.beside)} probes among them" if planned.beside else ""
    if search := planned.study.search:
        text += f"; {search.trials} of them proposed by {search.sampler.type} as results come in, for less "
        text += " and ".join(goal.replace("_", " ") for goal in search.minimize)
        limits = [f"{value:,.10g} {name.replace('_', ' ')}" for name, value in search.constraints.values().items()]
        text += f", each with at most {' and '.join(limits)}" if limits else ""
    return text


def _seeds(planned: Plan) -> str:
    seeds = planned.study.seeds
    if isinstance(seeds, int):
        return f"{seeds} seeds"
    margin = "" if seeds.margin is None else f", or equivalent within {seeds.margin:g}"
    return f"{seeds.min} to {seeds.max} seeds (until the difference is resolved{margin})"


def _tuning(tune: Tune) -> str:
    """The values that every variant tries."""
    points, paths = tune.points, [short(path) for path in tune.axes]
    texts = [", ".join(brief_text(value) for value in axis.values) for axis in tune.axes.values()]
    how = f"{len(points)} rates ({texts[0]})"
    if paths != ["lr"]:
        listed = "; ".join(f"{path}: {text}" for path, text in zip(paths, texts, strict=True))
        how = f"{len(points)} settings ({listed})"
    steps = max(tune.steps(path) for path in tune.axes)
    how += f", up to {steps} more on a side while the best lies at the edge," if steps else ""
    if tune.brackets and len(points) > 1:
        rungs = " and ".join(f"{share:.0%}" for share in tune.brackets.rungs)
        how += f" of which the best {tune.brackets.keep:.0%} go on at {rungs} of the steps,"
    return how

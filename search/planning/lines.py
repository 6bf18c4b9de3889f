"""What a plan says in sentences: its components, its ladder, its trials, its screen."""

from __future__ import annotations

from collections.abc import Iterator

from archlab.arch_dsl.language.errors import shorten
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.formatting.numbers import count
from archlab.search.planning.plan import Plan
from archlab.search.sections.design.lines import LONGEST, component_lines, design_lines
from archlab.search.sections.screen.decide import most_left_out, probe_tokens, sentences, tokens_of
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
    record = planned.design() if planned.study.design else {"components": []}
    others = {n: spelt(planned.study.components[n].settings) for n in ticked(planned) if n not in record["components"]}
    if planned.study.design:
        yield from design_lines(record)
    if others:
        yield from component_lines(others, {}, "other components" if planned.study.design else "components")


def _ends(planned: Plan) -> tuple[Variant, Variant]:
    """The variants with the fewest and with the most tokens."""
    ordered = sorted(planned.variants, key=lambda variant: variant.recipe.tokens)
    return ordered[0], ordered[-1]


def ladder_lines(planned: Plan) -> Iterator[str]:
    """How a ladder trains its baseline, rung by rung."""
    if planned.study.ladder:
        yield "ladder, as it trains the baseline:"
    for variant in planned.variants if planned.study.ladder else ():
        if variant.base == planned.study.report.baseline:
            recipe, stack = variant.recipe, [*variant.model.stacks().values()][-1]
            flops = count(float(variant.figures["training_flops_per_token"] * recipe.tokens))
            steps = f"{recipe.steps} steps of {recipe.sequences} x {recipe.context}, lr {recipe.lr:g}"
            sizes = f"{stack.n_layers} layers of {variant.model.d_model}"
            yield f"  {variant.rung}: {sizes}, {count(recipe.tokens)} tokens ({steps}), {flops} FLOPs"
    for name, found in planned.coordinates.items():
        site, power = next(iter(found.powers.items()))
        widths = ", ".join(map(str, found.widths))
        told = f"at most as width^{power:.2f} (at least {found.least[site]:.2f}), at {site}"
        yield f"muP of {name}: over the widths {widths} coordinates grow {told}"


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
    fixed = isinstance(planned.study.seeds, int) and not planned.probes
    most = "" if fixed else "about " if grows else "at most "
    text = f"{len(planned.variants)} variants x {how}: {most}{planned.trials} trials of {each}"
    text += f", {len(planned.probes)} probes among them" if planned.probes else ""
    if search := planned.study.search:
        text += f"; {search.trials} of them proposed by {search.sampler.type} as results come in, for less "
        text += " and ".join(goal.replace("_", " ") for goal in search.minimize)
        limits = [f"{value:,.10g} {name.replace('_', ' ')}" for name, value in search.constraints.values().items()]
        text += f", each with at most {' and '.join(limits)}" if limits else ""
    return text


def screen_lines(planned: Plan) -> Iterator[str]:
    """What the probes of a screen take and may save, and what they have said so far."""
    if planned.study.screen is None:
        return
    record, probe = planned.record(), planned.probes[planned.variants[0].name]
    every, most = tokens_of(record, planned.probes), most_left_out(record)
    largest = sum(sorted(tokens_of(record, [name]) for name in planned.probes)[len(planned.probes) - most :])
    yield (
        f"before that a screen: {len(planned.probes)} probes of {count(probe.recipe.all_tokens)} tokens of "
        f"{probe.dataset.record()['source']}, {count(probe_tokens(record))} in all; it may leave out up to {most} of "
        f"{len(planned.variants)} variants, and save up to {count(largest)} of {count(every)} tokens"
    )
    if planned.screened is not None and planned.screened.probes:
        yield from sentences(record, planned.screened)


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

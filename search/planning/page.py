"""What `archlab plan` prints, and an editor shows: a row per variant, what would be trained, how long that takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from archlab.arch_dsl.language.errors import shorten
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.formatting.numbers import count, duration, plain_console, signed, size
from archlab.search.planning.auto_settings import lines as settled_lines
from archlab.search.planning.foreseen import foreseen
from archlab.search.planning.known import Known
from archlab.search.planning.plan import Plan
from archlab.search.recipe.initial_weights import start_lines
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.stages import stage_lines
from archlab.search.sections.budget.spec import standing
from archlab.search.sections.design.lines import LONGEST, component_lines, design_lines
from archlab.search.sections.evaluate.wanted import to_measure
from archlab.search.sections.recipes.average import AXIS
from archlab.search.sections.tune.spec import Tune, short
from archlab.search.variants.patches import spelt
from archlab.search.variants.variant import Variant

_ROWS = 200  # variants that a plan prints
_FEW = 8  # variants that share a line
_FIGURES = 40  # characters that the numbers of a variant take in a plan


def plan_json(planned: Plan, root: Path, slots: int | None = None) -> dict[str, Any]:
    """A plan as JSON: its record, the number of trials, how many have a result, and the estimate in seconds."""
    known = Known.of(planned, root)
    return {
        **planned.record(),
        "trials": planned.trials,
        "done": known.done,
        "left": planned.left(known.done),
        "estimate": asdict(known.guess(planned, root, slots)),
        "resolution": asdict(known.resolution) if known.resolution else None,
        "edits": known.edits,
        "measuring": asdict(to_measure(planned.study.evaluate, planned, root)),
        "settled": asdict(planned.builder.settled) if planned.builder.settled else None,
        "going_on": asdict(known.going_on) if known.going_on else None,
        "spent": {
            "trials": len(known.spent.trials),
            "tokens": known.spent.tokens,
            "gpu_hours": round(known.spent.gpu_s / 3600, 4),
        },
    }


def print_plan(planned: Plan, root: Path, slots: int | None = None) -> None:
    """A row per variant, then what would be trained and how long that takes with so many trials at once."""
    console = plain_console()
    console.print(Text.assemble((planned.study.study, "bold"), f"  {planned.study.question}"))
    for line in chain(_head(planned), _print_variants(console, planned), _lines(planned, root, slots)):
        console.print(Text(line))


def plan_sentences(planned: Plan, root: Path, slots: int | None = None) -> dict[str, Any]:
    """The same for a page: `lines`, and of the first variants `variants`, each with its name, `changes` and numbers."""
    added = planned.added()
    rows = [
        {
            "name": variant.name,
            "changes": list(map(str, variant.changes)),
            "parameters": f"{variant.parameters:,}",
            "more": _more(planned, variant, added),
            "flops": count(variant.flops_per_token),
        }
        for variant in planned.variants[:_ROWS]
    ]
    lines = [*_head(planned), *_below(planned, []), *_lines(planned, root, slots)]
    return {"more": _more_of(planned), "variants": rows, "lines": lines}


def _head(planned: Plan) -> Iterator[str]:
    if planned.study.include:
        yield f"includes {', '.join(planned.study.include)}"
    if others := [name for name in planned.study.scales if name != planned.study.scale]:
        yield f"scale {planned.study.scale}; `--set scale=NAME` for {', '.join(others)}"


def _more_of(planned: Plan) -> str:
    """What the column beside the parameters holds."""
    return "mismatch" if planned.study.match else "added"


def _more(planned: Plan, variant: Variant, added: Mapping[str, int]) -> str:
    return f"{variant.mismatch:+.2%}" if planned.study.match else signed(added[variant.name])


def _lines(planned: Plan, root: Path, slots: int | None) -> Iterator[str]:
    known = Known.of(planned, root)
    done, left = known.done, planned.left(known.done)
    told = f"; {done} of them have a result, {left} are left, as far as is known" if done else ""
    if done and not left:
        told = f"; all that are wanted have a result ({done}): the study is complete"
    yield _trials_line(planned) + told
    for section in planned.study.sections:
        yield from section.lines(planned)
    if known.going_on:
        yield str(known.going_on)
    yield from _data_lines(planned.variants[0])
    if planned.absent:
        yield f"not downloaded yet: {'; '.join(planned.absent)}; `archlab run` does that first"
    if left or not done:
        guess = known.guess(planned, root, slots)
        evaluated = f", {duration(guess.evaluate_s)} of them to evaluate" if guess.evaluate_s > guess.core_s / 4 else ""
        core = f"{duration(guess.core_s)} of one core{evaluated}; from {guess.source}"
        yield f"about {duration(guess.wall_s)} on {guess.slots} cores ({core})"
        yield f"{size(guess.memory_bytes)} of memory for the tensors of the largest trial, or somewhat more"
    if known.resolution:
        yield str(known.resolution)
    recipes = [variant.recipe for variant in planned.variants]
    yield from settled_lines(planned.builder.settled, planned.study.train, recipes)
    yield from to_measure(planned.study.evaluate, planned, root).lines()
    yield from foreseen(planned.variants)
    yield from (f"edited: {line}" for line in known.edits)
    if budget := standing(planned.study.budget, known.spent):
        yield budget
    yield "nothing was trained"


def _print_variants(console: Console, planned: Plan) -> Iterator[str]:
    """Prints a row per variant, with its components or changes and its sizes; then says what the columns mean."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = list(planned.variants[0].components)
    if not planned.study.design and len(shown) < 2:
        shown = []  # a column for one component says no more than the variant's name
    room = console.width - _FIGURES - max(len(variant.name) for variant in planned.variants[:_ROWS])
    numbered = sum(len(name) + 2 for name in shown) > room
    table.add_column("variant")
    for index, name in enumerate(shown, 1):
        table.add_column(str(index) if numbered else Text(name), justify="center")
    if not shown:
        table.add_column("changes from the base")
    table.add_column("parameters", justify="right")
    sparse = any(variant.figures["active_parameters"] < variant.parameters for variant in planned.variants)
    if sparse:
        table.add_column("active", justify="right")
    table.add_column(_more_of(planned), justify="right")
    table.add_column("FLOPs/token", justify="right")
    added = planned.added()
    for variant in planned.variants[:_ROWS]:
        said = "\n".join(map(str, variant.changes)) or "none"
        cells = [Text("✓" if variant.components[name] else "") for name in shown] or [Text(said)]
        flops = count(variant.flops_per_token)
        sizes = [variant.parameters, *([variant.figures["active_parameters"]] if sparse else [])]
        table.add_row(
            Text(variant.name), *cells, *(f"{size:,}" for size in sizes), _more(planned, variant, added), flops
        )
    console.print(table)
    if numbered:
        yield "columns: " + ", ".join(f"{index} {name}" for index, name in enumerate(shown, 1))
    yield from _below(planned, shown)


def _below(planned: Plan, shown: list[str]) -> Iterator[str]:
    """What must be known to read the rows, of which those `shown` have a column for each component."""
    if len(planned.variants) > _ROWS:
        yield f"… and {len(planned.variants) - _ROWS:,} more variants (--json shows all)"
    yield from _component_lines(planned, shown)
    for variant in planned.variants:
        if variant.start:
            yield from start_lines(variant.name, variant.start)
    stages: dict[str, list[str]] = {}
    for variant in planned.variants:
        for line in stage_lines(variant.stages):
            stages.setdefault(line, []).append(variant.name)
    for line, names in stages.items():
        few = ", ".join(names[:_FEW]) + " …" * bool(names[_FEW:])
        yield line if len(names) == len(planned.variants) else f"{few}: {line}"


def _data_lines(first: Variant) -> Iterator[str]:
    data = first.dataset.record()
    if first.dataset.absent:
        yield f"data: {data['source']}, {data['tokenizer']}"
        return
    each = first.recipe.epochs(first.dataset)
    epochs = f"{each[0]:.2g} epochs" if len(each) == 1 else f"{len(each)} domains"
    density = f", {data['bytes_per_token']:.3g} bytes per token" if "bytes_per_token" in data else ""
    tokens = f"{count(data['train_tokens'])} training tokens{density} ({epochs})"
    yield f"data: {data['source']}, {data['tokenizer']}, {tokens}, {data['identity']}"
    for row, read_times in zip(data.get("domains", ()), each, strict=False):
        yield f"  {row['name']}: {row['share']:.1%} of the rows, {read_times:.2g} epochs"


def _component_lines(planned: Plan, shown: list[str]) -> Iterator[str]:
    """What variants shown by their components change beside these; the design, or what the components change."""
    study = planned.study
    for name, patch in study.variants.items() if shown else ():
        if own := spelt(setting for setting in patch.settings if setting.path):
            yield f"{name} also changes {'; '.join(shorten(text, LONGEST) for text in own)}"
    record = study.design.record(planned) if study.design else {"components": []}
    if study.design:
        yield from design_lines(record)
    if others := {n: spelt(study.components[n].settings) for n in shown if n not in record["components"]}:
        yield from component_lines(others, {}, "other components" if study.design else "components")


def _trials_line(planned: Plan) -> str:
    recipe = planned.variants[0].recipe
    lengths = [variant.recipe.tokens for variant in planned.variants]
    each = " to ".join(dict.fromkeys(map(count, (min(lengths), max(lengths))))) + " tokens"
    under = planned.variants[0].axes.get(AXIS)  # the other recipes have lines of their own
    steps = {_steps(variant.recipe) for variant in planned.variants if variant.axes.get(AXIS) == under}
    if len(steps) == 1:
        each += f" ({steps.pop()})"
    if (search := planned.study.search) and search.promote:
        shortest = search.promote[0].tokens or planned.study.train.tokens
        each = f"{count(shortest)} to {count(recipe.tokens)} tokens"
    if planned.study.tune:
        close = ", the best two with a second" if planned.contested else ""
        how = f"{_tuning(planned.study.tune)} with one seed{close}, then the best with {_seeds(planned)}"
    else:
        how = _seeds(planned)
    tune = planned.study.tune
    grows = planned.contested or (tune is not None and any(tune.steps(path) for path in tune.axes))
    fixed = isinstance(planned.study.seeds, int) and not planned.beside
    most = "about " if grows else "" if fixed else "at most "
    text = f"{len(planned.variants)} variants x {how}: {most}{planned.trials} trials of {each}"
    text += f", {len(planned.beside)} probes among them" if planned.beside else ""
    if search := planned.study.search:
        text += f"; {search.trials} of them proposed by {search.sampler.type} as results come in, for less "
        text += " and ".join(goal.replace("_", " ") for goal in search.minimize)
        limits = [f"{value:,.10g} {name.replace('_', ' ')}" for name, value in search.constraints.values().items()]
        text += f", each with at most {' and '.join(limits)}" if limits else ""
    return text


def _steps(recipe: Recipe) -> str:
    batch = f"{recipe.ramp.start} to {recipe.sequences}" if recipe.ramp else str(recipe.sequences)
    return f"{recipe.steps} steps of {batch} x {recipe.context}"


def _seeds(planned: Plan) -> str:
    seeds = planned.study.seeds
    if isinstance(seeds, int):
        return f"{seeds} seeds"
    margin = "" if seeds.margin is None else f", or equivalent within {seeds.margin:g}"
    return f"{seeds.min} to {seeds.max} seeds (until the difference is resolved{margin})"


def _tuning(tune: Tune) -> str:
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

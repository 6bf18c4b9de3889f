"""What the command line prints: plans, trees, kernels, primitives, findings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arch_dsl.catalogue import describe, families, find
from arch_dsl.errors import shorten
from arch_dsl.identity import brief_text
from search.budget import Spent, limits_of, spent_of, standing
from search.design_text import LONGEST, component_lines, design_lines
from search.doctor import Finding
from search.edits import edits
from search.estimate import estimate
from search.measure_plan import to_measure
from search.noise import Resolution, resolution
from search.planning import Plan, Variant, spelt
from search.prefixes import GoingOn, going_on
from search.resources import Room
from search.screening import most_left_out, probe_tokens, sentences, tokens_of
from search.settled import lines as settled_lines
from search.stage_plans import stage_lines
from search.start import start_lines
from search.stop import Summary
from search.store import Store
from search.tune import Tune, short

_ROWS = 200  # variants that a plan prints
_FIGURES = 40  # characters that the numbers of a variant take in a plan
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def plain_console() -> Console:
    """Plain when not a terminal, and then wide enough for tables to stay whole."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 140))


def count(number: float) -> str:
    """1234567 as 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """1234567 bytes as 1.23 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"


def signed(number: int) -> str:
    """How much more or less, or nothing for 0."""
    return f"{'+' if number > 0 else '-'}{count(abs(number))}" if number else ""


def duration(seconds: float) -> str:
    """4000 s as 1h 07m."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 90 else f"{minutes // 60}h {minutes % 60:02d}m"


# plan


def plan_json(planned: Plan, root: Path, slots: int | None = None) -> dict[str, Any]:
    """A plan as JSON: its record, the number of trials, how many have a result, and the estimate in seconds."""
    done = _done(planned, root)
    left = planned.left(done)
    guess = asdict(estimate(planned, root, slots or _here(planned), done if left else planned.trials))
    found = _resolution(planned, root)
    spent = _spent(planned, root)
    told = {
        "resolution": asdict(found) if found else None,
        "edits": _edits(planned, root),
        "measuring": asdict(to_measure(planned, root)),
        "settled": planned.builder.settled.record() if planned.builder.settled else None,
        "going_on": asdict(longer) if (longer := _going_on(planned, root)) else None,
        "spent": {"trials": len(spent.trials), "tokens": spent.tokens, "gpu_hours": round(spent.gpu_s / 3600, 4)},
    }
    return {**planned.record(), "trials": planned.trials, "done": done, "left": left, "estimate": guess, **told}


def _resolution(planned: Plan, root: Path) -> Resolution | None:
    """The smallest difference that the plan can resolve."""
    if not (root / "store.json").exists():
        return resolution(planned, None)
    with Store.open(root, create=False) as store:
        return resolution(planned, store)


def _done(planned: Plan, root: Path) -> int:
    if not (root / "store.json").exists():
        return 0
    with Store.open(root, create=False) as store:
        return planned.done(store)


def _here(planned: Plan) -> int:
    """Trials at once on this machine. Raises ResourcesError when it has no room for one."""
    return planned.study.resources.slots([Room.here()])


def print_plan(planned: Plan, root: Path, slots: int | None = None) -> None:
    """A row per variant, then what would be trained and how long that takes with so many trials at once."""
    console = plain_console()
    console.print(Text.assemble((planned.study.study, "bold"), f"  {planned.study.question}"))
    if others := [name for name in planned.study.scales if name != planned.study.scale]:
        console.print(Text(f"scale {planned.study.scale}; `--set scale=NAME` for {', '.join(others)}"))
    _print_variants(console, planned)
    done = _done(planned, root)
    left = planned.left(done)
    known = f"; {done} of them have a result, {left} are left, as far as is known" if done else ""
    if done and not left:
        known = f"; all that are wanted have a result ({done})"
    console.print(Text(_trials(planned) + known))
    for line in _screen(planned):
        console.print(Text(line))
    if longer := _going_on(planned, root):
        console.print(Text(str(longer)))
    _print_data(console, planned.variants[0])
    guess = estimate(planned, root, slots or _here(planned), done if left else planned.trials)
    console.print(
        f"about {duration(guess.wall_s)} on {guess.slots} cores ({duration(guess.core_s)} of one core; "
        f"from {guess.source})"
    )
    console.print(f"{size(guess.memory_bytes)} of memory for the tensors of the largest trial, or somewhat more")
    if found := _resolution(planned, root):
        console.print(Text(str(found)))
    recipes = [variant.recipe for variant in planned.variants]
    for line in settled_lines(planned.builder.settled, planned.study.train, recipes):
        console.print(Text(line))
    for line in to_measure(planned, root).lines():
        console.print(Text(line))
    for line in _edits(planned, root):
        console.print(Text(f"edited: {line}"))
    if budget := standing(limits_of(planned.study.budget), _spent(planned, root)):
        console.print(Text(budget))
    console.print("nothing was trained")


def _print_variants(console: Console, planned: Plan) -> None:
    """A row per variant, with its components or changes and its sizes; below it what the columns mean."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    matched = bool(planned.study.match)
    ticked = _ticked(planned)
    room = console.width - _FIGURES - max(len(variant.name) for variant in planned.variants[:_ROWS])
    numbered = sum(len(name) + 2 for name in ticked) > room
    table.add_column("variant")
    for index, name in enumerate(ticked, 1):
        table.add_column(str(index) if numbered else Text(name), justify="center")
    if not ticked:
        table.add_column("changes from the base")
    table.add_column("parameters", justify="right")
    sparse = any(variant.figures["active_parameters"] < variant.parameters for variant in planned.variants)
    if sparse:
        table.add_column("active", justify="right")
    table.add_column("mismatch" if matched else "added", justify="right")
    table.add_column("FLOPs/token", justify="right")
    added = planned.added()
    for variant in planned.variants[:_ROWS]:
        said = "\n".join(map(str, variant.changes)) or "none"
        cells = [Text("✓" if variant.components[name] else "") for name in ticked] or [Text(said)]
        more = f"{variant.mismatch:+.2%}" if matched else signed(added[variant.name])
        flops = count(variant.flops_per_token)
        sizes = [variant.parameters, *([variant.figures["active_parameters"]] if sparse else [])]
        table.add_row(Text(variant.name), *cells, *(f"{size:,}" for size in sizes), more, flops)
    console.print(table)
    if len(planned.variants) > _ROWS:
        console.print(f"… and {len(planned.variants) - _ROWS:,} more variants (--json shows all)")
    if numbered:
        console.print(Text("columns: " + ", ".join(f"{index} {name}" for index, name in enumerate(ticked, 1))))
    for line in [*_also_changed(planned), *_made_of(planned, ticked), *_rungs(planned)]:
        console.print(Text(line))
    for variant in planned.variants:
        for line in start_lines(variant.name, variant.start) if variant.start else ():
            console.print(Text(line))
        for line in stage_lines(variant.name, variant.stages):
            console.print(Text(line))


def _print_data(console: Console, first: Variant) -> None:
    """What the first variant reads, and how often."""
    data = first.dataset.record()
    each = first.recipe.epochs(first.dataset)
    epochs = f"{each[0]:.2g} epochs" if len(each) == 1 else f"{len(each)} domains"
    density = f", {data['bytes_per_token']:.3g} bytes per token" if "bytes_per_token" in data else ""
    read = (
        f"data: {data['source']}, {data['tokenizer']}, {count(data['train_tokens'])} training tokens{density} "
        f"({epochs}), {data['identity']}"
    )
    console.print(Text(read))
    for row, read_times in zip(data.get("domains", ()), each, strict=False):
        console.print(Text(f"  {row['name']}: {row['share']:.1%} of the rows, {read_times:.2g} epochs"))


def _edits(planned: Plan, root: Path) -> list[str]:
    """What was edited since the study was run."""
    if not (root / "store.json").exists():
        return []
    with Store.open(root, create=False) as store:
        return edits(planned, store)


def _going_on(planned: Plan, root: Path) -> GoingOn | None:
    """What goes on from shorter trials."""
    if not (root / "store.json").exists():
        return None
    with Store.open(root, create=False) as store:
        return going_on(planned, store)


def _spent(planned: Plan, root: Path) -> Spent:
    """What the study's runs have spent so far."""
    if not (root / "store.json").exists():
        return Spent()
    with Store.open(root, create=False) as store:
        return spent_of(store, planned.study.study)


def _ticked(planned: Plan) -> list[str]:
    """The components that a plan shows as columns: those of a design, or where variants are made of several."""
    names = list(planned.variants[0].components)
    return names if planned.study.design or len(names) > 1 else []


def _also_changed(planned: Plan) -> Iterator[str]:
    """What variants shown by their components change beside these."""
    if not _ticked(planned):
        return
    for name, patch in planned.study.variants.items():
        if own := spelt(setting for setting in patch.settings if setting.path):
            yield f"{name} also changes {'; '.join(shorten(text, LONGEST) for text in own)}"


def _made_of(planned: Plan, ticked: list[str]) -> Iterator[str]:
    """The design, or what the components change that stand in the table."""
    record = planned.design() if planned.study.design else {"components": []}
    others = {n: spelt(planned.study.components[n].settings) for n in ticked if n not in record["components"]}
    if planned.study.design:
        yield from design_lines(record)
    if others:
        yield from component_lines(others, {}, "other components" if planned.study.design else "components")


def _ends(planned: Plan) -> tuple[Variant, Variant]:
    """The variants with the fewest and with the most tokens."""
    ordered = sorted(planned.variants, key=lambda variant: variant.recipe.tokens)
    return ordered[0], ordered[-1]


def _rungs(planned: Plan) -> Iterator[str]:
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


def _trials(planned: Plan) -> str:
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


def _screen(planned: Plan) -> Iterator[str]:
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


def print_summary(summary: Summary, study: str, root: Path) -> None:
    """How a run ended, and what to type next."""
    console = plain_console()
    counts = ", ".join(f"{number} {state}" for state, number in summary.counts.items() if number)
    console.print(Text(f"{summary.message}: {counts}" if counts else summary.message))
    store = "" if str(root) == ".archlab" else f" --store {shlex.quote(str(root))}"
    if summary.counts.get("complete"):
        console.print(Text(f"  archlab report {shlex.quote(study)}{store}\n  archlab dashboard{store}"))


# primitives and doctor


def print_primitives(name: str | None, as_json: bool) -> None:
    """All primitives by family, or one of them with its formula, fields and defaults."""
    if name is None:
        listing = families()
        if as_json:
            print(json.dumps(listing))
            return
        console = plain_console()
        for family, members in listing.items():
            console.print(f"[bold]{family}[/]")
            width = max(len(member) for member in members)
            for member, line in members.items():
                console.print(Text(f"  {member:<{width}}  {line}"))
        console.print("\narchlab primitives NAME explains one")
        return
    found = find(name)
    if as_json:
        print(json.dumps([describe(kind) for kind in found]))
        return
    console = plain_console()
    for kind in found:
        facts = describe(kind)
        console.print(f"[bold]{facts['type']}[/] ({facts['family']})")
        console.print(Text(facts["doc"]))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("field", "what may stand there", "default"):
            table.add_column(column)
        for field in facts["fields"]:
            table.add_row(field["name"], Text(field["allowed"]), Text(field["default"]))
        console.print(table)


def print_findings(findings: list[Finding]) -> None:
    """A line per finding: what is there, and what that means for a study."""
    console = plain_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(_MARKS[finding.status], f"[bold]{finding.name}[/]", Text(finding.detail), Text(finding.meaning))
    console.print(table)

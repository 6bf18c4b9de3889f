"""The verb that measures finished trials: eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from archlab.cli import completion
from archlab.cli.kit import JSON, PLUGIN, STORE, TRY_AGAIN, fail, store_folder, study_name, verb
from archlab.search.utils.exits import leave

if TYPE_CHECKING:
    from archlab.arch_dsl.language.source import Node
    from archlab.search.evaluation.measures import Measures
    from archlab.search.store.store import Store

_KEY_DIGITS = 12


@click.command("eval")
@click.argument("target", metavar="STUDY|TRIAL", shell_complete=completion.trials)
@click.option("--measure", "named", multiple=True, metavar="NAME", help="A measure, as `evaluate:` has it; or all.")
@click.option(
    "--suite", "suites", multiple=True, metavar="NAME", help="Tasks of a paper's table, as `lm_eval` has them."
)
@click.option("--again", is_flag=True, help="Evaluate what is known too, and replace it.")
@click.option("--no-track", is_flag=True, help="Do not send anything to MLflow.")
@STORE
@PLUGIN
@JSON
@verb
def eval_(
    target: str,
    named: tuple[str, ...],
    suites: tuple[str, ...],
    again: bool,
    no_track: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Measure finished trials from the weights that they ended with. Nothing is trained.

    STUDY is a study's name or file: the trials of its table. TRIAL is STUDY/VARIANT[/SEED], or the start of a trial's
    key. Without --measure and --suite what the study's `evaluate:` asks for, or else all. What is known is not
    evaluated again. Exits with 1 when an evaluation went wrong or has no weights.
    """
    from archlab.search.executors.executor import ExecutorError
    from archlab.search.running.measure import evaluate
    from archlab.search.running.progress import line_of
    from archlab.search.running.run import make_executor
    from archlab.search.sections.evaluate.wanted import wanted, without_weights
    from archlab.search.store.findings import ask
    from archlab.search.store.lock import in_use
    from archlab.search.store.store import Store
    from archlab.search.trackers.shipper import sync
    from archlab.tables import send

    def tell(event: dict[str, Any]) -> None:
        click.echo(json.dumps(event) if as_json else line_of(event, ""), err=not as_json)

    root = store_folder(store).absolute()
    named += tuple(f"lm_eval: {{suite: {json.dumps(suite)}}}" for suite in suites)
    with Store.open(root, create=False) as opened, in_use(root):
        study, trials, measures = _asked(opened, target, named)
        if (owner := study or target.partition("/")[0]) in {each["name"] for each in opened.studies()}:
            ask(opened, owner, [measure.label for measure in measures.evaluated])
        missing = wanted(opened, measures, trials, again)
        workers = make_executor("inline", root)
        try:
            outcome = evaluate(opened, None, missing, workers, tell)
        except ExecutorError as error:
            fail(f"{error}; what was measured by then is kept", TRY_AGAIN)
        if outcome.kept and not no_track:
            sync(root, study)
            if study:
                send(root, study)
        _print_found(opened, trials, as_json)
    lost = without_weights(missing)
    for line in [*outcome.wrong, *lost]:
        click.echo(line, err=True)
    leave(outcome.code or int(bool(lost)))


def _asked(store: Store, target: str, named: tuple[str, ...]) -> tuple[str | None, list[dict[str, Any]], Measures]:
    """The study if it is one, the finished trials, and the measures. Raises SpecError for what means nothing."""
    from archlab.arch_dsl import SpecError
    from archlab.arch_dsl.language.include import read_whole
    from archlab.arch_dsl.language.source import Node, read_text
    from archlab.search.evaluation.measures import ALL
    from archlab.search.models.weights import folder_of
    from archlab.search.sections.evaluate.wanted import about_of, standing
    from archlab.search.trial.trial import Trial

    name: str | None = study_name(target)
    asked = Node.of([ALL])
    is_file = Path(target).suffix in (".yaml", ".yml")
    if is_file or name in {each["name"] for each in store.studies()}:
        assert name is not None
        record = store.study(name)
        trials = standing(record, store.study_trials(name))
        asked = Node.of(record.get("evaluate") or [ALL])
        if is_file and isinstance(written := read_whole(target).value, dict):
            asked = written.get("evaluate", asked)
        if not trials:
            raise SpecError.of(target, "has no finished trial in its table yet")
    else:
        name, key = None, folder_of(target, store.root).name
        if store.known([key])[key]["state"] != "complete":
            raise SpecError.of(target, "is not complete: only a trial that came to its end is measured")
        trials = [{"key": key, "variant": key[:_KEY_DIGITS], "seed": Trial.from_json(store.spec(key)).seed}]
    measures = _measures(Node([read_text(text, "--measure") for text in named], None) if named else asked)
    specs = [Trial.from_json(store.spec(trial["key"])) for trial in trials]
    if problems := [*measures.problems(lambda: (about_of(spec, store.root / "data") for spec in specs))]:
        raise SpecError(problems)
    return name, trials, measures


def _measures(asked: Node) -> Measures:
    """Those that are asked for, in the notation of `evaluate:`."""
    from archlab.arch_dsl import SpecError
    from archlab.arch_dsl.language.errors import Problem
    from archlab.search.evaluation.measures import Measures

    problems: list[Problem] = []
    found = Measures.parse_node(asked, "evaluate", problems)
    if problems:
        raise SpecError(problems)
    measures: Measures = found
    return measures


def _print_found(store: Store, trials: list[dict[str, Any]], as_json: bool) -> None:
    """What is known of the trials now."""
    from archlab.search.store.findings import findings

    known = findings(store, [trial["key"] for trial in trials])
    for trial in trials:
        found = known.get(trial["key"], [])
        if as_json:
            told = {name: trial[name] for name in ("key", "variant", "seed")}
            click.echo(json.dumps({"event": "measures", **told, "measures": found}))
            continue
        click.echo(f"{trial['variant']} seed {trial['seed']}")
        for each in found:
            for name, value in each["values"].items():
                click.echo(f"  {name:<28} {'-' if value is None else format(value, '.6g')}")
            for name, curve in each["curves"].items():
                ends = [f"{y:.4g} at {x}" for x, y in zip(curve["x"], curve["y"], strict=True) if y is not None]
                click.echo(f"  {name:<28} {' to '.join(ends[:: max(len(ends) - 1, 1)])}")
            for name, grid in each.get("grids", {}).items():
                size = f"{len(grid['rows'])} x {len(grid['columns'])}"
                click.echo(f"  {name:<28} {size}, {grid['row']} by {grid['column']}")


VERBS = (eval_,)

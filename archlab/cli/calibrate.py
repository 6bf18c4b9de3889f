"""`archlab calibrate`: the recipe that suits a study's model, text and time."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from archlab.cli.kit import (
    ADDRESS,
    ALLOW,
    INLINE,
    INVALID,
    JSON,
    PLUGIN,
    SET,
    STORE,
    STUDY,
    fail,
    parsed,
    store_folder,
    verb,
)
from archlab.search.utils.exits import leave, leaving_early

if TYPE_CHECKING:
    from archlab.search.planning.plan import Plan

_HEAD = "# archlab calibrate "  # of a file that --write made


@click.command()
@STUDY
@STORE
@SET
@PLUGIN
@ALLOW
@JSON
@click.option("--trials", type=click.IntRange(1), help="Whole trials' work that it takes at most; the study's own.")
@click.option(
    "--against", metavar="VARIANT", help="Tried beside the baseline; the variant least like it, without this."
)
@click.option(
    "--write", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Where the recipe goes too."
)
@ADDRESS
@INLINE
@verb
def calibrate(
    study: str,
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
    trials: int | None,
    against: str | None,
    write: Path | None,
    address: str | None,
    inline: bool,
) -> None:
    """Find the recipe that suits a study's model, text and time. Ctrl-C and the same command goes on.

    The same trials as `run` would make, of the baseline and one far variant, under recipes that Optuna proposes: short
    ones first, at most as much work as the study itself. Then `train: {recipe: calibrated}` takes what was found.
    """
    from archlab.search.calibration.calibrate import calibrate as find
    from archlab.search.running.progress import make_progress
    from archlab.search.study.calibrated import block

    if write is not None:
        _check(write)
    command = _command(study, overrides, trials, against)

    def begin(planned: Plan) -> None:
        progress.plan(planned.record(), planned.trials)

    with leaving_early(), make_progress(as_json=as_json) as progress:
        found = find(
            study,
            store_folder(store),
            trials=trials,
            against=against,
            overrides=parsed(overrides),
            executor="inline" if inline else "ray",
            address=address,
            on_event=progress.event,
            on_plan=begin,
            allow_plugins=allow_plugins,
            command=command,
        )
    if found.recipe is None:
        click.echo(found.summary.message, err=True)
        leave(found.summary.exit_code)
    text = f"# {command}\n{block(found.recipe)}"
    if write is not None:
        write.write_text(text)
    if as_json:
        click.echo(json.dumps({"event": "calibrated", "study": found.study, **found.recipe}))
    else:
        _print(found.study, text, store_folder(store))
    leave(0)


def _check(file: Path) -> None:
    """Refuses, before anything is trained, a file that a recipe must not be written to."""
    if not file.parent.is_dir():
        fail(f"{file.parent} is no folder", INVALID)
    if file.exists() and not file.read_text(errors="replace").startswith(_HEAD):
        fail(f"{file} exists and holds no calibrated recipe; it is not overwritten", INVALID)


def _command(study: str, overrides: tuple[str, ...], trials: int | None, against: str | None) -> str:
    """What was typed, as far as it decides what is found."""
    words = ["archlab", "calibrate", study, *(word for each in overrides for word in ("--set", each))]
    words += ["--trials", str(trials)] if trials else []
    return shlex.join([*words, *(["--against", against] if against else [])])


def _print(study: str, text: str, root: Path) -> None:
    """The tables of the calibration, and the recipe."""
    from archlab.search.comparison.compare import load_comparison
    from archlab.search.reporting.report import section_report
    from archlab.search.store.store import Store

    with Store.open(root, create=False) as store:
        click.echo(section_report(load_comparison(store, study), "calibration").rstrip())
    click.echo(f"\n{text}")
    click.echo("`train: {recipe: calibrated}` takes it from this store; fields beside that win")


VERBS = [calibrate]

"""`archlab challenge`: proposals become verdicts, one after the other, against a champion."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    in_bytes,
    parsed,
    store_folder,
    verb,
)
from archlab.search.utils.exits import leave, leaving_early

if TYPE_CHECKING:
    from archlab.search.challenge.ledger import Entry
    from archlab.search.planning.plan import Plan

_SHOWN = 8  # names of what is left, at most
_MANY = 50  # changes that take seconds to check

SEEDS = click.option(
    "--seeds", type=click.IntRange(2, 100), default=8, show_default=True, help="Of a challenger, at most."
)
MARGIN = click.option(
    "--margin", type=click.FloatRange(0, min_open=True), help="Nats per token within which two are equivalent."
)
FALSE_KEEPS = click.option(
    "--false-keeps",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.1,
    show_default=True,
    help="The share of those kept that are no better, in expectation, at most.",
)
TOGETHER = click.option(
    "--together",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="Try each with one seed, and confirm N that were lower at once.",
)
DISK = click.option("--disk", metavar="SIZE", callback=in_bytes, help="How large the store may become, such as 20GB.")


@click.command()
@STUDY
@click.argument("patches", nargs=-1)
@STORE
@SET
@PLUGIN
@ALLOW
@JSON
@SEEDS
@MARGIN
@FALSE_KEEPS
@TOGETHER
@click.option("--confirm", is_flag=True, help="Confirm at the end what was lower with one seed, however few.")
@click.option("--trials", type=click.IntRange(1), help="How many this command trains at most.")
@click.option(
    "--core-seconds", type=click.FloatRange(0, min_open=True), help="How long its trials hold cores at most, in all."
)
@DISK
@click.option("--why", default="", metavar="TEXT", help="Kept in the ledger with each of PATCHES.")
@click.option("--again", is_flag=True, help="Try again what lost to an earlier champion.")
@ADDRESS
@INLINE
@verb
def challenge(
    study: str,
    patches: tuple[str, ...],
    store: str | None,
    overrides: tuple[str, ...],
    allow_plugins: bool,
    as_json: bool,
    address: str | None,
    inline: bool,
    why: str,
    **rules: Any,
) -> None:
    """Hold changes against a champion, each until its seeds decide, and keep what is better.

    PATCHES are files, `-` for standard input, or YAML: mappings of names to changes, as under `variants:`. The study's
    baseline is the first champion. Without PATCHES it prints the ledger. Ctrl-C and the same command goes on.
    """
    from archlab.search.challenge.changes import Idea
    from archlab.search.challenge.page import page
    from archlab.search.challenge.referee import challenge as hold
    from archlab.search.challenge.rules import Rules
    from archlab.search.reporting.report import as_text
    from archlab.search.running.progress import make_progress

    wanted = {name: Idea(node, why) for name, node in _read(patches).items()}

    def begin(planned: Plan) -> None:
        progress.plan(planned.record(), planned.trials)

    def tell(entry: Entry, known: bool) -> None:
        if as_json:
            progress.event({"event": "verdict", "known": known, **asdict(entry)})

    with leaving_early(), make_progress(as_json=as_json) as progress:
        found = hold(
            study,
            wanted,
            store_folder(store),
            rules=Rules(**rules),
            overrides=parsed(overrides),
            executor="inline" if inline else "ray",
            address=address,
            on_event=progress.event,
            on_plan=begin,
            on_entry=tell,
            allow_plugins=allow_plugins,
            command=shlex.join(["archlab", *sys.argv[1:]]),
        )
    if as_json:
        click.echo(json.dumps({"event": "ledger", **found.ledger.told()}))
    else:
        click.echo(as_text(page(found.ledger)).rstrip())
    undecided = [name for name, entry in found.entries.items() if entry is None]
    if found.stopped is not None:
        left = undecided or [entry.name for entry in found.ledger.candidate]
        told = "not decided" if undecided else "not confirmed"
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        click.echo(f"{found.stopped.message}; {told}: {', '.join(left[:_SHOWN])}{more}", err=True)
        leave(found.stopped.exit_code)
    leave(0)


def _read(patches: tuple[str, ...]) -> dict[str, Any]:
    """name -> node of its changes; says so where there are many to check. Raises SpecError for what is no mapping, or
    names one twice."""
    from archlab.arch_dsl.language.errors import SpecError
    from archlab.arch_dsl.language.source import read, read_text

    found: dict[str, Any] = {}
    for text in patches:
        if text == "-":
            node = read_text(sys.stdin.read(), "<standard input>")
        elif text.endswith((".yaml", ".yml")) or Path(text).is_file():
            node = read(Path(text))
        else:
            node = read_text(text, "<PATCH>")
        if not isinstance(node.value, dict) or not node.value:
            fail(f"{text[:80]}: a patch is a mapping of names to changes, `gate: {{block.attention.gate: …}}`", INVALID)
        for name, child in node.value.items():
            if name in found:
                raise SpecError.of(f"challengers.{name}", "is there twice", node.key_marks.get(name, child.mark))
            found[name] = child
    if len(found) > _MANY:
        click.echo(f"checking {len(found)} changes before anything trains", err=True)
    return found


VERBS = [challenge]

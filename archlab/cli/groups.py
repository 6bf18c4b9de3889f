"""The list of commands in groups, and what to type next in this folder."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from archlab.cli.arguments import print_escapes, refuse_bytes

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = {
    "Write a study": ("init", "plan", "show", "diff", "zoo", "data", "schema"),
    "Write a primitive": ("primitives", "new-primitive", "check-primitive"),
    "Run it": ("run", "calibrate", "challenge", "mcp", "watch", "status", "stop", "retry"),
    "Read what came out": ("report", "dashboard", "figures", "publish", "note", "eval", "generate"),
    "Keep what was computed": ("check", "gc", "delete", "export", "import", "sync", "move"),
    "This machine": ("doctor", "bench"),
}


_STORED = 5  # studies of the store whose files are elsewhere, the newest


class Grouped(click.Group):
    """A group whose help lists its commands by what they are for, each with its whole first sentence."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses what is no text, before any command reads it."""
        if not ctx.resilient_parsing:  # as a shell does that completes
            print_escapes()
            refuse_bytes(args)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups of commands."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, first_sentence(self.commands[name])) for name in names], col_max=16)


def first_sentence(command: click.Command) -> str:
    """What a command does, up to the first full stop that ends a sentence."""
    paragraph = " ".join((command.help or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def next_steps(folder: Path, root: Path) -> str:
    """What to type next: to write a study where there is none, else a line for every study of a folder or its store."""
    from archlab.search.study.files import studies_in

    found = {str(path): name for path, name in studies_in(folder).items()}
    stored = _stored(root)
    lines = [step for path, name in found.items() for step in _steps(shlex.quote(path), stored.get(name))]
    elsewhere = [name for name in stored if name not in found.values()]  # their files are not in this folder
    lines += [step for name in elsewhere[:_STORED] for step in _steps(name, stored[name], file=False)]
    if not lines:
        lines = [
            ("archlab init my_study.yaml", "write a commented study to start from"),
            ("archlab run my_study.yaml", "train it"),
        ]
    elif stored:
        lines.append(("archlab dashboard", "all studies in a browser"))
    lines.append(("archlab --help", "all commands"))
    width = max(len(command) for command, _ in lines)
    return "\n".join(f"  {command:<{width}}  {why}" for command, why in lines)


def _stored(root: Path) -> dict[str, dict[str, Any]]:
    """The studies of a store by name, newest first; none where there is no store."""
    from archlab.search.running.status import status_of

    if not (root / "store.json").exists():
        return {}
    return {row["name"]: row for row in status_of(root)}


def _steps(study: str, row: dict[str, Any] | None, file: bool = True) -> list[tuple[str, str]]:
    """What to type next about a study, by its file or else its name, given its row in the store."""
    from archlab.search.running.status import told

    if row is None:
        return [
            (f"archlab plan {study}", "what it would train, and how long that takes"),
            (f"archlab run {study}", "train it"),
        ]
    counts = row["counts"]
    if row["holder"] is not None:
        return [(f"archlab watch {study}", f"it is running: {told(counts)}")]
    if any(counts.get(state) for state in ("interrupted", "planned")):
        if file:
            return [(f"archlab run {study}", f"go on: {told(counts)}")]
        return [(f"archlab report {study}", f"its table so far; run its file to go on: {told(counts)}")]
    return [(f"archlab report {study}", f"its table: {told(counts)}")]

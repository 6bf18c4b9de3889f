"""What `archlab check-primitive` prints: a line per property for every member of a plug-in."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from archlab.arch_dsl.catalogue.describe import first_line
from archlab.arch_dsl.conformance import Verdict, check
from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.parts.families import Primitive


def check_plugin(path: str, as_json: bool) -> bool:
    """Loads a plug-in, prints a verdict for each property of its members, and returns whether all hold."""
    plugin = plugins.load(path)
    members = [member for member in plugin.members if issubclass(member, Primitive)]
    if not members:
        raise SpecError.of("", f"{path} registers no primitive of a model")
    found: dict[str, list[Verdict]] = {}
    for member in members:
        if not as_json:
            click.echo(f"{member.type}  {first_line(member)}")
        verdicts = found.setdefault(member.type, [])
        for verdict in check(member):
            verdicts.append(verdict)
            if not as_json:
                click.echo(_line(verdict, member.type))
    wrong = sum(not verdict.holds() for verdicts in found.values() for verdict in verdicts)
    if as_json:
        print(json.dumps({name: [asdict(verdict) for verdict in verdicts] for name, verdicts in found.items()}))
    else:
        click.echo(f"\n{Path(path).name}: " + (f"{wrong} do not hold" if wrong else "all properties hold"))
    return not wrong


def _line(verdict: Verdict, plain: str) -> str:
    if verdict.holds():
        return f"  {click.style('ok', fg='green')}     {verdict.property}"
    where = f" (as {verdict.case})" if verdict.case not in ("", plain) else ""
    return f"  {click.style('wrong', fg='red')}  {verdict.property}: {verdict.complaint}{where}"

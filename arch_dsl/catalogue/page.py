"""The catalogue as a page, docs/reference/primitives.md: made of the registry, and so never out of date."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from archlab.arch_dsl.catalogue.describe import FAMILIES, describe
from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.language.spec import Family, families, fields_of
from archlab.arch_dsl.model.model import DecoderModel
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.arch_dsl.primitives.branch import OUTER
from archlab.arch_dsl.tree.identity import brief_text
from archlab.arch_dsl.tree.knob import Knob

_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_ROOT = Path(__file__).resolve().parents[2]


def markdown() -> str:
    """The page: families in the order of the catalogue, their members in the order in which they were registered."""
    parts = [_HEAD, *(f"- [{kind.noun}](#{kind.noun.replace(' ', '-')}): {_members(kind)}" for kind in FAMILIES)]
    parts.append(f"- [knobs](#knobs): {', '.join(f'`{knob.name}`' for knob in KNOBS)}")
    for kind in FAMILIES:
        parts += ["", *_family(kind)]
    link = "[two ways to write one model](model/index.md#two-ways-to-write-one-model)"
    parts += ["", "## Knobs", "", f"Short forms for sites: {link}."]
    for knob in KNOBS:
        parts += ["", *_entry(knob)]
    return "\n".join(parts) + "\n"


_HEAD = """\
# Primitives

All that a model can be made of, written by `archlab primitives --format md`: what each computes, what its fields may
hold, where it may stand. `archlab primitives NAME` prints one of them. A bare name is a member with its defaults;
fields come in a mapping with its `type`. [Models](model/index.md) explains sites, knobs and patches;
[plug-ins](../guides/plugins.md) how to add one of your own.
"""


def _members(kind: type[Family]) -> str:
    return ", ".join(f"`{name}`" for name in [*kind.members, *kind.aliases]) or "none yet"


def _family(kind: type[Family]) -> Iterator[str]:
    yield f"## {kind.noun[0].upper()}{kind.noun[1:]}"
    yield ""
    yield inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    sites = ", ".join(f"`{site}`" for site in sites_of(kind))
    if sites:
        yield f"It may stand at {sites}."
    for member in kind.members.values():
        yield ""
        yield from _entry(member)
    for alias, (name, implied) in kind.aliases.items():
        fields = ", ".join(f"{key}: {brief_text(value)}" for key, value in implied.items())
        yield ""
        yield f"### `{alias}`"
        yield ""
        yield f"Another name of `{{type: {name}{', ' + fields if fields else ''}}}`."


def _entry(kind: type[Family] | Knob) -> Iterator[str]:
    facts = describe(kind)
    yield f"### `{facts['type']}`"
    yield ""
    text = " ".join(facts["doc"].split()).replace("<", "&lt;")
    yield _PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    if not isinstance(kind, Knob):
        yield f"\n{_source(kind)}"
    if facts["fields"]:
        yield ""
        yield "| field | what may stand there | default |"
        yield "|---|---|---|"
        for field in facts["fields"]:
            default = f"`{field['default']}`" if field["default"] not in ("", "required") else field["default"]
            yield f"| `{field['name']}` | {_words(field['allowed'])} | {default} |"


def _words(allowed: str) -> str:
    """Words in backticks, as `|` would end a cell."""
    if " | " not in allowed:
        return allowed
    *words, last = allowed.split(" | ")
    if " " in last.partition(",")[0]:
        return f"{', '.join(f'`{each}`' for each in words)}, or {last}"
    word, comma, rest = last.partition(",")
    return ", ".join(f"`{each}`" for each in [*words, word]) + comma + rest


def _source(member: type[Family]) -> str:
    """Where it is written: a file of the repository, or a plug-in."""
    file = Path(inspect.getsourcefile(member) or "")
    if member.plugin:
        name = next(plugin.path.name for plugin in plugins.loaded() if plugin.digest == member.plugin)
        return f"Source: the plug-in {name}, {member.plugin}."
    path = file.resolve().relative_to(_ROOT).as_posix()
    return f"Source: [{path}](../../{path})."


def sites_of(kind: type[Family]) -> list[str]:
    """Every field of the model and of primitives that takes a family, as `attention.query`."""
    holders: list[tuple[str, type]] = [("", DecoderModel)]
    holders += [(name, member) for family in FAMILIES for name, member in family.members.items()]
    found = []
    for holder, cls in holders:
        for name, item in fields_of(cls).items():
            if kind in families(item.annotation):
                outer = issubclass(cls, Branch) and name in OUTER
                found.append(f"*.{name}" if outer else f"{holder}.{name}" if holder else name)
    return list(dict.fromkeys(found))

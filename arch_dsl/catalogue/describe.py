"""The catalogue of primitives as data: families, members, and what each field may hold."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from archlab.arch_dsl.language.errors import SpecError, unknown
from archlab.arch_dsl.language.spec import Family, Range, Spec, alternatives, fields_of
from archlab.arch_dsl.language.spec import families as families_of
from archlab.arch_dsl.model.constraint import Constraint
from archlab.arch_dsl.model.prediction import Prediction
from archlab.arch_dsl.parts import families as parts
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.arch_dsl.primitives.balance import Balance
from archlab.arch_dsl.primitives.injections import Injection
from archlab.arch_dsl.primitives.low_rank import LowRank
from archlab.arch_dsl.primitives.rope_scaling import RopeScaling
from archlab.arch_dsl.primitives.skips import Skip
from archlab.arch_dsl.primitives.streams import Streams
from archlab.arch_dsl.primitives.switch import Switch
from archlab.arch_dsl.tree.identity import brief_text, canonical
from archlab.arch_dsl.tree.knob import Knob

FAMILIES: tuple[type[Family], ...] = (
    parts.Branch, parts.Norm, parts.Gate, parts.Scale, parts.Carry, parts.Decay, parts.Adapter, parts.Position,
    parts.Rotary, RopeScaling, parts.Score, parts.Weights, parts.Mask, parts.Join, Balance, Switch, Streams, Skip,
    Injection, LowRank, Prediction, Constraint,
)  # fmt: skip


def families() -> dict[str, dict[str, str]]:
    """Family noun to its members' short names with their one-line docs; the knobs last."""
    found = {kind.noun: {name: first_line(member) for name, member in kind.members.items()} for kind in FAMILIES}
    return found | {"knob (a short form for sites)": {knob.name: knob.doc for knob in KNOBS}}


def find(name: str) -> list[type[Family] | Knob]:
    """The primitives and knobs of that name. Raises SpecError with the nearest one."""
    members = list(dict.fromkeys(kind.members[name] for kind in FAMILIES if name in kind.members))
    knobs = [knob for knob in KNOBS if knob.name == name]
    if not members and not knobs:
        names = [*(key for kind in FAMILIES for key in kind.members), *(knob.name for knob in KNOBS)]
        raise SpecError.of("", unknown(name, "primitive", dict.fromkeys(names)))
    return [*members, *knobs]


def describe(kind: type[Family] | Knob) -> dict[str, Any]:
    """`{type, family, doc, fields: [{name, allowed, default}]}` of one primitive or knob."""
    if isinstance(kind, Knob):
        where = "block" if kind.holder.__name__ == "Block" else "block.attention"
        fields = [{"name": name, "allowed": allowed, "default": default} for name, allowed, default in kind.fields]
        return {"type": kind.name, "family": f"knob at {where}", "doc": f"Sets {kind.doc}.", "fields": fields}
    fields = [
        {
            "name": name,
            "allowed": allowed(item.annotation),
            "default": "required" if item.required else brief_text(canonical(item.default, brief=True)),
        }
        for name, item in fields_of(kind).items()
    ]
    return {"type": kind.type, "family": _noun(kind), "doc": inspect.cleandoc(kind.__doc__ or ""), "fields": fields}


def _noun(kind: type[Family]) -> str:
    return " or ".join(base.noun for base in FAMILIES if issubclass(kind, base))


def first_line(kind: type[Spec]) -> str:
    """The formula and the source: the first paragraph of the docstring on one line."""
    paragraph = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def allowed(annotation: Any) -> str:
    """What may stand in a field, in words: `sigmoid | silu`, `an integer of at least 1`, `a list of norm or gate`."""
    for item in getattr(annotation, "__metadata__", ()):
        if hasattr(item, "words"):
            return str(item.words())
    if typing.get_origin(annotation) is typing.Annotated:
        base, *limits = typing.get_args(annotation)
        return f"{allowed(base)}{''.join(_limits(limit) for limit in limits if isinstance(limit, Range))}"
    options = [option for option in alternatives(annotation) if option is not type(None)]
    optional = len(options) < len(alternatives(annotation))
    if kinds := families_of(annotation):
        many = any(typing.get_origin(option) is tuple for option in options)
        nouns = " or ".join(kind.noun for kind in kinds)
        text = f"a list of {nouns}" if many else nouns
    elif typing.get_origin(options[0]) is tuple:
        text = f"a list, each {allowed(typing.get_args(options[0])[0])}"
    elif typing.get_origin(options[0]) is typing.Literal:
        text = " | ".join(typing.get_args(options[0]))
    elif len(options) == 1 and options[0] is not annotation:
        text = allowed(options[0])
    else:
        text = " or ".join(_kind(option) for option in options)
    return f"{text}, or {'none' if kinds else 'null'}" if optional else text


def _kind(option: Any) -> str:
    """What a value of a type is called."""
    if (isinstance(option, type) and issubclass(option, Spec)) or typing.get_origin(option) is dict:
        return "a mapping"
    names = {int: "an integer", float: "a number", bool: "true | false", str: "a word"}
    return names.get(option, getattr(option, "__name__", str(option)).lower())


def _limits(limit: Range) -> str:
    words = (("min", ">="), ("max", "<="), ("above", ">"), ("below", "<"))
    shown = [f"{sign} {getattr(limit, name):g}" for name, sign in words if getattr(limit, name) is not None]
    return f" {' and '.join(shown)}" if shown else ""

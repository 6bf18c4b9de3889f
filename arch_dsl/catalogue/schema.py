"""JSON Schema of specs, from their annotations and docstrings: what completion, hover texts and checks in editors need.

It allows what the parser allows, as far as JSON Schema can say it: a bare word or a mapping with `type`, one item or a
list, a number or `2M`, the knobs beside the sites that they stand for, the type that a branch's name implies.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from archlab.arch_dsl.catalogue.describe import allowed, first_line
from archlab.arch_dsl.language.spec import Family, FieldType, Range, Spec, alternatives, families, fields_of
from archlab.arch_dsl.model.depths import Depths
from archlab.arch_dsl.model.exits import Exit
from archlab.arch_dsl.model.loop import Loop
from archlab.arch_dsl.parts.families import Branch, Gate, Join, Norm, Position, Rotary, Score
from archlab.arch_dsl.patching.knobs import KNOBS
from archlab.arch_dsl.primitives.groups import Group
from archlab.arch_dsl.primitives.parallel import Parallel
from archlab.arch_dsl.primitives.sequential import Sequential
from archlab.arch_dsl.tree.block import Block
from archlab.arch_dsl.tree.identity import brief_text, canonical
from archlab.arch_dsl.tree.knob import Knob
from archlab.arch_dsl.tree.overrides import LAYERS, Overrides

Schema = dict[str, Any]

UNIT = r"^[0-9]+(\.[0-9]+)?[kMBT]$"
PATH_STEP = r"[^.\s]+"
NONE: Schema = {"const": "none"}
ANYTHING: Schema = {}
_KINDS_OF_KNOBS: dict[str, tuple[type[Family], ...]] = {
    "norm": (Norm,),
    "join": (Join,),
    "gate": (Gate,),
    "positional": (Rotary, Score, Position),
    "qk_norm": (Norm,),
}


class Writer:
    """Makes schemas of annotations; what has a name of its own is written once, into `definitions`.

    `own` has the schema of classes that are read in a way of their own.
    """

    def __init__(self, own: Mapping[type, Callable[[Writer], Schema]] | None = None) -> None:
        self.definitions: dict[str, Schema] = {}
        self.own: dict[type, Callable[[Writer], Schema]] = {
            Block: _block,
            Overrides: _overrides,
            Parallel: partial(_group, Parallel),
            Sequential: partial(_group, Sequential),
            Loop: partial(_or_field, Loop, "turns"),
            Depths: partial(_or_field, Depths, "capacity"),
            Exit: partial(_or_field, Exit, "entropy"),
            **(own or {}),
        }

    def of(self, annotation: Any) -> Schema:
        """The schema of what an annotation asks for."""
        for item in getattr(annotation, "__metadata__", ()):
            if hasattr(item, "schema"):
                found: Schema = item.schema()
                return found
        if typing.get_origin(annotation) is typing.Annotated:
            base, *limits = typing.get_args(annotation)
            return _limited(self.of(base), [item for item in limits if isinstance(item, Range)])
        options = alternatives(annotation)
        if type(None) in options:
            rest = [option for option in options if option is not type(None)]
            absent = {"enum": ["none", None]} if families(annotation) else {"type": "null"}
            return either([*(self.of(option) for option in rest), absent])
        if isinstance(annotation, type) and annotation in self.own:
            return self.named(annotation.__name__.lower(), lambda: self.own[annotation](self))
        origin = typing.get_origin(annotation)
        if origin is tuple:
            return self._list(typing.get_args(annotation)[0])
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(typing.get_args(annotation)[1])}
        if origin is typing.Literal:
            return {"enum": list(typing.get_args(annotation))}
        if isinstance(annotation, type) and issubclass(annotation, Family):
            return self.family(annotation)
        if isinstance(annotation, type) and issubclass(annotation, Spec):
            return self.named(annotation.__name__.lower(), lambda: self.record(annotation))
        if len(options) > 1:
            return either([self.of(option) for option in options])
        return _scalar(annotation)

    def named(self, name: str, make: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is made when first needed."""
        name = re.sub(r"\W+", "_", name)
        if name not in self.definitions:
            self.definitions[name] = ANYTHING  # what it contains may contain it
            self.definitions[name] = make()
        return {"$ref": f"#/$defs/{name}"}

    def _list(self, item: Any) -> Schema:
        """A list, or its only item without brackets; `none` and nothing are empty ones."""
        one = self.of(item)
        none = [NONE] if families(item) else []
        return either([one, {"type": "array", "items": one}, *none, {"type": "null"}])

    def family(self, kind: type[Family]) -> Schema:
        """A member by its bare name, or as a mapping with its `type`."""
        return self.named(kind.noun, lambda: self._family(kind))

    def _family(self, kind: type[Family]) -> Schema:
        default = getattr(kind, "default_type", None)
        members = [self.member(member, typed=name != default) for name, member in kind.members.items()]
        return {"title": kind.noun, **either([*names(kind), *members])}

    def member(self, member: type[Family], typed: bool = True, extra: Schema | None = None) -> Schema:
        """A member as a mapping. `extra` are properties that its place adds; without `typed` the type goes unsaid."""
        if member in self.own and not extra:
            return self.named(f"{member.type}_branch", lambda: self.own[member](self))
        if extra is None:
            suffix = "" if typed else "_untyped"
            return self.named(f"{_noun(member)}_{member.type}{suffix}", lambda: self.record(member, typed))
        return self.record(member, typed, extra)

    def published(self, name: str, member: type[Family], given: Collection[str]) -> Schema:
        """A member under a published name, which says its type and some of its fields; none where that is enough."""
        needed = {field for field, item in fields_of(member).items() if item.required}
        shape = self.member(member, typed=False)
        if needed & set(given):
            shape = self.named(f"{_noun(member)}_{name}", lambda: self.record(member, typed=False, implied=given))
        return shape if needed - set(given) else either([shape, {"type": "null"}])

    def record(
        self, cls: type[Spec], typed: bool = True, extra: Schema | None = None, implied: Collection[str] = ()
    ) -> Schema:
        """A mapping with the fields of a spec, and no others; those `implied` by a name need not be said."""
        fields = fields_of(cls)
        properties: Schema = dict(extra or {})
        required = [name for name, item in fields.items() if item.required and name not in implied]
        ways: list[Schema] = []  # in which what is required may be said otherwise
        if isinstance(cls, type) and issubclass(cls, Family) and cls.type:
            aliases = {alias: given for alias, (name, given) in _family_of(cls).aliases.items() if name == cls.type}
            properties = {"type": {"enum": [cls.type, *aliases]}, **properties}
            for alias, given in aliases.items():
                if any(name in given for name in required):  # the published name brings it
                    left = [name for name in required if name not in given]
                    ways.append({"properties": {"type": {"const": alias}}, "required": ["type", *left]})
            required = ["type", *required] if typed else required
        properties |= {name: self.field(cls, item) for name, item in fields.items()}
        properties |= {knob.name: self.knob(knob) for knob in KNOBS if issubclass(cls, knob.holder)}
        words = [name for name in getattr(cls, "short_forms", ()) if name not in properties]
        properties |= {name: {"type": "string"} for name in words}
        needed: Schema = {"required": required} if required else {}
        ways += [{"required": [word]} for word in words]  # what a word stands for may bring what is required
        if ways and required:
            needed = {"anyOf": [needed, *ways]}
        shape = {"type": "object", "properties": properties, "additionalProperties": False, **needed}
        return {"title": _title(cls), "description": first_line(cls), **shape}

    def field(self, cls: type[Spec], item: FieldType) -> Schema:
        """The schema of one field with what its class says about it, and its default."""
        said = [f"{allowed(item.annotation)}.", *_sentences(cls, item.name)]
        if item.required:
            return {"description": " ".join(said), **self.of(item.annotation)}
        default = canonical(item.default, brief=True)
        said.insert(1, f"Default: {brief_text(default) or repr(default)}.")
        return {"description": " ".join(said), "default": default, **self.of(item.annotation)}

    def knob(self, knob: Knob) -> Schema:
        """A knob: a bare word, a mapping with the knob's own fields beside those of the primitive, a list, or none."""
        return self.named(f"knob_{knob.name}", lambda: self._knob(knob))

    def _knob(self, knob: Knob) -> Schema:
        kinds = _KINDS_OF_KNOBS[knob.name]
        own = {name: words for name, words, _ in knob.fields if name not in ("type", "…")}
        extra = {name: {"enum": words.split(" | ")} for name, words in own.items()}
        bare = [word for kind in kinds for word in names(kind)]
        if "position" in own:
            bare = [{"enum": own["position"].split(" | ")}]
        members = [
            self.member(member, typed="position" not in own or name != "gate", extra=extra or None)
            for kind in kinds
            for name, member in kind.members.items()
        ]
        one = either([*bare, *members])
        doc = {"title": knob.name, "description": f"Sets {knob.doc}."}
        return {**doc, **either([one, {"type": "array", "items": one}, NONE, {"type": "null"}])}


def either(options: Iterable[Schema]) -> Schema:
    """One of these, where a choice among choices is one choice; nothing at all if there is none."""
    flat: list[Schema] = []
    for option in options:
        flat += option["anyOf"] if set(option) == {"anyOf"} else [option]
    if not flat:
        return {"not": {}}
    unique = [option for index, option in enumerate(flat) if option not in flat[:index]]
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def names(kind: type[Family]) -> list[Schema]:
    """The members and aliases of a family that may stand there as a bare word, each with its formula."""
    found: list[Schema] = []
    for name, member in kind.members.items():
        if not any(item.required for item in fields_of(member).values()):
            found.append({"const": name, "description": first_line(member)})
    for alias, (name, implied) in kind.aliases.items():
        needed = {item.name for item in fields_of(kind.members[name]).values() if item.required}
        if needed <= implied.keys():
            fields = ", ".join(f"{key}: {brief_text(value)}" for key, value in implied.items())
            found.append({"const": alias, "description": f"{name} with {fields}"})
    return found


def _scalar(kind: Any) -> Schema:
    if kind in (int, float):
        number = "integer" if kind is int else "number"
        return {"anyOf": [{"type": number}, {"type": "string", "pattern": UNIT}]}
    words = {bool: "boolean", str: "string"}
    return {"type": words[kind]} if kind in words else ANYTHING


def _limited(schema: Schema, limits: list[Range]) -> Schema:
    """The numbers of a schema within limits; those with a unit are not checked."""
    words = (("min", "minimum"), ("max", "maximum"), ("above", "exclusiveMinimum"), ("below", "exclusiveMaximum"))
    bounds = {
        word: getattr(limit, name) for limit in limits for name, word in words if getattr(limit, name) is not None
    }
    return {"anyOf": [option if "pattern" in option else {**option, **bounds} for option in schema["anyOf"]]}


def _title(cls: type[Spec]) -> str:
    return str(getattr(cls, "type", "") or getattr(cls, "title", cls.__name__.lower()))


def _family_of(cls: type[Family]) -> type[Family]:
    return next(base for base in cls.__mro__ if base.__dict__.get("noun"))


def _noun(cls: type[Family]) -> str:
    return _family_of(cls).noun


def _sentences(cls: type[Spec], name: str) -> list[str]:
    """The sentences of a docstring that speak of a field, of `field: what it is.` the second part."""
    text = " ".join((cls.__doc__ or "").split())
    found = [sentence for sentence in re.split(r"(?<=[.;])\s+", text) if re.search(rf"`{name}(`|:)", sentence)]
    return [re.sub(rf"^`{name}`: (.)", lambda match: match[1].upper(), sentence) for sentence in found]


# blocks


def _block(writer: Writer) -> Schema:
    """Branches by name, each with the type that its name implies or says; or a list of branches with names."""
    knobs = {knob.name: writer.knob(knob) for knob in KNOBS if issubclass(Block, knob.holder)}
    listed = {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["name"]}}
    return {
        "title": "block",
        "description": "Branches in the order in which they are applied; a name such as attention_2 says its type.",
        "anyOf": [{"type": "object", "minProperties": 1, **_branches(writer, knobs)}, listed],
    }


def _branches(writer: Writer, others: Schema) -> Schema:
    """Mappings whose keys are `others` and names of branches."""
    branch = writer.family(Branch)
    properties, patterns = dict(others), {}
    for name, member in Branch.members.items():
        needs = any(item.required for item in fields_of(member).values()) and not issubclass(member, Group)
        implied = either([writer.member(member, typed=False), branch, *([] if needs else [{"type": "null"}])])
        properties[name] = implied
        patterns[f"^{name}_[0-9]+$"] = implied
    for name, (kind, given) in Branch.aliases.items():
        implied = either([writer.published(name, Branch.members[kind], given), branch])
        properties[name] = implied
        patterns[f"^{name}_[0-9]+$"] = implied
    return {
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": branch,
        "propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"},
    }


def _group(kind: type[Group], writer: Writer) -> Schema:
    """Members beside the group's own sites."""
    fields = {name: item for name, item in fields_of(kind).items() if name != "branches"}
    own = {name: writer.field(kind, item) for name, item in fields.items()}
    own |= {"type": {"const": kind.type}, "branches": writer.of(Block)}
    own |= {knob.name: writer.knob(knob) for knob in KNOBS if issubclass(kind, knob.holder)}
    return {"title": kind.type, "description": first_line(kind), "type": "object", **_branches(writer, own)}


def _or_field(kind: type[Spec], name: str, writer: Writer) -> Schema:
    """The value of one field, or a mapping."""
    return {"title": _title(kind), **either([writer.of(fields_of(kind)[name].annotation), writer.record(kind)])}


def _overrides(_writer: Writer) -> Schema:
    """Slices of layers to patches."""
    return {
        "title": "overrides",
        "description": first_line(Overrides),  # type: ignore[arg-type]
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": LAYERS},
                "additionalProperties": {"type": "object", "propertyNames": {"pattern": rf"^block(\.{PATH_STEP})*$"}},
            },
            {"type": "null"},
        ],
    }
